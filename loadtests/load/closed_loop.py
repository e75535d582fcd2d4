"""Serves recorded sessions of agents to a running cluster: a turn is sent when its answer before has ended.

Owns the order of turns, subagents and lanes, the pauses, and what is done about a refusal. Bounds: a lane has
one session at a time, which sends one turn at a time, or waits for its subagents.
"""

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from loadtests.load.records import record_of
from loadtests.load.replay import Endpoint, Sender
from loadtests.load.streaming import REFUSALS, Answer
from loadtests.workloads import TraceRequest, Workload, shrink
from loadtests.workloads.prompts import Prompts
from loadtests.workloads.sessions import Session, SessionFile

MOST_RETRIES = 10
"""Patient clients of agents try again as often."""
FIRST_BACKOFF_SECONDS, MOST_BACKOFF_SECONDS = 0.5, 8.0
MOST_TOLD_SECONDS = 60.0
"""A server that tells a client to stay away longer is not believed."""

PROGRAM, AGENT, PARENT_AGENT = "x-kvasir-program", "x-kvasir-agent", "x-kvasir-parent-agent"
_ID = re.compile(r"[!-~]{1,256}")
"""Text that a header can carry."""


@dataclass(frozen=True, slots=True)
class Program:
    """One agent of a session, with the requests of its turns, which all have these headers."""

    session: Session
    requests: tuple[TraceRequest, ...]
    headers: Mapping[str, str]


def programs_of(
    file: SessionFile, *, scale_tokens: float = 1.0, limit: int | None = None
) -> tuple[int, tuple[Program, ...]]:
    """Return tokens of a block, and the agents of the first `limit` sessions. Raises ValueError.

    Below its full blocks, a prompt has tokens of its own.
    """
    roots: dict[str, Session] = {}
    made: list[TraceRequest] = []
    for session in file.sessions:
        if not _ID.fullmatch(session.id):
            raise ValueError(f"no header can carry a session's id {session.id!r}")
        root = roots[session.id] = session if session.parent is None else roots[session.parent]
        for turn in session.turns:
            tail = () if turn.num_input_tokens % file.block_tokens == 0 else (-1 - len(made),)
            ids = turn.block_ids + tail
            made.append(
                TraceRequest(0.0, turn.num_input_tokens, turn.num_output_tokens, ids, root.id, session.id)
            )
    shrunk = shrink(Workload(file.name, file.block_tokens, tuple(made)), scale_tokens)
    requests = iter(shrunk.requests)
    programs = [
        Program(session, tuple(next(requests) for _ in session.turns), _headers(session, roots))
        for session in file.sessions
    ]
    first = list(dict.fromkeys(root.id for root in roots.values()))[:limit]
    return shrunk.block_tokens, tuple(each for each in programs if each.headers[PROGRAM] in first)


def within(programs: Sequence[Program], context_length: int) -> tuple[Program, ...]:
    """Each ends before its first turn that exceeds the context, and takes later subagents with it."""
    kept: dict[str, Program] = {}
    for program in programs:
        session = program.session
        fits = takewhile(
            lambda each: each.num_input_tokens + each.num_output_tokens <= context_length, program.requests
        )
        requests = tuple(fits)
        if session.parent is not None and session.parent_turn is not None:
            parent = kept.get(session.parent)
            if parent is None or session.parent_turn >= len(parent.requests):
                continue
        if requests:
            kept[session.id] = replace(program, requests=requests)
    return tuple(kept.values())


def num_turns(programs: Sequence[Program]) -> int:
    return sum(len(each.requests) for each in programs)


def _headers(session: Session, roots: Mapping[str, Session]) -> dict[str, str]:
    root = roots[session.id].id
    if session.parent is None:
        return {PROGRAM: root}
    parent = {} if session.parent == root else {PARENT_AGENT: session.parent}
    return {PROGRAM: root, AGENT: session.id, **parent}


class ClosedLoop(Sender):
    """One run. `sent` are the requests in the order of their sending, as `records` are numbered."""

    def __init__(
        self,
        target: Endpoint,
        programs: Sequence[Program],
        prompts: Prompts,
        *,
        speed: float,
        timeout_seconds: float,
    ) -> None:
        super().__init__(target, timeout_seconds)
        self.sent: list[TraceRequest] = []
        self._prompts, self._speed = prompts, speed
        self._lanes: dict[int, list[Program]] = defaultdict(list)
        self._children: dict[tuple[str, int], list[Program]] = defaultdict(list)
        for program in programs:
            session = program.session
            if session.parent is None or session.parent_turn is None:
                self._lanes[session.lane].append(program)
            else:
                self._children[session.parent, session.parent_turn].append(program)
        self._start = 0.0

    @property
    def num_lanes(self) -> int:
        return len(self._lanes)

    async def run(self) -> None:
        """Until the last lane is at its end."""
        self._start = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as tasks:
                for lane in self._lanes.values():
                    tasks.create_task(self._serve_lane(lane, tasks))
        finally:
            self.abort()

    async def _serve_lane(self, lane: Sequence[Program], tasks: asyncio.TaskGroup) -> None:
        ended = self._start
        for program in lane:
            ended = await self._serve(program, ended, tasks)

    async def _serve(self, program: Program, since: float, tasks: asyncio.TaskGroup) -> float:
        """Return when it ended: after its last turn, or after one that failed."""
        session, ended = program.session, since
        for number, request in enumerate(program.requests):
            pause = session.turns[number].think_seconds if number else session.after_seconds
            has_succeeded = await self._send(program, request, ended + pause / self._speed)
            ended = time.perf_counter()
            if not has_succeeded:
                break
            children = [
                tasks.create_task(self._serve(child, ended, tasks))
                for child in self._children[session.id, number]
            ]
            if number + 1 < len(program.requests):
                ended = max([ended, *[await child for child in children]])
        return ended

    async def _send(self, program: Program, request: TraceRequest, due: float) -> bool:
        body = self._prompts.body(request)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        number, self.num_sent = self.num_sent, self.num_sent + 1
        request = replace(request, arrival_seconds=due - self._start)
        self.sent.append(request)
        began = time.perf_counter()
        num_retries = 0
        answer, error = await self.post(body, program.headers)
        while answer is not None and answer.status in REFUSALS and num_retries < MOST_RETRIES:
            await asyncio.sleep(_wait_of(answer, num_retries))
            num_retries += 1
            answer, error = await self.post(body, program.headers)
        if answer is not None and num_retries:
            answer = replace(answer, sent_seconds=began)
        record = record_of(request, answer, error, began=began, due=due)
        self.records[number] = replace(record, num_retries=num_retries)
        return record.error is None


def _wait_of(refusal: Answer, num_retries: int) -> float:
    """Return the time that the server says, else one twice as long each time."""
    backoff = min(MOST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0**num_retries)
    try:
        told = float(refusal.headers["retry-after"])
    except (KeyError, ValueError):
        return backoff
    return min(told, MOST_TOLD_SECONDS) if told >= 0 else backoff
