"""DiskBooks: the state that the disk's threads and its caller share, under one lock.

Owns the queue, finished jobs, the files and their bytes, measured speeds, and whether writes are allowed. It
opens no file; nothing blocks under its lock.
"""

import contextlib
import itertools
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from replicas.kvstore.chunk import ChunkName
from replicas.kvstore.layout import ChunkHeader
from replicas.kvstore.on_disk.disk_health import DiskHealth
from replicas.kvstore.on_disk.disk_jobs import DiskOutcome
from replicas.kvstore.on_disk.disk_options import DiskOptions, DiskSpeeds
from replicas.kvstore.on_disk.jobs import DiskJob, Finished, JobQueue, Kind, State
from replicas.kvstore.on_disk.journal import Journal
from replicas.kvstore.on_disk.transfer_speed import TransferSpeed
from replicas.protocol.blocks import BlockHash
from replicas.protocol.tier_figures import WriteStop

logger = logging.getLogger(__name__)

MAX_NOTES = 100_000
"""Uses and leases that wait for the journal; more are dropped while its thread hangs."""

REMOVE_AGAIN_SECONDS = 10.0
MAX_REMOVED_AGAIN = 8192
"""Interval, and number at once, for retrying files that could not be removed."""

Note = Callable[[Journal], None]
"""A note for the journal, executed by its own thread."""


@dataclass(slots=True, eq=False)
class Worker:
    """A thread's job, and whether another has taken its place meanwhile."""

    job: DiskJob | None = None
    is_replaced: bool = False


class DiskBooks:
    """`sizes` are the bytes of each file that is known. `start_worker` makes a thread for a worker."""

    def __init__(
        self,
        options: DiskOptions,
        sizes: Mapping[BlockHash, int],
        start_worker: Callable[[Worker], None],
        clock: Callable[[], float],
    ) -> None:
        self._options = options
        self._start_worker = start_worker
        self._clock = clock
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._has_news = threading.Condition(self._lock)
        self._queue = JobQueue()
        self._finished: list[Finished] = []
        self._found: list[ChunkName] = []
        self._sizes = dict(sizes)
        self._own_bytes = sum(sizes.values())
        self._unremoved: OrderedDict[BlockHash, None] = OrderedDict()
        """Files that were to be removed and could not be."""
        self._remove_again_at = 0.0
        self._next_number = 1
        self._workers: list[Worker] = []
        self._reading, self._writing = TransferSpeed(), TransferSpeed()
        self._health = DiskHealth(options)
        self._is_stuck = False
        """Every thread hangs, those that were to replace others too."""
        self._off: str | None = None
        self.notes: deque[Note] = deque()
        """For the journal's thread to take from the left."""

    # For the caller.

    def ask(
        self,
        kind: Kind,
        key: BlockHash | None = None,
        *,
        slot: memoryview | None = None,
        header: ChunkHeader | None = None,
        sync: bool = False,
        num_bytes: int = 0,
    ) -> int | None:
        """Queue a job and return its number; None if too many wait, or there is no room for a write."""
        now = self._clock()
        with self._lock:
            growth = 0
            if key is not None and kind is not Kind.READ:
                growth = num_bytes - self._sizes.get(key, 0)
            if not self._accepts(kind, growth):
                return None
            if kind is Kind.ERASE:
                self._fail_waiting("erased")
            number, self._next_number = self._next_number, self._next_number + 1
            self._queue.add(DiskJob(kind, number, now, key, slot, header, sync, num_bytes, growth))
            self._has_work.notify()
            return number

    def can_write(self) -> bool:
        now = self._clock()
        with self._lock:
            return (
                self._off is None
                and not self._is_stuck
                and not self._queue.is_erasing
                and self._queue.num_waiting < self._options.max_queue
                and self._health.allows(now)
            )

    def write_stop(self) -> WriteStop | None:
        with self._lock:
            if self._off is not None:
                return WriteStop.OFF
            if self._is_stuck:
                return WriteStop.HANGS
            return self._health.write_stop

    def take_finished(self) -> list[Finished]:
        with self._lock:
            self._look(self._clock())
            finished, self._finished = self._finished, []
            return finished

    def wait(self, seconds: float) -> bool:
        end = self._clock() + seconds
        with self._lock:
            while True:
                now = self._clock()
                self._look(now)
                if self._finished or now >= end:
                    return bool(self._finished)
                until, asked_at = end, self._queue.next_deadline()
                if asked_at is not None:
                    until = min(end, asked_at + self._options.read_deadline_seconds)
                self._has_news.wait(max(0.001, until - now))

    def take_found(self) -> list[ChunkName]:
        with self._lock:
            found, self._found = self._found, []
        return sorted(found, key=lambda name: -name.last_block)

    def own_bytes(self) -> int:
        with self._lock:
            return self._own_bytes

    @property
    def num_unremoved(self) -> int:
        return len(self._unremoved)

    def speeds(self) -> DiskSpeeds:
        with self._lock:
            per_byte = self._reading.seconds_per_byte
            return DiskSpeeds(
                per_byte, self._writing.seconds_per_byte, self._queue.bytes_to_read * (per_byte or 0.0)
            )

    @property
    def is_off(self) -> bool:
        return self._off is not None

    def note(self, note: Note) -> None:
        if len(self.notes) < MAX_NOTES:
            self.notes.append(note)

    # For the threads.

    def next_job(self, worker: Worker) -> DiskJob | None:
        """Waits for one. None if the thread is to end."""
        with self._lock:
            while self._off is None and not worker.is_replaced:
                job = self._queue.take(self._clock())
                if job is not None:
                    worker.job = job
                    speed = self._speed_of(job)
                    if speed is not None:
                        speed.begun(job.started_at)
                    return job
                self._has_work.wait()
            self._workers = [each for each in self._workers if each is not worker]
            return None

    def excess_bytes(self, job: DiskJob, other_bytes: int, stuck_bytes: int) -> int:
        """Bytes that other layouts must give up for this job, besides those that are stuck."""
        if job.kind is not Kind.WRITE:
            return 0
        with self._lock:
            needed = self._own_bytes + job.num_bytes + other_bytes - self._options.max_bytes
        return min(needed, other_bytes - stuck_bytes)

    def may_clear(self, job: DiskJob) -> bool:
        """Whether a read that failed may remove its file: not once it is overdue, since then the file may be
        another by now.
        """
        with self._lock:
            if job.state is not State.RUNNING:
                return False
            job.state = State.CLEARING
            return True

    def ended(self, worker: Worker, job: DiskJob, outcome: DiskOutcome) -> None:
        now = self._clock()
        with self._lock:
            worker.job = None
            was_overdue = job.state is State.OVERDUE
            self._queue.end(job)
            if was_overdue:
                self._tell(Kind.RETURNED, job, now, "late")
            else:
                self._book(job, outcome, now)
            self._has_work.notify_all()

    @contextlib.contextmanager
    def claimed(self, key: BlockHash) -> Iterator[bool]:
        """Whether the key is without a job, and the thread's until the end."""
        with self._lock:
            is_ours = self._queue.claim(key)
        try:
            yield is_ours
        finally:
            if is_ours:
                with self._lock:
                    self._queue.release(key)
                    self._has_work.notify_all()

    def knows(self, key: BlockHash) -> bool:
        with self._lock:
            return key in self._sizes

    @property
    def num_found(self) -> int:
        return len(self._found)

    def found(self, name: ChunkName, num_bytes: int) -> None:
        """A file that was not known. Its key is claimed."""
        with self._lock:
            self._add(name, num_bytes)
            self._found.append(name)

    def lost(self, key: BlockHash) -> None:
        """A file that was known is not there. Its key is claimed."""
        with self._lock:
            self._forget(key)
            self._finished.append(Finished(Kind.LOST, 0, key, ok=False, reason="missing", is_gone=True))
            self._has_news.notify_all()

    def look(self, free_bytes: int | None) -> None:
        """Apply the passing of time, and the file system's free bytes if they were read."""
        with self._lock:
            self._look(self._clock())
            if free_bytes is not None:
                self._health.has_free(free_bytes)

    def add_workers(self, number: int) -> bool:
        """False if the system has none for us."""
        with self._lock:
            return sum(self._add_worker() for _ in range(number)) > 0

    def turn_off(self, reason: str) -> bool:
        """Whether it was on."""
        with self._lock:
            was_on = self._off is None
            if was_on:
                self._off = reason
                self._fail_waiting(reason)
            self._has_work.notify_all()
            self._has_news.notify_all()
        return was_on

    # With the lock.

    def _accepts(self, kind: Kind, growth: int) -> bool:
        if self._off is not None:
            return False
        if self._queue.is_erasing and kind is not Kind.PROBE:
            return False
        if kind not in (Kind.READ, Kind.WRITE):
            return True
        if self._is_stuck or self._queue.num_waiting >= self._options.max_queue:
            return False
        grown = self._own_bytes + self._queue.bytes_to_grow + growth
        return kind is Kind.READ or growth <= 0 or grown <= self._options.max_bytes

    def _look(self, now: float) -> None:
        for job in self._queue.late_reads(now - self._options.read_deadline_seconds):
            if job.state is State.RUNNING:
                self._queue.give_up(job)
                self._reading.ended(now, 0)
                self._tell(Kind.OVERDUE, job, now, "late")
            else:
                self._tell(Kind.READ, job, now, "late")
            self._has_work.notify_all()
        self._replace_hanging(now)
        if self._unremoved and now >= self._remove_again_at:
            self._remove_again_at = now + REMOVE_AGAIN_SECONDS
            self._remove_again(now)

    def _remove_again(self, now: float) -> None:
        """Retry removals; keys with a job are left to it. Room counts only once it is free."""
        if self._off is not None or self._queue.is_erasing:
            return
        for key in [*itertools.islice(self._unremoved, MAX_REMOVED_AGAIN)]:
            self._unremoved.move_to_end(key)
            if not self._queue.has(key):
                number, self._next_number = self._next_number, self._next_number + 1
                self._queue.add(DiskJob(Kind.REMOVE, number, now, key))
        self._has_work.notify_all()

    def _replace_hanging(self, now: float) -> None:
        num_stuck = 0
        for worker in [each for each in self._workers if not each.is_replaced]:
            job = worker.job
            if job is None or now - job.started_at <= self._options.hang_seconds:
                continue
            may_replace = self._off is None and len(self._workers) < 2 * self._options.num_threads
            if may_replace and self._add_worker():
                worker.is_replaced = True
            else:
                num_stuck += 1
        is_stuck = num_stuck >= self._options.num_threads
        if is_stuck and not self._is_stuck:
            logger.error(
                "%s hangs: each of %d threads has been at one file for more than %g seconds;"
                " nothing is read or written until one of them comes back",
                self._options.folder,
                len(self._workers),
                self._options.hang_seconds,
            )
        self._is_stuck = is_stuck

    def _add_worker(self) -> bool:
        """False if the system has no thread for us."""
        worker = Worker()
        try:
            self._start_worker(worker)
        except RuntimeError:
            return False
        self._workers.append(worker)
        return True

    def _fail_waiting(self, reason: str) -> None:
        now = self._clock()
        for job in self._queue.drop_waiting():
            if job.kind in (Kind.READ, Kind.WRITE, Kind.ERASE):
                self._tell(job.kind, job, now, reason)

    def _tell(
        self,
        kind: Kind,
        job: DiskJob,
        now: float,
        reason: str,
        header: ChunkHeader | None = None,
        *,
        is_gone: bool = False,
    ) -> None:
        seconds = now - job.started_at if job.started_at else 0.0
        self._finished.append(
            Finished(kind, job.number, job.key, not reason, header, max(0.0, seconds), reason, is_gone)
        )
        self._has_news.notify_all()

    def _speed_of(self, job: DiskJob) -> TransferSpeed | None:
        return {Kind.READ: self._reading, Kind.WRITE: self._writing}.get(job.kind)

    # What has become of a job; with the lock.

    def _book(self, job: DiskJob, outcome: DiskOutcome, now: float) -> None:
        speed = self._speed_of(job)
        if speed is not None:
            speed.ended(now, 0 if outcome.reason else job.num_bytes)
        if job.kind is Kind.WRITE:
            self._book_write(job, outcome, now)
        elif job.kind is Kind.REMOVE:
            self._book_removal(job, outcome, now)
        elif job.kind is Kind.ERASE:
            self._book_erasing(outcome)
        elif job.kind is Kind.PROBE and outcome.read_seconds_per_byte is not None:
            self._reading.probed(outcome.read_seconds_per_byte)
            self._writing.probed(outcome.write_seconds_per_byte or 0.0)
        elif outcome.is_worthless and job.key is not None:
            self._forget(job.key)
        if job.kind in (Kind.READ, Kind.WRITE, Kind.ERASE):
            self._tell(job.kind, job, now, outcome.reason, outcome.header, is_gone=outcome.is_worthless)

    def _book_write(self, job: DiskJob, outcome: DiskOutcome, now: float) -> None:
        if outcome.error is not None:
            self._health.has_failed_to_write(now, outcome.error)
            self._has_stayed(job.key, now)  # one before it, of which the caller knows nothing any more
        elif job.header is not None and not outcome.reason:
            self._health.has_written(job.num_bytes)
            self._add(job.header.name, job.num_bytes)

    def _book_removal(self, job: DiskJob, outcome: DiskOutcome, now: float) -> None:
        if outcome.error is not None:
            self._health.has_failed_to_remove(outcome.error)
            self._has_stayed(job.key, now)
        elif job.key is not None and not outcome.reason:
            self._forget(job.key)

    def _has_stayed(self, key: BlockHash | None, now: float) -> None:
        """A file is there, and should not be."""
        if key in self._sizes and key not in self._unremoved:
            self._remove_again_at = now + REMOVE_AGAIN_SECONDS
            self._unremoved[key] = None

    def _book_erasing(self, outcome: DiskOutcome) -> None:
        self._found.clear()
        if outcome.error is not None:
            logger.error(
                "%s could not be erased whole, and what is left is tried again: %s",
                self._options.folder,
                outcome.error.strerror,
            )
            self._unremoved = OrderedDict.fromkeys(
                self._sizes
            )  # which of them is not said: each is looked for
            self._remove_again_at = 0.0
            return
        self._sizes.clear()
        self._unremoved.clear()
        self._own_bytes = 0
        self.notes.append(Journal.clear)

    def _add(self, name: ChunkName, num_bytes: int) -> None:
        self._own_bytes += num_bytes - self._sizes.pop(name.key, 0)
        self._sizes[name.key] = num_bytes
        self._unremoved.pop(name.key, None)
        self.notes.append(lambda journal: journal.added(name, num_bytes))

    def _forget(self, key: BlockHash) -> None:
        num_bytes = self._sizes.pop(key, None)
        self._unremoved.pop(key, None)
        if num_bytes is not None:
            self._own_bytes -= num_bytes
            self.notes.append(lambda journal: journal.removed(key))
