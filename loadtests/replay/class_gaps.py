"""Times between tokens by class of request: the tokens of a step belong to whoever decoded in it."""

from collections import Counter
from collections.abc import Mapping

from loadtests.engine import EngineRequest, StepResult
from loadtests.replay.record import RequestRecord, TokenGaps


class ClassGaps:
    """Follows which classes decode on which replica, and shares out the gaps of its steps.

    Attributes:
        gaps: by class; requests without a class are left out.
    """

    def __init__(self, replicas: int) -> None:
        """Start with nothing decoding.

        Args:
            replicas: how many.
        """
        self.gaps: dict[str, TokenGaps] = {}
        self._decoding: list[dict[EngineRequest, str]] = [{} for _ in range(replicas)]
        self._counts: list[Counter[str]] = [Counter() for _ in range(replicas)]

    def step_ended(
        self,
        slot: int,
        result: StepResult,
        began_s: float,
        now_s: float,
        records: Mapping[EngineRequest, RequestRecord],
        *,
        counted: bool,
    ) -> None:
        """Take in an engine's step.

        Args:
            slot: the replica.
            result: what the step did.
            began_s, now_s: when the step began and ended.
            records: of all requests in engines, those that have just finished included.
            counted: the gaps belong to the figures; false during warm-up.
        """
        # Preemptions come before the step's tokens, all else after.
        for request in result.preempted:
            self._leave(slot, request)
        if counted and result.decodes:
            gap_s = result.duration_s / result.steps
            for name, decodes in self._counts[slot].items():
                if decodes:
                    self.gaps[name].add(gap_s, decodes * result.steps)
        for request in result.first_tokens:
            self._join(slot, request, records)
        for request in result.resumed:
            self._join(slot, request, records)
        if counted:
            for request in result.preempted:
                gaps = self._of(request, records)
                if gaps is not None and request.emitted:
                    gaps.preempted(request, began_s)
            for request in result.resumed:
                gaps = self._of(request, records)
                if gaps is not None:
                    gaps.resumed(request, now_s)
        for request in result.finished:
            self._leave(slot, request)

    def ended(self, slot: int, request: EngineRequest) -> None:
        """A request is gone with its replica."""
        self._leave(slot, request)
        for gaps in self.gaps.values():
            gaps.ended(request)

    def _of(self, request: EngineRequest, records: Mapping[EngineRequest, RequestRecord]) -> TokenGaps | None:
        record = records.get(request)
        return None if record is None or not record.turn.request_class else self._named(record.turn.request_class)

    def _named(self, name: str) -> TokenGaps:
        gaps = self.gaps.get(name)
        if gaps is None:
            gaps = self.gaps[name] = TokenGaps()
        return gaps

    def _join(self, slot: int, request: EngineRequest, records: Mapping[EngineRequest, RequestRecord]) -> None:
        # Prompts on prefill replicas have no record here; their only token has no gap.
        record = records.get(request)
        name = record.turn.request_class if record is not None else ""
        if name:
            self._named(name)
            self._decoding[slot][request] = name
            self._counts[slot][name] += 1

    def _leave(self, slot: int, request: EngineRequest) -> None:
        name = self._decoding[slot].pop(request, None)
        if name is not None:
            self._counts[slot][name] -= 1
