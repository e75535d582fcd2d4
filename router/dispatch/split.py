"""FirstPart: the part of a split that computes the prompt, for the replica that answers.

Owns its attempt, of which the client sees nothing, and how the usages of both parts become one.
`generation_run.py` knows what follows from its end::

    it has computed the prompt    nothing: its KV is on its way. Where servers have a connector of their own,
                                  the second part is sent now
    it is lost, or refused        before the first token both parts are given back, and the request is placed
                                  anew; later the answer goes on

The second part asks for the whole request, and samples the first token itself. So whatever a client can ask
for is done there as ever, and the token that the first part samples is thrown away.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from replicas.protocol.frames import FinishReason, PromptUsage, RefusalCode, SamplingParams
from replicas.protocol.pulls import PullHint
from replicas.protocol.split_handover import sent_on
from router.shared.instruments import Instrument, counter

if TYPE_CHECKING:
    from router.dispatch.attempt import Attempt
    from router.routing.table import RoutedRequest

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
"""Sampling of the first part."""


class FirstPart:
    """`attempt` is the prefiller's, `sent_at` by any clock in seconds. If it `goes_first`, the second part
    waits for its end."""

    __slots__ = ("attempt", "goes_first", "sent_at", "usage")

    def __init__(self, attempt: "Attempt", sent_at: float, *, goes_first: bool) -> None:
        self.attempt = attempt
        self.goes_first = goes_first
        self.sent_at = sent_at
        self.usage: PromptUsage | None = None
        """Once the prompt is computed."""

    def look(self) -> RefusalCode | None:
        """Read what has come. Returns why it has failed, if it has."""
        inflight = self.attempt.inflight
        for delta in inflight.take():
            if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                return RefusalCode.INTERNAL if delta.refusal is None else delta.refusal.code
            self.usage = delta.usage or self.usage
            if delta.finish_reason is not None:
                self.attempt.num_open = 0
        if self.attempt.num_open and inflight.lost is not None:
            return RefusalCode.INTERNAL
        return None

    def hint(self, routed: "RoutedRequest", seconds_left: float | None) -> PullHint | None:
        """Return what the second part is to wait for; None if that is nothing, or the peer is not known. It
        has `seconds_left` until its first token."""
        peer, decision = self.attempt.client, routed.decision
        assert decision.split is not None
        if self.goes_first or peer.epoch is None:
            return None
        seconds = decision.split.wait_seconds
        if seconds_left is not None:
            seconds = min(seconds, seconds_left)
        return PullHint(
            peer.replica_id,
            peer.epoch,
            peer.address,
            decision.overlap_tokens,
            seconds,
            self.attempt.routed.announcement.announcement_id,
        )

    def handover(self, now: float) -> bytes:
        """Return what its server says to the second part's, to be sent now and once; empty if that is too old
        to be used."""
        said = b"" if self.usage is None else self.usage.handover
        return sent_on(said, now - self.sent_at, time.time()) if said else b""

    def joined(self, second: PromptUsage) -> PromptUsage:
        """Return the client's usage, from that of the part that answers.

        Cached is what the first part has read from cache: what it computed was computed for this request, and
        is none of the cache's merit where it was pulled. If the first part has not said it, or less has come
        than it had found, the second part's own count stands, without or with what was pulled.
        """
        first, num_pulled = self.usage, second.num_pulled_tokens
        num_split = num_pulled or second.num_split_tokens
        if first is None or first.num_cached_tokens is None or second.num_cached_tokens is None:
            return replace(
                second,
                num_cached_tokens=None
                if second.num_cached_tokens is None
                else second.num_cached_tokens - num_pulled,
                num_slower_tier_tokens=second.num_slower_tier_tokens - num_pulled,
                num_pulled_tokens=0,
                num_split_tokens=num_split,
            )
        if second.num_cached_tokens < first.num_cached_tokens:
            return replace(second, num_split_tokens=num_split)
        return replace(
            first,
            leases=second.leases,
            answer_id=second.answer_id,
            num_split_tokens=num_split,
            handover=b"",
        )


@dataclass(frozen=True, slots=True)
class SecondPart:
    """A second part that is sent when the first has ended; `choices` are those to submit."""

    choices: Sequence[int]
    routed: "RoutedRequest"
    first: FirstPart


class SplitCounts:
    """Counts of splits by their outcome."""

    def __init__(self) -> None:
        self.outcomes = dict.fromkeys(("whole", "part", "failed"), 0)
        self.num_tokens = 0

    def answered(self, usage: PromptUsage) -> None:
        """Count a second part that has begun to answer, with this usage."""
        self.outcomes["part" if usage.num_lost_tokens else "whole"] += 1
        self.num_tokens += usage.num_pulled_tokens or usage.num_split_tokens

    def failed(self) -> None:
        self.outcomes["failed"] += 1

    def instruments(self) -> Iterator[Instrument]:
        yield counter(
            "router_splits_total",
            "Prompts computed at one replica and decoded at another: all of their KV came in time (whole),"
            " the decoder computed some (part), or the replica that computed it was lost or refused (failed)",
            lambda: self.outcomes,
            "outcome",
        )
        yield counter(
            "router_split_tokens_total",
            "Prompt tokens whose KV came from the replica that had computed them for the same request",
            lambda: self.num_tokens,
        )


def parts_of(routed: "RoutedRequest") -> Sequence["RoutedRequest"]:
    """Return the parts of a request, or the request."""
    return (routed,) if routed.prefill is None else (routed.prefill, routed)
