"""RequestRates: what a request takes of its caller's limits while it is served, and what headers say of them.

Owns when something is given back: all of it, if the request was refused or failed here. Who leaves before the
end has used what was computed until then.
"""

import datetime
import math
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from types import TracebackType

from router.api.anthropic.errors import ANTHROPIC_ERRORS
from router.api.error_shapes import OPENAI_ERRORS, ErrorShape
from router.caller import Caller
from router.edge.http import Header
from router.generation import Generation
from router.limits.admission import COUNTED_OUTPUT_TOKENS
from router.tenants.rate_account import Ask, Quota
from router.tenants.rate_limits import Quotas, RateLimits, Taken, has_rates


class RequestRates:
    def __init__(
        self, limits: RateLimits, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        self.limits = limits
        self._clock = clock
        self._wall_clock = wall_clock

    def begin(self, caller: Caller) -> None:
        """Before anything of a request is read. Raises LimitReached."""
        if has_rates(caller):
            self.limits.begin(caller, self._clock())

    def hold(
        self, caller: Caller, generations: Sequence[Generation], num_used_tokens: Callable[[], int | None]
    ) -> "RateHold":
        """While it is served. `num_used_tokens` tells of its answers at the end; None: no replica had it.
        Raises LimitReached."""
        taken = None
        if has_rates(caller):
            taken = self.limits.take(caller, _ask(generations), self._clock())
        return RateHold(self, taken, num_used_tokens)

    def end(self, taken: Taken, num_output_tokens: int | None) -> None:
        """None: it was not served."""
        if num_output_tokens is None:
            self.limits.give_back(taken, self._clock())
        else:
            self.limits.end(taken, num_output_tokens, self._clock())

    def headers(self, caller: Caller, shape: ErrorShape) -> list[Header]:
        """None for who has no limits. Gemini's clients know none."""
        if not has_rates(caller):
            return []
        quotas = self.limits.quotas(caller, self._clock())
        if quotas is None:
            return []
        if shape is ANTHROPIC_ERRORS:
            return _anthropic_headers(quotas, self._wall_clock())
        return _openai_headers(quotas) if shape is OPENAI_ERRORS else []


class RateHold:
    """One request's reservation. Leave it once."""

    __slots__ = ("_num_used_tokens", "_rates", "_taken")

    def __init__(
        self, rates: RequestRates, taken: Taken | None, num_used_tokens: Callable[[], int | None]
    ) -> None:
        self._rates = rates
        self._taken = taken
        self._num_used_tokens = num_used_tokens

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._taken is not None:
            has_failed = error is not None and not isinstance(error, CancelledError)
            self._rates.end(self._taken, None if has_failed else self._num_used_tokens())


def _ask(generations: Sequence[Generation]) -> Ask:
    num_prompt_tokens = num_output_tokens = num_sequences = 0
    for generation in generations:
        num_choices = generation.num_choices
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
