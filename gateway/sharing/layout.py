"""What is in Redis: which keys, who writes them, how large they get, and what happens when they are lost.

    {namespace}:1:{schedule}:{n}:log      stream, n = 0 ... shards-1: the prefix map
    {namespace}:1:{schedule}:{n}:birth    string: which life of that stream this is
    {namespace}:1:{schedule}:{load}:log   stream: outstanding load

`1` is the version of the format, and `schedule` a digest of the block lengths (`prefixes`): workers that cut prompts
differently do not see each other. The braces around n are the hash tag of Redis Cluster: a stream and its birth are on
one node, and the shards spread over all. Replicas spread over shards by identity, a hash of the URL; a replica's
entries are all in one shard, in order. Models, adapters and salts need no keys of their own: they are part of every
block hash. No prompt, no model name and no address of a replica is in Redis.

The prefix map is a log. Every worker appends what it has sent where, some tens of times a second, one entry for all
requests since the last one, after the fact; every worker reads all logs, from the start when it starts, and then goes
on. So the snapshot is the feed, there is no moment between the two, and the order of use, which eviction needs, is the
order of the log. See `messages` for the bytes.

Size: a log keeps about four times the bytes of what is alive in it (`PrefixShare.refresh`), 35 to 45 bytes per block
where prompts grow by ten blocks at a time, at most `max_bytes` over all shards. What is older is cut off by whoever
writes, with every entry (MINID); what is still in use by then has been told again (`gateway.prefixes.shared`). Nothing
is ever changed or looked up, so Redis does no work but append, send and trim. Keys nobody has written for an hour
expire.

Epochs: entries name the replica's life, in milliseconds of its process start, or of when its restart was noticed. Who
sees a later one than it knows forgets all it knows of that replica, and entries of an earlier one are ignored: so a
replica's restart is noticed once and for all, also by workers that start later.

The load log holds states, not changes: what one worker has outstanding on each replica where that has changed, and
once a second all of it. A worker not heard for three seconds has none. The log keeps some hundred entries, and is read
from its end.

Failover: what the new primary has not got is lost to workers that start later, until it is used again or told again;
workers that run have it. The streams' ids are times, so that readers go on where they were; one whose place is beyond
the end of the log goes on from the end. A log that has come to nothing (FLUSHALL, an empty node) has no birth: whoever
sees that first gives it another, and all tell again what they hold, after a random pause, leaving out what others have
told by then.
"""

from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from gateway.prompt.blocks import BlockSchedule

VERSION = 1
EXPIRE_S = 3600
LOAD_ENTRIES = 400
"""Entries the load log keeps, about."""


class Keys:
    """The names of all keys.

    Attributes:
        logs: the prefix logs by shard.
        births: the births of those.
        load: the load log.
    """

    def __init__(self, namespace: str, schedule: BlockSchedule, shards: int) -> None:
        """Make the names.

        Args:
            namespace: keeps apart what must not be shared in one Redis.
            schedule: where prompts are cut into blocks.
            shards: number of prefix logs.
        """
        schedule.covered_bytes(4096)
        digest = xxh3_64_hexdigest(b"%r" % schedule.offsets[:4096])[:8]
        prefix = f"{namespace}:{VERSION}:{digest}:{shards}"
        self.logs = [f"{prefix}:{{{shard}}}:log" for shard in range(shards)]
        self.births = [f"{prefix}:{{{shard}}}:birth" for shard in range(shards)]
        self.load = f"{prefix}:{{load}}:log"


def replica_identity(base_url: str) -> int:
    """Return the number under which a replica is known to all: a hash of its URL."""
    return xxh3_64_intdigest(base_url)
