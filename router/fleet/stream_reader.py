"""StreamReader: follows one Redis stream over a connection of its own.

Owns the connection. redis-py's client takes a pooled connection for every command, returns it and notifies
observers, which costs a router more than the answer itself: a busy fleet changes its index at every step.
Knows no index.
"""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias, cast

from redis.exceptions import ConnectionError as RedisConnectionError

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.connection import AbstractConnection

Entries: TypeAlias = Sequence[tuple[bytes, Mapping[bytes, bytes]]]
"""Redis' answer (protocol 2, undecoded): entries of a stream."""


class StreamReader:
    """Reads the stream at `key` with a client of protocol 2 that decodes nothing. It never reconnects: a
    follower must notice the gap."""

    def __init__(self, client: "Redis", key: str) -> None:
        self._client = client
        self._key = key
        self._connection: AbstractConnection | None = None

    async def read(self, after: str, *, count: int, block_seconds: float) -> Entries:
        """Return up to `count` entries after the one with this id; none if none comes in this time.

        Raises RedisError, ResponseError if the key holds no stream, or OSError. There is no other timeout.
        """
        connection = self._connection
        if connection is None or not connection.is_connected:
            raise RedisConnectionError("the connection for the stream was closed")
        milliseconds = int(block_seconds * 1000)
        await connection.send_command(
            "XREAD", "COUNT", count, "BLOCK", milliseconds, "STREAMS", self._key, after
        )
        answer = await connection.read_response()
        if not answer:
            return ()
        ((_, entries),) = cast("Sequence[tuple[bytes, Sequence[tuple[bytes, Sequence[bytes]]]]]", answer)
        return [(entry_id, dict(zip(fields[::2], fields[1::2], strict=True))) for entry_id, fields in entries]

    async def __aenter__(self) -> "StreamReader":
        self._connection = self._client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        await self._connection.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None:
            await self._connection.disconnect(nowait=True)
