"""kvasir fleet status, and what the waiting commands say when they stop waiting."""

import json
from dataclasses import replace

import pytest

from cluster.cli import main
from cluster.commands.fleet_words import as_plain, missing, render, trouble
from cluster.controller.actors import ReplicaReport
from cluster.controller.views import FleetView, PoolView, ReplicaView
from cluster.registry import Registry
from replicas.protocol.status import Epoch, ReplicaId, ReplicaState

REPORT = ReplicaReport(7, "10.0.0.1:50051", Epoch("1"), None, "abc", "node")
SERVING = ReplicaView(
    *(ReplicaId("small-0"), ReplicaState.READY, REPORT, None, 0, False, "abc"), is_waiting_for_room=False
)
WAITING = ReplicaView(
    *(ReplicaId("small-1"), ReplicaState.STARTING, None, None, 0, False, "abc"), is_waiting_for_room=True
)
POOL = PoolView("small", "toy_model", "abc", 2, 1, is_settled=False, failure=None)
URL = "redis://:secret@10.0.0.1:6380/0"
VIEW = FleetView(
    3, (SERVING, WAITING), (), "10.0.0.1:9400", (POOL,), URL, complaints=("the controller is unwell",)
)


def test_the_password_of_redis_is_not_shown() -> None:
    for text in (render(VIEW, Registry({})), json.dumps(as_plain(VIEW, Registry({})))):
        assert "secret" not in text
        assert "redis://:***@10.0.0.1:6380/0" in text
    assert "Redis    -" in render(replace(VIEW, redis_url=None), Registry({}))


def test_roles_of_pools_are_shown_where_one_has_a_role_of_its_own() -> None:
    assert "ROLE" not in render(VIEW, Registry({}))
    pools = (POOL, replace(POOL, name="other", role="prefill"))
    shown = render(replace(VIEW, pools=pools), Registry({})).splitlines()
    assert [line.split()[2] for line in shown[:3]] == ["ROLE", "both", "prefill"]
    assert as_plain(replace(VIEW, pools=pools), Registry({}))["pools"][1]["role"] == "prefill"


def test_what_is_wrong_with_the_controller_is_shown() -> None:
    assert "WRONG    the controller is unwell" in render(VIEW, Registry({}))
    assert as_plain(VIEW, Registry({}))["complaints"] == ["the controller is unwell"]
    assert "http://10.0.0.1:9400/metrics" in render(VIEW, Registry({}))


def test_a_replica_that_waits_for_room_is_shown_so_and_is_no_failure() -> None:
    assert "starting (waits for room)" in render(VIEW, Registry({}))
    assert as_plain(VIEW, Registry({}))["replicas"][1]["is_waiting_for_room"] is True
    assert trouble(VIEW, None) is None
    assert missing(VIEW) == " (ready: small 1 of 2; waiting for room in the Ray cluster: small-1)"
    assert missing(replace(VIEW, replicas=(SERVING,))) == " (ready: small 1 of 2)"


@pytest.mark.timeout(45)  # Ray alone tries for more than a minute
def test_a_cluster_that_has_ended_is_said_to_be_so_at_once(
    free_port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["fleet", "status", "--address", f"127.0.0.1:{free_port}"]) == 2
    assert "there is no Ray cluster at 127.0.0.1:" in capfd.readouterr().err
