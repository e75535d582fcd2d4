"""The ledger and what is made of it, against a list of everything that was ever counted."""

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from replicas.protocol.frames import PromptUsage
from replicas.protocol.prefix_leases import LeaseAnswer, LeaseRefusal, PrefixLease
from router.caller import Caller, Tenant
from router.features.usage.amounts import (
    ALL_READ,
    ALL_WRITTEN,
    WRITTEN,
    Amount,
    Amounts,
    amounts_of,
    nothing,
    num_prompt_tokens,
    written_by_class,
)
from router.features.usage.ledger import OTHER, OTHER_USE, Ledger, Row, Use
from router.features.usage.ratios import CostRatios, RatioTable, cost_of
from router.features.usage.sums import (
    Group,
    UsageQuery,
    UsageSums,
    stored_entry,
    stored_field,
    stored_value,
)
from router.generation import Generation
from router.served import CLIENT_GONE, ServedPrompt, ServedRequest
from tests.examples import examples
from tests.router.scripted_replica import asking

ACME = Caller(tenant=Tenant(name="acme"), key_id="0123456789ab")


def served(
    *prompts: PromptUsage | None, status: int = 200, caller: Caller = ACME, at: float = 0.0, **fields: Any
) -> ServedRequest:
    return ServedRequest(
        request_id="q",
        route="completions",
        model="m",
        status=status,
        error=None if status < 400 else "Overloaded",
        arrived_at=at,
        prepared_seconds=None,
        first_token_seconds=None,
        ended_seconds=1.0,
        is_stream=False,
        caller=caller,
        prompts=tuple(prompt(usage, **fields) for usage in prompts),
    )


def prompt(usage: PromptUsage | None, num_leases: int = 0, **fields: Any) -> ServedPrompt:
    submit = msgspec.structs.replace(
        asking([1] * 10, max_tokens=9), leases=(PrefixLease(1, 300),) * num_leases
    )
    return ServedPrompt(Generation("m", [1] * 10, submit, [], b"bucket"), None, usage, 7, **fields)


def amounts(**numbers: int) -> dict[str, int]:
    return {name.upper(): number for name, number in numbers.items()}


def named(counted: Amounts) -> dict[str, int]:
    return {amount.name: counted[amount] for amount in Amount if counted[amount]}


def test_a_prompt_is_taken_apart_without_rest() -> None:
    usage = PromptUsage(100, 64, 32, 16, num_slower_tier_tokens=48, num_disk_tokens=20)
    counted = amounts_of(served(usage, usage, num_reasoning_tokens=3))
    expected = {"requests": 1, "read_device": 32, "read_host": 56, "read_disk": 40, "cross_user": 32}
    assert named(counted) == amounts(**expected, uncached=8, written=64, output=14, reasoning=6)
    assert num_prompt_tokens(counted) == 200
    assert sum(counted[ALL_READ]) == 128
    assert sum(counted[ALL_WRITTEN]) == 64


def test_what_the_engine_does_not_say_is_counted_apart_and_costs_what_is_plain() -> None:
    counted = amounts_of(served(PromptUsage(100, None, 0)))
    assert named(counted) == amounts(requests=1, unreported=100, output=7)
    assert num_prompt_tokens(counted) == 100
    assert cost_of(counted, CostRatios()).saved == 0


@pytest.mark.parametrize(
    ("done", "counted"),
    [
        (served(status=429), amounts(requests=1, errors=1)),
        (
            served(PromptUsage(100, 64, 32), None, status=CLIENT_GONE),
            amounts(requests=1, aborted=1, uncached=4, read_device=64, written=32, output=14),
        ),
        (served(PromptUsage(5, 0, 0), num_silent_tokens=7), amounts(requests=1, uncached=5)),
    ],
)
def test_errors_clients_that_left_and_what_no_answer_shows(
    done: ServedRequest, counted: dict[str, int]
) -> None:
    assert named(amounts_of(done)) == counted


def test_the_routers_own_leases_cost_nobody_anything() -> None:
    usage = PromptUsage(100, 0, 96, leases=(LeaseAnswer(300, 32), LeaseAnswer(3600, 96)))
    with_own = amounts_of(served(usage, num_leases=2, num_own_leases=1))
    assert (with_own[Amount.WRITTEN_5M], with_own[Amount.WRITTEN_1H], with_own[Amount.WRITTEN]) == (32, 0, 64)


LEASES = st.lists(
    st.one_of(
        st.builds(LeaseAnswer, st.integers(1, 86_400), st.integers(0, 120)),
        st.just(LeaseAnswer(refusal=LeaseRefusal.BUDGET)),
    ),
    max_size=5,
)
LIMITS = {"5m": 300, "30m": 1800, "1h": 3600, "12h": 43_200, "24h": 86_400}


@given(LEASES, st.integers(0, 60), st.integers(0, 60))
def test_each_written_token_is_of_the_longest_lease_over_it(
    leases: Sequence[LeaseAnswer], num_cached: int, num_written: int
) -> None:
    expected: Counter[Amount] = Counter()
    for place in range(num_cached, num_cached + num_written):
        over = [lease.seconds for lease in leases if lease.refusal is None and lease.num_tokens > place]
        name = next(name for name, most in LIMITS.items() if max(over) <= most) if over else "none"
        expected[WRITTEN[name]] += 1
    found: Counter[Amount] = Counter()
    for amount, number in written_by_class(PromptUsage(200, num_cached, num_written), num_cached, leases):
        found[amount] += number
    assert found == expected


def test_costs_and_what_the_cache_saved() -> None:
    counted = nothing()
    counted[Amount.UNCACHED], counted[Amount.READ_HOST] = 100, 1000
    counted[Amount.WRITTEN], counted[Amount.WRITTEN_5M], counted[Amount.WRITTEN_1H] = 10, 20, 30
    counted[Amount.OUTPUT], counted[Amount.REASONING] = 7, 5
    cost = cost_of(counted, CostRatios())
    assert cost.cost == pytest.approx(100 + 0.1 * 1000 + 10 + 1.25 * 20 + 2 * 30 + 5 * 7)
    assert cost.without_cache == pytest.approx(1160 + 35)
    assert cost.saved == pytest.approx(cost.without_cache - cost.cost)
    dear = cost_of(counted, RatioTable(["read=0.5", "write_1h=4"]).of("acme"))
    assert dear.cost == pytest.approx(cost.cost + 0.4 * 1000 + 2 * 30)


def test_ratios_of_one_tenant_begin_with_those_of_all() -> None:
    table = RatioTable(["acme:read=0.02", "output=4", "acme:write=3", "read=0.2"])
    assert table.of("acme") == CostRatios(read=0.02, output=4, write=3)
    assert table.of("beta") == CostRatios(read=0.2, output=4)


@pytest.mark.parametrize("text", ["read", "read=", "read=much", "read=-1", "read=nan", "read=1e9", "rode=1"])
def test_a_ratio_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ratio"):
        RatioTable([text])
    with pytest.raises(ValueError, match="ratio"):
        RatioTable([f"acme:{text}"])


@given(st.text(max_size=20), st.integers(1, 99), st.lists(st.integers(0, 2**40), max_size=16))
def test_what_is_stored_is_read_again(model: str, part: int, numbers: list[int]) -> None:
    counted = nothing()
    counted[: len(numbers)] = array("Q", numbers)
    use = Use("0123456789ab", model.encode("utf-8", "replace").decode())
    entry = stored_entry(stored_field("w", part, use).encode(), stored_value(counted))
    assert entry == ("w", part, use, counted.tolist())


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_what_others_have_written_there_does_no_harm(name: bytes, value: bytes) -> None:
    stored_entry(name, value)
    stored_entry(b"w:1::m", value)


def test_beyond_the_bounds_sums_lose_nothing() -> None:
    ledger = Ledger(max_entries=10, max_tenants=5)
    counted = amounts_of(served(PromptUsage(100, 64, 32)))
    for tenant in range(20):
        for key in range(20):
            ledger.add(3, f"t{tenant}", Use(f"k{key}", "m"), counted)
    sums = UsageSums(UsageQuery(0, 9, None), "w")
    sums.add_held(ledger.held(0, 9))
    found = sums.groups()
    assert sum(total[Amount.REQUESTS] for total in found.values()) == 400
    assert sum(num_prompt_tokens(total) for total in found.values()) == 40_000
    assert len(found) <= 7
    assert found[Group(3 * 3600, OTHER, None, None)][Amount.REQUESTS] == 300
    assert ledger.num_lumped == 390
    assert ledger.num_entries <= 10 + 5 + 1
    rows = ledger.take_unwritten(1000)
    assert any(row.use == OTHER_USE and row.tenant != OTHER for row in rows)


HOURS = st.integers(100, 105)
NAMES = st.sampled_from(["a", "b", "c"])


class Keeping(RuleBasedStateMachine):
    """One router's ledger, a store that fails in every way that a Redis does, and clocks that jump."""

    @initialize()
    def begin(self) -> None:
        self.ledger = Ledger(max_entries=12, max_tenants=8)
        self.stored: dict[tuple[int, str], dict[str, bytes]] = {}
        self.counted: Counter[tuple[int, Amount]] = Counter()

    @rule(hour=HOURS, tenant=NAMES, key=NAMES, cached=st.integers(0, 50), status=st.sampled_from([200, 499]))
    def ask(self, hour: int, tenant: str, key: str, cached: int, status: int) -> None:
        caller = Caller(tenant=Tenant(name=tenant), key_id=key)
        done = served(PromptUsage(100, cached, 7), status=status, caller=caller, at=hour * 3600.0)
        self.ledger.observe(done)
        for amount, number in zip(Amount, amounts_of(done), strict=True):
            self.counted[hour, amount] += number

    @rule(most=st.integers(1, 9), is_stored=st.booleans(), is_told=st.booleans())
    def write(self, most: int, is_stored: bool, is_told: bool) -> None:
        rows = self.ledger.take_unwritten(most)
        if is_stored:
            self._store(rows)
        if not (is_stored and is_told):
            self.ledger.put_back(rows)

    def _store(self, rows: list[Row]) -> None:
        for row in rows:
            place = self.stored.setdefault((row.hour, row.tenant), {})
            place[stored_field("w", row.part, row.use)] = stored_value(row.amounts)

    @rule(now=HOURS)
    def let_go(self, now: int) -> None:
        self.ledger.let_go(now, 100)

    @invariant()
    def nothing_is_lost_and_nothing_counts_twice(self) -> None:
        sums = UsageSums(UsageQuery(100, 106, None), "w")
        sums.add_held(self.ledger.held(100, 106))
        for (hour, tenant), fields in self.stored.items():
            entries = [stored_entry(name.encode(), value) for name, value in fields.items()]
            sums.add_stored(hour, tenant, [entry for entry in entries if entry is not None])
        found: Counter[tuple[int, Amount]] = Counter()
        for group, total in sums.groups().items():
            for amount, number in zip(Amount, total, strict=True):
                found[group.start // 3600, amount] += number
        assert +found == +self.counted
        assert self.ledger.num_dropped == 0


TestKeeping = Keeping.TestCase
TestKeeping.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


def test_hours_that_are_too_far_away_are_let_go_and_counted_as_lost() -> None:
    ledger = Ledger()
    ledger.observe(served(PromptUsage(9, 0, 0), at=0.0))
    ledger.observe(served(PromptUsage(9, 0, 0), at=5000 * 3600.0))
    ledger.let_go(5000, 744)
    assert (ledger.num_dropped, ledger.num_entries, ledger.num_tenants) == (1, 1, 1)
