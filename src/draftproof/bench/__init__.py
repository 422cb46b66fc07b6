"""Measures the speed of the engine as a user runs it."""
