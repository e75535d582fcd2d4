"""A prompt with a lease whose replica is removed by an operator: the real command, controller, replicas and
router, before and after.
"""

import secrets
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from replicas.toy_model import toy_model_path
from tests.cluster.kvasir_command import wait_until
from tests.cluster.running_fleet import SECONDS, SECRET, RunningFleet, open_fleet, pool

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "alpha"
STAYS, LEAVES = "alpha-0", "alpha-1"
TEXT = "The cat that sails asks the dog that sings for the long way home. " * 40
MIB = 1 << 20
LEASED = "replica_prefix_leased_tokens"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """Two replicas of our own engine, with host memory and a disk each, that may pull from each other."""
    folder = tmp_path_factory.mktemp("fleet")
    secret_file = folder / SECRET
    secret_file.write_text(secrets.token_hex(32))
    secret_file.chmod(0o600)
    with open_fleet(folder, "hand-over-test", "tests.cluster.ray_machines", "2") as running:
        tiers = {"host_kv_bytes": 64 * MIB, "disk_kv_bytes": 128 * MIB, "kv_folder": str(folder / "kv")}
        settings = {"engine": "torch", "num_threads": 1, "num_blocks": 512, "metrics_port": 0}
        one_pool = pool(MODEL, toy_model_path(), 2, **settings, **tiers, pull_bytes_per_second=1e9)
        applied = running.apply(one_pool, secret_file=str(secret_file))
        assert applied.returncode == 0, applied.stdout + applied.stderr
        yield running


def ask(fleet: RunningFleet, prompt: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 16}
    answer = fleet.client.post(
        f"{fleet.router_url}/v1/chat/completions", json={**body, "temperature": 0, **fields}
    )
    assert answer.status_code == 200, answer.text
    return answer


def details(answer: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["usage"]["prompt_tokens_details"]
    return found


def routed(fleet: RunningFleet) -> list[str]:
    """The replicas that the router knows."""
    try:
        return sorted(fleet.explain(MODEL, "Hello").get("affinity_order", []))
    except httpx.HTTPError:
        return []


def leased_at(fleet: RunningFleet, replica_id: str) -> tuple[str, httpx.Response]:
    """A prompt that was answered there and is to be kept for a day, and the answer."""
    for number in range(200):
        prompt = f"Story {number}. {TEXT}"
        answer = ask(fleet, prompt, prompt_cache_retention="24h")
        if answer.headers["x-kvasir-replica"] == replica_id:
            return prompt, answer
    raise AssertionError(f"no prompt goes to {replica_id}")


def metric(address: str, name: str) -> float:
    lines = httpx.get(f"http://{address}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split()[0] == name)


def host_tokens(fleet: RunningFleet, prompt: str, replica_id: str) -> int:
    """What the router knows of the prompt in that replica's host memory."""
    candidates = fleet.explain(MODEL, prompt).get("candidates", [])
    tiers = {each["replica"]: each["tiers"] for each in candidates}.get(replica_id)
    return 0 if tiers is None else int(tiers["host_tokens"])


def test_a_replica_that_is_scaled_away_leaves_what_it_has_leased_to_the_one_that_stays(
    fleet: RunningFleet,
) -> None:
    wait_until(lambda: routed(fleet) == [STAYS, LEAVES], lambda: str(routed(fleet)), SECONDS)
    prompt, first = leased_at(fleet, LEAVES)
    (lease,) = details(first)["cache_leases"]
    assert (lease["status"], lease["seconds"]) == ("granted", 86_400)
    num_leased = lease["tokens"]
    assert num_leased >= 512
    there, here = (fleet.ready()[name]["metrics_address"] for name in (LEAVES, STAYS))
    wait_until(
        lambda: metric(there, LEASED) == num_leased,
        lambda: "\n".join(fleet.controller_log()[-40:]),
        SECONDS,
    )
    num_before = metric(here, LEASED)

    assert "ready: alpha 1" in fleet.do("scale", MODEL, "1")

    assert sorted(fleet.ready()) == [STAYS]
    assert metric(here, LEASED) == num_before + num_leased, "the lease is known there"
    assert metric(here, "replica_taken_over_chunks_total") == num_leased / 128
    assert metric(here, "replica_prefix_lease_broken_tokens_total") == 0
    wait_until(lambda: routed(fleet) == [STAYS], lambda: str(routed(fleet)), SECONDS)
    wait_until(
        lambda: host_tokens(fleet, prompt, STAYS) == num_leased,
        lambda: str(fleet.explain(MODEL, prompt)),
        SECONDS,
    )
    again = ask(fleet, prompt)
    assert again.headers["x-kvasir-replica"] == STAYS
    assert again.json()["choices"][0]["message"] == first.json()["choices"][0]["message"]
    usage = details(again)
    assert usage["cached_tokens"] == usage["host_cached_tokens"] == num_leased
    assert "evicted_early_tokens" not in usage, "no lease was broken"
