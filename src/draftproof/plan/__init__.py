"""Predicts whether drafting pays, with which drafter, and how much, before anything is bought."""
