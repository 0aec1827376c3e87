"""Replicas: registry, load accounting, health and metrics scrape."""
