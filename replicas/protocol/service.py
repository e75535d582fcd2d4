"""The gRPC service of a replica: its methods and their handlers.

Owns the methods' names, and that messages are bytes; `wire.py` knows their content. Both ends receive raw
messages, so that they, not gRPC, handle violations of the contract.
"""

from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc

from replicas.protocol.wire import SERVICE_NAME, encode


class Replica(Protocol):
    """The calls that a router and the controller make. Input is encoded, output is not."""

    def serve(self, frames: AsyncIterator[bytes], context: Any) -> Any:
        """One stream per router process and replica carries every request between them: ClientFrames one way,
        a ServerFrame per engine step the other way."""

    async def describe(self, request: bytes, context: Any) -> Any:
        """DescribeRequest to DescribeResponse."""

    def list_blocks(self, request: bytes, context: Any) -> Any:
        """Nothing to BlockLists: the hashes that the index should hold, for rebuilding and checking it."""

    async def pull(self, request: bytes, context: Any) -> None:
        """PullRequest to PullParts: chunks of KV from host memory, for another replica."""

    async def take_over(self, request: bytes, context: Any) -> Any:
        """TakeOver to TakenOver: chunks that another replica had leased and cannot keep any longer."""

    async def put_media(self, parts: AsyncIterator[bytes], context: Any) -> Any:
        """ImageParts to ImageTaken: the content of an image that prompts will refer to."""

    async def begin_drain(self, request: bytes, context: Any) -> Any:
        """Nothing to Nothing: stop admitting, finish running requests, leave. Returns at once."""


def path(method: str) -> str:
    """Return the method's gRPC name."""
    return f"/{SERVICE_NAME}/{method}"


def handler(replica: Replica) -> "grpc.GenericRpcHandler[Any, Any]":
    """For a server to serve this replica."""
    methods = {
        "Serve": grpc.stream_stream_rpc_method_handler(replica.serve, response_serializer=encode),
        "Describe": grpc.unary_unary_rpc_method_handler(replica.describe, response_serializer=encode),
        "ListBlocks": grpc.unary_stream_rpc_method_handler(replica.list_blocks, response_serializer=encode),
        "Pull": grpc.unary_stream_rpc_method_handler(replica.pull, response_serializer=encode),
        "TakeOver": grpc.unary_unary_rpc_method_handler(replica.take_over, response_serializer=encode),
        "PutMedia": grpc.stream_unary_rpc_method_handler(replica.put_media, response_serializer=encode),
        "Drain": grpc.unary_unary_rpc_method_handler(replica.begin_drain, response_serializer=encode),
    }
    return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)


class ReplicaStub:
    """The other end: calls take structs, or bytes for `serve` and `put_media`, and give bytes."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.serve: Any = channel.stream_stream(path("Serve"), None, None)
        self.describe: Any = channel.unary_unary(path("Describe"), encode, None)
        self.list_blocks: Any = channel.unary_stream(path("ListBlocks"), encode, None)
        self.put_media: Any = channel.stream_unary(path("PutMedia"), None, None)
        self.drain: Any = channel.unary_unary(path("Drain"), encode, None)
