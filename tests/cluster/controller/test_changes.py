"""Changes to a fleet: what a cluster has room for, what they make of the state, and how that is kept."""

from dataclasses import replace

import pytest
import yaml

from cluster.config import AutoscaleSpec, BackoffSpec, FleetSpec, FoundServer, PoolSpec
from cluster.controller.capacity import misfit
from cluster.controller.changes import FleetState, applied, given_up, rolled, scaled, settled, with_found
from cluster.controller.kept_state import from_kept, to_kept
from cluster.fleet_file import parse_fleet
from replicas.process.settings import SettingsError
from tests.cluster.finding import finding

MACHINES = [{"CPU": 4.0}]
A, B = PoolSpec(1, "a"), PoolSpec(1, "b")
STATE = FleetState(FleetSpec((A, B)))


def pool(state: FleetState, name: str) -> PoolSpec:
    found = state.spec.pool(name)
    assert found is not None
    return found


def test_more_than_the_cluster_holds_is_refused_and_less_never_is() -> None:
    with pytest.raises(SettingsError, match="cannot hold 4 replicas of pool a"):
        scaled(STATE, "a", 4, MACHINES)
    big = scaled(STATE, "a", 3, MACHINES)
    assert pool(scaled(big, "a", 2, [{"CPU": 1.0}]), "a").num_replicas == 2


def test_a_size_outside_of_the_autoscaling_bounds_is_refused() -> None:
    state = applied(STATE, FleetSpec((replace(A, autoscaling=AutoscaleSpec(1, 2, 8)), B)), MACHINES)
    with pytest.raises(SettingsError, match="its autoscaling keeps 1 to 2"):
        scaled(state, "a", 3, MACHINES)


def test_a_rollout_remembers_where_it_came_from_until_it_is_done() -> None:
    state = rolled(STATE, "a", {"max_running": "9"}, MACHINES)
    assert state.previous == {"a": A}
    again = rolled(state, "a", {"max_running": "8"}, MACHINES)
    assert again.previous == {"a": A}, "no replica of the revision between has proved itself"
    assert settled(again, "a").previous == {}


def test_a_rollout_that_fails_leaves_the_pool_as_it_was_but_for_its_size() -> None:
    state = scaled(rolled(STATE, "a", {"max_running": "9"}, MACHINES), "a", 2, MACHINES)
    state = given_up(state, "a", "it did not start")
    assert pool(state, "a") == replace(A, num_replicas=2)
    assert (state.previous, state.failures) == ({}, {"a": "it did not start"})
    assert rolled(state, "a", {"max_running": "8"}, MACHINES).failures == {}


def test_a_rollout_without_room_is_refused_and_its_failure_kept() -> None:
    full = FleetState(FleetSpec((replace(A, num_replicas=4),)), failures={"a": "once"})
    with pytest.raises(SettingsError, match="no room for one more replica of pool a"):
        rolled(full, "a", {}, MACHINES)


def test_an_apply_keeps_the_size_that_autoscaling_has_found_within_its_new_bounds() -> None:
    scaling = replace(A, autoscaling=AutoscaleSpec(1, 3, 8))
    state = scaled(applied(STATE, FleetSpec((scaling,)), MACHINES), "a", 3, MACHINES)
    assert pool(applied(state, FleetSpec((scaling,)), MACHINES), "a").num_replicas == 3
    lower = replace(scaling, autoscaling=AutoscaleSpec(1, 2, 8))
    assert pool(applied(state, FleetSpec((lower,)), MACHINES), "a").num_replicas == 2


def test_an_apply_of_the_same_file_does_not_undo_a_restart_and_undoes_a_setting() -> None:
    restarted = rolled(STATE, "a", {}, MACHINES)
    assert pool(applied(restarted, STATE.spec, MACHINES), "a").revision == pool(restarted, "a").revision
    changed = rolled(STATE, "a", {"max_running": "9"}, MACHINES)
    assert pool(applied(changed, STATE.spec, MACHINES), "a").revision == A.revision


def test_what_was_applied_last_is_remembered_whatever_happens_to_the_fleet_since() -> None:
    state = applied(STATE, STATE.spec, MACHINES)
    for later in (
        scaled(state, "b", 1, MACHINES),
        rolled(state, "a", {}, MACHINES),
        given_up(rolled(state, "a", {"max_running": "9"}, MACHINES), "a", "it did not start"),
        settled(state, "a"),
    ):
        assert later.applied_revision == STATE.spec.revision
    other = FleetSpec((A, replace(B, num_replicas=B.num_replicas + 1)))
    assert applied(state, other, MACHINES).applied_revision == other.revision != STATE.spec.revision


def test_servers_that_were_found_stay_over_changes_and_go_with_their_pool() -> None:
    servers = finding("p")
    state = with_found(FleetState(FleetSpec((A, servers))), "p", [FoundServer("http://a:1")])
    assert [each.name for each in state.wanted().pools] == ["a", "p_at_a-1"]
    state = rolled(state, "p", {}, MACHINES)
    assert [each.num_restarts for each in state.wanted().pools] == [0, 1]
    with pytest.raises(SettingsError, match="pool p has a replica for each server that it finds"):
        scaled(state, "p", 2, MACHINES)
    state = with_found(applied(state, FleetSpec((A,)), MACHINES), "p", [FoundServer("http://a:1")])
    assert (state.found, state.wanted()) == ({}, state.spec)


ROOM = [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 2.0}, {"CPU": 8.0, "slot": 2.0}]


def gpu(count: int, gpus: float, **fields: object) -> PoolSpec:
    return PoolSpec(count, "gpu", num_gpus=gpus, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pools", "sentence"),
    [
        ([gpu(4, 1)], None),
        (
            [gpu(5, 1)],
            "the cluster cannot hold 5 replicas of pool gpu: each asks for 1 CPU, 1 GPU, and there",
        ),
        ([gpu(5, 1)], "is room for 4"),
        ([gpu(2, 2)], None),
        (
            [gpu(1, 4)],
            "no machine of the cluster can hold a replica of pool gpu, which asks for 1 CPU, 4 GPU",
        ),
        ([gpu(1, 4, bundle="gpu")], None),
        ([gpu(2, 4, bundle="gpu")], "there is room for 1"),
        ([gpu(8, 0.5), PoolSpec(8, "cpu")], None),
        ([PoolSpec(12, "cpu"), gpu(4, 1)], None),
        ([PoolSpec(13, "cpu"), gpu(4, 1)], "cannot hold 13 replicas of pool cpu"),
        ([PoolSpec(2, "s", custom_resources={"slot": 1})], None),
        (
            [PoolSpec(3, "s", custom_resources={"slot": 1})],
            "3 replicas of pool s: each asks for 1 CPU, 1 slot",
        ),
        ([PoolSpec(1, "s", custom_resources={"tpu": 1})], "no machine"),
        ([PoolSpec(0, "s", custom_resources={"tpu": 1})], None),
        ([PoolSpec(160, "s", num_cpus=0.1)], None),
    ],
)
def test_misfit(pools: list[PoolSpec], sentence: str | None) -> None:
    found = misfit(FleetSpec(tuple(pools)), ROOM)
    assert found is None if sentence is None else found is not None and sentence in found


def test_a_rollout_needs_room_for_one_more_unless_an_old_one_leaves_first() -> None:
    full = gpu(4, 1)
    assert misfit(FleetSpec((full,)), ROOM, rolling=["gpu"]) == (
        "there is no room for one more replica of pool gpu while it is rolled over; "
        "with surge 0 an old one leaves first"
    )
    assert misfit(FleetSpec((replace(full, surge=0),)), ROOM, rolling=["gpu"]) is None
    assert misfit(FleetSpec((replace(full, num_replicas=3),)), ROOM, rolling=["gpu"]) is None


LARGE_MACHINES = [{"CPU": 64.0, "GPU": 8.0, "slot": 9.0}]

FULL = """
redis_url: redis://:secret@redis:6379/2
log_format: json
metrics_host: 0.0.0.0
metrics_port: 9100
drain_seconds: 12.5
pools:
  - name: large
    replicas: 2
    settings:
      engine: vllm
      model: /models/large
      model_name: large
      kv_cache_bytes: 1099511627776
      adapters: {sql: /adapters/sql, "no": /adapters/no}
      engine_args: {seed: 1, ratio: 1.0e-05, none: null, "on": "off", sizes: [1, 2], deep: {1: [true, "1"]}}
    resources: {cpus: 1, gpus: 2, custom: {slot: 0.5}, bundle: gpu}
    surge: 0
    drain_seconds: 3
    threads: 2
  - name: small
    settings: {engine: simulated, model: toy, trace_sample_ratio: 0.1}
    resources: {cpus: 0.5}
    autoscaling: {min: 1, max: 3, target_in_flight: 2.5, down_seconds: 7, tolerance: 0.25}
"""


def states() -> list[FleetState]:
    state = applied(FleetState(FleetSpec(())), parse_fleet(FULL), LARGE_MACHINES)
    rolling = rolled(state, "small", {"max_running": "9"}, LARGE_MACHINES)
    return [
        FleetState(FleetSpec(())),
        state,
        rolling,
        rolled(rolling, "large", {}, LARGE_MACHINES),
        given_up(rolling, "small", "it did: not\nstart, says 'ä'"),
        with_found(
            applied(
                FleetState(FleetSpec(())), FleetSpec((finding(file="/servers"), finding("q"))), LARGE_MACHINES
            ),
            "p",
            [FoundServer("http://a:1"), FoundServer("http://b:1", 1)],
        ),
        replace(state, spec=replace(state.spec, backoff=BackoffSpec(0.25, 3.0, 1.5), is_growing=True)),
    ]


@pytest.mark.parametrize("state", states())
def test_what_is_kept_is_read_as_it_was_and_no_replica_has_another_revision(state: FleetState) -> None:
    read = from_kept(to_kept(state))
    assert read == state
    assert repr(read) == repr(state), "revisions are made of it"
    assert [pool.revision for pool in read.spec.pools] == [pool.revision for pool in state.spec.pools]
    assert read.spec.revision == state.spec.revision


def test_a_state_of_another_version_is_read_as_far_as_it_is_known() -> None:
    state = states()[2]
    plain = yaml.safe_load(to_kept(state))
    del plain["applied_revision"], plain["spec"]["metrics_port"], plain["spec"]["pools"][0]["surge"]
    del plain["spec"]["pools"][0]["replica"]["lease_seconds"]
    plain["fresh"] = plain["spec"]["fresh"] = plain["spec"]["pools"][1]["fresh"] = {"a": 1}
    plain["spec"]["pools"][1]["replica"]["fresh"] = plain["spec"]["pools"][1]["autoscaling"]["fresh"] = 2
    read = from_kept(yaml.safe_dump(plain).encode())
    first, second = read.spec.pools
    assert (read.applied_revision, read.spec.metrics_port, first.surge) == (None, None, 1)
    assert replace(first, surge=0) == state.spec.pools[0]
    assert second == state.spec.pools[1]


@pytest.mark.parametrize("kept", [b"", b"\x80\x05\x95", b"[1, 2]", b"spec: {}", b"a: [", b"previous: {}"])
def test_what_is_no_state_is_refused(kept: bytes) -> None:
    with pytest.raises(ValueError, match="not that of a fleet"):
        from_kept(kept)
