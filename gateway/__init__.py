"""Warmgate: a cache-aware routing gateway for fleets of vLLM replicas."""
