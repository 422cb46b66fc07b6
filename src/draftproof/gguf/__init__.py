"""Reads GGUF files: metadata, tensors, configuration and tokenizer."""
