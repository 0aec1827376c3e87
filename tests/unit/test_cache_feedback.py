"""What engines report of their caches, held against what the prefix map promised."""

import logging
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.prefixes.feedback import CacheFeedback, Promise
from gateway.prefixes.index import PrefixIndex
from gateway.prompt.blocks import BlockSchedule

BLOCK_BYTES = 256
TOKENS = 64  # of a block


class Map:
    """An index with feedback; prompts are lists of block names, four bytes a token."""

    def __init__(self, capacity_blocks: int = 1000, *, enabled: bool = True, reporting: bool = True) -> None:
        schedule = BlockSchedule(BLOCK_BYTES, growth=0)
        self.index = PrefixIndex(schedule)
        self.feedback = CacheFeedback(self.index, schedule, enabled=enabled)
        self.feedback.set_capacity(0, capacity_blocks * BLOCK_BYTES, 16)
        if reporting:
            # One request of which nothing was promised shows that the engine reports at all.
            self.serve([1], 0)

    def ask(self, prompt: list[int]) -> Promise:
        return self.feedback.promise(self.index.insert(0, prompt), len(prompt) * BLOCK_BYTES)

    def answer(self, promise: Promise, cached_tokens: int | None) -> None:
        promise.computed()
        promise.ended(len(promise.record.hashes) * TOKENS, cached_tokens, kept=True)

    def serve(self, prompt: list[int], cached_tokens: int | None) -> None:
        self.answer(self.ask(prompt), cached_tokens)

    @property
    def promises(self) -> tuple[int, int, int]:
        return self.feedback.promises(0)

    @property
    def share(self) -> float:
        return self.feedback.capacity_share(0)

    def held(self, prompt: list[int]) -> int:
        return dict(self.index.match(prompt)).get(0, 0)


def chain(name: int, blocks: int) -> list[int]:
    return [name * 1000 + number for number in range(blocks)]


def test_a_promise_that_holds() -> None:
    it = Map()
    it.serve(chain(1, 10), 0)
    # The engine computes the last token itself, and so the whole last block.
    it.serve(chain(1, 10), 10 * TOKENS - 16)
    assert it.promises == (1, 0, 0)
    assert it.feedback.kept_share(0) == 1.0
    assert it.share == 1.0


def test_answers_that_are_not_found_again_count_no_more() -> None:
    """Reasoning left out of what clients repeat; 4 blocks of prompt, then an answer of 4 blocks."""
    it = Map()

    def turn(name: int, found_blocks: int) -> None:
        prompt = chain(name, 4)
        asked = it.ask(prompt)
        it.answer(asked, 0)
        asked.answered(prompt[-1] + 500)
        longer = it.index.insert(0, [*prompt, *chain(name + 1000, 5)], prompt[-1] + 500)
        it.answer(it.feedback.promise(longer, 9 * BLOCK_BYTES, 8 * BLOCK_BYTES), found_blocks * TOKENS)

    def counts() -> bool:
        prompt = chain(99, 4)
        it.ask(prompt).answered(7)
        return it.index.holds(0, 7)

    for name in range(1, 10):
        turn(name, 8)
    assert counts()
    for name in range(10, 30):
        turn(name, 4)
    assert not counts()
    # What the prompt itself promised was kept all the while.
    assert it.promises[:2] == (29, 0)
    for name in range(30, 50):
        turn(name, 8)
    assert counts()


def test_a_new_process_has_given_no_answer() -> None:
    it = Map()
    before = it.ask(chain(1, 4))
    it.feedback.forget(0)
    it.index.forget(0)
    before.answered(7)
    assert not it.index.holds(0, 7)


@pytest.mark.parametrize("block_tokens", [16, 32, 128])
def test_rounding_to_the_engines_blocks_breaks_no_promise(block_tokens: int) -> None:
    it = Map()
    it.feedback.set_capacity(0, 1000 * BLOCK_BYTES, block_tokens)
    for blocks in range(1, 40):
        it.serve(chain(blocks, blocks), 0)
        tokens = blocks * TOKENS
        it.serve(chain(blocks, blocks), (tokens - 1) // block_tokens * block_tokens)
    assert it.promises[1] == 0


def test_after_a_broken_promise_what_is_older_is_gone_and_the_prompt_is_there() -> None:
    it = Map()
    old, broken, young = chain(1, 10), chain(2, 10), chain(3, 10)
    for prompt in (old, broken, young):
        it.serve(prompt, 0)
    it.serve(broken, 0)
    assert it.promises == (0, 1, 0)
    assert (it.held(old), it.held(broken), it.held(young)) == (0, 10, 10)
    assert it.share < 1.0


def test_a_branch_that_was_used_meanwhile_stays() -> None:
    it = Map()
    root = chain(1, 5)
    stale, later = [*root, 7001, 7002], [*root, 8001, 8002]
    it.serve(stale, 0)
    it.serve(root, 4 * TOKENS)
    it.serve(chain(2, 5), 0)
    promise = it.ask(root)
    it.serve(later, 5 * TOKENS)
    it.answer(promise, 0)
    assert (it.held(stale), it.held(later), it.held(root)) == (5, 7, 5)


def test_requests_in_flight_together_for_a_new_prefix_say_nothing() -> None:
    it = Map()
    prompt = chain(1, 10)
    first = it.ask(prompt)
    second = it.ask([*prompt, 9001])
    it.answer(first, 0)
    it.answer(second, 0)
    assert it.promises == (0, 0, 1)
    it.serve(prompt, 0)
    assert it.promises == (0, 1, 1)


def test_one_in_flight_elsewhere_in_the_tree_does_not_excuse_a_promise() -> None:
    it = Map()
    it.serve(chain(1, 10), 0)
    it.ask([*chain(1, 10), 9001])
    it.serve([*chain(1, 10), 9002], 0)
    assert it.promises == (0, 1, 0)


def test_an_aborted_request_is_taken_back_and_says_nothing() -> None:
    it = Map()
    it.serve(chain(1, 4), 0)
    promise = it.ask([*chain(1, 4), 9001])
    promise.ended(None, None, kept=False)
    assert it.held([*chain(1, 4), 9001]) == 4
    # Nor does it excuse later ones.
    it.serve(chain(1, 4), 0)
    assert it.promises == (0, 1, 0)


def test_what_was_promised_before_a_restart_is_not_judged() -> None:
    it = Map()
    it.serve(chain(1, 10), 0)
    promise = it.ask(chain(1, 10))
    it.index.forget(0)
    it.feedback.forget(0)
    it.answer(promise, 0)
    assert it.promises == (0, 0, 0)
    assert it.share == 1.0


def test_prompts_that_cannot_be_measured_are_not_judged() -> None:
    it = Map()
    it.serve(chain(1, 10), 0)
    it.answer(it.feedback.promise(it.index.insert(0, chain(1, 10)), 0), 0)
    assert it.promises == (0, 0, 1)


def test_off() -> None:
    it = Map(enabled=False)
    it.serve(chain(1, 10), 0)
    it.serve(chain(1, 10), 0)
    assert it.promises == (0, 0, 0)


def test_the_log_says_once_how_to_switch_it_on(caplog: pytest.LogCaptureFixture) -> None:
    it = Map(reporting=False)
    with caplog.at_level(logging.INFO):
        for name in range(1, 100):
            it.serve(chain(name, 2), None)
    assert sum("--enable-prompt-tokens-details" in record.message for record in caplog.records) == 1
    assert it.promises == (0, 0, 0)


def test_nothing_is_said_to_those_who_have_it_on(caplog: pytest.LogCaptureFixture) -> None:
    it = Map()
    with caplog.at_level(logging.INFO):
        for name in range(1, 100):
            it.serve(chain(name, 2), None)
    assert not caplog.records


class Engine:
    """An LRU cache of blocks, tails before roots."""

    def __init__(self, blocks: int) -> None:
        self.room = blocks
        self.cache: OrderedDict[int, None] = OrderedDict()

    def serve(self, prompt: list[int]) -> int:
        found = 0
        while found < len(prompt) and prompt[found] in self.cache:
            found += 1
        for block in reversed(prompt):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > self.room:
            self.cache.popitem(last=False)
        return found


def test_an_engine_smaller_than_believed_is_found_out_and_one_that_grows_is_believed_again() -> None:
    it = Map(capacity_blocks=1000)
    engine = Engine(400)

    def rounds(conversations: int, count: int) -> float:
        """Share of promises kept in the last half."""
        half = it.promises
        for number in range(count):
            if number == count // 2:
                half = it.promises
            prompt = chain(1 + number * 7 % conversations, 10)
            it.serve(prompt, engine.serve(prompt) * TOKENS)
        kept, broken, _ = (now - then for now, then in zip(it.promises, half, strict=True))
        return kept / max(kept + broken, 1)

    # 80 conversations of 10 blocks in turn: the map believes in all, and the engine holds none when it comes round.
    rounds(80, 800)
    shrunk = it.share
    assert shrunk < 0.8
    assert it.index.blocks(0) < 800
    # 30 conversations fit: once the engine has seen them, all promises hold, and belief comes back slowly.
    rounds(30, 30)
    shrunk = it.share
    assert rounds(30, 30) == 1.0
    assert shrunk < it.share < shrunk + 0.1
    rounds(30, 1000)
    assert it.share == 1.0


@given(
    st.lists(
        st.tuples(
            st.integers(1, 4),
            st.integers(0, 12),
            st.sampled_from(["ask", "token", "end", "abort", "forget"]),
            st.one_of(st.none(), st.integers(0, 2000)),
        ),
        max_size=60,
    )
)
def test_any_order_of_events(steps: list[tuple[int, int, str, int | None]]) -> None:
    it = Map(capacity_blocks=20)
    open_promises: list[Promise] = []
    for name, blocks, what, cached in steps:
        if what == "ask":
            open_promises.append(it.ask(chain(name, blocks)))
        elif what == "forget":
            it.index.forget(0)
            it.feedback.forget(0)
            it.feedback.set_capacity(0, 20 * BLOCK_BYTES)
        elif open_promises:
            promise = open_promises[blocks % len(open_promises)]
            if what == "token":
                promise.computed()
            else:
                open_promises.remove(promise)
                promise.ended(blocks * TOKENS + 1, cached, kept=what == "end")
        assert 0.0 < it.share <= 1.0
        assert it.index.held_bytes(0) <= 20 * BLOCK_BYTES
    for promise in open_promises:
        promise.ended(None, None, kept=False)
    assert not it.feedback._slots[0].pending
