"""The exact map of one engine's blocks: names, copies, keys, bounds."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.prefixes.events.block_map import BlockMap, free_slowly
from gateway.prefixes.events.wire import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, read_batch
from gateway.prompt.token_chain import TokenChain, TokenPrompt, pack

RECORDED = [
    json.loads(line) for line in (Path(__file__).parent / "data" / "vllm_kv_events.jsonl").read_text().splitlines()
]
BLOCK = 4


def stored(
    names: list[BlockHash], tokens: list[int], parent: BlockHash | None = None, block: int = BLOCK, **fields: Any
) -> BlockStored:
    return BlockStored(names, parent, tokens, block, **{"medium": "GPU", **fields})


def removed(*names: BlockHash, **fields: Any) -> BlockRemoved:
    return BlockRemoved(list(names), **{"medium": "GPU", **fields})


def prompt(tokens: list[int], adapter: str = "", salt: str | None = None) -> list[int]:
    return TokenPrompt(pack(tokens), adapter, salt).hashes(BLOCK)


def make(max_blocks: int = 1000) -> BlockMap:
    return BlockMap(TokenChain(), max_blocks)


A, B, C = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]


def test_blocks_are_found_by_their_tokens_whatever_the_engine_calls_them() -> None:
    numbers, digests = make(), make()
    numbers.apply([stored([11, 12], A + B), stored([13], C, parent=12)])
    digests.apply([stored([b"x" * 32, b"y" * 32], A + B), stored([b"z" * 32], C, parent=b"y" * 32)])
    for blocks in (numbers, digests):
        assert blocks.block_tokens == BLOCK
        assert blocks.match(prompt(A + B + C)) == 3
        assert blocks.match(prompt(A + B + [9])) == 2
        assert blocks.match(prompt(A + C)) == 1
        assert blocks.match(prompt(B)) == 0
        assert blocks.match([]) == 0


def test_a_hash_stored_twice_needs_two_removals() -> None:
    blocks = make()
    blocks.apply([stored([1], A), stored([1], A)])
    blocks.apply([removed(1)])
    assert blocks.match(prompt(A)) == 1
    blocks.apply([removed(1)])
    assert blocks.match(prompt(A)) == 0
    assert len(blocks) == 0
    blocks.apply([removed(1)])  # one too many changes nothing
    assert len(blocks) == 0


def test_three_copies() -> None:
    blocks = make()
    blocks.apply([stored([1], A)] * 3 + [removed(1, 1)])
    assert blocks.match(prompt(A)) == 1
    blocks.apply([removed(1)])
    assert blocks.match(prompt(A)) == 0


def test_adapters_and_salts_share_nothing() -> None:
    blocks = make()
    blocks.apply(
        [
            stored([1], A),
            stored([2], B, lora_name="ada", extra_keys=[["ada"]]),
            stored([3, 4], C + A, extra_keys=[["tenant"], None]),
            stored([5, 6], A + C, lora_name="ada", extra_keys=[["ada", "tenant"], ["ada"]]),
        ]
    )
    assert blocks.match(prompt(A)) == 1
    assert blocks.match(prompt(A, "ada")) == 0
    assert blocks.match(prompt(B, "ada")) == 1
    assert blocks.match(prompt(B)) == 0
    assert blocks.match(prompt(C + A, salt="tenant")) == 2
    assert blocks.match(prompt(C + A)) == 0
    assert blocks.match(prompt(C + A, salt="other")) == 0
    assert blocks.match(prompt(A + C, "ada", "tenant")) == 2


def test_images_are_part_of_the_key_of_the_blocks_they_lie_in() -> None:
    # Two blocks of place-holders, the image begins at the third token and ends in the second block.
    tokens, image = [1, 2, 0, 0, 0, 0, 7, 8], ("f00d", 2, 4)
    blocks = make()
    blocks.apply([stored([1, 2, 3], tokens + A, extra_keys=[[["f00d", 2]], [["f00d", -2]], None])])
    assert blocks.match(TokenPrompt(pack(tokens + A), media=[image]).hashes(BLOCK)) == 3
    assert blocks.match(TokenPrompt(pack(tokens + A), media=[("beef", 2, 4)]).hashes(BLOCK)) == 0
    assert blocks.match(TokenPrompt(pack(tokens + A)).hashes(BLOCK)) == 0


def test_a_block_without_a_known_parent_has_no_name() -> None:
    blocks = make()
    blocks.apply([stored([2], B, parent=1), removed(2), stored([1], A), stored([2], B, parent=1)])
    assert blocks.orphans == 1
    assert blocks.match(prompt(A + B)) == 2


def test_clearing() -> None:
    blocks = make()
    garbage = list(blocks.apply([stored([1, 2], A + B), AllBlocksCleared(), stored([3], C)]))
    assert blocks.complete
    assert blocks.hashes() == frozenset(prompt(C))
    assert free_slowly(garbage, 1)
    while free_slowly(garbage, 1):
        pass
    assert garbage == []


def test_other_tiers_and_other_layers_do_not_count() -> None:
    blocks = make()
    blocks.apply(
        [
            stored([1], A, group_idx=1, kv_cache_spec_kind="full_attention"),
            stored([1], A, medium="CPU"),
            stored([9], B, group_idx=0, kv_cache_spec_kind="sliding_window"),
            stored([1], A, group_idx=2, kv_cache_spec_kind="full_attention"),
            removed(1, medium="CPU"),
            removed(1, group_idx=2),
        ]
    )
    assert blocks.match(prompt(A)) == 1
    assert blocks.match(prompt(B)) == 0
    assert blocks.ignored == 5
    blocks.apply([removed(1, group_idx=1)])
    assert blocks.match(prompt(A)) == 0


@pytest.mark.parametrize(
    "event",
    [stored([1, 2], A), stored([1], [1, 2, 3, -4]), stored([1], [1, 2, 3, 2**32]), stored([1], [], block=0)],
    ids=["too few tokens", "a negative token", "a huge token", "no block size"],
)
def test_events_that_make_no_sense_are_counted(event: BlockStored) -> None:
    blocks = make()
    blocks.apply([event])
    assert blocks.malformed == 1
    assert len(blocks) == 0


def test_a_map_beyond_its_bound_starts_anew() -> None:
    blocks = make(max_blocks=2)
    blocks.complete = True
    blocks.apply([stored([1, 2], A + B)])
    assert len(blocks) == 2
    blocks.apply([stored([3], C)])
    assert (len(blocks), blocks.overflows, blocks.complete) == (0, 1, False)


def test_a_map_that_lacks_something_is_as_good_as_complete_after_a_turnover() -> None:
    blocks = make()
    blocks.apply([stored([1, 2], A + B)])
    blocks.compare(2)
    assert not blocks.complete
    blocks.apply([removed(2), stored([3], C)])
    blocks.compare(2)
    assert blocks.complete


def test_a_map_of_more_blocks_than_the_engine_has_starts_anew() -> None:
    """vLLM tells of hits again when a client asks for it, and the counts are wrong then."""
    blocks = make()
    blocks.complete = True
    blocks.apply([stored([1], A)] * 3)
    blocks.compare(3)
    assert len(blocks) == 1
    blocks.apply([stored([1], A)])
    blocks.compare(3)
    assert (len(blocks), blocks.overflows, blocks.complete) == (0, 1, False)


def test_the_recorded_engine_ends_with_what_it_said() -> None:
    """The recording of block size 128: stored, evicted, cleared, stored again."""
    blocks = make()
    names: Counter[BlockHash] = Counter()
    for record in RECORDED:
        if "payload_hex" not in record:
            continue
        batch = read_batch(bytes.fromhex(record["payload_hex"]))
        blocks.apply(batch.events)
        for event in batch.events:
            if isinstance(event, BlockStored):
                names.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                names.subtract(event.block_hashes)
            else:
                names.clear()
    assert blocks.block_tokens == 128
    assert blocks.complete
    assert len(blocks) == sum(count > 0 for count in names.values()) == 2
    last = next(record for record in RECORDED if record["seq"] == 20)["batch"][1][1]["token_ids"]
    assert blocks.match(TokenPrompt(pack(last)).hashes(128)) == 2


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_map_equals_a_block_pool(data: st.DataObject) -> None:
    """Against a plain model: physical blocks with names and tokens; children leave before their parents."""
    seed = data.draw(st.integers(0, 2**32))
    generator = random.Random(seed)
    blocks = make()
    physical: list[tuple[int, ...]] = []  # of each block, the prefix it ends
    for _ in range(generator.randrange(1, 40)):
        if physical and generator.random() < 0.4:
            # Any block whose prefix no other needs.
            leaves = [p for p in physical if not any(q != p and q[: len(p)] == p for q in physical)]
            victim = generator.choice(leaves)
            physical.remove(victim)
            blocks.apply([removed(hash(victim))])
        else:
            parent = generator.choice([(), *physical])
            count = generator.randrange(1, 4)
            tokens = [generator.randrange(3) for _ in range(count * BLOCK)]
            prefixes = [parent + tuple(tokens[: (i + 1) * BLOCK]) for i in range(count)]
            physical.extend(prefixes)
            name = hash(parent) if parent else None
            blocks.apply([stored([hash(p) for p in prefixes], tokens, parent=name)])
    expected = {prompt(list(p))[-1] for p in physical}
    assert blocks.hashes() == expected
    for prefix in [*physical, tuple(generator.randrange(3) for _ in range(12 * BLOCK))]:
        hashes = prompt(list(prefix) + [generator.randrange(3) for _ in range(2 * BLOCK)])
        depth = next((i for i, h in enumerate(hashes) if h not in expected), len(hashes))
        assert blocks.match(hashes) == depth
        assert all(blocks.match(hashes, guess) == depth for guess in range(len(hashes) + 2))


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50), st.integers(1, 8))
def test_a_chain_made_in_pieces_is_the_chain(tokens: list[int], block: int) -> None:
    chain = TokenChain()
    whole = TokenPrompt(pack(tokens)).hashes(block)
    made: list[int] = []
    seed = chain.root("")
    for start in range(0, len(tokens) // block * block, block * 2):
        piece = tokens[start : min(start + block * 2, len(tokens) // block * block)]
        new = chain.extend(seed, piece, block, None)
        made.extend(new)
        seed = new[-1]
    assert made == list(whole or ())


def test_bytes_among_the_keys_are_hashed_too() -> None:
    chain = TokenChain()
    first = chain.extend(0, A, BLOCK, [[b"digest"]])
    assert first != chain.extend(0, A, BLOCK, [[b"other"]])
    assert first != chain.extend(0, A, BLOCK, None)


def test_a_recorded_adapter_is_in_the_root() -> None:
    record = next(r for r in RECORDED if any(e.get("lora_name") for e in r["batch"][1]))
    event = msgspec.convert(
        {k: v for k, v in record["batch"][1][0].items() if k != "block_hashes"} | {"block_hashes": [1]}, BlockStored
    )
    blocks = make()
    blocks.apply([event])
    assert blocks.match(TokenPrompt(pack(event.token_ids), "mylora").hashes(32)) == 1
    assert blocks.match(TokenPrompt(pack(event.token_ids)).hashes(32)) == 0
