"""Training draft heads: texts in, a folder with weights, figures and provenance out."""
