import pytest

from gateway.replicas.health import HealthSettings, Vitals
from gateway.replicas.probe import ProbeFailure

PROBES = {
    "ok": (None, False),
    "refused": (ProbeFailure.REFUSED, False),
    "refused+": (ProbeFailure.REFUSED, True),
    "error": (ProbeFailure.ERROR, False),
    "error+": (ProbeFailure.ERROR, True),
    "timeout": (ProbeFailure.TIMEOUT, False),
    "timeout+": (ProbeFailure.TIMEOUT, True),
}
"""A plus means that bytes of answers flow."""


@pytest.mark.parametrize(
    ("probes", "verdicts"),
    [
        ("ok ok", "up -"),
        ("error error error error", "- - down -"),
        ("timeout ok", "- up"),
        ("ok error error ok error error", "up - - - - -"),
        ("ok error error error ok", "up - - down up"),
        ("ok refused refused", "up - down"),
        ("ok refused+ refused+", "up - down"),
        ("ok refused error refused", "up - - down"),
        ("ok error+ error+ error+", "up - - down"),
        ("ok timeout timeout timeout", "up - - down"),
        # Busy is not dead, and does not make up for failures either.
        ("ok timeout+ timeout+ timeout+ timeout+ timeout+", "up - - - - -"),
        ("ok error timeout+ error timeout+ error", "up - - - - down"),
        ("ok error error error timeout+ ok", "up - - down - up"),
        ("timeout+ timeout+ timeout+", "- - down"),
    ],
)
def test_verdicts(probes: str, verdicts: str) -> None:
    vitals = Vitals(HealthSettings())
    names = {True: "up", False: "down", None: "-"}
    assert [names[vitals.observe(*PROBES[probe])] for probe in probes.split()] == verdicts.split()


def test_rise_asks_for_more_after_a_fall_but_not_at_first() -> None:
    vitals = Vitals(HealthSettings(rise=2, fall=1))
    script = ["ok", "error", "ok", "error", "ok", "ok"]
    assert [vitals.observe(*PROBES[probe]) for probe in script] == [True, False, None, None, None, True]
