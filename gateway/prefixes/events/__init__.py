"""Engines' own word on what they have cached: vLLM's KV events, and the exact map made of them."""
