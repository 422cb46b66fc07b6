"""Trains draft heads on texts, and writes folders with weights, figures and provenance."""
