"""Reading GGUF files: metadata, tensors, configuration and tokenizer."""
