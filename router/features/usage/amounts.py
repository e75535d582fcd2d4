"""Amounts: what requests have used, counted in whole tokens, and what one request has.

Owns the list of what is counted and how a prompt is taken apart: each of its tokens was read from cache (from
one tier), written to it (under the longest lease that was granted to its client, or under none), neither, or
it is not reported which; the four add up to the prompt. Knows no tenant and no hour.
"""

import enum
from array import array
from collections.abc import Iterable, Sequence
from typing import NewType

from replicas.protocol.frames import PromptUsage
from replicas.protocol.prefix_leases import LeaseAnswer
from router.errors import ErrorKind
from router.served import CLIENT_GONE, ServedPrompt, ServedRequest

Amounts = NewType("Amounts", "array[int]")
"""One number for each Amount, in their order."""


class Amount(enum.IntEnum):
    """Append only: Redis has these by their places. Tokens of CROSS_USER are among those that were read,
    those of REASONING among the output's; a request that was aborted is no error."""

    REQUESTS = 0
    ERRORS = 1
    ABORTED = 2
    UNCACHED = 3
    READ_DEVICE = 4
    READ_HOST = 5
    READ_DISK = 6
    CROSS_USER = 7
    WRITTEN = 8
    """Under no lease: kept for as long as there is room."""
    WRITTEN_5M = 9
    WRITTEN_30M = 10
    WRITTEN_1H = 11
    WRITTEN_12H = 12
    WRITTEN_24H = 13
    OUTPUT = 14
    REASONING = 15
    UNREPORTED = 16
    """Prompt tokens of which the engine does not say how many were cached."""


READ = {"device": Amount.READ_DEVICE, "host": Amount.READ_HOST, "disk": Amount.READ_DISK}
"""By tier."""

UNLEASED = "none"

WRITTEN = {
    UNLEASED: Amount.WRITTEN,
    "5m": Amount.WRITTEN_5M,
    "30m": Amount.WRITTEN_30M,
    "1h": Amount.WRITTEN_1H,
    "12h": Amount.WRITTEN_12H,
    "24h": Amount.WRITTEN_24H,
}
"""By the class of the time for which it is kept."""

ALL_READ = slice(Amount.READ_DEVICE, Amount.READ_DISK + 1)
ALL_WRITTEN = slice(Amount.WRITTEN, Amount.WRITTEN_24H + 1)

CLASS_SECONDS = {"5m": 300, "30m": 1800, "1h": 3600, "12h": 43_200, "24h": 86_400}
"""The longest time of each class; a lease is of the first class that reaches as far."""

_CLASSES = [(seconds, WRITTEN[name]) for name, seconds in CLASS_SECONDS.items()]
_ZEROS = [0] * len(Amount)
_MOST = 2**64 - 1


def nothing() -> Amounts:
    return Amounts(array("Q", _ZEROS))


def amounts_of(served: ServedRequest) -> Amounts:
    """Return a request's amounts. If the client left, these are the prompts that a replica took and the
    output that reached the router. A request for which no replica was ready counts as none, like those before
    routing."""
    amounts = nothing()
    if served.error_kind is ErrorKind.NO_REPLICA and all(prompt.usage is None for prompt in served.prompts):
        return amounts
    amounts[Amount.REQUESTS] = 1
    if served.status == CLIENT_GONE:
        amounts[Amount.ABORTED] = 1
    elif served.error is not None or served.status >= 400:
        amounts[Amount.ERRORS] = 1
    for prompt in served.prompts:
        _count_prompt(amounts, prompt)
    return amounts


def add(total: Amounts, more: Iterable[int]) -> None:
    for place, number in enumerate(more):
        if number:
            total[place] = min(_MOST, total[place] + number)


def num_prompt_tokens(amounts: Sequence[int]) -> int:
    plain = amounts[Amount.UNCACHED] + amounts[Amount.UNREPORTED]
    return plain + sum(amounts[ALL_READ]) + sum(amounts[ALL_WRITTEN])


def written_by_class(
    usage: PromptUsage, num_cached: int, wished: Sequence[LeaseAnswer]
) -> list[tuple[Amount, int]]:
    """Divide written tokens by lease class (TTL bucket). `wished` are the answers to the client's leases;
    leases that the router requested itself are free."""
    reach, end = num_cached, num_cached + usage.num_written_tokens
    found: list[tuple[Amount, int]] = []
    for lease in sorted(wished, key=lambda lease: -lease.seconds):
        if lease.refusal is None and lease.num_tokens > reach < end:
            stop = min(lease.num_tokens, end)
            found.append((class_of(lease.seconds), stop - reach))
            reach = stop
    if reach < end:
        found.append((Amount.WRITTEN, end - reach))
    return found


def class_of(seconds: int) -> Amount:
    return next((amount for most, amount in _CLASSES if seconds <= most), Amount.WRITTEN_24H)


def _count_prompt(amounts: Amounts, prompt: ServedPrompt) -> None:
    amounts[Amount.OUTPUT] += prompt.num_output_tokens - prompt.num_silent_tokens
    amounts[Amount.REASONING] += prompt.num_reasoning_tokens
    usage = prompt.usage
    if usage is None:
        return
    num_cached = usage.num_cached_tokens
    if num_cached is None:
        amounts[Amount.UNREPORTED] += usage.num_prompt_tokens
        return
    num_plain = usage.num_prompt_tokens - num_cached - usage.num_written_tokens
    amounts[Amount.UNCACHED] += max(0, num_plain)
    amounts[Amount.READ_DEVICE] += max(0, usage.num_device_tokens)
    amounts[Amount.READ_HOST] += max(0, usage.num_host_tokens)
    amounts[Amount.READ_DISK] += usage.num_disk_tokens
    amounts[Amount.CROSS_USER] += usage.num_cross_user_tokens
    num_wished = len(prompt.generation.submit.leases) - prompt.num_own_leases
    if num_wished <= 0:
        amounts[Amount.WRITTEN] += usage.num_written_tokens
        return
    for amount, num_tokens in written_by_class(usage, num_cached, usage.leases[:num_wished]):
        amounts[amount] += num_tokens
