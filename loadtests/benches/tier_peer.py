"""TierPeer: an engine in a process of its own whose KV others may pull, for benches of where KV lies.

Owns that process: it computes prompts on command, and serves its host memory like a replica. It has no Redis,
no router and no Serve stream.
"""

import asyncio
import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import grpc
from msgspec.structs import replace
from prometheus_client import Counter

from replicas.config import ReplicaConfig
from replicas.engine import Engine, expand
from replicas.engines import build_engine_here
from replicas.kvstore.pulling.chunk_reader import ChunkReader
from replicas.protocol.frames import Submit
from replicas.protocol.pulls import PullHint
from replicas.protocol.service import path
from replicas.protocol.status import Epoch, ReplicaId
from replicas.protocol.wire import encode
from replicas.serving.pull_service import PullService

EPOCH = Epoch("bench")
PEER = ReplicaId("peer")
START_SECONDS = 300


class TierPeer:
    def __init__(self, address: str, told: Connection) -> None:
        self._address = address
        self._told = told
        self._serial = 0

    def compute(self, asked: Submit) -> PullHint:
        """Until its chunks lie in host memory. From where they may be pulled."""
        self._serial += 1
        self._told.send((self._serial, replace(asked, pull=None)))
        self._told.recv()
        return PullHint(PEER, EPOCH, self._address, asked.num_tokens)


@contextmanager
def tier_peer(config: ReplicaConfig) -> Iterator[TierPeer]:
    spawn = multiprocessing.get_context("spawn")
    told, theirs = spawn.Pipe()
    process = spawn.Process(target=_run, args=(config, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        assert told.poll(START_SECONDS), "the peer does not start"
        yield TierPeer(told.recv(), told)
    finally:
        told.close()
        process.join(30)
        process.kill()


def settle(engine: Engine) -> None:
    """Until nothing is copied or written any more."""
    pause = threading.Event()
    while engine.step().look_again_seconds is not None or engine.has_work():
        pause.wait(0.001)


def _run(config: ReplicaConfig, told: Connection) -> None:
    engine, _ = build_engine_here(config)
    engine.begin(lambda: None)
    engine.step()
    address: list[str] = []
    listens = threading.Event()
    threading.Thread(target=lambda: asyncio.run(_serve(engine, address, listens)), daemon=True).start()
    assert listens.wait(START_SECONDS)
    told.send(address[0])
    try:
        while True:
            serial, asked = told.recv()
            for request in expand(asked, serial):
                engine.add(request)
            settle(engine)
            told.send(serial)
    except EOFError:
        engine.close()


async def _serve(engine: Engine, address: list[str], listens: threading.Event) -> None:
    shared = engine.shared_kv
    assert shared is not None, "the peer has host memory that may be read"
    desk = PullService(ChunkReader(shared), EPOCH, Counter("sent", "Chunks sent", registry=None))
    server = grpc.aio.server()
    method: Any = grpc.unary_stream_rpc_method_handler(desk.serve, response_serializer=encode)
    service, _, name = path("Pull").removeprefix("/").partition("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: method}),))
    address.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    listens.set()
    await server.wait_for_termination()
