"""Converts text to token ids and back, without transformers where possible."""
