"""Pure functions on frozen dataclasses: trees, noise, sampling, acceptance. Torch only."""
