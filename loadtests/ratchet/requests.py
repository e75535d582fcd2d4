"""`python -m loadtests.ratchet.requests`: a router that answers chats in one process, to count instructions.

Owns the driver: a client's connection is a transport in memory, and so is the replica's stream. All between
them is the router's own code. Sockets, gRPC, Redis and the router's background tasks are left out, because
what they do depends on time and on other processes. Clocks pass by the number of engine steps.

The orders on standard input (`orders.py`) are `KIND COUNT SEED`, with KIND `streamed` or `whole`.
"""

import time


class _Clock:
    """Seconds that pass by the number of engine steps."""

    now = 1000.0

    def read(self) -> float:
        return self.now

    def look(self) -> float:
        """For processor time: what is measured takes `LOOK_SECONDS`."""
        self.now += LOOK_SECONDS
        return self.now


STEP_SECONDS = 0.002
LOOK_SECONDS = 0.0005
CLOCK = _Clock()
# Before other modules take these functions as their defaults.
time.monotonic = time.perf_counter = CLOCK.read
time.thread_time = CLOCK.look

# ruff: noqa: E402
import asyncio
import bisect
import random
from collections.abc import Sequence
from typing import Any, cast

import uvicorn
import uvloop
from uvicorn.server import ServerState

from loadtests.benches.door import MODEL, OUTPUT_TOKENS, WORKLOAD
from loadtests.benches.router import bodies
from loadtests.ratchet.orders import Action, follow_orders
from replicas.config import ReplicaConfig
from replicas.engines import build_engine_here
from replicas.process.settings import build
from replicas.protocol.cluster_secret import ClusterSecret
from replicas.protocol.frames import (
    FinishReason,
    LoadSnapshot,
    PromptUsage,
    RequestKey,
    ServerFrame,
    Submit,
    TokenDelta,
)
from replicas.protocol.keys import IndexChange
from replicas.protocol.status import Epoch, ModelCard, ReplicaId, TokenizerBundle
from replicas.protocol.wire import encode
from router.assembly import Router
from router.config import RouterConfig
from router.edge.http_protocol import ClientProtocol, protocol_of
from router.fleet.inflight import Inflight, Mailbox
from router.fleet.membership import Membership
from router.fleet.registry_source import RegistrySource
from router.fleet.replica_client import ReplicaClient
from router.memory import spare_long_lived_objects
from router.routing.table import RoutingTable

NUM_CONNECTIONS = 16
NUM_TURNS = 10
"""Turns of the event loop after which all that was received is worked on."""
REPLICA = ReplicaId("replica-0")
EPOCH = Epoch("epoch")
INDEX_STRIDE = RouterConfig.index_stride
TOKEN_BYTES = 4
"""The size of a packed token."""


class _Client(ReplicaClient):
    """Its replica answers each submit with `OUTPUT_TOKENS` tokens, one a step."""

    block_size: int

    def __init__(self, table: RoutingTable) -> None:
        super().__init__(REPLICA, "127.0.0.1:1", table.update_load, epoch=EPOCH)
        self._table = table
        self._live: dict[int, tuple[Submit, int]] = {}
        """With the number of tokens so far, by submit id."""
        self._num_changes = 0
        self._newest = b""
        """The prompt that was stored last."""

    def submit(self, submit: Submit, mailbox: Mailbox | None = None) -> Inflight:
        inflight = super().submit(submit, mailbox)
        self._live[inflight.submit_id] = submit, 0
        return inflight

    def step(self) -> None:
        """One frame in each direction."""
        self._next_frame()
        deltas = tuple(self._token(submit_id) for submit_id in list(self._live))
        load = LoadSnapshot(num_running=len(self._live))
        self._receive(encode(ServerFrame(deltas, load, self._num_submits)))

    def _token(self, submit_id: int) -> TokenDelta:
        submit, number = self._live.pop(submit_id)
        usage = None
        if number == 0:
            num_cached = self._num_cached_tokens(submit.packed_tokens)
            self._store(submit)
            usage = PromptUsage(submit.num_tokens, num_cached, submit.num_tokens - num_cached)
        is_last = number + 1 == OUTPUT_TOKENS
        if not is_last:
            self._live[submit_id] = submit, number + 1
        finish = FinishReason.LENGTH if is_last else None
        return TokenDelta(RequestKey(submit_id, 0), (300 + number,), finish, usage)

    def _num_cached_tokens(self, packed: bytes) -> int:
        """Return the full blocks that the newest prompt has as well."""
        size = self.block_size * TOKEN_BYTES
        ends = range(size, len(packed) + 1, size)
        num_blocks = bisect.bisect_left(ends, True, key=lambda end: packed[:end] != self._newest[:end])
        return num_blocks * self.block_size

    def _store(self, submit: Submit) -> None:
        """The index hears of the prompt's blocks."""
        self._newest = submit.packed_tokens
        self._num_changes += 1
        change = IndexChange(
            REPLICA,
            EPOCH,
            self._num_changes,
            added=submit.announced_hashes,
            ended=(submit.announcement_id,) if submit.announcement_id else (),
        )
        self._table.index(MODEL).apply(change)


class _Members(Membership):
    """The one replica."""

    own: ReplicaClient

    def client(self, replica_id: ReplicaId) -> ReplicaClient | None:
        return self.own


class _DrivenRouter(Router):
    """Its replica is in this process."""

    def _follow_members(self, secret: ClusterSecret | None) -> Membership:
        source = RegistrySource(self._config.redis_url, self._config.poll_seconds)
        members = _Members(source, self._table, index_stride=INDEX_STRIDE, on_model=self._add_model)
        members.own = self.replica = _Client(self._table)
        return members

    async def begin(self, card: ModelCard, bundle: TokenizerBundle) -> None:
        self.replica.block_size = card.block_size
        await self._add_model(card, bundle)
        self._table.add_replica(REPLICA, card, INDEX_STRIDE)
        self._table.index(MODEL).replace(REPLICA, EPOCH, ())


class _Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 2), "sockname": ("127.0.0.1", 1)})
        self.written: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


class _Driver:
    """Connections to the router, all of which send at once and wait for all answers."""

    def __init__(self, router: _DrivenRouter) -> None:
        self._router = router
        config = uvicorn.Config(
            router.apps.main,
            loop="none",
            http=protocol_of(router.connections),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
        )
        config.load()
        make = cast(Any, config.http_protocol_class)
        self._connections: list[tuple[ClientProtocol, _Transport]] = []
        for _ in range(NUM_CONNECTIONS):
            protocol = make(config=config, server_state=ServerState(), app_state={})
            self._connections.append((protocol, _Transport()))
            protocol.connection_made(self._connections[-1][1])

    async def send(self, requests: Sequence[bytes]) -> None:
        """Raises RuntimeError for an answer that is not whole."""
        for start in range(0, len(requests), NUM_CONNECTIONS):
            asked = list(zip(self._connections, requests[start : start + NUM_CONNECTIONS], strict=False))
            for (protocol, _), request in asked:
                protocol.data_received(request)
            await _turns()
            while self._router.replica.num_inflight:
                CLOCK.now += STEP_SECONDS
                self._router.replica.step()
                await _turns()
            for (_, transport), _ in asked:
                written = b"".join(transport.written)
                transport.written.clear()
                if not written.startswith(b"HTTP/1.1 200") or not written.endswith((b"0\r\n\r\n", b"}")):
                    raise RuntimeError(f"the router answered {written[:1000]!r}")


async def _turns() -> None:
    for _ in range(NUM_TURNS):
        await asyncio.sleep(0)


def _request(body: bytes) -> bytes:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


async def _serve() -> None:
    engine, bundle = build_engine_here(
        build(ReplicaConfig, {"engine": "simulated", "model_name": MODEL, "num_blocks": 65536})
    )
    config = build(RouterConfig, {"secret": "00" * 32})
    router = _DrivenRouter(config, rng=random.Random(0), clock=CLOCK.read)
    await router.begin(engine.card, bundle)
    driver = _Driver(router)
    spare_long_lived_objects()

    async def prepare(words: Sequence[str]) -> Action:
        kind, count, seed = words
        stream = kind == "streamed"
        made = bodies(WORKLOAD, int(count), stream=stream, max_tokens=OUTPUT_TOKENS, seed=int(seed))
        requests = [_request(body) for body in made]
        return lambda: driver.send(requests)

    await follow_orders(prepare)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve())
