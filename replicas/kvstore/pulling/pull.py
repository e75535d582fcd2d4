"""Puller: KV from other replicas' host memory, read by threads while the engine continues.

Owns the threads and the transfers. The directory decides which chunk goes where. Its caller is one thread,
the engine's; only `wait` and `close` block it.

A transfer is a chain's chunks from one peer, in order, each into a slot of its own. Whatever happens, missing
chunks are misses, not errors::

    the peer has not, or not all      the stream ends early
    it lies, sends half or too much   the transfer ends, and the peer is left alone for a while
    it refuses, stalls or vanishes    likewise, at the deadline at the latest
    it is busy with others            the transfer ends, and the next may be tried at once
    a thread hangs                    its slots come back when it does
    no thread can be started          the transfer ends at once, as one that the peer has failed

A *binding* transfer is of a prompt that the peer is computing (a split). It waits for each chunk until its
own deadline. That the peer was slow is then no failure of it, and waiting is not the link's speed.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from replicas.kvstore.layout import ChunkHeader
from replicas.kvstore.on_disk.transfer_speed import TransferSpeed
from replicas.kvstore.pulling.incoming import ChunkKind, Ending, PullFailed, Wanted, incoming
from replicas.kvstore.pulling.peers import IDLE_SECONDS, Peers
from replicas.protocol.blocks import BlockHash
from replicas.protocol.pulls import MAX_PULL_SECONDS, MAX_PULLED_CHUNKS, PullHint, PullPart, PullRequest
from replicas.protocol.tier_figures import MoveFailure
from replicas.protocol.ways import PULL_MOVE_SECONDS

logger = logging.getLogger(__name__)

NUM_THREADS = 4
"""Transfers that run at once."""

MAX_TRANSFERS = 16
"""Waiting transfers included."""

MAX_BINDING = 64
"""Binding transfers, besides. Each has a thread, for as long as it waits for the peer to compute."""

PATIENCE = 4.0
MIN_SECONDS = 1.0
"""A transfer fails after this many times its expected duration, and not before this time."""

OVERDUE_SECONDS = 1.0
"""A thread hangs if it has not returned this long after its transfer's end."""


class Pulled(NamedTuple):
    """The outcome of one chunk. `header` and duration come with FILLED."""

    ending: Ending
    transfer: int
    key: BlockHash
    slot: int
    header: ChunkHeader | None = None
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Transfer:
    number: int
    peer: PullHint
    chunks: Sequence[Wanted]
    ends_at: float
    binds: bool
    num_done: int = 0
    has_begun: bool = False
    is_overdue: bool = False
    is_cancelled: bool = False
    cancel: Callable[[], object] | None = None

    @property
    def left(self) -> Sequence[Wanted]:
        return self.chunks[self.num_done :]


class Puller:
    """`bytes_per_second` is the assumed network speed until pulls have measured it. It closes `peers`."""

    def __init__(
        self,
        kind: ChunkKind,
        peers: Peers,
        *,
        bytes_per_second: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kind = kind
        self._peers = peers
        self._clock = clock
        self._speed = TransferSpeed()
        self._speed.probed(1.0 / bytes_per_second)
        self._changed = threading.Condition()
        self._waiting: deque[_Transfer] = deque()
        self._transfers: dict[int, _Transfer] = {}
        """All that have not ended: that wait, run or hang."""
        self._finished: list[Pulled] = []
        self._last_number = 0
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        self._failures: list[MoveFailure] = []

    # What the engine's thread calls.

    def may_pull(self, peer: PullHint) -> bool:
        """Whether there is room for another transfer, and the peer has not just failed."""
        return len(self._transfers) - self._num_binding < MAX_TRANSFERS and self.trusts(peer)

    def trusts(self, peer: PullHint) -> bool:
        """Whether the peer has not just failed."""
        return not self._is_closed and self._peers.allows(peer, self._clock())

    @property
    def may_bind(self) -> bool:
        """Whether there is room for another binding transfer."""
        return self._num_binding < MAX_BINDING

    def is_under_way(self, number: int) -> bool:
        return number in self._transfers

    def new_number(self) -> int:
        """Return a number for transfers that are to count as one."""
        self._last_number += 1
        return self._last_number

    def pull(self, peer: PullHint, chunks: Sequence[Wanted]) -> int:
        """Start a transfer and return its number. The caller has checked for room. The slots belong to the
        puller until each chunk has ended, and after OVERDUE until RETURNED."""
        with self._changed:
            num_bytes = len(chunks) * self.kind.image_bytes + self._num_bytes_left
            seconds = PULL_MOVE_SECONDS + num_bytes * self.seconds_per_byte
            ends_at = self._clock() + min(MAX_PULL_SECONDS, max(MIN_SECONDS, PATIENCE * seconds))
            number = self.new_number()
            self._begin(_Transfer(number, peer, chunks, ends_at, binds=False))
            return number

    def bind(self, peer: PullHint, chunks: Sequence[Wanted], *, number: int, ends_at: float) -> None:
        """Start a binding transfer likewise, by a number that none under way has."""
        assert not self.is_under_way(number), "transfers of one number come one after the other"
        with self._changed:
            self._begin(_Transfer(number, peer, chunks, ends_at, binds=True))

    def cancel(self, number: int) -> None:
        """End a binding transfer, if it is under way, since no request waits for it."""
        transfer = self._transfers.get(number)
        if transfer is None or not transfer.binds or self._clock() >= transfer.ends_at:
            return  # it ends by itself at its deadline, and counts as late
        with self._changed:
            transfer.is_cancelled = True
            if transfer.cancel is not None:
                transfer.cancel()

    def take_finished(self) -> list[Pulled]:
        """Return the pulls that ended since the last call."""
        if not (self._transfers or self._finished):
            return []
        with self._changed:
            self._give_up_late(self._clock())
            finished, self._finished = self._finished, []
            return finished

    def take_failures(self) -> list[MoveFailure]:
        """Transfers that have brought less than was wanted, since the last call."""
        failures, self._failures = self._failures, []
        return failures

    @property
    def is_busy(self) -> bool:
        """Something has ended or will, by its deadline at the latest. Threads that hang do not count."""
        if not (self._transfers or self._finished):
            return False
        with self._changed:
            return bool(self._finished) or not all(each.is_overdue for each in self._transfers.values())

    @property
    def seconds_per_byte(self) -> float:
        per_byte = self._speed.seconds_per_byte
        assert per_byte is not None, "it had a first value"
        return per_byte

    @property
    def backlog_seconds(self) -> float:
        """Expected duration of the transfers under way."""
        if not self._transfers:
            return 0.0
        with self._changed:
            return self._num_bytes_left * self.seconds_per_byte

    def wait(self, seconds: float) -> None:
        """Wait until a transfer has ended, at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished, seconds)

    def close(self, seconds: float) -> bool:
        """Fail transfers under way and close the connections. False if threads still hang, perhaps in
        slots."""
        with self._changed:
            self._is_closed = True
            for transfer in self._transfers.values():
                if transfer.cancel is not None:
                    transfer.cancel()
            self._changed.notify_all()
        end = time.monotonic() + seconds
        threads = [*self._threads]
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            return False
        self._peers.close()
        return True

    # Under the lock.

    @property
    def _num_binding(self) -> int:
        return sum(each.binds for each in self._transfers.values())

    @property
    def _num_bytes_left(self) -> int:
        """Bytes that are on the link, or queue for it."""
        moving = [each for each in self._transfers.values() if not (each.is_overdue or each.binds)]
        return sum(len(each.left) for each in moving) * self.kind.image_bytes

    def _begin(self, transfer: _Transfer) -> None:
        assert 0 < len(transfer.chunks) <= MAX_PULLED_CHUNKS, "a transfer is of a bounded number of chunks"
        self._transfers[transfer.number] = transfer
        self._waiting.append(transfer)
        num_binding = self._num_binding
        if len(self._threads) < num_binding + min(NUM_THREADS, len(self._transfers) - num_binding):
            self._start_thread()
        if not self._threads:
            self._waiting.remove(transfer)
            self._peers.failed(transfer.peer, self._clock())
            self._end(transfer, MoveFailure.IO_ERROR)
        self._changed.notify_all()

    @property
    def _first_to_run(self) -> _Transfer | None:
        """The first transfer that may run now. Binding ones leave the others their threads."""
        num_moving = sum(each.has_begun and not each.binds for each in self._transfers.values())
        return next((each for each in self._waiting if each.binds or num_moving < NUM_THREADS), None)

    def _give_up_late(self, now: float) -> None:
        for transfer in list(self._transfers.values()):
            if not transfer.has_begun and now > transfer.ends_at:
                self._waiting.remove(transfer)
                self._end(transfer, MoveFailure.LATE)
            elif not transfer.is_overdue and now > transfer.ends_at + OVERDUE_SECONDS:
                transfer.is_overdue = True
                self._failures.append(MoveFailure.LATE)
                if not transfer.binds:
                    self._peers.failed(transfer.peer, now)
                self._finished += [_of(Ending.OVERDUE, transfer, each) for each in transfer.left]
                if transfer.cancel is not None:
                    transfer.cancel()

    def _end(self, transfer: _Transfer, failure: MoveFailure | None) -> None:
        ending = Ending.RETURNED if transfer.is_overdue else Ending.FAILED
        self._finished += [_of(ending, transfer, each) for each in transfer.left]
        del self._transfers[transfer.number]
        if failure is not None and not transfer.is_overdue:
            self._failures.append(failure)
        self._changed.notify_all()

    def _is_over(self, transfer: _Transfer) -> bool:
        """Whether no request waits for it any more."""
        return self._is_closed or transfer.is_overdue or transfer.is_cancelled

    def _start_thread(self) -> None:
        """Start a daemon thread, since it may hang forever. One that cannot be started, because there are too
        many, is tried again with the next transfer."""
        thread = threading.Thread(target=self._work, name="kv-pull", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not self._threads:
                logger.warning("no thread can be started that pulls KV: %s", error)
            return
        self._threads.append(thread)

    # What the threads do.

    def _work(self) -> None:
        while (transfer := self._next()) is not None:
            failure: MoveFailure | None = MoveFailure.IO_ERROR
            try:
                failure = self._run(transfer)
            except Exception:  # the thread's outermost frame: the transfer has failed, others may not
                logger.exception("a pull of KV has failed by a fault of our own")
            with self._changed:
                now = self._clock()
                if not transfer.binds:
                    self._speed.ended(now, transfer.num_done * self.kind.image_bytes)
                self._judge(transfer, failure, now)
                self._end(transfer, None if transfer.is_cancelled else failure)

    def _judge(self, transfer: _Transfer, failure: MoveFailure | None, now: float) -> None:
        """Note what the transfer says of its peer."""
        if failure in (None, MoveFailure.MISSING):
            self._peers.succeeded(transfer.peer)
        elif failure is MoveFailure.BUSY or self._is_closed or transfer.is_cancelled:
            return
        elif not (transfer.binds and failure is MoveFailure.LATE):
            self._peers.failed(transfer.peer, now)

    def _next(self) -> _Transfer | None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._first_to_run, IDLE_SECONDS)
                if self._is_closed:
                    while self._waiting:
                        self._end(self._waiting.popleft(), MoveFailure.LATE)
                    return None
                transfer = self._first_to_run
                if transfer is not None:
                    self._waiting.remove(transfer)
                    transfer.has_begun = True
                    if not transfer.binds:
                        self._speed.begun(self._clock())
                    return transfer
                if len(self._threads) > NUM_THREADS:
                    self._threads.remove(threading.current_thread())
                    return None
            self._peers.close_idle()

    def _run(self, transfer: _Transfer) -> MoveFailure | None:
        """Why it brought less than was wanted."""
        keys = tuple(chunk.name.key for chunk in transfer.chunks)
        split_id = transfer.peer.split_id if transfer.binds else 0
        request = PullRequest(transfer.peer.epoch, self.kind.layout, keys, split_id)
        seconds = max(0.0, transfer.ends_at - self._clock())
        try:
            with self._peers.call(transfer.peer, request, seconds) as (parts, cancel):
                with self._changed:
                    transfer.cancel = cancel
                    if self._is_over(transfer):
                        return MoveFailure.LATE
                arrivals = _Arrivals(parts, self._clock)
                for chunk, header in incoming(arrivals, transfer.chunks, self.kind):
                    now = self._clock()
                    with self._changed:
                        if self._is_over(transfer):
                            return MoveFailure.LATE
                        if transfer.binds and transfer.num_done and not arrivals.has_waited:
                            self._speed.begun(arrivals.since)
                            self._speed.ended(now, self.kind.image_bytes)
                        transfer.num_done += 1
                        seconds = now - arrivals.since
                        self._finished.append(_of(Ending.FILLED, transfer, chunk, header, seconds))
                        self._changed.notify_all()
                    arrivals.since, arrivals.has_waited = now, False
        except PullFailed as failed:
            logger.info(
                "a pull of KV has failed peer=%s reason=%s error=%s",
                transfer.peer.replica_id,
                failed.reason.value,
                type(failed.__cause__ or failed).__name__,
            )
            return failed.reason
        return MoveFailure.MISSING if transfer.left else None


class _Arrivals:
    """The parts as they arrive, and since when the present chunk has been on its way."""

    def __init__(self, parts: Iterator[PullPart], clock: Callable[[], float]) -> None:
        self._parts = parts
        self._clock = clock
        self.since = clock()
        self.has_waited = False

    def __iter__(self) -> Iterator[PullPart]:
        for part in self._parts:
            if part.has_waited:
                self.since, self.has_waited = self._clock(), True
            yield part


def _of(
    ending: Ending,
    transfer: _Transfer,
    chunk: Wanted,
    header: ChunkHeader | None = None,
    seconds: float = 0.0,
) -> Pulled:
    return Pulled(ending, transfer.number, chunk.name.key, chunk.slot, header, seconds)
