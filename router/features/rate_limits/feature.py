"""RequestRates: what a request takes of its caller's limits while it is served, and what headers say of them.

Owns when something is given back: all of it, if the request was refused or failed here. Who leaves before the
end has used what was computed until then.
"""

import datetime
import math
from asyncio import CancelledError
from collections.abc import Iterator, Sequence
from types import TracebackType

from router.api.api_request import ApiRequest
from router.api.context import ApiContext
from router.api.dialects import ANTHROPIC, OPENAI, vendor_of
from router.edge.http import Header
from router.feature import Feature
from router.features.rate_limits.rate_account import Ask, Quota
from router.features.rate_limits.rate_exchange import RateExchange
from router.features.rate_limits.rate_limits import Quotas, RateLimits, Taken, has_rates
from router.generation import Generation
from router.limits.admission import COUNTED_OUTPUT_TOKENS
from router.shared.instruments import Instrument


class RequestRates(Feature):
    """Off without API keys: only its instruments are there, for alerts."""

    store: RateExchange | None

    def __init__(self, context: ApiContext) -> None:
        self.limits = RateLimits()
        self.clock, self.wall_clock = context.clock, context.wall_clock
        self.is_on = context.keys is not None
        self._exchange = RateExchange(context.config.redis_url, self.limits, context.clock)
        self.store = self._exchange if self.is_on else None

    def instruments(self) -> Iterator[Instrument]:
        yield from self.limits.instruments()
        if not self.is_on:
            yield from self._exchange.instruments()

    def arrived(self, request: ApiRequest) -> None:
        """Raises LimitReached."""
        if has_rates(request.caller):
            self.limits.begin(request.caller, self.clock())

    def admitted(self, request: ApiRequest) -> "RateHold | None":
        """Raises LimitReached."""
        if not has_rates(request.caller):
            return None
        taken = self.limits.take(request.caller, _ask(request.generations), self.clock())
        return None if taken is None else RateHold(self, taken, request)

    def headers(self, request: ApiRequest) -> list[Header]:
        """None for who has no limits. Gemini's clients know none."""
        if not has_rates(request.caller):
            return []
        quotas = self.limits.quotas(request.caller, self.clock())
        if quotas is None:
            return []
        vendor = vendor_of(request.scope)
        if vendor is ANTHROPIC:
            return _anthropic_headers(quotas, self.wall_clock())
        return _openai_headers(quotas) if vendor is OPENAI else []


class RateHold:
    """One request's reservation. Leave it once."""

    __slots__ = ("_rates", "_request", "_taken")

    def __init__(self, rates: RequestRates, taken: Taken, request: ApiRequest) -> None:
        self._rates = rates
        self._taken = taken
        self._request = request

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        limits, now = self._rates.limits, self._rates.clock()
        has_failed = error is not None and not isinstance(error, CancelledError)
        num_output_tokens = None if has_failed else self._request.num_used_tokens()
        if num_output_tokens is None:
            limits.give_back(self._taken, now)
        else:
            limits.end(self._taken, num_output_tokens, now)


def _ask(generations: Sequence[Generation]) -> Ask:
    num_prompt_tokens = num_output_tokens = num_sequences = 0
    for generation in generations:
        num_choices = generation.num_sequences
        num_sequences += num_choices
        num_prompt_tokens += len(generation.token_ids)
        num_output_tokens += num_choices * min(generation.sampling.max_tokens, COUNTED_OUTPUT_TOKENS)
    return Ask(num_prompt_tokens, num_output_tokens, num_sequences)


def _openai_headers(quotas: Quotas) -> list[Header]:
    headers: list[Header] = []
    for name, quota in ((b"requests", quotas.requests), (b"tokens", quotas.tokens)):
        if quota is not None:
            headers += [
                (b"x-ratelimit-limit-" + name, b"%d" % quota.limit),
                (b"x-ratelimit-remaining-" + name, b"%d" % quota.num_remaining),
                (b"x-ratelimit-reset-" + name, duration(quota.reset_seconds).encode()),
            ]
    return headers


def _anthropic_headers(quotas: Quotas, now: float) -> list[Header]:
    """One limit holds for the tokens of prompts and answers, so each of the two has what is left of both."""
    headers: list[Header] = []
    tokens = quotas.tokens
    named: list[tuple[bytes, Quota | None]] = [
        (b"requests", quotas.requests),
        (b"tokens", tokens),
        (b"input-tokens", tokens),
        (b"output-tokens", tokens),
    ]
    for name, quota in named:
        if quota is not None:
            prefix = b"anthropic-ratelimit-" + name
            headers += [
                (prefix + b"-limit", b"%d" % quota.limit),
                (prefix + b"-remaining", b"%d" % quota.num_remaining),
                (prefix + b"-reset", _moment(now + quota.reset_seconds).encode()),
            ]
    return headers


def duration(seconds: float) -> str:
    """Format a duration like OpenAI: 12ms, 1.5s, 6m0s."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"


def _moment(seconds: float) -> str:
    """RFC 3339, in whole seconds, none too early."""
    when = datetime.datetime.fromtimestamp(math.ceil(seconds), datetime.UTC)
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")
