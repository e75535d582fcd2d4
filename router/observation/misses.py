"""Findings: what is known about why a prompt's tokens were, or were not, read from cache.

Owns the sentences. Each states what the decision, the replica's usage and this router's sightings say, and
no more: where they say nothing, there is none.
"""

import enum
from dataclasses import dataclass

from replicas.protocol.frames import PromptUsage
from router.observation.sightings import Known
from router.routing.decision import Candidate, Decision


class FindingKind(enum.StrEnum):
    CACHED = "cached"
    """Everything that could be read from a cache was."""
    NEW = "new"
    """No request before had it."""
    ELSEWHERE = "elsewhere"
    """Another replica held it."""
    GONE = "gone"
    """It was served before; at the decision the index had it nowhere."""
    STALE = "stale"
    """The index said that it was there."""
    LUCKY = "lucky"
    """More was there than the index said."""
    NAMESPACE = "namespace"
    """It was seen under another model, adapter or salt."""
    SHORT = "short"
    """There is no full block that could be read."""


@dataclass(frozen=True, slots=True)
class Finding:
    kind: FindingKind
    text: str


def findings(
    usage: PromptUsage, decision: Decision | None, known: Known, block_size: int
) -> tuple[Finding, ...]:
    """What comes first matters most."""
    num_reusable = max(0, usage.num_prompt_tokens - 1) // block_size * block_size
    num_cached = usage.num_cached_tokens
    if not num_reusable:
        return (
            Finding(
                FindingKind.SHORT,
                f"The prompt does not fill a block of {block_size} tokens before its last token.",
            ),
        )
    found: list[Finding] = []
    if decision is not None:
        found += _stale(decision, num_cached)
    if num_cached >= num_reusable:
        found.append(Finding(FindingKind.CACHED, "Everything that could be read from a cache was."))
    else:
        if decision is not None:
            found += _elsewhere(decision, num_cached)
            found += _gone(decision, known, num_cached, num_reusable)
        found += _new(known, num_cached, num_reusable)
    if decision is not None:
        found += _lucky(decision, num_cached)
    return tuple(found)


def _stale(decision: Decision, num_cached: int) -> list[Finding]:
    if num_cached >= decision.overlap_tokens:
        return []
    text = (
        f"The index said that {decision.replica_id} held {decision.overlap_tokens:,} tokens; it read"
        f" {num_cached:,} from cache."
    )
    return [Finding(FindingKind.STALE, text)]


def _lucky(decision: Decision, num_cached: int) -> list[Finding]:
    if num_cached <= decision.overlap_tokens:
        return []
    text = (
        f"{decision.replica_id} read {num_cached - decision.overlap_tokens:,} more tokens from cache than the"
        f" index, which keeps only some blocks, had promised."
    )
    return [Finding(FindingKind.LUCKY, text)]


def _elsewhere(decision: Decision, num_cached: int) -> list[Finding]:
    chosen = _chosen(decision)
    others = [candidate for candidate in decision.candidates if candidate is not chosen]
    deepest = max(others, key=lambda other: other.reach.local, default=None)
    if deepest is None or deepest.reach.local <= max(num_cached, decision.overlap_tokens):
        return []
    text = f"{deepest.replica_id} held {deepest.reach.local:,} tokens"
    if chosen is not None:
        text += (
            f", at a cost of {_milliseconds(deepest)} with {_busy(deepest)}; {chosen.replica_id} cost"
            f" {_milliseconds(chosen)} with {_busy(chosen)}"
        )
    return [Finding(FindingKind.ELSEWHERE, text + ".")]


def _gone(decision: Decision, known: Known, num_cached: int, num_reusable: int) -> list[Finding]:
    if not decision.candidates or known.replica_id is None:
        return []
    start = max(num_cached, *(candidate.reach.peer for candidate in decision.candidates))
    end = min(known.num_tokens, num_reusable)
    if start >= end:
        return []
    text = (
        f"{_tokens(start, end)} had been seen before, most recently on {known.replica_id}; the index, which"
        f" keeps only some blocks, had them at no replica that was compared."
    )
    return [Finding(FindingKind.GONE, text)]


def _new(known: Known, num_cached: int, num_reusable: int) -> list[Finding]:
    start = max(known.num_tokens, num_cached)
    if start >= num_reusable:
        return []
    text = f"{_tokens(start, num_reusable)} are new to this router: no request that had ended had them."
    found = [Finding(FindingKind.NEW, text)]
    if not known.num_tokens and known.is_elsewhere:
        text = (
            "A prompt that begins alike was seen under another model, adapter or salt, which shares nothing."
        )
        found.append(Finding(FindingKind.NAMESPACE, text))
    return found


def _chosen(decision: Decision) -> Candidate | None:
    return next((one for one in decision.candidates if one.replica_id == decision.replica_id), None)


def _tokens(start: int, end: int) -> str:
    return f"Tokens {start + 1:,} to {end:,}"


def _milliseconds(candidate: Candidate) -> str:
    return f"{1e3 * candidate.cost.seconds:,.1f} ms"


def _busy(candidate: Candidate) -> str:
    load = candidate.load
    return f"{load.num_requests:,} requests and {load.num_pending_tokens:,} pending tokens"
