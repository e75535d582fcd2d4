"""Jobs: a disk's queue, in order of execution.

Owns the order: reads before removals before writes, and jobs of one key in the order requested, one at a
time. Pure: it moves nothing and reads no clock. Its caller holds a lock around it.
"""

import enum
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from replicas.kvstore.layout import ChunkHeader
from replicas.protocol.blocks import BlockHash


class Kind(enum.Enum):
    """Kinds of jobs (the first five) and of endings. Endings of all but REMOVE and PROBE are reported."""

    READ = "read"
    REMOVE = "remove"
    WRITE = "write"
    ERASE = "erase"
    PROBE = "probe"
    OVERDUE = "overdue"
    """A read has not ended within its deadline: it failed, and its slot may still be written to."""
    RETURNED = "returned"
    """An overdue read has ended: nothing writes to its slot any more."""
    LOST = "lost"
    """No job: a file that the journal knew is not there."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The outcome of a job. Every job ends with one READ, WRITE or ERASE; an overdue read ends with OVERDUE,
    then RETURNED.

    `header` belongs to a read that is `ok`: its slot holds verified KV. `seconds` is the duration without the
    wait in the queue. `reason` is one word for a metric if it is not `ok`.
    """

    kind: Kind
    job: int
    key: BlockHash | None
    ok: bool
    header: ChunkHeader | None = None
    seconds: float = 0.0
    reason: str = ""
    is_gone: bool = False
    """The key's file is not there any more, or cannot be read."""


class State(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    CLEARING = enum.auto()
    """A read has failed and its file is being removed: from here on it ends, late or not."""
    OVERDUE = enum.auto()
    ENDED = enum.auto()


@dataclass(slots=True, eq=False)
class DiskJob:
    kind: Kind
    number: int
    asked_at: float
    key: BlockHash | None = None
    slot: memoryview | None = None
    header: ChunkHeader | None = None
    sync: bool = False
    num_bytes: int = 0
    """Bytes that it moves."""
    growth: int = 0
    """Bytes by which it makes the folder grow; less than 0 for a removal."""
    state: State = State.WAITING
    started_at: float = 0.0


_ORDER = (Kind.PROBE, Kind.READ, Kind.REMOVE, Kind.WRITE)


class JobQueue:
    def __init__(self) -> None:
        self._ready: dict[Kind, deque[DiskJob]] = {kind: deque() for kind in _ORDER}
        self._behind: dict[BlockHash, deque[DiskJob]] = {}
        """For each key that a job or a claim has: the jobs that wait for it."""
        self._reads: deque[DiskJob] = deque()
        """Oldest first, ended ones too until they come to the front."""
        self._erase: DiskJob | None = None
        self.num_waiting = 0
        """Reads and writes."""
        self.num_running = 0
        """Running jobs of any kind, without overdue reads."""
        self.bytes_to_read = 0
        """Bytes of waiting and running reads, without overdue ones."""
        self.bytes_to_grow = 0
        """Bytes by which waiting and running jobs will grow the folder."""

    @property
    def is_erasing(self) -> bool:
        """Erasing waits or runs."""
        return self._erase is not None

    def add(self, job: DiskJob) -> None:
        if job.kind is Kind.ERASE:
            assert self._erase is None, "one erasing at a time"
            self._erase = job
            return
        self._count(job, 1)
        if job.kind is Kind.READ:
            self._reads.append(job)
        if job.key is None:
            self._ready[job.kind].append(job)
        elif job.key in self._behind:
            self._behind[job.key].append(job)
        else:
            self._behind[job.key] = deque()
            self._ready[job.kind].append(job)

    def take(self, now: float) -> DiskJob | None:
        """Return the next job. Erasing waits until nothing else runs, and everything else for erasing."""
        if self._erase is not None:
            if self.num_running:
                return None
            return self._start(self._erase, now)
        for kind in _ORDER:
            if self._ready[kind]:
                job = self._ready[kind].popleft()
                self.num_waiting -= job.kind in (Kind.READ, Kind.WRITE)
                return self._start(job, now)
        return None

    def end(self, job: DiskJob) -> None:
        """A job that ran has ended."""
        was_overdue = job.state is State.OVERDUE
        job.state = State.ENDED
        if was_overdue:
            return
        self.num_running -= 1
        if job is self._erase:
            self._erase = None
        else:
            self._count_bytes(job, -1)
            self._release(job.key)

    def give_up(self, job: DiskJob) -> None:
        """Give up an overdue read: others may have its key, and nothing waits for it."""
        assert job.state is State.RUNNING, "what is given up runs"
        job.state = State.OVERDUE
        self.num_running -= 1
        self._count_bytes(job, -1)
        self._release(job.key)

    def late_reads(self, asked_before: float) -> Iterator[DiskJob]:
        """Reads that were asked for before then and still wait or run, oldest first. Waiting ones are taken
        off the queue; those that run are the caller's to give up.
        """
        while self._reads and self._reads[0].asked_at < asked_before:
            job = self._reads.popleft()
            if job.state is State.WAITING:
                self._drop(job)
                yield job
            elif job.state is State.RUNNING:
                yield job

    def next_deadline(self) -> float | None:
        """Return when the oldest waiting or running read was requested."""
        while self._reads and self._reads[0].state not in (State.WAITING, State.RUNNING):
            self._reads.popleft()
        return self._reads[0].asked_at if self._reads else None

    def drop_waiting(self) -> list[DiskJob]:
        """Take everything off the queue that does not run yet, in no order."""
        dropped = [job for jobs in (*self._behind.values(), *self._ready.values()) for job in jobs]
        for job in dropped:
            self._drop(job)
        if self._erase is not None and self._erase.state is State.WAITING:
            self._erase.state = State.ENDED
            dropped.append(self._erase)
            self._erase = None
        return dropped

    def has(self, key: BlockHash) -> bool:
        """Whether a job or a claim has the key."""
        return key in self._behind

    def claim(self, key: BlockHash) -> bool:
        """Have the key as a job would, if no job has it or waits for it; then `release`."""
        if key in self._behind or self._erase is not None:
            return False
        self._behind[key] = deque()
        self.num_running += 1
        return True

    def release(self, key: BlockHash) -> None:
        self.num_running -= 1
        self._release(key)

    def _start(self, job: DiskJob, now: float) -> DiskJob:
        job.state = State.RUNNING
        job.started_at = now
        self.num_running += 1
        return job

    def _drop(self, job: DiskJob) -> None:
        """Take one that waits out of the line."""
        job.state = State.ENDED
        self._count(job, -1)
        if job.key is not None and job in self._behind[job.key]:
            self._behind[job.key].remove(job)
        else:
            self._ready[job.kind].remove(job)
            self._release(job.key)

    def _release(self, key: BlockHash | None) -> None:
        if key is None:
            return
        behind = self._behind[key]
        if behind:
            job = behind.popleft()
            self._ready[job.kind].append(job)
        else:
            del self._behind[key]

    def _count(self, job: DiskJob, sign: int) -> None:
        self.num_waiting += sign * (job.kind in (Kind.READ, Kind.WRITE))
        self._count_bytes(job, sign)

    def _count_bytes(self, job: DiskJob, sign: int) -> None:
        if job.kind is Kind.READ:
            self.bytes_to_read += sign * job.num_bytes
        self.bytes_to_grow += sign * job.growth
