"""The soak, short: the script works, and what it would call a fault does not happen."""

import json

from loadtests.soak.run import Options, as_json, soak


async def test_a_few_thousand_requests_while_replicas_come_and_go() -> None:
    said: list[str] = []
    options = Options(requests=3000, users=16, replicas=3, churn_s=0.3, awake_s=0.5)
    report = await soak(options, said.append)
    progress = report.progress
    assert progress.finished == sum(progress.outcomes.values()) == 3000
    assert report.restarts > 0
    # Memory has not had the time to settle; all else has.
    assert report.faults() == [] or [fault for fault in report.faults() if not fault.startswith("memory")] == []
    assert progress.outcomes["plain", "200"] > 1500
    assert len(report.awake) == 2
    assert all(one.probes > 0 for one in report.awake)
    figures = json.loads(as_json(report, options))
    assert figures["requests"] == 3000
    assert figures["second_half"] is not None
    assert said
