"""Sends requests in one process of a load test: scheduled arrivals, or users who wait for answers.

Owns the sending and the records of its share of a workload, and Locust's events for them. `worker.py` takes
the records to the leader.

Open loop: one Locust user hands out the arrivals; each is a greenlet of its own, so no answer delays the next
request. Closed loop: a Locust user plays one session after another, turn by turn.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import gevent
from gevent.pool import Group
from locust import User, task
from locust.env import Environment

from loadtests.load.locust_stream import StreamClient
from loadtests.load.options import LoadOptions
from loadtests.load.records import record_of, unanswered
from loadtests.reports.report import RequestRecord
from loadtests.workloads import TraceRequest
from loadtests.workloads.chat_bodies import ChatBodies

LEAD_SECONDS = 1.0
"""From the plan to time zero; every process gets it in time."""
STOPPED = "stopped"

Numbered = tuple[int, TraceRequest]
"""A request with its position in the whole workload."""


class AnswerError(Exception):
    """Locust's exception for a failed request."""


class Sender:
    """Sends one process's share. `on_record` is called with each request's number and record."""

    def __init__(
        self,
        environment: Environment,
        base_url: str,
        options: LoadOptions,
        *,
        context_length: int | None,
        index: int,
        num_workers: int,
        on_record: Callable[[int, RequestRecord], None],
    ) -> None:
        workload, _ = options.make_workload(context_length)
        self._environment, self._options, self._on_record = environment, options, on_record
        self._client = StreamClient(base_url)
        self._bodies = ChatBodies(options.model, workload.block_tokens, options.seed, options.is_standard)
        self._start = time.perf_counter() + LEAD_SECONDS
        own = share_of(workload.requests, index, num_workers)
        self._arrivals = iter(own)
        self._sessions = iter(_by_session(own))
        self._are_sessions_left = True
        self._in_flight: dict[int, TraceRequest] = {}
        self._num_playing = 0
        self._num_own, self._num_recorded = len(own), 0
        self._greenlets = Group()
        self._is_stopped = False

    def is_done(self) -> bool:
        """Nothing is left to send, and all that was sent has a record."""
        if self._is_stopped:
            return True
        if not self._options.closed_loop:
            return self._num_recorded == self._num_own
        is_over = not self._are_sessions_left or self._now() > self._options.duration_seconds
        return is_over and not self._num_playing

    def keep_sending(self) -> None:
        """For as long as there is something to send. Each Locust user calls it."""
        if self._options.closed_loop:
            self._play()
        else:
            self._pace()

    def _pace(self) -> None:
        """Every arrival at its time. Several may do this at once; each arrival is sent once."""
        for number, request in self._arrivals:
            body = self._bodies.body(request)
            gevent.sleep(max(0.0, request.arrival_seconds - self._now()))
            self._in_flight[number] = request
            self._greenlets.spawn(self._send, number, request, body)

    def _play(self) -> None:
        """Sessions one after another until none is left or the time is over."""
        gevent.sleep(max(0.0, -self._now()))
        while self._now() < self._options.duration_seconds:
            session = next(self._sessions, None)
            if session is None:
                self._are_sessions_left = False
                return
            self._num_playing += 1
            try:
                for number, request in session:
                    if self._now() < self._options.duration_seconds:
                        sent = self._in_flight[number] = replace(request, arrival_seconds=self._now())
                        self._send(number, sent, self._bodies.body(request))
            finally:
                self._num_playing -= 1

    def stop(self) -> None:
        """Record requests in flight as stopped."""
        self._is_stopped = True
        self._greenlets.kill()
        for number, request in list(self._in_flight.items()):
            waited = self._now() - request.arrival_seconds
            self._record(number, unanswered(request, STOPPED, waited_seconds=waited, tenant=request.tenant))
        self._client.close()

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _send(self, number: int, request: TraceRequest, body: bytes) -> None:
        request_id = f"{self._options.workload}-{self._options.seed}-{number}"
        headers = {"x-request-id": request_id}
        if key := self._options.api_keys.get(request.tenant or "", self._options.api_key):
            headers["authorization"] = f"Bearer {key}"
        began = time.perf_counter()
        answer, error = self._client.post(body, self._options.timeout_seconds, headers)
        due = self._start + request.arrival_seconds
        record = record_of(
            request, answer, error, began=began, due=due, request_id=request_id, tenant=request.tenant
        )
        self._fire(record)  # first, since the last record ends the run
        self._record(number, record)

    def _record(self, number: int, record: RequestRecord) -> None:
        del self._in_flight[number]
        self._num_recorded += 1
        self._on_record(number, record)

    def _fire(self, record: RequestRecord) -> None:
        """Locust's rows. Only the row e2e counts requests and failures."""
        request = self._environment.events.request

        def row(kind: str, name: str, value: float, size: int, error: Exception | None = None) -> None:
            request.fire(
                request_type=kind,
                name=name,
                response_time=value,
                response_length=size,
                exception=error,
                context={},
            )

        error = None if record.error is None else AnswerError(record.error)
        row("SSE", "e2e", (record.e2e_seconds or 0.0) * 1e3, record.num_output_tokens, error)
        if record.ttft_seconds is not None:
            row("SSE", "ttft", record.ttft_seconds * 1e3, record.num_input_tokens)
        for gap in record.itl_seconds:
            row("SSE", "itl", gap * 1e3, 0)
        if record.tpot_seconds is not None:
            row("SSE", "tpot", record.tpot_seconds * 1e3, record.num_output_tokens)
        if error is None and record.num_cached_tokens is not None:
            row("tokens", "cached", float(record.num_cached_tokens), record.num_cached_tokens)


class ChatUser(User):
    """A Locust user: in an open loop the source of all arrivals of its process."""

    sender: ClassVar[Sender | None] = None
    """The run's, if there is one."""

    @task
    def send(self) -> None:
        if self.sender is not None:
            self.sender.keep_sending()
        gevent.event.Event().wait()  # Locust would call again, and replaces a user that ends


def share_of(requests: Sequence[TraceRequest], index: int, num_workers: int) -> list[Numbered]:
    """One process's share, numbered as in the whole: every `num_workers`-th session, with all its turns."""
    sessions: dict[str, int] = {}
    return [
        (number, request)
        for number, request in enumerate(requests)
        if sessions.setdefault(request.session, len(sessions)) % num_workers == index
    ]


def _by_session(requests: Sequence[Numbered]) -> list[list[Numbered]]:
    sessions: dict[str, list[Numbered]] = {}
    for numbered in requests:
        sessions.setdefault(numbered[1].session, []).append(numbered)
    return list(sessions.values())
