"""A minimal faithful model of one vLLM V1 engine: scheduler, paged KV blocks, prefix cache, step times.

Pure: no clock, no I/O, no random numbers. The caller adds requests, calls `Engine.step()` and owns the clock
that the durations add up on, be it a real one (`loadtests.replica`) or a virtual one (the trace replay).
"""

from loadtests.engine.engine import Engine
from loadtests.engine.types import EngineLimits, EngineRequest, Phase, StepResult, StoredBlocks

__all__ = ["Engine", "EngineLimits", "EngineRequest", "Phase", "StepResult", "StoredBlocks"]
