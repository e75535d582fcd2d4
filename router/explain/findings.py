"""Findings: sentences about why a prompt's tokens were, or were not, read from cache.

Owns the sentences. What they state was found by `router/explain/causes.py`, which decides.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from replicas.protocol.frames import PromptUsage
from router.misses import Cause, MissedSpan, Misses
from router.routing.decision import Candidate, Decision

LARGE_BLOCK_TOKENS = 128
"""Larger blocks are named where a prompt does not fill one."""


@dataclass(frozen=True, slots=True)
class Finding:
    cause: Cause
    text: str


def findings(
    usage: PromptUsage, decision: Decision | None, misses: Misses, block_size: int
) -> tuple[Finding, ...]:
    """Return the findings in prompt order. A remainder at the end is left out, unless blocks are large."""
    decision = None if decision is None else decision.of_prompt()
    if misses.cause is Cause.NOT_REPORTED:
        return (Finding(Cause.NOT_REPORTED, _not_reported(decision)),)
    if misses.cause is Cause.BELOW_A_BLOCK:
        text = f"The prompt does not fill a block of {block_size:,} tokens before its last token."
        return (Finding(Cause.BELOW_A_BLOCK, text),)
    found = [
        Finding(span.cause, f"{_tokens(span)} {sentence_of(span, decision, block_size)}")
        for span in misses.spans
        if span.cause is not Cause.BELOW_A_BLOCK or block_size > LARGE_BLOCK_TOKENS
    ]
    if misses.cause is Cause.HIT:
        found.append(Finding(Cause.HIT, "Everything that could be read from a cache was."))
    if decision is not None and _is_predicted(decision):
        text = f"No cache events say what {decision.replica_id} holds: that is predicted."
        found.append(Finding(misses.cause, text))
    num_more = 0 if decision is None else (usage.num_cached_tokens or 0) - decision.overlap_tokens
    if decision is not None and num_more > 0:
        text = (
            f"{decision.replica_id} read {num_more:,} more tokens from cache than the index, which keeps only"
            " some blocks, had promised."
        )
        found.append(Finding(Cause.HIT, text))
    return tuple(found)


def sentence_of(span: MissedSpan, decision: Decision | None, block_size: int) -> str:
    """Return the words after "Tokens 1 to 512"."""
    if span.cause is Cause.BELOW_A_BLOCK and block_size > LARGE_BLOCK_TOKENS:
        return f"do not fill a block of {block_size:,} tokens that could be read."
    if span.cause is Cause.HELD_ELSEWHERE:
        return _elsewhere(span, decision)
    return _SENTENCES[span.cause](span.replica_id or "a replica")


_SENTENCES: Mapping[Cause, Callable[[str], str]] = {
    Cause.HIT: lambda _: "were read from cache.",
    Cause.NEVER_CACHED: lambda _: "are new: no request that had ended had them.",
    Cause.BELOW_A_BLOCK: lambda _: "do not fill a block that could be read.",
    Cause.PREFIX_CHANGED: lambda _: (
        "follow a change: the prompt that this one is compared with has them as well, behind other tokens."
    ),
    Cause.OTHER_NAMESPACE: lambda _: (
        "are new here: a prompt that begins alike was seen under another model, adapter or template, which"
        " shares nothing."
    ),
    Cause.NOT_YET_WRITTEN: lambda at: f"were just being computed at {at}, for another request.",
    Cause.NOT_WORTH_MOVING: lambda at: (
        f"lay below a device at {at}; computing them was expected to be sooner."
    ),
    Cause.LOST_IN_TRANSFER: lambda at: f"were to be moved to the device of {at}, and did not come in time.",
    Cause.NOT_RESUMABLE: lambda at: (
        f"had been computed at {at}, which kept nothing here that all layers can resume from: they keep that"
        " at a prompt's end and, beside full attention, where a beginning is shared."
    ),
    Cause.EVICTED: lambda at: f"had been cached at {at}, and had to make room there.",
    Cause.EXPIRED: lambda at: f"had been leased at {at}; the lease ran out, and then they went.",
    Cause.LEASE_BROKEN: lambda at: f"had been leased at {at}, and went before their time.",
    Cause.FILE_LOST: lambda at: (
        f"had been written to the disk of {at}, and their file was damaged or is gone."
    ),
    Cause.CLEARED: lambda at: f"had been cached at {at}, until its cache was emptied.",
    Cause.REPLICA_RESTARTED: lambda at: f"had been cached at {at}, in an incarnation that is gone.",
    Cause.UNKNOWN: lambda at: f"had been seen before, at {at}; why they are not there any more is not known.",
}


def _is_predicted(decision: Decision) -> bool:
    chosen = _candidate(decision, decision.replica_id)
    return chosen is not None and chosen.load.is_predicted


def _not_reported(decision: Decision | None) -> str:
    text = "The engine does not say how many tokens it read from its cache"
    if decision is None:
        return text + "."
    predicted = ", a prediction" if _is_predicted(decision) else ""
    return f"{text}; the router expected {decision.overlap_tokens:,} at {decision.replica_id}{predicted}."


def _elsewhere(span: MissedSpan, decision: Decision | None) -> str:
    text = f"were held by {span.replica_id}"
    chosen = _candidate(decision, None if decision is None else decision.replica_id)
    holder = _candidate(decision, span.replica_id)
    if chosen is None:
        return text + "."
    if holder is None:
        return f"{text}, which was not compared; {_price(chosen)}."
    return f"{text}, at a cost of {_milliseconds(holder)} with {_busy(holder)}; {_price(chosen)}."


def _price(chosen: Candidate) -> str:
    return f"{chosen.replica_id} cost {_milliseconds(chosen)} with {_busy(chosen)}"


def _candidate(decision: Decision | None, replica_id: str | None) -> Candidate | None:
    candidates = () if decision is None else decision.candidates
    return next((one for one in candidates if one.replica_id == replica_id), None)


def _tokens(span: MissedSpan) -> str:
    return f"Tokens {span.start + 1:,} to {span.end:,}"


def _milliseconds(candidate: Candidate) -> str:
    return f"{1e3 * candidate.cost.seconds:,.1f} ms"


def _busy(candidate: Candidate) -> str:
    load = candidate.load
    return f"{load.num_requests:,} requests and {load.num_pending_tokens:,} pending tokens"
