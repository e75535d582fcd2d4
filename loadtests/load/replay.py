"""Sends a workload to a running cluster at its own pace and records what became of every request.

Owns the open loop: a request is sent at its time, however slow the answers to earlier ones are, and what this
client is late by is recorded. Does not know what the figures mean, or command lines.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from loadtests.load.streaming import Answer, Connection, StreamCut
from loadtests.reports.report import RequestRecord
from loadtests.workloads import TraceRequest, Workload
from loadtests.workloads.prompts import Prompts

MOST_IDLE_SECONDS = 1.0
"""Servers close idle connections; one that is younger than this is certainly still there."""
REFUSALS = (429, 503)

Default = TypeVar("Default", int, None)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go."""

    host: str
    port: int
    headers: dict[str, str]
    path: str = "/v1/completions"


class Replay:
    """One run. `records` grows while it is under way; `num_sent` counts what has been started."""

    def __init__(
        self, target: Endpoint, workload: Workload, prompts: Prompts, *, timeout_seconds: float
    ) -> None:
        self.records: dict[int, RequestRecord] = {}
        self.num_sent = 0
        self._workload, self._prompts = workload, prompts
        self._timeout_seconds = timeout_seconds
        self._connections = _Connections(target)
        self._path = target.path

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
            self._connections.abort()

    async def _send(self, number: int, request: TraceRequest, body: bytes, due: float) -> None:
        began = time.perf_counter()
        answer: Answer | None = None
        error: str | None = None
        try:
            async with asyncio.timeout(self._timeout_seconds), self._connections.take() as connection:
                answer = await connection.post(self._path, body)
            error = _error_of(answer)
        except TimeoutError:
            error = "timed out"
        except StreamCut as cut:
            answer, error = cut.answer, "truncated"
        except (OSError, EOFError):
            error = "connection lost"
        except (ValueError, KeyError):
            error = "unreadable answer"
        ended = time.perf_counter()
        if answer is None:
            self.records[number] = RequestRecord(
                arrival_seconds=request.arrival_seconds,
                num_input_tokens=request.num_input_tokens,
                e2e_seconds=ended - began,
                error=error,
                lateness_seconds=began - due,
                user=request.user,
                session=request.session,
            )
        else:
            self.records[number] = record_of(request, answer, error, answer.sent_seconds - due)


def record_of(request: TraceRequest, answer: Answer, error: str | None, lateness: float) -> RequestRecord:
    details = answer.usage.get("prompt_tokens_details")
    details = details if isinstance(details, dict) else {}
    predicted = answer.headers.get("x-kvasir-overlap-tokens")
    return RequestRecord(
        arrival_seconds=request.arrival_seconds,
        num_input_tokens=_number(answer.usage.get("prompt_tokens"), request.num_input_tokens),
        num_output_tokens=_number(answer.usage.get("completion_tokens"), 0),
        ttft_seconds=answer.ttft if error is None else None,
        e2e_seconds=answer.e2e,
        num_cached_tokens=_number(details.get("cached_tokens"), None),
        num_cross_user_tokens=_number(details.get("cross_user_cached_tokens"), None),
        predicted_tokens=None if predicted is None else int(predicted),
        replica=answer.headers.get("x-kvasir-replica"),
        error=error,
        lateness_seconds=lateness,
        user=request.user,
        session=request.session,
        reason=answer.headers.get("x-kvasir-reason"),
        itl_seconds=answer.itl_seconds if error is None else (),
        request_id=answer.headers.get("x-request-id"),
    )


def _error_of(answer: Answer) -> str | None:
    if answer.status in REFUSALS:
        return f"refused ({answer.status})"
    if answer.status != 200:
        return f"status {answer.status}"
    return None if answer.is_whole else "truncated"


def _number(value: object, default: Default) -> int | Default:
    return value if isinstance(value, int) else default


class _Connections:
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


async def show_progress(replay: Replay, total: int, show: Callable[[str], None]) -> None:
    """Twice a second, until cancelled."""
    start = time.perf_counter()
    while True:
        records = list(replay.records.values())
        num_failed = sum(record.error is not None for record in records)
        show(
            f"{time.perf_counter() - start:6.0f} s  {replay.num_sent} of {total} sent, "
            f"{replay.num_sent - len(records)} in flight, {num_failed} failed"
        )
        await asyncio.sleep(0.5)
