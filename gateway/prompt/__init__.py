"""Request body -> canonical prompt bytes -> chained block hashes, token estimate."""
