"""A gRPC server over real sockets with a scripted engine behind it, and a router's end of it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import pytest
from prometheus_client import CollectorRegistry

from replicas.loop import EngineLoop
from replicas.observation.metrics import ReplicaMetrics
from replicas.protocol.blocks import BlockHash
from replicas.protocol.status import Epoch, ReplicaId, TokenizerBundle
from replicas.serving.frame_bridge import FrameBridge
from replicas.serving.intake import Intake
from replicas.serving.server import Identity, ReplicaServer
from tests.replicas.router_client import RouterClient
from tests.replicas.scripted_engine import CARD, ScriptedEngine
from tests.replicas.waiting import until


class Announcer:
    """An index writer that only keeps score."""

    def __init__(self) -> None:
        self.live: dict[int, tuple[BlockHash, ...]] = {}
        self.num_begun = 0

    def announce(
        self, announcement_id: int, block_hashes: tuple[BlockHash, ...], points: tuple[BlockHash, ...] = ()
    ) -> bool:
        if announcement_id in self.live:
            return False
        self.live[announcement_id] = block_hashes + points
        self.num_begun += 1
        return True

    def end(self, announcement_id: int) -> None:
        del self.live[announcement_id]


class Harness:
    def __init__(self, call_keys: Sequence[bytes] = ()) -> None:
        self.engine = ScriptedEngine()
        self.announcer = Announcer()
        self.drains = 0
        self.address = ""
        self.blocks = [BlockHash(bytes([n]) * 16) for n in range(5)]
        self.metrics = metrics = ReplicaMetrics(CollectorRegistry())
        self.bridge = FrameBridge(asyncio.get_running_loop(), lambda *frame: self.server.deliver(*frame))
        self.loop = EngineLoop(self.engine, self.bridge.put, lambda _: None)
        self.server = ReplicaServer(
            Identity(
                ReplicaId("r0"),
                Epoch("e1"),
                lambda: CARD,
                TokenizerBundle({"tokenizer.json": b"{}" * 4_000_000}),
            ),
            self.loop,
            self.announcer,
            list_blocks=lambda: self.blocks,
            on_drain=self._on_drain,
            metrics=metrics,
            heartbeat_seconds=0.05,
            intake=Intake(max_sequences=300, max_tokens=200_000),
            call_keys=call_keys,
        )

    def _on_drain(self) -> None:
        self.drains += 1

    def sample(self, name: str) -> float:
        value = self.metrics.registry.get_sample_value(name)
        assert value is not None, name
        return value

    async def until_engine_is_empty(self) -> None:
        await until(lambda: not self.engine.has_work() and not self.server.num_requests)


@asynccontextmanager
async def serving(harness: Harness) -> AsyncIterator[Harness]:
    harness.loop.start()
    port = await harness.server.start("127.0.0.1", 0)
    await harness.server.set_serving(True)
    harness.address = f"127.0.0.1:{port}"
    yield harness
    harness.engine.gate.set()
    await harness.server.stop(1.0)
    harness.bridge.close()
    assert await asyncio.to_thread(harness.loop.stop, 5.0)


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    async with serving(Harness()) as served:
        yield served


@pytest.fixture
async def channel(harness: Harness) -> AsyncIterator[grpc.aio.Channel]:
    options = [("grpc.max_receive_message_length", 64 * 2**20)]
    async with grpc.aio.insecure_channel(harness.address, options=options) as channel:
        yield channel


@pytest.fixture
def client(channel: grpc.aio.Channel) -> RouterClient:
    return RouterClient(channel)
