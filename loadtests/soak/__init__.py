"""Does a gateway leak, and does it stay awake? Many requests while replicas come and go; probes under heavy prompts."""
