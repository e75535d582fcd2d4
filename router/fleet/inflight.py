"""Inflight: one submitted request, and its arrived deltas. Mailbox: wakes their consumer.

Owns the deltas that were not taken yet. `generation_run.py` decides about requests.

Waking a task for a token costs several times the work on it. So a mailbox may have a listener, which takes a
delta in the middle of an answer as it arrives, while the task sleeps on.
"""

import asyncio
from collections.abc import Callable

from replicas.protocol.frames import TokenDelta


class ReplicaLost(Exception):
    """The stream to the replica is gone, with every request on it. The message says why."""


BYTES_OF_DELTA = 4096

Listener = Callable[[TokenDelta], bool]
"""Returns whether it has taken the delta. It runs where frames are read, so it never raises."""


class Mailbox:
    """Wakes the one task that waits for deltas, from however many inflights. No queue, no lock."""

    __slots__ = ("listener", "waiter")

    def __init__(self) -> None:
        self.waiter: asyncio.Future[None] | None = None
        self.listener: Listener | None = None
        """It is offered deltas only while the task waits, so that none overtakes another."""

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def wait(self) -> None:
        """Until the next `wake`. The caller looks first whether something has already come."""
        assert self.waiter is None, "a mailbox has one consumer"
        self.waiter = asyncio.get_running_loop().create_future()
        try:
            await self.waiter
        finally:
            self.waiter = None


class Inflight:
    """One submitted request and its untaken deltas.

    Ids count the stream's submits from 1, in the order in which they are sent.
    """

    __slots__ = ("_deltas", "_mailbox", "lost", "num_tokens", "open_choices", "submit_id")

    def __init__(self, submit_id: int, num_choices: int, mailbox: Mailbox) -> None:
        self.submit_id = submit_id
        self.lost: ReplicaLost | None = None
        self.num_tokens = 0  # that have arrived, over all choices
        self.open_choices = set(range(num_choices))
        self._deltas: list[TokenDelta] = []
        self._mailbox = mailbox

    @property
    def num_waiting(self) -> int:
        """Count the untaken deltas, those with more of a body for as many as it would fill."""
        return sum(1 + len(delta.body or b"") // BYTES_OF_DELTA for delta in self._deltas)

    def take(self) -> list[TokenDelta]:
        """All deltas since the last call, in order. They come before `lost` is worth a look."""
        deltas, self._deltas = self._deltas, []
        return deltas

    async def batch(self) -> list[TokenDelta]:
        """Return the next deltas, at least one; for callers with a mailbox of their own per request."""
        while not self._deltas:
            if self.lost is not None:
                raise self.lost
            await self._mailbox.wait()
        return self.take()

    def deliver(self, delta: TokenDelta) -> None:
        self.num_tokens += len(delta.token_ids) + delta.num_counted
        # Wakes once per frame however many deltas it brings: the consumer runs after the read loop.
        if not self._deltas:
            listener, waiter = self._mailbox.listener, self._mailbox.waiter
            is_awaited = waiter is not None and not waiter.done()
            if is_awaited and listener is not None and delta.finish_reason is None and listener(delta):
                return
            self._mailbox.wake()
        self._deltas.append(delta)

    def fail(self, lost: ReplicaLost) -> None:
        self.lost = lost
        self._mailbox.wake()

    def close_choice(self, choice: int) -> bool:
        """True when it was the last one open."""
        self.open_choices.discard(choice)
        return not self.open_choices
