"""Training draft heads: texts in, a folder with the weights, their figures and their provenance out."""
