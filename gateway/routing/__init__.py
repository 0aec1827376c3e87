"""Candidates -> policy -> decision, and the log of it."""
