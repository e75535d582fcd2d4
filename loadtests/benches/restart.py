"""A replica that is killed and comes back to its disk: how long from its engine to its place in the index.

A real replica process of the toy model behind a real router, with small chunks of KV, as many on disk as is
asked for. Each round ends the replica with SIGKILL and starts it again. *Registered* is when Redis has its
record and the hashes of all that lies on its disk; then a prompt from before is asked for.

    python -m loadtests.benches.restart [--chunks 10000] [--rounds 5]
"""

import argparse
import random
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import redis
from prometheus_client.parser import text_string_to_metric_families

from loadtests.figures import percentiles, print_header
from loadtests.stacks.local_stack import LocalStack, free_port, local_stack
from replicas.protocol import keys
from replicas.protocol.status import Epoch, ReplicaId, ReplicaState

MODEL = "toy_model"
REPLICA = ReplicaId("replica-0")
CHUNK_TOKENS = 32
TOKEN_BYTES = 2560
PROMPT_TOKENS = 2000
PROMPT_CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS
MOST_IN_HOST = 400
MAX_SECONDS = 600.0
POLL_SECONDS = 0.002

_STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) .*\bengine is ready\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Restart:
    """Seconds, from the process's start and from the time when its engine was ready."""

    engine_ready: float
    registered: float
    num_hashes: int
    first_answer: float
    first_hit_tokens: int
    first_disk_tokens: int

    @property
    def seconds(self) -> float:
        return self.registered - self.engine_ready


class Bench:
    def __init__(self, stack: LocalStack, metrics_port: int, num_chunks: int) -> None:
        self._stack = stack
        self._metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        self._num_chunks = num_chunks
        self._rng = random.Random(num_chunks)
        self._prompts: list[list[int]] = []
        self._redis = redis.Redis.from_url(stack.redis_url, protocol=2)

    def ask(self, prompt: Sequence[int]) -> dict[str, int]:
        body = {"model": MODEL, "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
        answer = httpx.post(f"{self._stack.url}/v1/completions", json=body, timeout=60.0)
        answer.raise_for_status()
        details: dict[str, int] = answer.json()["usage"]["prompt_tokens_details"]
        return details

    def num_on_disk(self) -> int:
        text = httpx.get(self._metrics_url, timeout=60.0).text
        return round(
            sum(
                sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.name == "replica_tier_chunks" and sample.labels["tier"] == "disk"
            )
        )

    def fill(self) -> None:
        """The disk, with prompts."""
        ends_at = time.monotonic() + MAX_SECONDS
        while (num := self.num_on_disk()) < self._num_chunks:
            if time.monotonic() > ends_at:
                raise TimeoutError(f"after {MAX_SECONDS:g} s {num} chunks lie on the disk")
            for _ in range(10):
                prompt = [self._rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)]
                self.ask(prompt)
                self._prompts.append(prompt)
        made = len(self._prompts) * PROMPT_CHUNKS
        print(f"  {num:,} of {made:,} chunks that were made are on the disk; {MOST_IN_HOST} fit in memory")

    def restart(self) -> Restart:
        number = self._rng.randrange(len(self._prompts) // 2)
        log = self._stack.run_directory / f"{REPLICA}.log"
        said = log.stat().st_size
        old_epoch = self._epoch()
        self._stack.kill(REPLICA)
        began = time.time()
        self._stack.start(REPLICA)
        num_hashes, registered = self._wait_registered(old_epoch)
        with log.open(encoding="utf-8", errors="replace") as file:
            file.seek(said)
            ready = _STAMP.search(file.read())
        assert ready is not None, "a replica says when its engine is ready"
        self._stack.wait_ready(1)
        asked = time.time()
        details = self.ask(self._prompts[number])
        return Restart(
            datetime.strptime(ready[1], "%Y-%m-%d %H:%M:%S,%f").timestamp() - began,
            registered - began,
            num_hashes,
            time.time() - asked,
            details["cached_tokens"],
            details["disk_cached_tokens"],
        )

    def _epoch(self) -> bytes | None:
        epoch = self._redis.hget(keys.replica_key(MODEL, REPLICA), "epoch")
        assert epoch is None or isinstance(epoch, bytes)
        return epoch

    def _wait_registered(self, old_epoch: bytes | None) -> tuple[int, float]:
        """How many hashes the index then has, and when."""
        ends_at = time.monotonic() + MAX_SECONDS
        while time.monotonic() < ends_at:
            epoch, state = self._redis.hmget(keys.replica_key(MODEL, REPLICA), ["epoch", "state"])
            assert epoch is None or isinstance(epoch, bytes)
            if epoch is not None and epoch != old_epoch and state == ReplicaState.READY.encode():
                now = time.time()
                blocks = keys.blocks_key(MODEL, REPLICA, Epoch(epoch.decode()))
                num_hashes = self._redis.scard(blocks)
                assert isinstance(num_hashes, int)
                return num_hashes, now
            time.sleep(POLL_SECONDS)
        raise TimeoutError("the replica did not come back")


def settings(folder: str, num_chunks: int, metrics_port: int) -> dict[str, Any]:
    chunk_bytes = 4096 + CHUNK_TOKENS * TOKEN_BYTES
    return {
        "engine": "torch",
        "device": "cpu",
        "model_name": MODEL,
        "num_threads": 1,
        "num_blocks": 300,
        "context_length": 4096,
        "chunk_tokens": CHUNK_TOKENS,
        "index_stride": CHUNK_TOKENS,
        "host_kv_bytes": MOST_IN_HOST * chunk_bytes,
        "disk_kv_bytes": 2 * num_chunks * chunk_bytes,
        "kv_folder": f"{folder}/kv",
        "metrics_port": metrics_port,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunks", type=int, default=10_000, help="on the disk; 86 KB each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the disk's folder is made")
    arguments = parser.parse_args()
    print_header(f"A replica comes back to {arguments.chunks:,} chunks")
    metrics_port = free_port()
    with (
        tempfile.TemporaryDirectory(prefix="kvasir-restart-", dir=arguments.folder) as folder,
        local_stack(
            replica_settings=settings(folder, arguments.chunks, metrics_port),
            router_settings={"index_stride": CHUNK_TOKENS},
        ) as stack,
    ):
        bench = Bench(stack, metrics_port, arguments.chunks)
        bench.fill()
        restarts = [bench.restart() for _ in range(arguments.rounds)]
    for each in restarts:
        print(
            f"  engine ready after {each.engine_ready:6.2f} s, registered {each.seconds:5.2f} s later with"
            f" {each.num_hashes:,} hashes; first answer after {1000 * each.first_answer:.0f} ms,"
            f" {each.first_hit_tokens} of {PROMPT_TOKENS} tokens cached, {each.first_disk_tokens} on disk"
        )
    seconds = [each.seconds for each in restarts]
    print(f"  from engine to index: p50 {percentiles(seconds).p50:.2f} s, at most {max(seconds):.2f} s")


if __name__ == "__main__":
    main()
