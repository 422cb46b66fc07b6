"""For those who have transformers code already."""
