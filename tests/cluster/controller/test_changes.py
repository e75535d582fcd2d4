from dataclasses import replace

import pytest

from cluster.config import AutoscaleSpec, FleetSpec, FoundServer, PoolSpec
from cluster.controller.changes import FleetState, applied, given_up, rolled, scaled, settled, with_found
from replicas.process.settings import SettingsError
from tests.cluster.finding import finding

MACHINES = [{"CPU": 4.0}]
A, B = PoolSpec(1, "a"), PoolSpec(1, "b")
STATE = FleetState(FleetSpec((A, B)))


def pool(state: FleetState, name: str) -> PoolSpec:
    found = state.spec.pool(name)
    assert found is not None
    return found


def test_a_new_size_is_no_rollout() -> None:
    state = scaled(STATE, "a", 2, MACHINES)
    assert pool(state, "a").num_replicas == 2
    assert state.previous == {}


def test_more_than_the_cluster_holds_is_refused_and_less_never_is() -> None:
    with pytest.raises(SettingsError, match="cannot hold 4 replicas of pool a"):
        scaled(STATE, "a", 4, MACHINES)
    big = scaled(STATE, "a", 3, MACHINES)
    assert pool(scaled(big, "a", 2, [{"CPU": 1.0}]), "a").num_replicas == 2


def test_a_size_outside_of_the_autoscaling_bounds_is_refused() -> None:
    state = applied(STATE, FleetSpec((replace(A, autoscaling=AutoscaleSpec(1, 2, 8)), B)), MACHINES)
    with pytest.raises(SettingsError, match="its autoscaling keeps 1 to 2"):
        scaled(state, "a", 3, MACHINES)


def test_an_unknown_pool_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(SettingsError, match="there is no pool c; there is a, b"):
        scaled(STATE, "c", 1, MACHINES)
    with pytest.raises(SettingsError, match="there is no pool c"):
        rolled(STATE, "c", {}, MACHINES)


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


def test_a_rollout_to_what_there_is_already_is_refused() -> None:
    with pytest.raises(SettingsError, match="pool a has these settings already"):
        rolled(STATE, "a", {"max_running": "256"}, MACHINES)


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


def test_a_pool_that_goes_takes_its_rollout_along() -> None:
    state = rolled(STATE, "a", {}, MACHINES)
    spec = FleetSpec((B,))
    assert applied(state, spec, MACHINES) == FleetState(spec, applied_revision=spec.revision)


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
