"""What a whole stack says of itself, for tests that ask whether everything was given back."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import httpx
import redis
from prometheus_client.parser import text_string_to_metric_families

from loadtests.stacks.local_stack import LocalStack, free_port, python_command
from replicas.protocol import keys
from replicas.protocol.blocks import BlockHash
from replicas.protocol.keys import ReplicaRecord
from replicas.protocol.status import Epoch, ReplicaId

MODEL = "toy"


def records(stack: LocalStack) -> dict[str, ReplicaRecord]:
    """The live replicas as Redis has them."""
    client = redis.Redis.from_url(stack.redis_url, protocol=2)
    found = {}
    for name in client.smembers(keys.replicas_key(MODEL)):
        replica_id = ReplicaId(name.decode())
        if fields := client.hgetall(keys.replica_key(MODEL, replica_id)):
            found[replica_id] = keys.decode_record(replica_id, fields)
    client.close()
    return dict(found)


def indexed_blocks(stack: LocalStack, replica_id: str, epoch: str) -> set[BlockHash]:
    client = redis.Redis.from_url(stack.redis_url, protocol=2)
    members = client.smembers(keys.blocks_key(MODEL, ReplicaId(replica_id), Epoch(epoch)))
    client.close()
    return {BlockHash(member) for member in members if member != keys.BLOCKS_MARKER}


GAUGES_OF_WORK = (
    "router_in_flight",
    "router_runs",
    "router_reservations",
    "router_replica_requests",
    "router_replica_pending_tokens",
    "router_index_predictions",
)
"""All 0 when there is nothing to do."""


def metrics(stack: LocalStack) -> Counter[str]:
    """Of the router: the sum of each metric's samples over all labels."""
    return metrics_at(stack.url)


def metrics_at(url: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(httpx.get(url + "/metrics", timeout=60).text):
        for sample in family.samples:
            found[sample.name] += sample.value  # type: ignore[assignment]
    return found


def metric(stack: LocalStack, name: str) -> float:
    return metrics(stack)[name]


def is_idle(stack: LocalStack) -> bool:
    """Nothing runs, waits or holds a block anywhere, and the router counts nothing that does."""
    loads = [record.load for record in records(stack).values()]
    busy = sum(
        load.num_running + load.num_waiting + load.num_pending_tokens + load.num_used_blocks for load in loads
    )
    return bool(loads) and busy == 0 and is_router_idle(stack)


def is_router_idle(stack: LocalStack) -> bool:
    """It counts nothing that runs, and has heard of all that its requests left in the index."""
    found = metrics(stack)
    return not any(found[name] for name in GAUGES_OF_WORK)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still waiting for: {what}"
        time.sleep(0.05)


def is_told(url: str) -> bool:
    """All that the router has answered is for others to find."""
    found = metrics_at(url)
    return not (found["router_history_untold"] or found["router_stored_response_memory_bytes"])


class AnotherRouter:
    """A second one of a stack, beside its own."""

    def __init__(self, stack: LocalStack, settings: Mapping[str, object]) -> None:
        self._stack = stack
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        stack.start("router-b", python_command("router", {"port": port, **stack.shared, **settings}))
        self._wait_ready()

    def kill(self) -> None:
        """It is started again, with nothing of what it knew."""
        self._stack.kill("router-b")
        self._stack.start("router-b")
        self._wait_ready()

    def _wait_ready(self) -> None:
        def is_ready() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                is_there = httpx.get(self.url + "/ready", timeout=60).status_code == 200
                return is_there and not metrics_at(self.url)["router_history_resting"]
            return False

        wait_until(is_ready, "the other router")


@contextlib.contextmanager
def another_router(stack: LocalStack, **settings: object) -> Iterator[AnotherRouter]:
    try:
        yield AnotherRouter(stack, settings)
    finally:
        stack.terminate("router-b")
