"""Disk: KV in files, read and written by threads while the engine continues.

Owns the open folder and the threads. The directory decides which chunk goes where. Its caller is one thread,
the engine's; only `wait` and `close` block it.

Every defect of a file is a miss. A slow, full or broken disk::

    a read is late                  it has failed; its slot comes back when the thread does
    a write fails                   writes pause, longer each time; reads go on
    a file cannot be removed        its bytes count, others are evicted, and it is tried again
    little free space               writes pause until there is more
    a thread hangs                  another takes its place, as often as there are threads
    all of them hang                nothing is read or written until one comes back
    a thread dies of our own bug    the disk is off
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from replicas.kvstore.chunk import ChunkName, NotedLease
from replicas.kvstore.layout import ChunkHeader, file_bytes
from replicas.kvstore.on_disk.chunk_files import ChunkFiles
from replicas.kvstore.on_disk.disk_books import DiskBooks, Worker
from replicas.kvstore.on_disk.disk_jobs import DiskOutcome, Files, perform
from replicas.kvstore.on_disk.disk_keeper import DiskKeeper
from replicas.kvstore.on_disk.disk_options import DiskOptions, DiskSpeeds
from replicas.kvstore.on_disk.folder import Folder
from replicas.kvstore.on_disk.jobs import DiskJob, Finished, Kind
from replicas.kvstore.on_disk.journal import Journal
from replicas.kvstore.on_disk.other_layouts import OtherLayouts
from replicas.process.settings import SettingsError
from replicas.protocol.blocks import BlockHash
from replicas.protocol.tier_figures import WriteStop

__all__ = ["Disk", "DiskOptions", "DiskSpeeds", "Finished", "Kind"]

logger = logging.getLogger(__name__)

MAX_PROBE_SHARE = 16
MIN_PROBE_BYTES = 1 << 20
"""A probe writes at most this part of the disk's capacity and of its free space, but at least this much."""


class Disk:
    """Opens the folder. Raises SettingsError, with a sentence that names it, if it cannot be used."""

    def __init__(self, options: DiskOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._folder = Folder(options.folder)
        with contextlib.ExitStack() as opened:
            opened.callback(self._folder.close)
            try:
                chunks = ChunkFiles(self._folder, options.layout)
                opened.callback(chunks.close)
                self._files = Files(chunks, OtherLayouts(self._folder, options.layout))
                self._journal = Journal(chunks.of_layout.fd)
                opened.callback(self._journal.close)
                free_bytes = chunks.free_bytes()
            except OSError as error:
                raise SettingsError(
                    f"the KV folder {options.folder} cannot be used: {error.strerror}"
                ) from error
            self._opened = opened.pop_all()
        self.restored: Sequence[ChunkName] = self._journal.names()
        """Chunks by the journal, least recently used first."""
        self.restored_leases: Mapping[BlockHash, NotedLease] = dict(self._journal.leases)
        self._threads: list[threading.Thread] = []
        self._books = DiskBooks(options, self._journal.sizes(), self._start_worker, clock)
        self._keeper = DiskKeeper(options, self._files, self._journal, self._books)
        self._is_closed = False
        self._books.look(free_bytes)
        self._probe(free_bytes)
        self._books.add_workers(options.num_threads)
        self._keeper_thread = self._start("kv-disk-keeper", self._keep)

    def take_found(self) -> list[ChunkName]:
        """Files that the journal did not know, found since the last call; the ends of chains first.

        The caller adopts them or has them removed.
        """
        return self._books.take_found()

    # Jobs. Each gets a number, which its Finished has.

    def read(self, key: BlockHash, slot: memoryview) -> int | None:
        """Read the chunk's file into the slot: the whole image. None if too many wait already, or if the disk
        is off. The slot is the disk's until the read has ended, and after OVERDUE until RETURNED.
        """
        return self._books.ask(Kind.READ, key, slot=slot, num_bytes=len(slot))

    def write(self, header: ChunkHeader, slot: memoryview, *, sync: bool = False) -> int | None:
        """Write the slot to a file, header filled in; with `sync` it is durable when it is finished. None if
        too many jobs wait, if the disk is off, or if it would exceed its capacity. The payload must not
        change until the write has ended."""
        num_bytes = file_bytes(header.payload_bytes)
        return self._books.ask(
            Kind.WRITE, header.name.key, slot=slot, header=header, sync=sync, num_bytes=num_bytes
        )

    def remove(self, keys: Iterable[BlockHash]) -> None:
        """Remove files, after earlier jobs for these keys and before later ones. Never reported as
        finished."""
        for key in keys:
            self._books.ask(Kind.REMOVE, key)

    def erase(self) -> int | None:
        """Remove every file of ours, of any layout, once running jobs end; waiting jobs fail. A job: it ends
        with ERASE, and nothing else is accepted until then. None if the disk is off or erasing."""
        return self._books.ask(Kind.ERASE)

    # What the journal keeps.

    def note_use(self, keys: Iterable[BlockHash]) -> None:
        """Record uses in order: the last is the newest. Unknown keys are ignored."""
        used = tuple(keys)
        self._books.note(lambda journal: journal.used(used))

    def note_lease(self, key: BlockHash, until: float, seconds: int = 0, tenant: bytes = b"") -> None:
        """Until is in seconds since 1970, 0 for none any more; a use makes it `seconds` from then. The chunk
        may be written later.
        """
        lease = NotedLease(until, seconds, tenant)
        self._books.note(lambda journal: journal.leased(key, lease))

    # What happens.

    def take_finished(self) -> list[Finished]:
        return self._books.take_finished()

    def wait(self, seconds: float) -> bool:
        """Wait until a job has finished, at most `seconds`; returns whether one has."""
        return self._books.wait(seconds)

    @property
    def can_write(self) -> bool:
        """Whether there is free space, no write has failed lately, and the queue has room."""
        return self._books.can_write()

    @property
    def write_stop(self) -> WriteStop | None:
        """Return why writing has stopped, unless the queue is only briefly full."""
        return self._books.write_stop()

    @property
    def is_off(self) -> bool:
        """Whether the disk is closed or broken for good."""
        return self._books.is_off

    @property
    def is_comparing(self) -> bool:
        """The folder has not been compared with its journal yet."""
        return self._keeper.is_comparing

    @property
    def max_bytes(self) -> int:
        return self._options.max_bytes

    @property
    def bytes_used(self) -> int:
        """Bytes of all our files, including counted ones of other layouts."""
        return self._books.own_bytes() + self._files.others.num_bytes

    @property
    def other_bytes(self) -> int:
        """Counted bytes of other layouts' and versions' files."""
        return self._files.others.num_bytes

    @property
    def num_unremoved(self) -> int:
        """Files that were to go and could not be removed, other layouts' counted in ours. They take room."""
        stuck = -(-self._files.others.stuck_bytes // self._options.slot_bytes)
        return self._books.num_unremoved + stuck

    def speeds(self) -> DiskSpeeds:
        return self._books.speeds()

    def close(self, seconds: float) -> bool:
        """End running jobs, fail waiting ones, sync the journal, leave the folder. False if threads still
        hang in the end: the folder then stays ours until the process ends."""
        if self._is_closed:
            return True
        end = time.monotonic() + seconds
        self._books.turn_off("closed")
        if not _join(self._threads, end):
            logger.warning("%s: threads still hang; they end with the process", self._options.folder)
            return False
        self._keeper.stop()
        if not _join([self._keeper_thread], end):
            return False
        self._opened.close()
        self._is_closed = True
        return True

    # Threads.

    def _probe(self, free_bytes: int) -> None:
        room = min(self._options.max_bytes, free_bytes - self._options.reserve_bytes)
        most = max(MIN_PROBE_BYTES, room // MAX_PROBE_SHARE)
        num_bytes = min(self._options.probe_bytes, most) >> 20 << 20
        if 0 < num_bytes <= room:
            self._books.ask(Kind.PROBE, num_bytes=num_bytes)

    def _start_worker(self, worker: Worker) -> None:
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(self._start("kv-disk", lambda: self._work(worker)))

    def _start(self, name: str, run: Callable[[], None]) -> threading.Thread:
        """Start a daemon thread: it may hang forever."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def _work(self, worker: Worker) -> None:
        while (job := self._books.next_job(worker)) is not None:
            try:
                outcome = self._do(job)
            except BaseException:
                self._die()
                outcome = DiskOutcome(reason="died")
            self._books.ended(worker, job, outcome)

    def _do(self, job: DiskJob) -> DiskOutcome:
        others = self._files.others
        excess = self._books.excess_bytes(job, others.num_bytes, others.stuck_bytes)
        outcome = perform(self._files, job, excess_bytes=excess)
        if outcome.is_worthless and job.key is not None and self._books.may_clear(job):
            with contextlib.suppress(OSError):
                self._files.chunks.remove(job.key)
        return outcome

    def _keep(self) -> None:
        try:
            self._keeper.run()
        except BaseException:
            self._die()

    def _die(self) -> None:
        """Stop after an exception in a thread: it is a bug, and nothing is trusted any more."""
        if self._books.turn_off("off"):
            logger.exception(
                "a thread of the disk has died: %s is neither read nor written any more", self._options.folder
            )


def _join(threads: Iterable[threading.Thread], end: float) -> bool:
    """Join the threads; returns whether all have ended by `end`."""
    for thread in list(threads):
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            return False
    return True
