"""Drafters: one method, one file; they never import each other."""
