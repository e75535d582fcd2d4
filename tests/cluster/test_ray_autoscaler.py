"""A fleet on a Ray cluster that has no machine until Ray's own autoscaler finds that one is needed.

The autoscaler is the real one, with a provider of machines that are processes here. The tests follow each
other on one fleet.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from replicas.toy_model import toy_model_path
from tests.cluster.kvasir_command import wait_until
from tests.cluster.running_fleet import SECONDS, RunningFleet, open_fleet, pool

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder = tmp_path_factory.mktemp("autoscaler")
    with open_fleet(folder, "autoscaler", "tests.cluster.ray_autoscaler") as running:
        yield running


def machines(fleet: RunningFleet) -> set[str]:
    """Those that replicas listen on."""
    return {entry["address"].rpartition(":")[0] for entry in fleet.ready().values()}


def alpha(num_replicas: int) -> dict[str, Any]:
    return pool("alpha", toy_model_path(), num_replicas)


def test_replicas_without_room_make_ray_add_machines(fleet: RunningFleet) -> None:
    applied = fleet.apply(alpha(4), ray_autoscaler=True)
    assert applied.returncode == 0, applied.stdout + applied.stderr
    said = [line for line in applied.stdout.splitlines() if line]  # Ray's libraries may end with an empty one
    assert said[0] == "no machine could say whether the model of pool alpha loads: its first replica will"
    assert any("waits for room" in line for line in said), "which is no failure"
    # Where everything is busy Ray gives new machines up after 30 s, with the replicas that are there already.
    died = [line for line in said if " died " in line]
    assert len(died) <= 2 and all("its process ended" in line for line in died), died
    assert said[-1] == "ready: alpha 4"
    assert len(machines(fleet)) == 2


def test_who_waits_for_more_than_there_will_ever_be_is_told_so(fleet: RunningFleet) -> None:
    before = fleet.epochs()
    waiting = fleet.run("scale", "alpha", "5", "--timeout", "15")
    assert waiting.returncode == 2
    assert waiting.stderr == (
        "kvasir: the fleet is not what it should be after 15 s (ready: alpha 4 of 5; "
        "waiting for room in the Ray cluster: alpha-4); the controller goes on\n"
    )
    assert "starting (waits for room)" in fleet.do("status")
    assert fleet.epochs().items() >= before.items(), "those that serve do not notice"


def test_a_pool_that_shrinks_leaves_a_machine_idle_and_ray_takes_it_away(fleet: RunningFleet) -> None:
    assert len(machines(fleet)) == 2
    assert "ready: alpha 2" in fleet.do("scale", "alpha", "2")
    assert len(machines(fleet)) == 1
    wait_until(lambda: fleet.tell_machines("machines") == "2", lambda: "it is still there", SECONDS)
    assert len(fleet.ready()) == 2, "the head and one machine are left, with both replicas"
