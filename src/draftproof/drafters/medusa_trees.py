"""The published Medusa trees (Cai et al., arXiv 2401.10774), as data.

Each was grown for one model from the accuracy of every rank of every head, and has 63 paths: the
one for models without their own tree, and those that FasterDecoding/Medusa uses for its published
heads. A word is a path, and its digits are the ranks at each head: ``012`` is the first choice of
head 0, then the second of head 1, then the third of head 2. The first n words are a tree as well.
"""

from __future__ import annotations

DYNAMIC = "dynamic"
"""The name of the tree that is rebuilt in every round."""

_WORDS = {
    "mc_sim_7b_63": """
        0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003
        40 21 004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101
        021 90 060 0001 16 070""",
    "vicuna_7b_stage2": """
        0 00 1 01 000 10 2 02 001 03 3 010 20 4 002 04 11 100 0000 5 003 05 020 30 011 06 6 07 004
        40 12 08 7 030 0001 005 21 006 101 0010 200 50 09 012 8 040 021 13 007 0002 008 110 0100 60
        9 013 0003 102 050 31 0020 70 14""",
    "vicuna_13b_stage2": """
        0 00 1 000 01 10 2 02 001 010 3 03 20 002 0000 04 100 11 4 003 05 020 5 30 011 06 004 0001
        07 005 12 0010 030 101 40 006 08 200 09 6 7 21 50 012 0002 8 040 0100 021 007 110 13 0020 9
        008 050 0003 009 013 102 0011 300 1000""",
    "vicuna_33b_stage2": """
        0 00 1 01 000 10 2 02 001 03 3 010 20 04 4 002 11 100 05 5 0000 003 30 020 06 011 6 004 07 7
        12 40 8 030 005 0001 08 21 09 101 200 006 50 0010 13 012 040 007 021 9 110 0002 60 008 0100
        70 013 050 14 009 31 102 22""",
    "zephyr_stage2": """
        0 00 1 01 2 000 10 02 3 03 4 20 001 04 5 05 010 11 6 002 30 06 7 07 08 003 100 09 020 12 40
        8 9 21 011 004 0000 50 030 13 005 006 60 200 101 012 040 14 31 22 007 70 021 008 013 050 15
        009 110 0001 0010 41 23""",
}

CHOICES: dict[str, tuple[tuple[int, ...], ...]] = {
    name: tuple(tuple(map(int, word)) for word in words.split()) for name, words in _WORDS.items()
}
"""Rank paths by published name."""
