"""Routing policies: pure, deterministic under a seed, and ignorant of the gateway."""
