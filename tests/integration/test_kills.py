"""kill -9 of Redis, a worker and a replica under load, short: only what ran on the victims fails."""

import pytest
from support.redis_servers import NO_SERVER, find_servers

from loadtests.kills.client import Sent
from loadtests.kills.run import Kill, Options, Report, run


@pytest.mark.skipif(not find_servers(), reason=NO_SERVER)
async def test_only_what_ran_on_a_victim_fails() -> None:
    said: list[str] = []
    report = await run(Options(duration_s=6.0, rate_per_s=40.0, replicas=3), said.append)
    assert said == ["redis killed", "worker killed", "replica killed"]
    assert (report.others(), report.not_back) == ([], [])
    assert len(report.requests) == 240
    assert sum(not request.failed for request in report.requests) > 200
    assert report.kills[1].client_ports


def test_who_was_at_work_on_a_request() -> None:
    early = Sent(1.0, True, 41, "replica-2", "broken", 0.5)
    late = Sent(1.8, True, 42, "replica-1", "broken", 0.5)
    fine = Sent(1.9, True, 42, "replica-1", "200", 0.5)
    replica, worker = Kill("replica", 1.2, replica="replica-2"), Kill("worker", 2.0, client_ports={41, 42})
    report = Report([early, late, fine], [replica, worker], 0.0, [])
    assert report.running(replica) == [early]
    assert report.running(worker) == [late, fine]
    assert report.others() == []
    assert Report([early, late], [replica], 0.0, []).others() == [late]
    assert Report([early, late], [worker], 0.0, []).others() == [early]
