"""RouterStream: one router's open requests on its Serve stream, and its unsent messages.

Owns the bounded outbox of one stream: deltas in order, merged into one message while the writer is behind.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from replicas.observation.trace_points import NO_TRACE, SubmitTrace
from replicas.protocol.frames import MAX_DELTAS_PER_FRAME, LoadSnapshot, ServerFrame, TokenDelta

MAX_FRAME_BYTES = 8 * 2**20
"""Bound of the bodies in a message, unless one alone has more: routers read MAX_SERVER_FRAME_BYTES."""

MAX_OUTBOX_WEIGHT = 400_000
"""Tokens and logprobs that wait for a router that does not read: half a minute of a busy replica.

A router so far behind will not catch up; cutting it off frees its requests for others.
"""

MAX_OUTBOX_BYTES = 256 * 2**20
"""Bytes of bodies that wait for such a router."""

MIN_LOAD_INTERVAL_SECONDS = 0.02
"""Shortest interval between messages with only a load."""

MATERIAL_TOKENS = 256


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A running request: its submit id, and its open choices.

    `announcement_id` is set while its blocks are announced.
    """

    stream: "RouterStream"
    submit_id: int
    choices: set[int]
    announcement_id: int | None = None
    trace: SubmitTrace = NO_TRACE
    split_id: int = 0


@dataclass(slots=True, eq=False)
class RouterStream:
    """`put` and `offer_load` fill it; the writer waits for `wanted` and takes one `ServerFrame` at a time.

    `load` counts every request that came before it was offered, so it is offered with each arrival.
    `knows_draining` is set once the router sends nothing new: it has confirmed, or is gone.
    """

    load: LoadSnapshot
    clock: Callable[[], float]
    serials: dict[int, int] = field(default_factory=dict)  # of the open requests, by submit id
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    overflowed: asyncio.Event = field(default_factory=asyncio.Event)
    knows_draining: asyncio.Event = field(default_factory=asyncio.Event)
    is_cut: bool = False
    is_draining: bool = False
    _is_closing: bool = False
    _outbox: list[TokenDelta] = field(default_factory=list)
    _weight: int = 0
    _num_bytes: int = 0
    """Bytes of the bodies in the outbox."""
    _num_submits: int = 0
    _num_counted: int = 0
    """Submits that `load` counts."""
    _num_sent: int = 0
    """The part of them that the router knows to be counted."""
    _sent_load: LoadSnapshot | None = None
    _sent_at: float = 0.0
    _timer: asyncio.TimerHandle | None = None

    def put(self, delta: TokenDelta) -> None:
        self._outbox.append(delta)
        self._weight += _weight(delta)
        if delta.body:
            self._num_bytes += len(delta.body)
        if self._weight > MAX_OUTBOX_WEIGHT or self._num_bytes > MAX_OUTBOX_BYTES:
            self.overflowed.set()
        self.wanted.set()

    def submitted(self) -> None:
        """One more submit of this stream; the load that counts it is offered next."""
        self._num_submits += 1

    def offer_load(self, load: LoadSnapshot) -> None:
        """Remember the newest load; wake the writer if it differs enough to be worth a message."""
        self.load = load
        self._num_counted = self._num_submits
        has_counted = self._num_counted > self._num_sent
        if self.wanted.is_set() or self._timer is not None or not (has_counted or self._is_material(load)):
            return
        wait = self._sent_at + MIN_LOAD_INTERVAL_SECONDS - self.clock()
        if wait <= 0:
            self.wanted.set()
        else:
            self._timer = asyncio.get_running_loop().call_later(wait, self._on_timer)

    def take(self) -> ServerFrame:
        """Return the next message: the oldest deltas that fit, and the newest load."""
        deltas = self._outbox[:MAX_DELTAS_PER_FRAME]
        if self._num_bytes:
            deltas = self._fitting(deltas)
        del self._outbox[: len(deltas)]
        self._weight -= sum(map(_weight, deltas))
        if not self._outbox:
            self.wanted.clear()
        self._sent_load, self._sent_at = self.load, self.clock()
        self._num_sent = self._num_counted
        return ServerFrame(tuple(deltas), self.load, self._num_counted, self.is_draining)

    def _fitting(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """Return the first of them, whose bodies fit into one message."""
        num_bytes = num_deltas = 0
        for delta in deltas:
            size = len(delta.body or b"")
            if num_deltas and num_bytes + size > MAX_FRAME_BYTES:
                break
            num_bytes += size
            num_deltas += 1
        self._num_bytes -= num_bytes
        return deltas[:num_deltas]

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to send, now or later."""
        return self.is_cut or (self._is_closing and not self._outbox)

    def tell_draining(self) -> None:
        """Announce the drain with the next message, and in all that follow."""
        self.is_draining = True
        self.wanted.set()

    def close(self) -> None:
        """Let the writer send the rest and end the stream."""
        self._is_closing = True
        self.wanted.set()

    def cut(self) -> None:
        """Drop the unsent messages, and let the writer end at once. Idempotent."""
        self.is_cut = True
        self._outbox.clear()
        self._weight = self._num_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
        self.knows_draining.set()
        self.wanted.set()

    def _on_timer(self) -> None:
        self._timer = None
        self.wanted.set()

    def _is_material(self, load: LoadSnapshot) -> bool:
        sent = self._sent_load
        return (
            sent is None
            or load.num_running != sent.num_running
            or load.num_waiting != sent.num_waiting
            or abs(load.num_pending_tokens - sent.num_pending_tokens) >= MATERIAL_TOKENS
        )


def _weight(delta: TokenDelta) -> int:
    weight = 1 + len(delta.token_ids)
    if delta.logprobs is not None:
        weight += sum(1 + len(logprobs.top) for logprobs in delta.logprobs)
    return weight
