"""Does drafting pay, with which drafter, and how much: predicted before anything is bought."""
