"""Replicas of vLLM that pull from each other, and a peer between them that does with chunks what it likes."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from msgspec.structs import replace

from replicas.config import ReplicaConfig
from replicas.engine_process.build import build_engine
from replicas.host import ReplicaHost
from replicas.kvstore.layout import file_bytes
from replicas.protocol.blocks import BlockHash, ImageTokens
from replicas.protocol.frames import PromptUsage, StepFrame, Submit
from replicas.protocol.media import ImagePart
from replicas.protocol.pulls import PullHint, PullPart
from replicas.protocol.service import path
from replicas.protocol.status import ReplicaId
from replicas.protocol.wire import decode_media_taken, decode_pull_part, decode_pull_request, encode
from tests.replicas.router_client import ROOT, RouterClient, submit
from tests.replicas.whole_replica import config

if TYPE_CHECKING:
    from replicas.vllm_engine.engine import VllmEngine

CHUNK = 128
BLOCK_BYTES = 40_960
"""Keys and values of 32 tokens in five layers of two heads of 32, in bfloat16."""

SETTINGS: dict[str, Any] = {
    "engine": "vllm",
    "num_threads": 1,
    "num_blocks": 64,
    "context_length": 1300,
    "max_batched_tokens": 256,
    "max_running": 16,
    "host_kv_bytes": 40 * file_bytes(4 * BLOCK_BYTES),
    "pull_bytes_per_second": 1e9,
    "lease_seconds": 600.0,
}


@dataclass
class PeerReplica:
    host: ReplicaHost
    engine: Any
    channel: grpc.aio.Channel
    client: RouterClient
    frames: list[StepFrame]
    """Those of an engine in this process."""
    last_id: int = 0

    def hint(self, num_tokens: int, **other: Any) -> PullHint:
        record = self.host.record()
        return replace(PullHint(record.replica_id, record.epoch, record.address, num_tokens), **other)

    def submit(
        self,
        prompt: list[int],
        pull: PullHint | None = None,
        *,
        root: BlockHash = ROOT,
        max_tokens: int = 6,
        media: tuple[ImageTokens, ...] = (),
    ) -> Submit:
        self.last_id += 1
        asked = submit(self.last_id, prompt, max_tokens=max_tokens)
        greedy = replace(asked.sampling, temperature=0.0)
        return replace(asked, root=root, pull=pull, sampling=greedy, media=media)

    async def put(self, content: bytes, root: BlockHash = ROOT) -> bytes:
        """Send an image of one part, as routers do before a prompt refers to it."""

        async def parts() -> AsyncIterator[bytes]:
            yield encode(ImagePart(content, root, len(content)))

        return decode_media_taken(await self.client.stub.put_media(parts(), timeout=60)).content_hash

    async def answer(self, *asked: Submit) -> list[tuple[list[int], PromptUsage]]:
        """All at once."""
        await self.client.send(*asked)
        return await self.finish(*asked)

    async def finish(self, *asked: Submit) -> list[tuple[list[int], PromptUsage]]:
        """Of what was sent before."""
        found = await self.client.finish(*((each.submit_id, 0) for each in asked))
        answers: list[tuple[list[int], PromptUsage]] = []
        for _, deltas in sorted(found.items()):
            (usage,) = [delta.usage for delta in deltas if delta.usage is not None]
            answers.append(([token for delta in deltas for token in delta.token_ids], usage))
        return answers

    async def ask(
        self, prompt: list[int], pull: PullHint | None = None, **fields: Any
    ) -> tuple[list[int], PromptUsage]:
        (answer,) = await self.answer(self.submit(prompt, pull, **fields))
        return answer

    def metric(self, name: str, **labels: str) -> float:
        assert self.host._parts is not None
        return self.host._parts.metrics.registry.get_sample_value(name, labels) or 0.0

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """The process of the engine does nothing."""
        os.kill(self.engine.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.engine.pid, signal.SIGCONT)

    def is_at_rest(self) -> bool:
        """An engine in this process holds no block, slot, pin, request or transfer."""
        engine: VllmEngine = self.engine
        tier = engine._tier
        assert tier is not None and tier.store._pulls is not None and self.host._parts is not None
        pulls, directory = tier.store._pulls, tier.store.directory
        chunks = list(directory._chunks.values())
        return (
            not (engine._live or tier.chains or self.host._parts.server.num_requests)
            and engine.core.num_free_blocks == engine.core.num_blocks
            and not (pulls._num_slots or pulls._puller._transfers or directory.num_quarantined)
            and not any(chunk.is_filling or chunk.num_readers for chunk in chunks)
            and directory.num_in_host + len(directory._free_slots) == directory.num_host_slots
            and not any(each.num_calls for each in pulls._puller._peers._connections.values())
        )


Two = tuple[PeerReplica, PeerReplica]
"""The one that is pulled from, and the one that pulls."""


@asynccontextmanager
async def peer_replica(redis_url: str, number: int, **settings: Any) -> AsyncIterator[PeerReplica]:
    built: list[Any] = []
    frames: list[StepFrame] = []

    def build(config: ReplicaConfig) -> Any:
        engine, bundle = build_engine(config)
        built.append(engine)
        if not config.has_engine_process:
            _keep_frames(engine, frames)
        return engine, bundle

    host = ReplicaHost(config(redis_url, **{**SETTINGS, "replica_id": f"r{number}", **settings}), build=build)
    await host.start()
    try:
        async with grpc.aio.insecure_channel(host.address) as channel:
            yield PeerReplica(host, built[0], channel, RouterClient(channel), frames)
    finally:
        await host.stop()


@asynccontextmanager
async def two_replicas(redis_url: str, **settings: Any) -> AsyncIterator[Two]:
    """The engine of the one that pulls is in this process, that of the other in its own."""
    async with AsyncExitStack() as stack:
        there = asyncio.create_task(stack.enter_async_context(peer_replica(redis_url, 0, **settings)))
        pulling = peer_replica(redis_url, 1, engine_process=False, **settings)
        here = await stack.enter_async_context(pulling)
        yield await there, here


def _keep_frames(engine: Any, frames: list[StepFrame]) -> None:
    step = engine.step

    def kept() -> StepFrame:
        frame: StepFrame = step()
        frames.append(frame)
        return frame

    engine.step = kept


class Between:
    """Stands for a replica, and has from it what it is asked for. How that is passed on, `way` says."""

    def __init__(self, replica: PeerReplica, way: "Way") -> None:
        self._replica = replica
        self._way = way
        self._server = grpc.server(ThreadPoolExecutor(4))
        self.num_sent = 0
        self.may_go_on = threading.Event()
        self.was_left = threading.Event()
        """By who has asked."""

    def __enter__(self) -> "Between":
        handler = grpc.unary_stream_rpc_method_handler(self._serve, response_serializer=encode)
        service, _, method = path("Pull").removeprefix("/").partition("/")
        handlers = grpc.method_handlers_generic_handler(service, {method: handler})
        self._server.add_generic_rpc_handlers((handlers,))
        self._address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.may_go_on.set()
        self._server.stop(0).wait()

    def hint(self, num_tokens: int) -> PullHint:
        return self._replica.hint(num_tokens, address=self._address, replica_id=ReplicaId("between"))

    def vanish(self) -> None:
        threading.Thread(target=self._server.stop, args=(0,)).start()

    def _serve(self, encoded: bytes, context: Any) -> Iterator[PullPart]:
        context.add_callback(self.was_left.set)
        request = decode_pull_request(encoded)
        with grpc.insecure_channel(self._replica.host.address) as channel:
            pull = channel.unary_stream(path("Pull"), encode, decode_pull_part)
            for part in self._way(self, pull(request, timeout=60), context):
                self.num_sent += 1
                yield part


Way = Callable[[Between, Iterator[PullPart], Any], Iterator[PullPart]]
