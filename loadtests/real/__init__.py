"""Real vLLM replicas on a machine without a GPU: setting them up, and what they show of the gateway.

They are slow and small, with a model of random weights, but they are vLLM: its API, scheduler, prefix cache and
metrics.
"""
