"""The forward pass of the common families, from tokens to logits."""
