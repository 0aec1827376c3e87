"""The prefix map: which replica holds which prompt prefix."""
