"""The model's side: the only folder that knows transformers."""
