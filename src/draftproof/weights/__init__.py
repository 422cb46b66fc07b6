"""Layers and tables of weights: packed, quantised, read from files, kept on disk."""
