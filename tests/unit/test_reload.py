"""What differs between two configurations, and when a changed file is read."""

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import eventually

from gateway.config import Config, ConfigError
from gateway.reload import ConfigWatcher, base_url, replica_changes, sections_that_wait
from gateway.replicas.spec import ReplicaSpec, Role


def spec(number: int, **fields: object) -> ReplicaSpec:
    return ReplicaSpec(f"http://replica-{number}.test:8000", **fields)  # type: ignore[arg-type]


def test_replicas_come_go_and_stay() -> None:
    changes = replica_changes([spec(1), spec(2)], [spec(2), spec(3)])
    assert changes.removed == (base_url(spec(1)),)
    assert changes.adjusted == ()
    assert changes.added == (spec(3),)


@pytest.mark.parametrize(
    "fields",
    [{"api_key": "sk"}, {"max_in_flight": 3}, {"hardware": "h100-sxm"}, {"model_shape": "x"}, {"tensor_parallel": 2}],
)
def test_what_a_running_replica_can_take_over(fields: dict[str, object]) -> None:
    changes = replica_changes([spec(1)], [spec(1, **fields)])
    assert changes.adjusted == ((base_url(spec(1)), spec(1, **fields)),)
    assert (changes.removed, changes.added) == ((), ())


@pytest.mark.parametrize("fields", [{"name": "other"}, {"models": ("m",)}, {"role": Role.PREFILL}])
def test_what_makes_another_replica_of_it(fields: dict[str, object]) -> None:
    changes = replica_changes([spec(1)], [spec(1, **fields)])
    assert changes.removed == (base_url(spec(1)),)
    assert changes.added == (spec(1, **fields),)


@pytest.mark.parametrize("spelling", ["http://A.test", "http://a.test:80", "http://a.test/", "http://a.test/v1"])
def test_a_url_written_differently_is_the_same_replica(spelling: str) -> None:
    changes = replica_changes([ReplicaSpec("http://a.test")], [ReplicaSpec(spelling)])
    assert (changes.removed, changes.added) == ((), ())


SPECS = st.builds(
    lambda number, key, limit, models: spec(number, api_key=key, max_in_flight=limit, models=models),
    st.integers(0, 4),
    st.sampled_from([None, "a"]),
    st.sampled_from([None, 2]),
    st.sampled_from([(), ("m",)]),
)
FLEETS = st.lists(SPECS, max_size=5, unique_by=base_url)


@given(FLEETS, FLEETS)
def test_the_changes_lead_from_one_list_to_the_other(old: list[ReplicaSpec], new: list[ReplicaSpec]) -> None:
    changes = replica_changes(old, new)
    fleet = {base_url(one): one for one in old}
    for url in changes.removed:
        del fleet[url]
    for url, adjusted in changes.adjusted:
        assert fleet[url].models == adjusted.models
        fleet[url] = adjusted
    for added in changes.added:
        assert base_url(added) not in fleet
        fleet[base_url(added)] = added
    assert {url: one.api_key for url, one in fleet.items()} == {base_url(one): one.api_key for one in new}
    assert set(fleet) == {base_url(one) for one in new}
    assert not replica_changes(new, new)


def test_options_that_wait_for_the_next_start_are_named() -> None:
    old = Config()
    assert sections_that_wait(old, Config()) == ()
    new = Config.model_validate(
        {
            "listen": {"port": 9},
            "scrape": {"interval_s": 9},
            "routing": {"token_budget": 9, "policy": "random"},
            "timeouts": {"idle_s": 9},
        }
    )
    assert sections_that_wait(old, new) == ("listen", "scrape", "routing.token_budget")


class Watched:
    """A file, and what a watcher of it has done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.taken: list[str] = []
        self.looks = 0
        self.write("old")
        self.watcher = ConfigWatcher(path, self._read, self._take, poll_s=0.01)
        signature = self.watcher._signature

        def counted() -> tuple[int, int, int] | None:
            seen = signature()
            self.looks += 1
            return seen

        self.watcher._signature = counted  # type: ignore[method-assign]

    def write(self, text: str) -> None:
        # As careful tools do: another file in its place.
        other = self.path.with_suffix(".new")
        other.write_text(text)
        other.replace(self.path)

    def _read(self) -> Config:
        text = self.path.read_text()
        if text == "bad":
            raise ConfigError("bad")
        return Config(model=text)

    async def _take(self, config: Config) -> None:
        assert config.model is not None
        if config.model == "unfit":
            raise ValueError("unfit")
        if config.model == "bug":
            raise ZeroDivisionError
        self.taken.append(config.model)

    async def some_looks(self) -> None:
        before = self.looks
        await eventually(lambda: self.looks >= before + 5)

    async def __aenter__(self) -> "Watched":
        self.task = asyncio.get_running_loop().create_task(self.watcher.run())
        await eventually(lambda: self.looks)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})


async def test_a_changed_file_is_read_once(tmp_path: Path) -> None:
    async with Watched(tmp_path / "gateway.yaml") as watched:
        await watched.some_looks()
        assert watched.taken == []
        watched.write("new")
        await eventually(lambda: watched.taken == ["new"])
        await watched.some_looks()
        assert watched.taken == ["new"]


async def test_a_request_reads_it_changed_or_not(tmp_path: Path) -> None:
    async with Watched(tmp_path / "gateway.yaml") as watched:
        watched.watcher.request()
        await eventually(lambda: watched.taken == ["old"])


@pytest.mark.parametrize("text", ["bad", "unfit", "bug"])
async def test_a_bad_one_is_refused_and_the_watch_goes_on(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Watched(tmp_path / "gateway.yaml") as watched:
        watched.write(text)
        await eventually(lambda: caplog.records)
        assert watched.taken == []
        if text != "bug":
            assert f"the old one stays in force: {text}" in caplog.text
        await watched.some_looks()
        assert len(caplog.records) == 1, "said once, and not at every look"
        watched.write("good")
        await eventually(lambda: watched.taken == ["good"])


async def test_a_file_still_being_written_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    async with Watched(path) as watched:
        for number in range(20):
            # Every look finds it different.
            before = watched.looks
            watched.write("x" * (number + 2))
            await eventually(lambda before=before: watched.looks > before)  # type: ignore[misc]
            assert watched.taken == []
        await eventually(lambda: watched.taken == ["x" * 21])


async def test_a_file_that_disappears_for_a_moment_is_no_change(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    async with Watched(path) as watched:
        aside = path.with_suffix(".aside")
        path.rename(aside)
        before = watched.looks
        await eventually(lambda: watched.looks > before)
        aside.rename(path)
        await watched.some_looks()
        assert watched.taken == []


async def test_a_link_that_is_moved_is_a_change(tmp_path: Path) -> None:
    """Kubernetes publishes a ConfigMap as a link to a directory, and moves the link."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    link = tmp_path / "data"
    link.symlink_to("one")
    async with Watched(link / "gateway.yaml") as watched:
        target = tmp_path / "two" / "gateway.yaml"
        target.write_text("two")
        # The same size and time as the one before: it is another file all the same.
        times = watched.path.stat()
        os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))
        other = tmp_path / "other"
        other.symlink_to("two")
        other.replace(link)
        await eventually(lambda: watched.taken == ["two"])
