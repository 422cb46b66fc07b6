"""Text to token ids and back, without transformers where that is possible."""
