"""A simulated vLLM replica: HTTP like vLLM 0.32, the engine model of `loadtests.engine` in real time.

On the command line, several replicas in one process:

    python -m loadtests.replica --port 8101 --port 8102 --hardware h100-sxm --model llama-3.1-8b --speedup 10

In tests, on a free port of the running event loop:

    async with await start_replica(ReplicaConfig(speedup=100)) as replica:
        ...  # replica.url, replica.engine, replica.faults, replica.state()

The sampled text is made up: words that follow from the prompt and the seed. The tokeniser cuts UTF-8 into
pieces of equal length. Times, queues, batches, KV memory and prefix cache are the engine model's.
"""

from loadtests.replica.config import ReplicaConfig
from loadtests.replica.server import RunningReplica, start_replica

__all__ = ["ReplicaConfig", "RunningReplica", "start_replica"]
