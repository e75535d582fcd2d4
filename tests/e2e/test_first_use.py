"""What a newcomer does first: one command, two users, one shared prompt, and an accident.

Everything is real: `kvasir up` with Ray, our own engine with the model that ships, Redis, the router,
and the official OpenAI client.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import redis

from replicas.protocol import keys
from replicas.protocol.blocks import HASH_BYTES
from replicas.protocol.status import Epoch, ReplicaId
from tests.integration.observe import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

RULES = " ".join(f"Rule {number}: answer in plain words and stay kind." for number in range(1, 131))
BLOCK_SIZE = 16


@dataclass(frozen=True)
class UpCluster:
    state_file: Path

    @property
    def state(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.state_file.read_text(encoding="utf-8"))
        return loaded

    def replica(self, replica_id: str) -> dict[str, Any]:
        return next(entry for entry in self.state["replicas"] if entry["replica_id"] == replica_id)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpCluster]:
    run_directory = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-m", "cluster.cli", "up", "--run-dir", str(run_directory), "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    with (run_directory.parent / "up.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    running = UpCluster(run_directory / "cluster.json")

    def ready() -> bool:
        assert process.poll() is None, (run_directory.parent / "up.log").read_text()
        return running.state_file.exists() and bool(running.state["ready"])

    try:
        wait_until(ready, "kvasir up", seconds=300)
        yield running
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0


def ask(cluster: UpCluster, user: str, question: str) -> tuple[openai.types.CompletionUsage, str, str]:
    """Usage, the replica that served it, and the answer's text."""
    with openai.OpenAI(base_url=cluster.state["router_url"] + "/v1", api_key="none", max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "system", "content": RULES}, {"role": "user", "content": question}],
            temperature=0,
            max_tokens=40,
            user=user,
        )
    answer = raw.parse()
    assert answer.usage is not None
    return answer.usage, raw.headers["x-kvasir-replica"], answer.choices[0].message.content or ""


def test_the_second_user_reads_what_the_first_one_wrote_and_an_accident_costs_only_time(
    cluster: UpCluster,
) -> None:
    first, first_replica, text = ask(cluster, "ada", "What is a KV cache?")
    second, second_replica, _ = ask(cluster, "grace", "Who was Kvasir?")
    assert text.strip()
    assert second_replica == first_replica
    assert first.prompt_tokens > 1500

    # All full blocks before the questions differ: the system prompt, give or take the block it ends in.
    num_shared_tokens = first.prompt_tokens - 40
    assert first.prompt_tokens_details is not None
    assert second.prompt_tokens_details is not None
    num_cached = second.prompt_tokens_details.cached_tokens
    assert num_cached is not None
    assert num_cached % BLOCK_SIZE == 0
    assert num_shared_tokens - BLOCK_SIZE <= num_cached < second.prompt_tokens

    entry = cluster.replica(first_replica)
    client = redis.Redis.from_url(cluster.state["redis_url"], protocol=2)
    model = next(iter(client.smembers(keys.MODELS_KEY))).decode()
    key = keys.blocks_key(model, ReplicaId(first_replica), Epoch(entry["epoch"]))

    def indexed() -> set[bytes]:
        return {member for member in client.smembers(key) if len(member) == HASH_BYTES}

    # One hash for every 128 tokens of the shared prompt, and the last full block of each prompt.
    wait_until(lambda: len(indexed()) >= num_cached // 128, "the shared prompt in the index")
    other = next(item for item in cluster.state["replicas"] if item["replica_id"] != first_replica)
    other_key = keys.blocks_key(model, ReplicaId(other["replica_id"]), Epoch(other["epoch"]))
    assert not indexed() & client.smembers(other_key)
    client.close()

    os.kill(entry["pid"], signal.SIGKILL)
    third, third_replica, text = ask(cluster, "ada", "What is a replica?")
    assert text.strip()
    assert third_replica != first_replica
    assert third.completion_tokens > 0

    def is_back() -> bool:
        now = cluster.replica(first_replica)
        return now["epoch"] not in (None, entry["epoch"]) and now["state"] == "ready"

    wait_until(is_back, "the replica under a new epoch", seconds=120)
