"""BodyRecorder: records request bodies, one per line, in a file for `kvasir lint`.

Owns the file and its mode: bodies are people's words, so recording requires a setting with a file that only
its owner may read. A thread writes; bodies that it cannot write in time, or beyond the file's bound, are left
out and counted. Several routers may share a file.
"""

import asyncio
import json
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from replicas.process.settings import SettingsError
from router.api.api_request import ApiRequest
from router.feature import Feature
from router.shared.instruments import Instrument, counter

logger = logging.getLogger(__name__)

WAITING_BYTES = 64 * 2**20
"""For lines to be written."""

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OPEN = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class RecordedBodies(NamedTuple):
    """Outcomes of bodies so far."""

    num_written: int
    num_left_out: int


class BodyRecorder(Feature):
    def __init__(self, path: str, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        """Raises SettingsError."""
        self._path, self._max_bytes, self._clock = path, max_bytes, clock
        self._file = _opened(path)
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_waiting_bytes = 0
        self._num_written = self._num_left_out = 0
        self._is_full = False
        self._thread: threading.Thread | None = None

    def prepared(self, request: ApiRequest, body: bytes) -> None:
        self.take(request.path, request.caller.namespace, body, self._clock())

    def take(self, path: str, tenant: str | None, body: bytes, time: float) -> None:
        """`body` is JSON; `tenant` names whom it shares prefixes with."""
        head = json.dumps({"path": path, "tenant": tenant, "time": round(time, 3)})[:-1].encode()
        body = body.replace(b"\n", b" ").replace(
            b"\r", b" "
        )  # white space, for within texts they are escaped
        line = b'%s, "body": %s}\n' % (head, body)
        with self._lock:
            if self._is_full or self._num_waiting_bytes + len(line) > WAITING_BYTES:
                self._num_left_out += 1
                return
            self._num_waiting_bytes += len(line)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="recorded bodies", daemon=True)
            self._thread.start()
        self._lines.put(line)

    def counts(self) -> RecordedBodies:
        with self._lock:
            return RecordedBodies(self._num_written, self._num_left_out)

    def instruments(self) -> Iterator[Instrument]:
        yield counter(
            "router_recorded_bodies_total",
            "Request bodies that were appended to the file of record_bodies, or left out of it",
            lambda: {"written": self.counts().num_written, "left_out": self.counts().num_left_out},
            "outcome",
        )

    async def close(self) -> None:
        await asyncio.to_thread(self.finish)

    def finish(self) -> None:
        """Close after writing what waits."""
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join()
        os.close(self._file)

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            is_written = self._write(line)
            with self._lock:
                self._num_waiting_bytes -= len(line)
                self._num_written += is_written
                self._num_left_out += not is_written

    def _write(self, line: bytes) -> bool:
        if self._is_full:
            return False
        try:
            if os.fstat(self._file).st_size + len(line) > self._max_bytes:
                return self._stop("it is full")
            num_written = os.write(self._file, line)
        except OSError as error:
            return self._stop(error.strerror or str(error))
        return num_written == len(line) or self._stop("the disk is full")

    def _stop(self, why: str) -> bool:
        self._is_full = True
        logger.warning("no more bodies are recorded in %s: %s", self._path, why)
        return False


def _opened(path: str) -> int:
    try:
        file = os.open(path, _OPEN, 0o600)
    except OSError as error:
        raise SettingsError(f"setting record_bodies: cannot write to {path}: {error.strerror}") from error
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & _OTHERS:
        os.close(file)
        raise SettingsError(
            f"setting record_bodies: {path} is to be a file of this user's that others can neither read nor"
            " write (mode 0600)"
        )
    return file
