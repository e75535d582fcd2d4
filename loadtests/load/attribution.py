"""Attributes cached tokens: to an own earlier turn, another user of the tenant, or another tenant. Pure.

Owns the oracle: how many tokens of a prompt the requests of its own tenant can have left in any cache. Cached
tokens beyond that came from another tenant (or an earlier run with the same seed), which must not happen.
Between users, the server's own count is believed.

The oracle never says too little. It knows words, and the server says how many tokens a prompt has: each word
is a token at least, so a prompt of T tokens, of which the last W words were never sent before, can have at
most T - W cached. It is only imprecise within the block where two prompts part.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from loadtests.reports.report import RequestRecord
from loadtests.workloads import TraceRequest, Workload

CLOCK_SLACK_SECONDS = 0.05
"""Several processes of a load generator do not start at quite the same moment."""


def attribute(workload: Workload, records: Mapping[int, RequestRecord]) -> dict[int, RequestRecord]:
    """Return the records with their cached tokens split. Keys are positions in the workload."""
    tenants: dict[str | None, _TenantSum] = {}
    for number, record in records.items():
        request = workload.requests[number]
        tenant = tenants.setdefault(request.tenant, _TenantSum(workload.block_tokens))
        tenant.add(number, request, record.arrival_seconds + record.lateness_seconds)
    return {
        number: _split(record, tenants[workload.requests[number].tenant], number, workload.requests[number])
        for number, record in records.items()
    }


def _split(record: RequestRecord, tenant: "_TenantSum", number: int, request: TraceRequest) -> RequestRecord:
    if record.num_cached_tokens is None:
        return record
    sent = record.arrival_seconds + record.lateness_seconds
    until = sent + (record.e2e_seconds or 0.0 if record.ttft_seconds is None else record.ttft_seconds)
    most = tenant.most_cached_tokens(
        number, request, until + CLOCK_SLACK_SECONDS, num_prompt_tokens=record.num_input_tokens
    )
    cross_user = record.num_cross_user_tokens
    return replace(
        record,
        num_own_tokens=None if cross_user is None else record.num_cached_tokens - cross_user,
        num_other_tenant_tokens=max(0, record.num_cached_tokens - most),
    )


@dataclass(slots=True)
class _Sightings:
    """The first two requests that sent something: one of them is not the one that asks."""

    first: tuple[float, int] | None = None
    second: tuple[float, int] | None = None

    def add(self, seconds: float, number: int) -> None:
        both = [each for each in (self.first, self.second) if each is not None]
        both = sorted([*both, (seconds, number)])
        self.first = both[0]
        self.second = both[1] if len(both) > 1 else None

    def has_other(self, number: int, until: float) -> bool:
        return any(
            each is not None and each[1] != number and each[0] <= until for each in (self.first, self.second)
        )


class _TenantSum:
    """One tenant's requests and their times."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._all = _Sightings()
        self._prefixes: dict[int, _Sightings] = {}
        self._answers: dict[int | None, int] = {}
        """The longest answer to a prompt whose last full block has that id; it goes on from there."""

    def add(self, number: int, request: TraceRequest, seconds: float) -> None:
        self._all.add(seconds, number)
        for prefix_id in request.prefix_ids:
            self._prefixes.setdefault(prefix_id, _Sightings()).add(seconds, number)
        num_full = request.num_input_tokens // self._block_tokens
        last = request.prefix_ids[num_full - 1] if num_full else None
        self._answers[last] = max(self._answers.get(last, 0), request.num_output_tokens)

    def most_cached_tokens(
        self, number: int, request: TraceRequest, until: float, *, num_prompt_tokens: int
    ) -> int:
        if not self._all.has_other(number, until):
            return 0
        num_words = request.num_input_tokens
        num_common = self._block_tokens - 1 + self._answers.get(None, 0)
        for depth, prefix_id in enumerate(request.prefix_ids, start=1):
            sightings = self._prefixes.get(prefix_id)
            if sightings is None or not sightings.has_other(number, until):
                break
            end = depth * self._block_tokens + self._block_tokens - 1
            num_common = max(num_common, end + self._answers.get(prefix_id, 0))
        num_fresh = max(0, num_words - num_common)
        return num_prompt_tokens - num_fresh
