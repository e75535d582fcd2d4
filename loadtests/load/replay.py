"""Sends a workload to a running cluster at its own pace and records what became of every request.

Owns the open loop: a request is sent at its time, however slow the answers to earlier ones are, and what this
client is late by is recorded. And how requests of both loops are sent: `closed_loop.py` has the other. The
command line is in `replay_command.py`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from loadtests.load.records import record_of
from loadtests.load.streaming import MOST_IDLE_SECONDS, Answer, Connection, StreamCut
from loadtests.reports.report import RequestRecord
from loadtests.workloads import TraceRequest, Workload
from loadtests.workloads.prompts import Prompts


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Target of requests."""

    host: str
    port: int
    headers: dict[str, str]
    path: str = "/v1/completions"


class Sender:
    """Sends for one run. `records` grows while it is under way; `num_sent` counts what has been started."""

    def __init__(self, target: Endpoint, timeout_seconds: float) -> None:
        self.records: dict[int, RequestRecord] = {}
        self.num_sent = 0
        self._timeout_seconds = timeout_seconds
        self._connections = _IdleConnections(target)
        self._path = target.path

    async def post(
        self, body: bytes, headers: Mapping[str, str] | None = None
    ) -> tuple[Answer | None, str | None]:
        """Return what came of an answer, and the error, if it is not whole."""
        answer: Answer | None = None
        error: str | None = None
        try:
            async with asyncio.timeout(self._timeout_seconds), self._connections.take() as connection:
                answer = await connection.post(self._path, body, headers)
            error = answer.error
        except TimeoutError:
            error = "timed out"
        except StreamCut as cut:
            answer, error = cut.answer, "truncated"
        except (OSError, EOFError):
            error = "connection lost"
        except (ValueError, KeyError):
            error = "unreadable answer"
        return answer, error

    def abort(self) -> None:
        self._connections.abort()


class Replay(Sender):
    """One run of an open loop."""

    def __init__(
        self, target: Endpoint, workload: Workload, prompts: Prompts, *, timeout_seconds: float
    ) -> None:
        super().__init__(target, timeout_seconds)
        self._workload, self._prompts = workload, prompts

    async def run(self) -> None:
        """Until the last answer has come or failed."""
        start = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, request in enumerate(self._workload.requests):
                    due = start + request.arrival_seconds
                    body = self._prompts.body(request)
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                    self.num_sent += 1
                    tasks.create_task(self._send(number, request, body, due))
        finally:
            self.abort()

    async def _send(self, number: int, request: TraceRequest, body: bytes, due: float) -> None:
        began = time.perf_counter()
        answer, error = await self.post(body)
        self.records[number] = record_of(request, answer, error, began=began, due=due)


class _IdleConnections:
    """Idle connections, the youngest first. One that was not left in peace is never used again."""

    def __init__(self, target: Endpoint) -> None:
        self._target = target
        self._idle: list[tuple[Connection, float]] = []

    @asynccontextmanager
    async def take(self) -> AsyncIterator[Connection]:
        connection = self._young() or Connection(self._target.host, self._target.port, self._target.headers)
        try:
            yield connection
        except BaseException:
            connection.abort()
            raise
        self._idle.append((connection, time.perf_counter()))

    def _young(self) -> Connection | None:
        while self._idle:
            connection, since = self._idle.pop()
            if connection.is_open and time.perf_counter() - since < MOST_IDLE_SECONDS:
                return connection
            connection.abort()
        return None

    def abort(self) -> None:
        for connection, _ in self._idle:
            connection.abort()
        self._idle.clear()
