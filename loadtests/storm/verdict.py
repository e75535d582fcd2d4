"""Verdict on a storm: requests and faults on one clock to broken invariants and figures.

Owns the judging. Pure. Times are seconds since the storm began.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

ROUTER_KILL = "router-kill"
RESET_SECONDS = 3.0
"""A stream of a killed router ends at once; so late its end may be noticed on a busy machine."""

DYING_SECONDS = 0.5
"""Seconds after a kill in which the system may still accept data for the process: it frees its memory
first."""


class Failure(Enum):
    RESET = "reset"
    """The connection ended before the answer did."""
    REFUSED = "refused"
    """A status other than 200, or an error inside the stream."""
    HANG = "hang"
    """Nothing more came, for as long as the client waits."""


@dataclass(frozen=True, slots=True)
class StormRequest:
    """One attempt of a client. `text` is what came, whole or not. If it `is_split`, one replica computed the
    prompt and another decoded."""

    client: int
    prompt: int
    sent: float
    ended: float
    text: str
    ttft: float | None = None
    failure: Failure | None = None
    detail: str = ""
    is_retry: bool = False
    is_split: bool = False

    @property
    def was_cut(self) -> bool:
        return self.failure is Failure.RESET


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, its target and its time; `healthy` is when all was well again, None if never."""

    name: str
    target: str
    began: float
    ended: float
    healthy: float | None

    @property
    def seconds_to_health(self) -> float | None:
        return None if self.healthy is None else self.healthy - self.began


@dataclass(frozen=True, slots=True)
class Verdict:
    wrong: tuple[StormRequest, ...]
    failed: tuple[StormRequest, ...]
    """Failures that no killed router excuses."""
    of_killed_routers: tuple[StormRequest, ...]
    unhealed: tuple[Fault, ...]
    left_behind: tuple[str, ...]
    hung_bodies: tuple[str, ...] = ()

    @property
    def is_broken(self) -> bool:
        return bool(self.wrong or self.failed or self.unhealed or self.left_behind or self.hung_bodies)


def judge(
    requests: Sequence[StormRequest],
    references: Sequence[str],
    faults: Sequence[Fault],
    left_behind: Sequence[str] = (),
    hung_bodies: Sequence[str] = (),
) -> Verdict:
    """Also of a request that failed: what it has said must be the beginning of its reference."""
    kills = [fault.began for fault in faults if fault.name == ROUTER_KILL]
    failed = [request for request in requests if request.failure is not None]
    excused = [request for request in failed if is_of_killed_router(request, kills)]
    return Verdict(
        wrong=tuple(request for request in requests if is_wrong(request, references[request.prompt])),
        failed=tuple(request for request in failed if request not in excused),
        of_killed_routers=tuple(excused),
        unhealed=tuple(fault for fault in faults if fault.healthy is None),
        left_behind=tuple(left_behind),
        hung_bodies=tuple(hung_bodies),
    )


def is_wrong(request: StormRequest, reference: str) -> bool:
    if request.failure is None:
        return request.text != reference
    return not reference.startswith(request.text)


def is_of_killed_router(request: StormRequest, kills: Sequence[float]) -> bool:
    """A reset of a request that was under way while the process died. What is sent again must not fail."""
    if not request.was_cut or request.is_retry:
        return False
    return any(
        request.sent <= kill + DYING_SECONDS and kill <= request.ended <= kill + RESET_SECONDS
        for kill in kills
    )


def ttfts(requests: Sequence[StormRequest], faults: Sequence[Fault] = ()) -> list[float]:
    """Return the TTFTs of answers that overlap none of the faults, each of which lasts until all is well
    again."""
    return [
        request.ttft
        for request in requests
        if request.ttft is not None and not any(_overlap(request, fault) for fault in faults)
    ]


def _overlap(request: StormRequest, fault: Fault) -> bool:
    healthy = float("inf") if fault.healthy is None else fault.healthy
    return request.sent <= max(healthy, fault.ended) and request.ended >= fault.began


def describe(request: StormRequest) -> str:
    what = request.failure.value if request.failure else "answered"
    return (
        f"client {request.client}, prompt {request.prompt}, sent {request.sent:.2f} s,"
        f" {what} {request.ended:.2f} s: {request.detail}"
    )


def explain_wrong(request: StormRequest, reference: str, faults: Sequence[Fault]) -> str:
    """Say where the texts part, and which faults overlapped."""
    same = 0
    for ours, theirs in zip(request.text, reference, strict=False):
        if ours != theirs:
            break
        same += 1
    lines = [
        describe(request),
        f"  parts after {same} of {len(reference)} characters",
        f"  expected {reference[max(0, same - 20) : same + 60]!r}",
        f"  got      {request.text[max(0, same - 20) : same + 60]!r}",
    ]
    lines += [
        f"  meanwhile {fault.name} of {fault.target} at {fault.began:.2f} s"
        for fault in faults
        if _overlap(request, fault)
    ]
    return "\n".join(lines)
