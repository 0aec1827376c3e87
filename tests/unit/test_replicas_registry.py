from typing import Any

import pytest

from gateway.replicas import catalogue
from gateway.replicas.metrics_page import ScrapedState
from gateway.replicas.registry import Change, Fleet, Replica, ReplicaSpec, Role


def model(name: str, parent: str | None = None, **more: Any) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 1, "owned_by": "vllm", "parent": parent, **more}


def fleet_of(*names: str, aliases: dict[str, str] | None = None, **spec: Any) -> tuple[Fleet, list[Replica]]:
    """A fleet of replicas that are up and list the given models."""
    fleet = Fleet(aliases)
    replicas = []
    for index, name in enumerate(names):
        replica = fleet.add(ReplicaSpec(f"http://10.0.0.{index}:8000", **spec))
        fleet.set_served(replica, [model(name)])
        fleet.set_up(replica, True)
        replicas.append(replica)
    return fleet, replicas


class TestAddress:
    @pytest.mark.parametrize(
        ("url", "expected"),
        [
            ("http://a", ("http", "a", 80, "", b"a")),
            ("http://a:80/", ("http", "a", 80, "", b"a")),
            ("http://a:8000/v1", ("http", "a", 8000, "", b"a:8000")),
            ("http://a:8000/team/v1/", ("http", "a", 8000, "/team", b"a:8000")),
            ("https://a.example:443/x", ("https", "a.example", 443, "/x", b"a.example")),
            ("https://a:8443", ("https", "a", 8443, "", b"a:8443")),
            ("http://[::1]:8000", ("http", "::1", 8000, "", b"[::1]:8000")),
            ("http://bücher.example", ("http", "xn--bcher-kva.example", 80, "", b"xn--bcher-kva.example")),
        ],
    )
    def test_is_read_from_the_url(self, url: str, expected: tuple[object, ...]) -> None:
        replica = Fleet().add(ReplicaSpec(url))
        found = (replica.scheme, replica.host, replica.port, replica.base_path, replica.host_header)
        assert found == expected
        assert replica.tls == (expected[0] == "https")

    @pytest.mark.parametrize(
        "url",
        [
            "",
            "a:8000",
            "ftp://a",
            "http://",
            "http://a:0",
            "http://a:99999",
            "http://a:x",
            "http://a?x=1",
            "http://a#x",
            "http://a/b c",
        ],
    )
    def test_refuses_what_it_cannot_use(self, url: str) -> None:
        fleet = Fleet()
        with pytest.raises(ValueError):
            fleet.add(ReplicaSpec(url))
        assert fleet.by_slot == []

    def test_no_line_end_reaches_a_header_or_a_path(self) -> None:
        replica = Fleet().add(ReplicaSpec("http://a\r\nX-Evil/p\r\nq"))
        assert not {"\r", "\n"} & set(replica.host_header.decode() + replica.base_path)

    def test_refuses_credentials_without_repeating_them(self) -> None:
        with pytest.raises(ValueError) as caught:
            Fleet().add(ReplicaSpec("http://user:secret@a"))
        assert "secret" not in str(caught.value)

    def test_key_and_address_stay_out_of_representations(self) -> None:
        spec = ReplicaSpec("http://10.1.2.3:8000", api_key="sk-secret")
        assert "sk-secret" not in repr(spec)
        assert "10.1.2.3" not in repr(Fleet().add(spec))


class TestSlotsAndNames:
    def test_names_follow_the_order_of_addition_and_skip_taken_ones(self) -> None:
        fleet = Fleet()
        fleet.add(ReplicaSpec("http://a", name="replica-2"))
        assert [fleet.add(ReplicaSpec(f"http://b{i}")).name for i in range(3)] == [
            "replica-1",
            "replica-3",
            "replica-4",
        ]

    def test_lowest_free_slot_is_reused_with_a_new_epoch(self) -> None:
        fleet, replicas = fleet_of("m", "m", "m", "m")
        by_slot = fleet.by_slot
        fleet.remove("replica-3")
        fleet.remove("replica-2")
        assert by_slot == [replicas[0], None, None, replicas[3]]
        first = fleet.add(ReplicaSpec("http://new"))
        second = fleet.add(ReplicaSpec("http://newer"))
        third = fleet.add(ReplicaSpec("http://newest"))
        assert [first.slot, second.slot, third.slot] == [1, 2, 4]
        assert fleet.by_slot is by_slot
        epochs = [replica.epoch for replica in (*replicas, first, second, third)]
        assert len(set(epochs)) == len(epochs)

    @pytest.mark.parametrize("name", ["", "http://a:1", "a b", "a\n", "é", "x" * 64])
    def test_names_fit_headers_and_labels(self, name: str) -> None:
        with pytest.raises(ValueError):
            Fleet().add(ReplicaSpec("http://a", name=name))

    def test_same_url_or_name_twice_is_refused_and_takes_no_slot(self) -> None:
        fleet = Fleet()
        fleet.add(ReplicaSpec("http://a:80", name="one"))
        with pytest.raises(ValueError, match="same URL"):
            fleet.add(ReplicaSpec("http://a/v1"))
        with pytest.raises(ValueError, match="named one"):
            fleet.add(ReplicaSpec("http://b", name="one"))
        assert len(fleet.by_slot) == 1


class TestRouting:
    def test_only_replicas_that_list_the_model(self) -> None:
        fleet, _ = fleet_of("a", "b", "a")
        assert list(fleet.route_slots("a")) == [0, 2]
        assert list(fleet.route_slots("b")) == [1]
        assert list(fleet.route_slots(None)) == [0, 1, 2]
        assert list(fleet.route_slots("c")) == []
        assert not fleet.knows("c")

    @pytest.mark.parametrize("how", ["down", "draining", "removed", "unlisted", "ejected"])
    def test_answers_follow_every_event(self, how: str) -> None:
        fleet, replicas = fleet_of("a", "a")
        victim = replicas[0]
        assert list(fleet.route_slots("a")) == [0, 1]
        if how == "down":
            fleet.set_up(victim, False)
        elif how == "draining":
            fleet.set_draining(victim, True)
        elif how == "removed":
            fleet.remove(victim.name)
        elif how == "unlisted":
            fleet.set_served(victim, [model("b")])
        else:
            fleet.set_ejected(victim, True)
        assert list(fleet.route_slots("a")) == [1]

    def test_answers_are_cached_between_events(self) -> None:
        fleet, _ = fleet_of("a", "a")
        assert fleet.route_slots("a") is fleet.route_slots("a")

    def test_unknown_names_leave_nothing_behind(self) -> None:
        fleet, _ = fleet_of("a")
        for index in range(100):
            fleet.route_slots(f"invented-{index}")
            fleet.prefill_slots(f"invented-{index}")
        assert not any("invented" in str(name) for name in [*fleet._routes, *fleet._prefill_routes])

    def test_roles(self) -> None:
        fleet = Fleet()
        for index, role in enumerate([Role.MIXED, Role.PREFILL, Role.DECODE]):
            replica = fleet.add(ReplicaSpec(f"http://r{index}", models=("m",), role=role))
            fleet.set_up(replica, True)
        assert list(fleet.route_slots("m")) == list(fleet.route_slots(None)) == [0, 2]
        assert list(fleet.prefill_slots("m")) == list(fleet.prefill_slots(None)) == [1]
        assert list(fleet.prefill_slots("x")) == []

    def test_a_prefill_replica_serves_whole_requests_only_while_nothing_else_is_up(self) -> None:
        fleet = Fleet()
        for index, role in enumerate([Role.PREFILL, Role.DECODE]):
            fleet.set_up(fleet.add(ReplicaSpec(f"http://r{index}", models=("m",), role=role)), True)
        decode = fleet.replicas["replica-2"]
        assert list(fleet.route_slots("m")) == [1]
        fleet.set_ejected(decode, True)
        assert list(fleet.route_slots("m")) == [1]
        fleet.set_up(decode, False)
        assert list(fleet.route_slots("m")) == [0]

    def test_when_all_are_ejected_those_that_are_up_are_tried(self) -> None:
        fleet, replicas = fleet_of("a", "a", "a")
        for replica in replicas:
            fleet.set_ejected(replica, True)
        fleet.set_up(replicas[0], False)
        fleet.set_draining(replicas[1], True)
        assert list(fleet.route_slots("a")) == [2]
        fleet.set_up(replicas[2], False)
        assert list(fleet.route_slots("a")) == []

    def test_a_trial_makes_an_ejected_replica_routable(self) -> None:
        fleet, replicas = fleet_of("a", "a")
        fleet.set_ejected(replicas[0], True)
        fleet.set_trial_open(replicas[0], True)
        assert list(fleet.route_slots("a")) == [0, 1]
        fleet.set_trial_open(replicas[0], False)
        assert list(fleet.route_slots("a")) == [1]

    def test_adapters_go_where_they_are_listed(self) -> None:
        fleet, replicas = fleet_of("base", "base")
        listed = [model("base", max_model_len=8192), model("sql", parent="base")]
        fleet.set_served(replicas[1], listed)
        assert list(fleet.route_slots("sql")) == [1]
        assert list(fleet.route_slots("base")) == [0, 1]
        assert replicas[1].adapters == {"sql": "base"}
        assert replicas[1].base_models == {"base"}
        assert replicas[1].max_model_len("sql") == replicas[1].max_model_len("base") == 8192
        assert fleet.pool("sql") == "base"


class TestModels:
    def test_known_stays_known_when_nobody_serves_it(self) -> None:
        fleet, replicas = fleet_of("a", aliases={"gpt": "a"})
        fleet.set_up(replicas[0], False)
        assert fleet.knows("a")
        assert fleet.knows("gpt")
        assert list(fleet.route_slots("gpt")) == []
        fleet.remove("replica-1")
        assert fleet.knows("a")

    def test_configured_names_are_known_from_the_start(self) -> None:
        fleet = Fleet({"gpt": "a"})
        fleet.add(ReplicaSpec("http://x", models=("m",)))
        assert fleet.knows("m")
        assert fleet.knows("gpt")
        assert fleet.knows("a")

    def test_aliases_route_like_their_model(self) -> None:
        fleet, _ = fleet_of("a", "b", aliases={"gpt": "b"})
        assert fleet.resolve("gpt") == "b"
        assert fleet.resolve("a") == "a"
        assert list(fleet.route_slots("gpt")) == [1]
        assert fleet.pool("gpt") == "b"

    def test_pools_are_names_somebody_knows(self) -> None:
        fleet, replicas = fleet_of("a", "a")
        assert fleet.pool(None) == "a"
        assert fleet.pool("x" * 500) == catalogue.UNKNOWN_POOL
        fleet.set_served(replicas[1], [model("b")])
        assert fleet.pool(None) == catalogue.UNKNOWN_POOL

    def test_merged_list_has_each_id_once_and_the_aliases(self) -> None:
        fleet, _ = fleet_of("a", "b", "a", aliases={"gpt": "b", "dangling": "nobody"})
        assert [item["id"] for item in fleet.models()] == ["a", "b", "gpt"]
        assert fleet.models()[2] == {**model("b"), "id": "gpt"}

    def test_objects_are_passed_on_as_the_replica_gave_them(self) -> None:
        fleet, replicas = fleet_of("a")
        listed = model("a/b", max_model_len=8192, root="/models/a", permission=[{"id": "x"}], future_field=7)
        fleet.set_served(replicas[0], [listed])
        assert fleet.models() == [listed]

    def test_malformed_listings_do_no_harm(self) -> None:
        fleet, replicas = fleet_of("a")
        fleet.set_served(
            replicas[0],
            [
                None,
                7,
                "x",
                [],
                {},
                {"id": None},
                {"id": ""},
                {"id": "x" * 300},
                model("b", max_model_len="9"),
            ],
        )
        assert replicas[0].served == {"b"}
        assert replicas[0].max_model_len("b") is None

    def test_a_replica_cannot_list_without_bound(self) -> None:
        fleet, replicas = fleet_of("a")
        fleet.set_served(replicas[0], [model(f"m{index}") for index in range(1500)])
        assert len(replicas[0].served) == 1000

    def test_memory_of_names_is_bounded_and_keeps_those_served(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(catalogue, "MAX_KNOWN_MODELS", 10)
        fleet, replicas = fleet_of("steady", "x", aliases={"alias": "configured"})
        for index in range(50):
            fleet.set_served(replicas[1], [model(f"m{index}")])
            if index == 44:
                fleet.set_served(replicas[1], [model("m40")])
        assert fleet.knows("m40")
        assert not fleet.knows("m41")
        assert fleet.knows("steady")
        assert fleet.knows("configured")
        assert fleet.knows("m49")
        assert fleet.knows("m45")
        assert not fleet.knows("m0")

    def test_configured_models_hold_whatever_is_listed_and_gain_adapters(self) -> None:
        fleet = Fleet()
        replica = fleet.add(ReplicaSpec("http://x", models=("a", "unlisted")))
        fleet.set_served(replica, [model("a", max_model_len=10), model("lora", parent="a"), model("other")])
        assert replica.served == {"a", "unlisted", "lora"}
        assert replica.max_model_len("a") == 10
        assert next(item for item in fleet.models() if item["id"] == "a") == model("a", max_model_len=10)


class TestEvents:
    def test_each_change_is_told_once_and_after_the_fact(self) -> None:
        fleet = Fleet()
        seen: list[tuple[str, str, tuple[int, ...]]] = []
        fleet.on_change(lambda kind, item: seen.append((kind, item.name, tuple(fleet.route_slots("m")))))
        replica = fleet.add(ReplicaSpec("http://a", name="a"))
        for _ in range(2):
            fleet.set_served(replica, [model("m")])
            fleet.set_up(replica, True)
            fleet.set_ejected(replica, True)
        for _ in range(2):
            fleet.set_ejected(replica, False)
            fleet.set_draining(replica, True)
        fleet.set_draining(replica, False)
        fleet.set_up(replica, False)
        fleet.remove("a")
        assert seen == [
            ("added", "a", ()),
            ("models", "a", ()),
            ("up", "a", (0,)),
            ("ejected", "a", (0,)),  # the only one: tried nevertheless
            ("restored", "a", (0,)),
            ("draining", "a", ()),
            ("resumed", "a", (0,)),
            ("down", "a", ()),
            ("removed", "a", ()),
        ]

    def test_fields_vllm_makes_up_at_every_call_are_no_change(self) -> None:
        fleet, replicas = fleet_of("m")
        before = fleet.models()
        kinds: list[str] = []
        fleet.on_change(lambda kind, _: kinds.append(kind))
        fleet.set_served(replicas[0], [{**model("m"), "created": 2, "permission": [{"id": "modelperm-2"}]}])
        assert kinds == []
        assert fleet.models() == before

    def test_late_facts_about_a_removed_replica_are_ignored(self) -> None:
        fleet, replicas = fleet_of("m")
        fleet.remove("replica-1")
        fresh = fleet.add(ReplicaSpec("http://fresh", models=("m",)))
        kinds: list[str] = []
        fleet.on_change(lambda kind, _: kinds.append(kind))
        old = replicas[0]
        fleet.set_up(old, False)
        fleet.set_up(old, True)
        fleet.set_served(old, [model("x")])
        fleet.set_ejected(old, True)
        fleet.set_scraped(old, ScrapedState(kv_capacity_tokens=5))
        fleet.restarted(old)
        assert kinds == []
        assert fresh.slot == old.slot
        assert list(fleet.route_slots("m")) == []
        assert not fleet.knows("x")

    def test_a_failing_listener_does_not_keep_the_others_from_knowing(self, caplog: pytest.LogCaptureFixture) -> None:
        fleet = Fleet()
        kinds: list[str] = []

        def fail(kind: Change, replica: Replica) -> None:
            raise RuntimeError("broken listener")

        fleet.on_change(fail)
        fleet.on_change(lambda kind, _: kinds.append(kind))
        fleet.add(ReplicaSpec("http://a"))
        assert kinds == ["added"]
        assert "broken listener" in caplog.text


class TestScraped:
    @pytest.mark.parametrize(
        ("before", "after", "restarted"),
        [
            (ScrapedState(), ScrapedState(process_start_s=1.0), False),
            (ScrapedState(process_start_s=1.0), ScrapedState(process_start_s=1.0), False),
            (ScrapedState(process_start_s=1.0), ScrapedState(process_start_s=2.0), True),
            (ScrapedState(process_start_s=1.0), ScrapedState(), False),
            # The process start time decides where there is one.
            (
                ScrapedState(process_start_s=1.0, prefix_queries_tokens=9.0),
                ScrapedState(process_start_s=1.0, prefix_queries_tokens=0.0),
                False,
            ),
            (ScrapedState(prefix_queries_tokens=9.0), ScrapedState(prefix_queries_tokens=8.0), True),
            (ScrapedState(prefix_queries_tokens=9.0), ScrapedState(prefix_queries_tokens=9.0), False),
            (ScrapedState(prefix_queries_tokens=9.0), ScrapedState(), False),
        ],
    )
    def test_restart(self, before: ScrapedState, after: ScrapedState, restarted: bool) -> None:
        fleet, replicas = fleet_of("m")
        fleet.set_scraped(replicas[0], before)
        epoch = replicas[0].epoch
        kinds: list[str] = []
        fleet.on_change(lambda kind, _: kinds.append(kind))
        fleet.set_scraped(replicas[0], after)
        assert kinds == (["restarted"] if restarted else [])
        assert (replicas[0].epoch != epoch) == restarted

    def test_a_restart_is_seen_across_stale_measurements(self) -> None:
        fleet, replicas = fleet_of("m")
        fleet.set_scraped(replicas[0], ScrapedState(process_start_s=1.0))
        fleet.set_scraped(replicas[0], replicas[0].kv.aged())
        epoch = replicas[0].epoch
        fleet.set_scraped(replicas[0], ScrapedState(process_start_s=2.0))
        assert replicas[0].epoch != epoch

    def test_capacity_is_told_when_it_becomes_known_or_changes(self) -> None:
        fleet, replicas = fleet_of("m")
        told: list[int | None] = []

        def listen(kind: Change, item: Replica) -> None:
            if kind is Change.CAPACITY:
                told.append(item.kv.kv_capacity_tokens)

        fleet.on_change(listen)
        for capacity in (None, 100, 100, None, 200):
            fleet.set_scraped(replicas[0], ScrapedState(kv_capacity_tokens=capacity))
        assert told == [100, 200]


class TestMayEject:
    @pytest.mark.parametrize(
        ("replicas", "share", "allowed"),
        [
            (1, 1.0, 0),
            (2, 0.5, 1),
            (3, 0.5, 2),
            (4, 0.5, 2),
            (5, 0.5, 3),
            (4, 1.0, 3),
            (10, 0.1, 1),
            (4, 0.0, 0),
        ],
    )
    def test_how_many_of_a_pool_may_be_out(self, replicas: int, share: float, allowed: int) -> None:
        fleet, members = fleet_of(*["m"] * replicas)
        ejected = 0
        for member in members:
            if fleet.may_eject(member, share):
                fleet.set_ejected(member, True)
                ejected += 1
        assert ejected == allowed

    def test_those_that_are_down_or_draining_are_no_substitute(self) -> None:
        fleet, (first, second, third) = fleet_of("m", "m", "m")
        fleet.set_up(second, False)
        fleet.set_draining(third, True)
        assert not fleet.may_eject(first, 1.0)

    def test_other_pools_and_roles_are_no_substitute(self) -> None:
        fleet, (first, _) = fleet_of("m", "n")
        prefill = fleet.add(ReplicaSpec("http://p", models=("m",), role=Role.PREFILL))
        fleet.set_up(prefill, True)
        assert not fleet.may_eject(first, 1.0)

    def test_an_adapter_on_one_replica_does_not_protect_it(self) -> None:
        fleet, (first, _) = fleet_of("m", "m")
        fleet.set_served(first, [model("m"), model("lora", parent="m")])
        assert fleet.may_eject(first, 0.5)
        fleet.set_ejected(first, True)
        assert list(fleet.route_slots("m")) == [1]
        assert list(fleet.route_slots("lora")) == [0]
