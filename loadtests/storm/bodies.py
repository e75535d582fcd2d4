"""The corpus of worst bodies, sent beside a storm: one after the other, over and over.

Owns the sending and the count of what came back. Any status is an answer, and so is a reset where a router
was killed; a body that gets neither within the patience hangs. Runs in a thread of its own, so that making a
body delays no client that is timed.
"""

import asyncio
import http.client
import itertools
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from loadtests.workloads.worst_bodies import WorstBody, worst_bodies

RESET = "reset"
HANG = "no answer"
PAUSE_SECONDS = 0.2


class StormBodies:
    """`outcomes` counts statuses, resets and hangs; `hung` names the bodies that hung."""

    def __init__(self, url: str, model: str, *, num_bytes: int, patience_seconds: float) -> None:
        address = urlsplit(url)
        assert address.hostname is not None and address.port is not None
        self._host, self._port = address.hostname, address.port
        self._model = model
        self._num_bytes = num_bytes
        self._patience_seconds = patience_seconds
        self._is_over = threading.Event()
        self.outcomes: Counter[str] = Counter()
        self.hung: list[str] = []

    @asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        """Bodies are sent while the block runs; the last one has ended when it is left."""
        sending = asyncio.create_task(asyncio.to_thread(self._send_all))
        try:
            yield
        finally:
            self._is_over.set()
            await sending

    def _send_all(self) -> None:
        for body in itertools.chain.from_iterable(
            worst_bodies(self._num_bytes, model=self._model) for _ in itertools.count()
        ):
            if self._is_over.wait(PAUSE_SECONDS):
                return
            outcome = self._send(body)
            self.outcomes[outcome] += 1
            if outcome == HANG:
                self.hung.append(f"{body.route} {body.name}")

    def _send(self, body: WorstBody) -> str:
        started = time.monotonic()
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._patience_seconds)
        try:
            connection.request("POST", body.route, body.content, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
        except TimeoutError:
            return HANG
        except (OSError, http.client.HTTPException):
            return RESET if time.monotonic() - started < self._patience_seconds else HANG
        finally:
            connection.close()
        return str(answer.status)
