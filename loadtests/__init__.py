"""Simulated vLLM replicas, workloads, benchmarks and load tests."""
