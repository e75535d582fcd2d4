"""Arrivals: the engine's load, plus the requests that it has received and not counted yet.

Owns those requests. Sees snapshots of the engine's load.

An engine counts a request when the step after its arrival has ended, possibly hundreds of milliseconds later.
Routers that do not hear of each other's requests meanwhile pile them onto one replica.
"""

from dataclasses import dataclass

from msgspec.structs import replace

from replicas.protocol.frames import LoadSnapshot


@dataclass(frozen=True, slots=True)
class _Arrival:
    num_requests: int
    num_tokens: int
    num_room_tokens: int
    num_image_tokens: int


class Arrivals:
    def __init__(self, load: LoadSnapshot) -> None:
        self._counted = load
        self._arrivals: dict[int, _Arrival] = {}  # ascending, like the ids
        self._num_requests = 0
        self._num_tokens = 0
        self._num_room_tokens = 0
        self._num_image_tokens = 0
        self._load: LoadSnapshot | None = load

    @property
    def load(self) -> LoadSnapshot:
        """Load of the engine and of requests on their way to it."""
        if self._load is None:
            counted = self._counted
            self._load = replace(
                counted,
                num_waiting=counted.num_waiting + self._num_requests,
                num_pending_tokens=counted.num_pending_tokens + self._num_tokens,
                num_room_tokens=None
                if counted.num_room_tokens is None
                else counted.num_room_tokens - self._num_room_tokens,
                num_pending_image_tokens=counted.num_pending_image_tokens + self._num_image_tokens,
            )
        return self._load

    @property
    def num_requests(self) -> int:
        """Count the requests that the engine has not counted yet, each choice separately."""
        return self._num_requests

    def add(
        self,
        serial: int,
        *,
        num_requests: int,
        num_tokens: int,
        num_room_tokens: int = 0,
        num_image_tokens: int = 0,
    ) -> None:
        """Record a request given to the engine that will compute `num_tokens` of its prompt of
        `num_room_tokens`, and encode images of that many tokens."""
        self._arrivals[serial] = _Arrival(num_requests, num_tokens, num_room_tokens, num_image_tokens)
        self._num_requests += num_requests
        self._num_tokens += num_tokens
        self._num_room_tokens += num_room_tokens
        self._num_image_tokens += num_image_tokens
        self._load = None

    def remove(self, serial: int) -> None:
        """It has ended, or the engine has counted it. Unknown ones are ignored."""
        arrival = self._arrivals.pop(serial, None)
        if arrival is not None:
            self._num_requests -= arrival.num_requests
            self._num_tokens -= arrival.num_tokens
            self._num_room_tokens -= arrival.num_room_tokens
            self._num_image_tokens -= arrival.num_image_tokens
            self._load = None

    def take(self, load: LoadSnapshot, last_serial: int) -> None:
        """The engine's own load, which counts the requests up to `last_serial`."""
        self._counted = load
        self._load = None
        while self._arrivals:
            oldest = next(iter(self._arrivals))
            if oldest > last_serial:
                break
            self.remove(oldest)
