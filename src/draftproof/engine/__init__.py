"""The running batch: sequences, budgets, the decoder's one method, and the engine around it."""
