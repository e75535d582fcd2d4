"""A peer that stands between two replicas, and passes on what is pulled in a way of its own."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import grpc

from replicas.host import ReplicaHost
from replicas.protocol.pulls import PullHint, PullPart, PullRequest
from replicas.protocol.service import path
from replicas.protocol.status import ReplicaId
from replicas.protocol.wire import decode_pull_part, decode_pull_request, encode


class Pulled(Protocol):
    """The replica that it stands for."""

    @property
    def host(self) -> ReplicaHost: ...

    def hint(self, num_tokens: int, **other: Any) -> PullHint: ...


class Between:
    """Stands for a replica, and has from it what it is asked for. How that is passed on, `way` says."""

    def __init__(self, replica: Pulled, way: "Way") -> None:
        self._replica = replica
        self._way = way
        self._server = grpc.server(ThreadPoolExecutor(4))
        self.num_sent = 0
        self.requests: list[PullRequest] = []
        self.may_go_on = threading.Event()

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

    @property
    def host(self) -> ReplicaHost:
        return self._replica.host

    def hint(self, num_tokens: int, **other: Any) -> PullHint:
        fields = {"address": self._address, "replica_id": ReplicaId("between"), **other}
        return self._replica.hint(num_tokens, **fields)

    def _serve(self, encoded: bytes, context: Any) -> Iterator[PullPart]:
        request = decode_pull_request(encoded)
        self.requests.append(request)
        with grpc.insecure_channel(self._replica.host.address) as channel:
            pull = channel.unary_stream(path("Pull"), encode, decode_pull_part)
            for part in self._way(self, pull(request, timeout=60)):
                self.num_sent += 1
                yield part


Way = Callable[[Between, Iterator[PullPart]], Iterator[PullPart]]


def freezes(between: Between, parts: Iterator[PullPart]) -> Iterator[PullPart]:
    for part in parts:
        if part.index == 3:
            between.may_go_on.wait(60)
        yield part


def dies(between: Between, parts: Iterator[PullPart]) -> Iterator[PullPart]:
    for part in parts:
        if part.index == 3:
            raise RuntimeError("it dies")
        yield part
