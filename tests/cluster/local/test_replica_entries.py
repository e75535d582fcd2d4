"""What the state file says of replicas while Ray, and with it their controller, starts anew."""

from dataclasses import replace

import pytest

from cluster.commands.status import render
from cluster.controller.actors import ReplicaReport
from cluster.controller.views import FleetView, ReplicaView
from cluster.local.replica_entries import replica_entries
from cluster.local.run_directory import ReplicaEntry
from cluster.local.scrape_targets import scrape_targets
from cluster.registry import Registry
from replicas.protocol.status import Epoch, ReplicaId, ReplicaState
from tests.cluster.commands.test_status import record, row, state

NAME = ReplicaId("replica-0")
REPORT = ReplicaReport(77, "127.0.0.1:9", Epoch("e1"), "127.0.0.1:19", "r", "machine")
NONE = FleetView(1, (), (), None, (), None)


def view(shown: ReplicaState, report: ReplicaReport | None = None) -> FleetView:
    return replace(NONE, replicas=(ReplicaView(NAME, shown, report, None, 0, False, None, False),))


LATE = [view(ReplicaState.STOPPED, REPORT), NONE, view(ReplicaState.STARTING)]
READY = replica_entries(view(ReplicaState.READY, REPORT), (), lambda _: True)


@pytest.mark.parametrize(
    "views", [[NONE], [view(ReplicaState.STARTING)], [NONE, view(ReplicaState.STARTING)], LATE]
)
def test_a_replica_that_outlives_its_controller_is_shown_as_routers_see_it_and_scraped(
    views: list[FleetView],
) -> None:
    entries = READY
    for each in views:
        entries = replica_entries(each, entries, lambda pid: pid == 77)
    assert entries == (replace(READY[0], state="starting"),), "nobody takes it for one that has been replaced"
    table = render(state(*entries), Registry({NAME: record(NAME, "e1")}))
    assert row(table, NAME)[1:4] == ["ready", "e1", "77"]
    assert row(render(state(*entries), Registry({NAME: record(NAME, "e2")})), NAME)[1:3] == ["ready", "e2"]
    assert row(render(state(*entries), Registry({})), NAME)[1] == "starting"
    assert [target["targets"] for target in scrape_targets(state(*entries))][1:] == [["127.0.0.1:19"]]
    newer = replace(REPORT, pid=78, epoch=Epoch("e2"))
    (now,) = replica_entries(view(ReplicaState.READY, newer), entries, lambda _: True)
    assert (now.state, now.pid, now.epoch) == ("ready", 78, "e2")


def test_a_replica_whose_process_has_ended_is_gone_from_the_state() -> None:
    (starting,) = replica_entries(view(ReplicaState.STARTING), READY, lambda _: False)
    assert starting == ReplicaEntry(NAME, "starting", None, None, None)
    assert replica_entries(NONE, READY, lambda _: False) == ()
    stopped = view(ReplicaState.STOPPED, REPORT)
    assert [each.state for each in replica_entries(stopped, READY, lambda _: False)] == ["stopped"]
    draining = replica_entries(view(ReplicaState.DRAINING, REPORT), READY, lambda _: True)
    assert [each.state for each in replica_entries(stopped, draining, lambda _: True)] == ["stopped"]
