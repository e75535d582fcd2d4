"""A fleet on a Ray cluster of several machines: the real command, controller, replicas, router and clients.

The tests follow each other on one fleet of two models, as a day with it would.
"""

import json
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from cluster.local.processes import find_marked
from replicas.protocol.keys import BLOCKS_MARKER, PREFIX
from replicas.toy_model import toy_model_path
from tests.cluster.kvasir_command import wait_until
from tests.cluster.running_fleet import SECONDS, Follower, RunningFleet, open_fleet, pool

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_MACHINES = 2
MODELS = ("alpha", "beta")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with open_fleet(folder, "fleet-test", "tests.cluster.ray_machines", str(NUM_MACHINES)) as running:
        yield running


@pytest.fixture(scope="module")
def pools(fleet: RunningFleet) -> list[dict[str, Any]]:
    """Two models: the one that ships, and one that differs from it in a comment of its template."""
    other = fleet.folder / "other"
    shutil.copytree(toy_model_path(), other, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    template = other / "chat_template.jinja"
    template.write_text("{#- another model -#}" + template.read_text())
    return [pool("alpha", toy_model_path(), 2), pool("beta", other, 1)]


def wait_routed(fleet: RunningFleet, expected: Callable[[set[str]], bool]) -> None:
    """Until the router knows those replicas."""

    def known() -> set[str]:
        try:
            orders = [fleet.explain(model, "Hello").get("affinity_order", []) for model in MODELS]
            return {replica_id for order in orders for replica_id in order}
        except httpx.HTTPError:
            return set()

    wait_until(lambda: expected(known()), lambda: str(known()), SECONDS)


def test_a_model_that_does_not_load_is_refused_before_anything_is_touched(
    fleet: RunningFleet, pools: list[dict[str, Any]]
) -> None:
    refused = fleet.apply(pools[0], pool("beta", Path("/nowhere"), 1))
    assert refused.returncode == 2
    sentence = r"pool beta would not start on 127\.0\.0\.1[12]: there is no checkpoint directory /nowhere"
    assert re.fullmatch(rf"kvasir: {sentence}\n", refused.stderr), refused.stderr
    assert fleet.run("status").returncode == 1, "not even a controller"


def test_apply_starts_what_the_file_says_wherever_there_is_room(
    fleet: RunningFleet, pools: list[dict[str, Any]]
) -> None:
    applied = fleet.apply(*pools)
    assert applied.returncode == 0, applied.stdout + applied.stderr
    assert applied.stdout.splitlines()[-1] == "ready: alpha 2, beta 1"
    ready = fleet.ready()
    assert sorted(ready) == ["alpha-0", "alpha-1", "beta-0"]
    hosts = {entry["address"].rpartition(":")[0] for entry in ready.values()}
    assert hosts <= {"127.0.0.11", "127.0.0.12"}, "replicas listen where Ray has put them"
    wait_routed(fleet, lambda known: known == set(ready))


STORY = "Tell me a story about a cat that sails, a dog that sings, and the long way home. " * 8


def test_two_models_never_share_a_block_a_bucket_or_a_queue(fleet: RunningFleet) -> None:
    answers = [fleet.ask(model, STORY) for model in ("alpha", "alpha", "beta", "beta")]
    cached = [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert (cached[0], cached[2]) == (0, 0), "the first of each model finds nothing of the other's"
    assert cached[1] > 0
    assert cached[3] > 0
    assert [answer.headers["x-kvasir-replica"].split("-")[0] for answer in answers] == [
        *("alpha", "alpha", "beta", "beta")
    ]
    alpha, beta = (fleet.explain(model, STORY) for model in MODELS)
    assert alpha["bucket"] != beta["bucket"]
    assert not set(alpha["affinity_order"]) & set(beta["affinity_order"])
    assert not hashes(alpha) & hashes(beta)
    wait_until(lambda: hashes(alpha) & stored(fleet, "alpha"), lambda: "not in the index", SECONDS)
    wait_until(lambda: hashes(beta) & stored(fleet, "beta"), lambda: "not in the index", SECONDS)
    assert stored(fleet, "alpha") & stored(fleet, "beta") == {BLOCKS_MARKER}


def stored(fleet: RunningFleet, model: str) -> set[bytes]:
    """What the index has of any replica of this model."""
    with redis.Redis.from_url(fleet.redis_url, protocol=2) as client:
        return set().union(*map(client.smembers, client.keys(f"{PREFIX}:{{{model}}}:blocks:*")))


def hashes(explained: dict[str, Any]) -> set[bytes]:
    return {bytes.fromhex(entry["hash"]) for entry in explained["block_hashes"]}


def assert_none_failed(outcomes: Counter[str]) -> None:
    others = {name for name in outcomes if name != "ok" and not name.startswith("alpha-")}
    assert not others, outcomes
    assert outcomes["ok"] > 0


def test_a_command_of_another_version_is_refused(
    fleet: RunningFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kvasir-99.0.dist-info").mkdir()
    (tmp_path / "kvasir-99.0.dist-info" / "METADATA").write_text("Name: kvasir\nVersion: 99.0\n")
    before = fleet.epochs()
    monkeypatch.setitem(fleet.environment, "PYTHONPATH", str(tmp_path))
    for words in (["status"], ["scale", "alpha", "1"], ["apply", str(fleet.folder / "fleet.yaml")]):
        refused = fleet.run(*words)
        assert refused.returncode == 2
        assert (
            f"the fleet controller is of Kvasir {version('kvasir')}, and this command of 99.0: "
            in refused.stderr
        )
    assert fleet.epochs() == before


def test_more_than_the_cluster_can_hold_is_refused_before_anything_is_touched(fleet: RunningFleet) -> None:
    before = fleet.epochs()
    refused = fleet.run("scale", "alpha", "6")
    assert refused.returncode == 2
    assert refused.stderr == (
        "kvasir: the cluster cannot hold 6 replicas of pool alpha: each asks for 0.1 CPU, 1 slot, "
        "and there is room for 5\n"
    )
    assert fleet.epochs() == before


def test_a_pool_grows_and_shrinks_without_a_failed_request(fleet: RunningFleet) -> None:
    before = fleet.ready()
    assert "ready: alpha 4, beta 1" in fleet.do("scale", "alpha", "4")
    assert len({entry["address"].rpartition(":")[0] for entry in fleet.ready().values()}) == NUM_MACHINES
    wait_routed(fleet, lambda known: len(known) == 5)
    with fleet.clients("alpha") as outcomes:
        wait_until(lambda: len(set(outcomes) - {"ok"}) > 1, lambda: str(outcomes))
        assert "ready: alpha 1, beta 1" in fleet.do("scale", "alpha", "1")
    assert_none_failed(outcomes)
    after = fleet.ready()
    assert sorted(after) == ["alpha-0", "beta-0"]
    assert after["alpha-0"]["epoch"] == before["alpha-0"]["epoch"], "those that stay do not notice"


def test_a_pool_that_scales_itself_follows_its_load(fleet: RunningFleet, pools: list[dict[str, Any]]) -> None:
    scaling = {"min": 1, "max": 2, "target_in_flight": 2, "up_seconds": 1, "down_seconds": 2}
    alpha, beta = (json.loads(json.dumps(pool)) for pool in pools)
    applied = fleet.apply(alpha | {"replicas": 1}, beta | {"autoscaling": scaling})
    assert applied.returncode == 0, applied.stdout + applied.stderr
    with fleet.clients("beta", count=8):
        wait_until(lambda: "beta-1 is ready" in said(fleet), lambda: said(fleet), SECONDS)
    wait_until(lambda: "beta-1 has ended" in said(fleet), lambda: said(fleet), SECONDS)
    assert "tokens ask for 2 replicas" in said(fleet)
    assert fleet.apply(alpha | {"replicas": 1}, beta).returncode == 0
    assert sorted(fleet.ready()) == ["alpha-0", "beta-0"]


def said(fleet: RunningFleet) -> str:
    return "\n".join(fleet.controller_log())


def test_a_rollout_under_load_replaces_every_replica_without_a_failed_request(fleet: RunningFleet) -> None:
    fleet.do("scale", "alpha", "2")
    before = fleet.ready()
    with fleet.clients("alpha") as outcomes:
        done = fleet.do("rollout", "alpha", "--set", "max_running=99")
    assert "ready: alpha 2, beta 1" in done
    assert_none_failed(outcomes)
    after = fleet.ready()
    assert len(after) == 3
    revisions = {entry["revision"] for name, entry in after.items() if name.startswith("alpha")}
    assert len(revisions) == 1
    assert revisions != {before["alpha-0"]["revision"]}
    assert after["beta-0"] | {"load": None} == before["beta-0"] | {"load": None}, "the other pool stays"


def test_a_rollout_to_a_model_that_does_not_load_is_refused(fleet: RunningFleet) -> None:
    before = fleet.epochs()
    refused = fleet.run("rollout", "alpha", "--set", "model=/nowhere")
    assert refused.returncode == 2
    assert refused.stderr.startswith("kvasir: pool alpha would not start on 127.0.0.1")
    assert refused.stderr.endswith("there is no checkpoint directory /nowhere\n")
    assert fleet.epochs() == before


def test_a_rollout_that_does_not_start_stops_and_the_old_replicas_serve_on(fleet: RunningFleet) -> None:
    before = fleet.epochs()
    with fleet.clients("alpha") as outcomes:
        stopped = fleet.run("rollout", "alpha", "--set", "host=203.0.113.7")
    assert stopped.returncode == 2
    assert "the rollout of pool alpha was given up, the old replicas serve on" in stopped.stderr
    assert "cannot listen" in stopped.stderr
    assert_none_failed(outcomes)
    assert fleet.epochs() == before
    assert "rollout given up" in fleet.do("status")
    alpha = fleet.status()["pools"][0]
    assert alpha["is_settled"], "it is to be what it was, so that its old replicas are the right ones"
    assert {entry["revision"] for entry in fleet.ready().values()} >= {alpha["revision"]}


def test_a_drained_replica_finishes_what_it_has_and_is_replaced(fleet: RunningFleet) -> None:
    before = fleet.ready()
    victim = next(name for name in before if name.startswith("alpha"))
    with fleet.clients("alpha") as outcomes:
        wait_until(lambda: outcomes["ok"] > 5, lambda: str(outcomes))
        fleet.do("drain", victim)
    assert_none_failed(outcomes)
    assert fleet.ready()[victim]["epoch"] != before[victim]["epoch"]
    refused = fleet.run("drain", "gamma-7")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


def test_a_killed_controller_starts_again_by_itself_and_knows_what_was_applied(fleet: RunningFleet) -> None:
    before = fleet.epochs()
    for entry in Path("/proc").glob("[0-9]*"):
        if is_controller_of(fleet, entry):
            os.kill(int(entry.name), signal.SIGKILL)
    wait_until(lambda: fleet.run("status").returncode == 0, lambda: "no controller")
    done = fleet.do("scale", "alpha", "2")
    assert "ready: alpha 2, beta 1" in done
    assert fleet.epochs() == before


def is_controller_of(fleet: RunningFleet, entry: Path) -> bool:
    try:
        title = (entry / "cmdline").read_text()
        return title.startswith("ray::FleetController") and int(entry.name) in find_marked(
            fleet.folder, fleet.ray_folder
        )
    except OSError:
        return False


def test_the_replicas_of_a_killed_machine_come_back_elsewhere(fleet: RunningFleet) -> None:
    before = fleet.ready()
    number = (
        min(int(entry["address"].rpartition(":")[0].rpartition(".")[2]) for entry in before.values()) - 11
    )
    gone = {name for name, entry in before.items() if entry["address"].startswith(f"127.0.0.{11 + number}:")}
    killed_at = time.time()
    assert fleet.tell_machines(f"kill {number}") == "killed"
    ended = {name: fleet.wait_said(f"{name} has ended", killed_at) for name in gone}
    back = {name: fleet.wait_said(f"{name} is ready", ended[name]) for name in gone}
    for name in sorted(gone):
        sys.stdout.write(
            f"{name}: noticed {ended[name] - killed_at:.1f} s after its machine was killed, "
            f"ready elsewhere {back[name] - ended[name]:.1f} s later\n"
        )
    fleet.do("scale", "alpha", "2")
    after = fleet.ready()
    assert set(after) == set(before)
    assert not any(entry["address"].startswith(f"127.0.0.{11 + number}:") for entry in after.values())
    wait_routed(fleet, lambda known: known == set(after))
    assert fleet.ask("alpha", STORY).status_code == 200
    assert fleet.ask("beta", STORY).status_code == 200


def test_a_file_that_is_followed_may_ask_for_more_than_there_is_room_for_just_now(
    fleet: RunningFleet, pools: list[dict[str, Any]]
) -> None:
    before = fleet.epochs()
    alpha, beta = pools
    refused = fleet.apply(alpha | {"replicas": 3}, beta)
    assert refused.returncode == 2
    waits = "waiting for room in the Ray cluster: alpha-"
    with Follower(fleet) as follower:
        wait_until(lambda: follower.says(waits), lambda: f"{follower.said()}", SECONDS)
        assert follower.said()[0].endswith("; they wait for it")
        assert not follower.ready_file.exists()
        assert fleet.epochs() == before, "those that serve do not notice"
        fleet.do("scale", "alpha", "1")
        follower.wait_ready()


def test_stop_leaves_nothing_behind(fleet: RunningFleet) -> None:
    assert fleet.do("stop") == "The fleet is stopped.\n"
    nothing = fleet.run("status")
    assert nothing.returncode == 1
    assert nothing.stderr.startswith("kvasir: no fleet runs on this Ray cluster")
    with redis.Redis.from_url(fleet.redis_url, protocol=2) as client:
        assert client.keys(f"{PREFIX}:*:replica:*") == []
