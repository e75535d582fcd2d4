"""Named caches on a whole path of real processes: made before all is killed, used after it from disk."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtests.stacks.local_stack import LocalStack, free_port, local_stack, python_command

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

BEGINNING = [{"role": "system", "content": "Of what is kept by its name, ☂. " * 60}]
PORT = free_port()
METRICS_PORT = free_port()
OTHER = f"http://127.0.0.1:{PORT}"


@pytest.fixture(scope="module")
def kv_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def tiered_stack(kv_folder: Path) -> Iterator[LocalStack]:
    """One replica of our own engine with memory below its cache, and two routers."""
    settings: dict[str, Any] = {
        "engine": "torch",
        "model_name": "toy",
        "num_threads": 1,
        "num_blocks": 256,
        "host_kv_bytes": 16 * 2**20,
        "disk_kv_bytes": 64 * 2**20,
        "metrics_port": METRICS_PORT,
        "kv_folder": str(kv_folder),
    }
    with local_stack(num_replicas=1, replica_settings=settings) as stack:
        stack.start("router-2", python_command("router", {"port": PORT, **stack.shared}))
        yield stack


def ask(url: str, cache: str, text: str) -> dict[str, Any]:
    body = {
        "model": "toy",
        "messages": [{"role": "user", "content": text}],
        "cache": cache,
        "max_tokens": 2,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]["prompt_tokens_details"]
    return usage


def wait_for(url: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"{url} is not ready")


def wait_until_on_disk(stack: LocalStack, kv_folder: Path, num_chunks: int) -> None:
    """Its chunks, each with its name and the end of its lease in the journal."""

    def is_there() -> bool:
        (journal,) = kv_folder.rglob("journal.log")
        return num_on_disk() >= num_chunks and journal.stat().st_size >= 128 * num_chunks

    stack.poll(is_there, "the disk")


def num_on_disk() -> float:
    text = httpx.get(f"http://127.0.0.1:{METRICS_PORT}/metrics").text
    values = [
        line.split()[1] for line in text.splitlines() if line.startswith('replica_tier_chunks{tier="disk"}')
    ]
    return float(values[0]) if values else 0.0


def test_one_made_before_everything_was_killed_is_used_after_it_from_disk(
    tiered_stack: LocalStack, kv_folder: Path
) -> None:
    stack = tiered_stack
    made = httpx.post(
        f"{stack.url}/v1/caches", json={"model": "toy", "messages": BEGINNING, "ttl": 7200}, timeout=60
    ).json()
    lease = made["lease"]
    assert lease["status"] == "granted" and lease["seconds"] == 7200 and lease["tokens"] >= 256
    wait_for(OTHER)
    used = ask(OTHER, made["id"], "Through the other router.")
    assert used["device_cached_tokens"] >= lease["tokens"]
    assert used["cache_leases"][0]["status"] == "granted"

    wait_until_on_disk(stack, kv_folder, lease["tokens"] // 128)
    stack.kill("replica-0")
    stack.kill("router")
    stack.start("replica-0")
    stack.start("router")
    stack.wait_ready(1)
    used = ask(stack.url, made["id"], "And after it all.")
    assert used["disk_cached_tokens"] == lease["tokens"]
    assert httpx.get(f"{OTHER}/v1/caches/{made['id']}").json() == made

    changed = httpx.patch(f"{OTHER}/v1/caches/{made['id']}", json={"ttl": 4000}, timeout=60).json()
    assert changed["lease"]["status"] == "granted" and changed["ttl"] == 4000
    assert httpx.delete(f"{stack.url}/v1/caches/{made['id']}").json()["deleted"]
    gone = httpx.get(f"{OTHER}/v1/caches/{made['id']}")
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "cache_deleted"
