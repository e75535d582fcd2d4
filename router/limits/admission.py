"""Admission: how many sequences and tokens a router serves at a time.

Owns the reservations. A request is weighed once it has been read: a hundred prompts with sixteen choices each
are one HTTP request and sixteen hundred sequences. Knows no HTTP, and no requests' outcomes.
"""

from collections.abc import Callable, Iterable, Iterator

import msgspec

from router.errors import InvalidRequest, Overloaded
from router.generation import Generation
from router.shared.instruments import Instrument, counter, gauge

COUNTED_OUTPUT_TOKENS = 1024
"""How many of a sequence's `max_tokens` are counted at most: few answers become longer, and many clients
allow as many as the context has room for."""


class Demand(msgspec.Struct, frozen=True):
    """Resources of a request while it is served. A prompt's tokens count once for all its choices."""

    num_sequences: int
    num_tokens: int


def demand_of(generations: Iterable[Generation]) -> Demand:
    num_sequences = num_tokens = 0
    for generation in generations:
        num_choices = generation.num_sequences
        num_sequences += num_choices
        num_output_tokens = min(generation.sampling.max_tokens, COUNTED_OUTPUT_TOKENS)
        num_tokens += len(generation.token_ids) + num_choices * num_output_tokens
    return Demand(num_sequences, num_tokens)


class Admission:
    def __init__(self, *, max_sequences: int, max_tokens: int) -> None:
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self.num_sequences = 0
        self.num_tokens = 0
        self.num_refused = 0

    def take(self, demand: Demand, retry_after_seconds: Callable[[], float]) -> None:
        """Reserve it; give it back once. Raises Overloaded while others hold too much, InvalidRequest if no
        waiting would help."""
        if demand.num_sequences > self._max_sequences or demand.num_tokens > self._max_tokens:
            self.num_refused += 1
            raise InvalidRequest(
                f"This request asks for {demand.num_sequences} sequences with {demand.num_tokens} tokens;"
                f" this router serves at most {self._max_sequences} and {self._max_tokens} at a time."
            )
        if (
            self.num_sequences + demand.num_sequences > self._max_sequences
            or self.num_tokens + demand.num_tokens > self._max_tokens
        ):
            self.num_refused += 1
            raise Overloaded(
                "The router has reached its limit of sequences and tokens. Try again shortly.",
                retry_after_seconds=retry_after_seconds(),
            )
        self.num_sequences += demand.num_sequences
        self.num_tokens += demand.num_tokens

    def give_back(self, demand: Demand) -> None:
        self.num_sequences -= demand.num_sequences
        self.num_tokens -= demand.num_tokens

    def instruments(self) -> Iterator[Instrument]:
        yield gauge(
            "router_admitted_sequences",
            "Sequences (prompts times n) of the requests being served",
            lambda: self.num_sequences,
        )
        yield gauge(
            "router_admitted_tokens",
            "Tokens of the requests being served: their prompts, and up to 1,024 of each answer",
            lambda: self.num_tokens,
        )
        yield counter(
            "router_admission_refusals_total",
            "Requests refused because too many sequences or tokens were in flight",
            lambda: self.num_refused,
        )
