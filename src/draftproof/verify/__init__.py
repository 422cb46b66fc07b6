"""Is it lossless? For us, and for other people's engines."""
