"""Draft heads for draftproof, each in a folder."""
