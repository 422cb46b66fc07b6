"""Models: the only folder that knows transformers."""
