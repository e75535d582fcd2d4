"""believed(): which servers count as there, by the answers of a source so far.

Answers come with their times. A bad answer takes away no server at once: one that names none is believed
after EMPTY_SECONDS, and a source that fails after STALE_SECONDS.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

EMPTY_SECONDS = 60.0
STALE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Failed:
    """A source that did not answer, and why."""

    sentence: str


@dataclass(frozen=True, slots=True)
class Belief:
    """`named_at` has the servers and when each was last named, longest known first. `complaint` says why they
    may differ from what is there."""

    named_at: Mapping[str, float] = field(default_factory=dict)
    complaint: str | None = None


def believed(
    before: Belief, answer: Collection[str] | Failed, now: float, *, linger_seconds: float, at_most: int
) -> Belief:
    """Return the belief after `answer`. A server that others outlive in an answer stays `linger_seconds`."""
    if isinstance(answer, Failed):
        kept = _named_within(before, STALE_SECONDS, now)
        return Belief(kept, f"{answer.sentence}; {_staying(len(kept), STALE_SECONDS)}")
    if not answer:
        kept = _named_within(before, max(EMPTY_SECONDS, linger_seconds), now)
        return Belief(kept, f"no server is named; {_staying(len(kept), EMPTY_SECONDS)}")
    named = _named_within(before, linger_seconds, now)
    named |= dict.fromkeys(sorted(answer), now)
    known_first = {url: named[url] for url in before.named_at if url in named} | named
    if len(known_first) <= at_most:
        return Belief(known_first)
    return Belief(
        dict(list(known_first.items())[:at_most]),
        f"{len(known_first)} servers are named, and at most {at_most} are taken",
    )


def _named_within(before: Belief, seconds: float, now: float) -> dict[str, float]:
    return {url: at for url, at in before.named_at.items() if now - at <= seconds}


def _staying(num_known: int, seconds: float) -> str:
    if not num_known:
        return "none is known"
    return f"the {num_known} known before stay for {seconds / 60:g} minutes"
