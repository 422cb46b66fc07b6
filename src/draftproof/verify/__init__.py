"""Proves whether decoding is lossless, for our engine and for others."""
