"""For users with existing transformers code."""
