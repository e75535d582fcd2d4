"""Tests of the fair queue against a naive model: nothing lost, nothing twice, counters as they should be."""

import dataclasses
import itertools
import math

from hypothesis import settings, strategies
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from replicas.protocol.status import ReplicaId
from router.queue.counters import SPARE_ENTRIES, LeastFirst, VirtualCounters
from router.queue.fair_queue import FairQueue
from router.queue.line import PATIENT_SHARE, Waiter
from tests.examples import examples

LINES = [ReplicaId("a"), ReplicaId("b")]
TENANTS = ["red", "green", "blue", "grey"]
WEIGHTS = {"red": 1.0, "green": 2.0, "blue": 0.5, "grey": 1.0}
MAX_WAITING = 6
MAX_BYTES = 40

tenants = strategies.sampled_from(TENANTS)
works = strategies.integers(0, 1000).map(float)


def waiter(
    tenant: str,
    order: int,
    *,
    line: ReplicaId = LINES[0],
    work: float = 1.0,
    priority: int = 0,
    num_bytes: int = 0,
) -> Waiter:
    return Waiter(
        line,
        tenant,
        work=work,
        order=order,
        since=0.0,
        weight=WEIGHTS[tenant],
        priority=priority,
        num_bytes=num_bytes,
    )


@dataclasses.dataclass
class Model:
    """What the queue should know, computed anew each time."""

    waiting: list[Waiter] = dataclasses.field(default_factory=list)
    counters: dict[str, float] = dataclasses.field(default_factory=dict)
    last: float = 0.0

    def active(self) -> set[str]:
        return {each.tenant for each in self.waiting}

    def floor(self) -> float:
        return min((self.counters[name] for name in self.active()), default=self.last)

    def lift(self, tenant: str) -> None:
        if tenant not in self.active():
            self.counters[tenant] = max(self.counters.get(tenant, 0.0), self.floor())

    def add(self, waiter: Waiter) -> None:
        self.lift(waiter.tenant)
        self.waiting.append(waiter)

    def remove(self, waiter: Waiter) -> None:
        self.waiting.remove(waiter)
        if not self.waiting:
            self.last = self.counters[waiter.tenant]

    def in_line(self, line: ReplicaId) -> list[Waiter]:
        return [each for each in self.waiting if each.line == line]

    def count(self, tenant: str) -> int:
        return sum(each.tenant == tenant for each in self.waiting)

    def place_of(self, waiter: Waiter) -> int:
        """Among its tenant's in its line."""
        own = [each for each in self.in_line(waiter.line) if each.tenant == waiter.tenant]
        return sorted(own, key=lambda each: (each.priority, each.work, -each.order)).index(waiter)


class QueueMachine(RuleBasedStateMachine):
    waiters = Bundle("waiters")

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue(max_waiting=MAX_WAITING, max_bytes=MAX_BYTES, max_tenants=100)
        self.model = Model()
        self.num_made = 0
        self.out: set[int] = set()

    @rule(
        target=waiters,
        tenant=tenants,
        line=strategies.sampled_from(LINES),
        work=works,
        priority=strategies.integers(-1, 1),
        num_bytes=strategies.integers(0, 15),
    )
    def enter(self, tenant: str, line: ReplicaId, work: float, priority: int, num_bytes: int) -> Waiter:
        self.num_made += 1
        new = waiter(tenant, self.num_made, line=line, work=work, priority=priority, num_bytes=num_bytes)
        counts = {name: self.model.count(name) / WEIGHTS[name] for name in TENANTS}
        lost = self.queue.enter(new)
        if lost is None:
            self.out.add(new.order)
            num_held = sum(each.num_bytes for each in self.model.waiting)
            assert len(self.model.waiting) >= MAX_WAITING or num_held + num_bytes > MAX_BYTES
            return new
        for each in lost:
            assert each.tenant != tenant
            assert counts[each.tenant] > (self.model.count(tenant) + 1) / WEIGHTS[tenant]
            assert (
                self.model.place_of(each)
                == sum(other.tenant == each.tenant for other in self.model.in_line(each.line)) - 1
            ), "the last of its tenant's is lost"
            counts[each.tenant] -= 1 / WEIGHTS[each.tenant]
            self.model.remove(each)
            self.out.add(each.order)
        self.model.add(new)
        return new

    @rule(waiter=consumes(waiters))
    def leave(self, waiter: Waiter) -> None:
        if waiter.order not in self.out:
            self.queue.leave(waiter)
            self.model.remove(waiter)
            self.out.add(waiter.order)

    @rule(line=strategies.sampled_from(LINES))
    def serve(self, line: ReplicaId) -> None:
        chosen = self.queue.next(line)
        there = self.model.in_line(line)
        if chosen is None:
            assert not there
            return
        assert chosen in there
        assert chosen.order not in self.out, "nobody goes twice"
        assert self.model.counters[chosen.tenant] == min(self.model.counters[each.tenant] for each in there)
        own = [each for each in there if each.tenant == chosen.tenant]
        patient = min(own, key=lambda each: (each.priority, each.order))
        assert chosen is patient or self.model.place_of(chosen) == 0
        self.queue.goes(chosen)
        self.model.counters[chosen.tenant] += chosen.work / WEIGHTS[chosen.tenant]
        self.model.remove(chosen)
        self.out.add(chosen.order)

    @rule(waiter=waiters, line=strategies.sampled_from(LINES))
    def move(self, waiter: Waiter, line: ReplicaId) -> None:
        if waiter.order not in self.out:
            self.queue.move(waiter, line)

    @rule(tenant=tenants, work=works)
    def passes(self, tenant: str, work: float) -> None:
        self.queue.counters.passes(tenant, WEIGHTS[tenant], work)
        self.model.lift(tenant)
        if not self.model.waiting:
            self.model.last = self.model.counters[tenant]
        self.model.counters[tenant] += work / WEIGHTS[tenant]

    @precondition(lambda self: self.model.counters)
    @rule(tenant=tenants, work=works, is_back=strategies.booleans())
    def charge(self, tenant: str, work: float, is_back: bool) -> None:
        if tenant not in self.model.counters:
            return
        work = -work if is_back else work
        self.queue.counters.charge(tenant, work)
        self.model.counters[tenant] += work / WEIGHTS[tenant]

    @invariant()
    def agrees(self) -> None:
        queue, model = self.queue, self.model
        assert queue.num_waiting == len(model.waiting) <= MAX_WAITING
        for line in LINES:
            there = model.in_line(line)
            assert queue.num_in_line(line) == len(there)
            assert sorted(each.order for each in queue.in_line(line)) == sorted(each.order for each in there)
            in_order = sorted({(model.counters[each.tenant], each.tenant) for each in there})
            for count in (1, 3):
                firsts = queue.firsts(line, count)
                assert [each.tenant for each in firsts] == [name for _, name in in_order[:count]]
        assert queue.num_bytes == sum(each.num_bytes for each in model.waiting) <= MAX_BYTES
        assert queue.counters.num_active == len(model.active())
        assert queue.counters.floor() == model.floor()
        for tenant in model.active():
            assert queue.counters.counter(tenant) == model.counters[tenant]


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


def test_of_two_with_equal_weights_that_always_wait_none_gets_more_than_a_request_ahead() -> None:
    """And with weights, within one largest request of each by its weight, whatever the sizes."""
    queue, given = FairQueue(), dict.fromkeys(TENANTS, 0.0)
    sizes = {"red": 900.0, "green": 10.0, "blue": 333.0, "grey": 1.0}
    order = 0
    for _ in range(2000):
        for tenant in TENANTS:
            while sum(each.tenant == tenant for each in queue.in_line(LINES[0])) < 2:
                order += 1
                queue.enter(waiter(tenant, order, work=sizes[tenant]))
        chosen = queue.next(LINES[0])
        assert chosen is not None
        queue.goes(chosen)
        given[chosen.tenant] += chosen.work
        for one in TENANTS:
            for other in TENANTS:
                ahead = given[one] / WEIGHTS[one] - given[other] / WEIGHTS[other]
                assert ahead <= sizes[one] / WEIGHTS[one] + sizes[other] / WEIGHTS[other]


def test_one_request_of_another_waits_for_no_flood() -> None:
    queue = FairQueue()
    for order in range(1000):
        queue.enter(waiter("red", order, work=10.0))
    chosen = queue.next(LINES[0])
    assert chosen is not None
    queue.goes(chosen)
    assert queue.work_ahead(LINES[0], "grey", weight=1.0, priority=0) == 0.0
    assert queue.work_ahead(LINES[0], "red", weight=1.0, priority=0) == 0.0, "the least work goes first"
    assert queue.work_ahead(LINES[0], "red", weight=1.0, priority=1) == 9990.0
    queue.enter(waiter("grey", 1000, work=10.0))
    chosen = queue.next(LINES[0])
    assert chosen is not None and chosen.tenant == "grey"


def test_the_work_ahead_is_what_goes_before() -> None:
    """Said before it comes, and counted as the line is served."""
    for works_of_red, works_of_blue in (([5.0] * 7, [3.0] * 4), ([100.0], [1.0] * 50), ([1.0] * 50, [])):
        queue, order = FairQueue(), 0
        for tenant, works in (("red", works_of_red), ("blue", works_of_blue)):
            for work in works:
                order += 1
                queue.enter(waiter(tenant, order, work=work))
        expected = queue.work_ahead(LINES[0], "blue", weight=0.5, priority=0)
        queue.enter(last := waiter("blue", order + 1, work=0.5))
        before = 0.0
        while (chosen := queue.next(LINES[0])) is not last:
            assert chosen is not None
            queue.goes(chosen)
            before += chosen.work
        assert math.isclose(before, expected, abs_tol=max(works_of_red)), "within a request"


def serve_all(queue: FairQueue) -> list[Waiter]:
    served = []
    while (chosen := queue.next(LINES[0])) is not None:
        queue.goes(chosen)
        served.append(chosen)
    return served


def test_of_one_tenants_requests_the_least_work_of_the_most_urgent_goes_first_then_the_newest() -> None:
    queue = FairQueue()
    requests = [(1, 5.0), (0, 100.0), (0, 5.0), (0, 5.0), (1, 4.0), (0, 7.0)]
    for order, (priority, work) in enumerate(requests):
        queue.enter(waiter("red", order, priority=priority, work=work))
    assert [each.order for each in serve_all(queue)] == [3, 2, 5, 1, 4, 0]


def test_long_prompts_get_no_more_than_the_share_of_the_patient_while_short_ones_wait() -> None:
    queue, orders, given = FairQueue(), itertools.count(), {50.0: 0.0, 1.0: 0.0}
    for _ in range(20):
        queue.enter(waiter("red", next(orders), work=50.0))
    for _ in range(2000):
        queue.enter(waiter("red", next(orders), work=1.0))
        chosen = queue.next(LINES[0])
        assert chosen is not None
        queue.goes(chosen)
        given[chosen.work] += chosen.work
    total = sum(given.values())
    assert PATIENT_SHARE * total - 50.0 <= given[50.0] <= PATIENT_SHARE * total + 50.0


def test_an_order_keeps_no_more_than_twice_what_stands_in_it() -> None:
    counters = VirtualCounters()
    order = LeastFirst()
    for name in TENANTS:
        counters.starts_to_wait(name, 1.0)
        counters.join(order, name)
    for number in range(10_000):
        counters.charge(TENANTS[number % len(TENANTS)], -1.0)
        assert order.num_entries <= 2 * len(order) + SPARE_ENTRIES
    counters.charge("grey", -1.0)
    assert [account.name for account in order.firsts(2)] == ["grey", "blue"]


def test_tenants_by_the_thousand_are_bounded() -> None:
    queue = FairQueue(max_tenants=100)
    for number in range(10_000):
        queue.counters.passes(f"tenant-{number}", 1.0, 5.0)
    assert queue.counters.num_tenants <= 101
    for number in range(500):
        one = Waiter(LINES[0], f"tenant-{number}", work=1.0, order=number, since=0.0)
        assert queue.enter(one) == []
        queue.leave(one)
    assert queue.counters.num_tenants <= 101
    assert queue.counters.num_active == 0
