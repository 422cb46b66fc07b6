"""Kernels of our own for CPUs: the C, and what compiles and calls it. Knows compilers and tensors,
nothing of models."""
