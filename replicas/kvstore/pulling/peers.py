"""Peers: connections to other replicas, over which chunks of KV are pulled.

Owns the channels, the credentials of calls, and pauses for peers that failed. Does not know what is pulled,
or why.
"""

import contextlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from replicas.kvstore.on_disk.breaker import Breaker
from replicas.kvstore.pulling.incoming import PullFailed
from replicas.process.tls import RouterTls
from replicas.protocol.call_tokens import METADATA_KEY, NONCE_BYTES, Audience, Caller, Role
from replicas.protocol.pulls import MAX_PART_BYTES, TOO_MANY_PULLS, PullHint, PullPart, PullRequest
from replicas.protocol.service import path
from replicas.protocol.tier_figures import MoveFailure
from replicas.protocol.wire import decode_pull_part, encode

IDLE_SECONDS = 60.0
"""Unused connections are closed after this time."""

MAX_PEERS = 72
"""Connections at once: more than there are transfers that run. For another one, one that is not in use is
closed."""

MAX_REMEMBERED = 256
"""Peers that have failed."""

_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", MAX_PART_BYTES + 4096),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
]

_REASONS = {
    grpc.StatusCode.DEADLINE_EXCEEDED: MoveFailure.LATE,
    grpc.StatusCode.UNAVAILABLE: MoveFailure.UNREACHABLE,
    grpc.StatusCode.CANCELLED: MoveFailure.UNREACHABLE,
}
"""All others are refusals."""


@dataclass(slots=True, eq=False)
class _PeerConnection:
    channel: grpc.Channel
    num_calls: int = 0
    last_used: float = field(default=0.0)


class Peers:
    """May be used by several threads. `key` makes the tokens; without one, none are shown."""

    def __init__(self, *, key: bytes | None, tls: RouterTls | None, clock: Callable[[], float]) -> None:
        self._key = key
        self._tls = tls
        self._clock = clock
        self._lock = threading.Lock()
        self._connections: dict[str, _PeerConnection] = {}
        self._breakers: OrderedDict[PullHint, Breaker] = OrderedDict()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    # Whom to leave alone.

    def allows(self, peer: PullHint, now: float) -> bool:
        with self._lock:
            breaker = self._breakers.get(_whole(peer))
            return breaker is None or breaker.allows(now)

    def failed(self, peer: PullHint, now: float) -> None:
        with self._lock:
            self._breakers.setdefault(_whole(peer), Breaker()).failed(now)
            self._breakers.move_to_end(_whole(peer))
            if len(self._breakers) > MAX_REMEMBERED:
                self._breakers.popitem(last=False)

    def succeeded(self, peer: PullHint) -> None:
        with self._lock:
            self._breakers.pop(_whole(peer), None)

    # Calls.

    @contextlib.contextmanager
    def call(
        self, peer: PullHint, request: PullRequest, seconds: float
    ) -> Iterator[tuple[Iterator[PullPart], Callable[[], object]]]:
        """Call a peer: returns the parts as they arrive, and a function that cancels from another thread.
        Inside the context, failures of connection and peer raise PullFailed."""
        connection = self._take(peer)
        try:
            pull = connection.channel.unary_stream(path("Pull"), encode, decode_pull_part)
            call: Any = pull(request, timeout=seconds, metadata=self._metadata(peer))
            try:
                yield _parts(call), call.cancel
            finally:
                call.cancel()
        finally:
            with self._lock:
                connection.num_calls -= 1
                connection.last_used = self._clock()

    def close_idle(self) -> None:
        """Close connections unused for `IDLE_SECONDS`."""
        oldest = self._clock() - IDLE_SECONDS
        with self._lock:
            idle = [
                address
                for address, each in self._connections.items()
                if not each.num_calls and each.last_used <= oldest
            ]
            closed = [self._connections.pop(address) for address in idle]
        for each in closed:
            each.channel.close()

    def close(self) -> None:
        with self._lock:
            connections = list(self._connections.values())
            self._connections.clear()
        for each in connections:
            each.channel.close()

    def _take(self, peer: PullHint) -> _PeerConnection:
        tls = None if self._tls is None else self._tls.current()
        with self._lock:
            connection = self._connections.get(peer.address)
            if connection is None:
                self._make_room()
                if tls is None:
                    channel = grpc.insecure_channel(peer.address, options=_OPTIONS)
                else:
                    options = [*_OPTIONS, *tls.options]
                    channel = grpc.secure_channel(peer.address, tls.credentials, options=options)
                connection = self._connections[peer.address] = _PeerConnection(channel)
            connection.num_calls += 1
            return connection

    def _make_room(self) -> None:
        if len(self._connections) < MAX_PEERS:
            return
        unused = [address for address, each in self._connections.items() if not each.num_calls]
        oldest = min(unused, key=lambda address: self._connections[address].last_used, default=None)
        if oldest is None:
            raise PullFailed(MoveFailure.REFUSED, "every connection to a peer is in use")
        self._connections.pop(oldest).channel.close()

    def _metadata(self, peer: PullHint) -> tuple[tuple[str, str | bytes], ...]:
        if self._key is None:
            return ()
        caller = Caller(self._key, Role.REPLICA, Audience(peer.replica_id, peer.epoch))
        return ((METADATA_KEY, caller.token(path("Pull"), secrets.token_bytes(NONCE_BYTES))),)


def _whole(peer: PullHint) -> PullHint:
    """Return the peer, however much it has."""
    return PullHint(peer.replica_id, peer.epoch, peer.address, 0)


def _parts(call: Any) -> Iterator[PullPart]:
    try:
        yield from call
    except grpc.RpcError as error:
        code: grpc.StatusCode = call.code()
        is_busy = code is grpc.StatusCode.RESOURCE_EXHAUSTED and call.details() == TOO_MANY_PULLS
        reason = MoveFailure.BUSY if is_busy else _REASONS.get(code, MoveFailure.REFUSED)
        raise PullFailed(reason, f"{code.name}: {call.details()}") from error
