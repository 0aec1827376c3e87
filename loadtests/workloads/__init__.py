"""Workloads: what clients ask for and when, for the replay in virtual time and for load over HTTP alike."""
