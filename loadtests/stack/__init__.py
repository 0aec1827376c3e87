"""A whole stack on one machine: replicas, a gateway in front of them, and their orderly end.

`python -m loadtests.stack` runs one for hand use; benchmarks and tests enter `Stack` as a context.
"""

from loadtests.stack.launch import FleetOptions, GatewayOptions, Stack
from loadtests.stack.processes import ChildFailedError

__all__ = ["ChildFailedError", "FleetOptions", "GatewayOptions", "Stack"]
