"""EventFeed: a server's cache events, in order and without gaps, from a thread of its own.

Owns the sockets and the numbers. A server publishes batches numbered from 0 and keeps the last ones; the feed
asks for those from before it listened, and for those of a gap. What it still misses is a gap: then
nothing is known to be held.

A server hands over all that it has kept at once, and its socket drops what is not read in time. So what lacks
in a replay is asked for again.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
import zmq

from replicas.errors import StartupError
from replicas.protocol.bounds import shown
from replicas.remote_engine.facts import EventSource
from replicas.remote_engine.residency import ServerEvent

logger = logging.getLogger(__name__)

REPLAY_SECONDS = 5.0
"""Maximum time for the next batch of a replay."""

MOST_QUEUED = 10_000
"""Batches that wait to be read; a slow reader loses what comes beyond that, and asks for it again."""

MOST_BATCH_BYTES = 64 * 2**20

MOST_SURE = 500
"""A replay of fewer batches fits into the sockets: ZeroMQ's take 1,000."""

LOG_SECONDS = 10.0
"""Time between two lines about the same defect of events."""

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

HEARTBEAT_MILLISECONDS = 10_000
"""A connection that says nothing for two of these is made anew: one may be gone without a word."""

_POLL_MILLISECONDS = 200
_NUMBER_BYTES = 8


class Events(NamedTuple):
    """One batch. `after_gap`: batches before it are lost."""

    events: Sequence[ServerEvent]
    after_gap: bool = False


class Restarted(NamedTuple):
    """The numbers began anew."""


Deliver = Callable[[Events | Restarted], None]


class EventFeed:
    """`read` raises one of UNREADABLE for an event that cannot be read. `deliver` is called in the feed's
    thread. Raises StartupError if the server cannot be listened to."""

    def __init__(
        self, source: EventSource, read: Callable[[msgspec.Raw], ServerEvent], deliver: Deliver
    ) -> None:
        self._source = source
        self._read = read
        self._deliver = deliver
        self._context = zmq.Context()
        self._expected = 0
        self._newest = -math.inf
        """The server's own time of the newest batch."""
        self._is_first = True
        self._complained_at: dict[str, float] = {}
        self._stops = threading.Event()
        self._decoder = msgspec.msgpack.Decoder(tuple[float, list[msgspec.Raw], int | None])
        self._subscriber = self._context.socket(zmq.SUB)
        self._subscriber.setsockopt(zmq.RCVHWM, MOST_QUEUED)
        self._subscriber.setsockopt(zmq.MAXMSGSIZE, MOST_BATCH_BYTES)
        self._subscriber.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MILLISECONDS)
        self._subscriber.setsockopt_string(zmq.SUBSCRIBE, source.topic)
        try:
            if source.binds:
                self._subscriber.connect(source.endpoint)
            else:
                self._subscriber.bind(source.endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise StartupError(
                f"the server sends its cache events to {source.endpoint}, which is not here ({error}): start"
                " it with an endpoint such as tcp://*:5557"
            ) from error
        self._thread = threading.Thread(target=self._run, name="server events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stops.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        for number, payload in self._replay(0):
            self._take(number, *self._decode(payload))
        while not self._stops.is_set():
            if not self._subscriber.poll(_POLL_MILLISECONDS):
                continue
            number, payload = _numbered(self._subscriber.recv_multipart())
            if number < 0:
                self._complain(f"what is published at {self._source.endpoint} is no batch of cache events")
                continue
            at, events = self._decode(payload)
            if number < self._expected and at > self._newest:
                self._deliver(Restarted())
                return
            if number > self._expected:
                for missed, earlier in self._replay(self._expected):
                    if missed < number:
                        self._take(missed, *self._decode(earlier))
            self._take(number, at, events)

    def _take(self, number: int, at: float, events: Sequence[ServerEvent]) -> None:
        if number < self._expected:
            return  # it came with a replay already
        # What was stored before the first batch that a server still has is only without a name.
        after_gap = number > self._expected and not self._is_first
        if after_gap:
            self._complain("the server's cache events have a gap: what it held counts as gone")
        self._expected, self._is_first, self._newest = number + 1, False, max(self._newest, at)
        self._deliver(Events(events, after_gap))

    def _decode(self, payload: bytes) -> tuple[float, list[ServerEvent]]:
        """Return the time of a batch and its events, without each that cannot be read."""
        events: list[ServerEvent] = []
        try:
            at, raws, _ = self._decoder.decode(payload)
        except UNREADABLE as error:
            self._complain("a batch of the server's cache events cannot be read", error)
            return -math.inf, []
        for raw in raws:
            try:
                events.append(self._read(raw))
            except UNREADABLE as error:
                self._complain("one of the server's cache events cannot be read", error)
        return at, events

    def _replay(self, first: int) -> Iterator[tuple[int, bytes]]:
        """Yield what the server has kept from a number on; nothing if it does not answer."""
        endpoint = self._source.replay_endpoint
        expected, asked = first, -1
        while endpoint is not None and expected > asked and not self._stops.is_set():
            asked, num_batches = expected, 0
            with self._context.socket(zmq.DEALER) as dealer, suppress(zmq.ZMQError):
                dealer.setsockopt(zmq.LINGER, 0)
                dealer.setsockopt(zmq.RCVHWM, MOST_QUEUED)
                dealer.setsockopt(zmq.MAXMSGSIZE, MOST_BATCH_BYTES)
                dealer.connect(endpoint)
                dealer.send_multipart([b"", asked.to_bytes(_NUMBER_BYTES)])
                while dealer.poll(int(1000 * REPLAY_SECONDS)) and not self._stops.is_set():
                    number, payload = _numbered(dealer.recv_multipart())
                    if number < 0 and num_batches < MOST_SURE:
                        return
                    if number < 0 or number > expected > asked:
                        break  # some were dropped, or may have been
                    yield number, payload
                    expected, num_batches = max(expected, number + 1), num_batches + 1
        if endpoint is not None and not self._stops.is_set():
            self._complain("the server does not answer which cache events were missed")

    def _complain(self, what: str, error: Exception | None = None) -> None:
        """Log it, at most once in LOG_SECONDS."""
        now = time.monotonic()
        if now - self._complained_at.get(what, -math.inf) >= LOG_SECONDS:
            self._complained_at[what] = now
            logger.warning("%s", what if error is None else f"{what}: {shown(str(error))}")


def _numbered(message: Sequence[bytes]) -> tuple[int, bytes]:
    """Return a message's number and payload; -1 at the end of a replay, and for what has no number."""
    if len(message) < 2 or len(message[-2]) != _NUMBER_BYTES:
        return -1, b""
    return int.from_bytes(message[-2], signed=True), message[-1]
