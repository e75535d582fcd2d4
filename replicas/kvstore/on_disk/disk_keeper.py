"""DiskKeeper: the disk's own thread: it keeps the journal, watches free space, and compares with the folder.

Owns the journal and its pace, and the comparison of journal and folder after a start, which takes a tenth of
a thread's time at most. Reads and writes of chunks are the workers'.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from replicas.kvstore.layout import ChunkError
from replicas.kvstore.on_disk.breaker import Breaker
from replicas.kvstore.on_disk.chunk_files import FileMissing
from replicas.kvstore.on_disk.disk_books import DiskBooks
from replicas.kvstore.on_disk.disk_jobs import Files
from replicas.kvstore.on_disk.disk_options import DiskOptions
from replicas.kvstore.on_disk.journal import Journal
from replicas.protocol.blocks import BlockHash

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.25
BUSY_TICK_SECONDS = 0.045
STEP_SECONDS = 0.005
"""Per busy tick of the comparison."""

MAX_FOUND = 4096
"""Files that wait for the caller to take them; then comparing waits too."""


class DiskKeeper:
    def __init__(self, options: DiskOptions, files: Files, journal: Journal, books: DiskBooks) -> None:
        self._options = options
        self._files = files
        self._journal = journal
        self._books = books
        self._breaker = Breaker()
        self._stop = threading.Event()
        self._not_seen = set(journal.keys())
        self._comparing: Iterator[None] | None = self._compare()
        self._next_sync = 0.0

    def run(self) -> None:
        """Run until `stop`; later notes are lost."""
        while not self._stop.wait(BUSY_TICK_SECONDS if self._comparing else TICK_SECONDS):
            self.note()
            now = time.monotonic()
            free_bytes = None
            if now >= self._next_sync:
                self._next_sync = now + self._options.sync_seconds
                self.sync()
                with contextlib.suppress(OSError):
                    free_bytes = self._files.chunks.free_bytes()
            self._books.look(free_bytes)
            self._compare_a_little()
        self.note()
        self.sync(at_end=True)

    def stop(self) -> None:
        self._stop.set()

    @property
    def is_comparing(self) -> bool:
        return self._comparing is not None

    def note(self) -> None:
        while self._books.notes:
            self._books.notes.popleft()(self._journal)

    def sync(self, *, at_end: bool = False) -> None:
        now = time.monotonic()
        if not (at_end or self._breaker.allows(now)):
            return
        try:
            self._journal.flush()
        except OSError as error:
            if not self._breaker.is_tripped:
                logger.error(
                    "the journal in %s cannot be written (%s): what is stored meanwhile has to be found file"
                    " by file after a restart",
                    self._options.folder,
                    error.strerror,
                )
            self._breaker.failed(now)
        else:
            self._breaker.succeeded()

    # Comparing.

    def _compare_a_little(self) -> None:
        end = time.monotonic() + STEP_SECONDS
        while self._comparing is not None and time.monotonic() < end:
            if self._books.num_found >= MAX_FOUND:
                return
            try:
                next(self._comparing)
            except StopIteration:
                self._comparing = None
            except OSError as error:
                logger.warning("cannot look through %s: %s", self._options.folder, error.strerror)
                self._comparing = None

    def _compare(self) -> Iterator[None]:
        """Compare the folder with the journal: unknown files, other layouts', then known chunks without a
        file."""
        for keys in self._files.chunks.walk():
            for key in keys:
                self._not_seen.discard(key)
                if not self._books.knows(key):
                    self._examine(key)
                    yield
            yield
        for _ in self._files.others.count():
            yield
        while self._not_seen:
            self._look_for(self._not_seen.pop())
            yield

    def _examine(self, key: BlockHash) -> None:
        """Examine an unknown file: record it, or remove it if it is not what its name says."""
        with contextlib.suppress(FileMissing, OSError), self._books.claimed(key) as is_ours:
            if not is_ours or self._books.knows(key):
                return
            try:
                header, num_bytes = self._files.chunks.read_header(key)
            except ChunkError:
                self._files.chunks.remove(key)
            else:
                self._books.found(header.name, num_bytes)

    def _look_for(self, key: BlockHash) -> None:
        with contextlib.suppress(OSError), self._books.claimed(key) as is_ours:
            if is_ours and self._books.knows(key) and not self._files.chunks.has(key):
                self._books.lost(key)
