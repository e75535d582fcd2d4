"""Who waits, how long and in which order, and what is tried again: away, full or hanging replicas."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace

import pytest
from msgspec import structs
from msgspec.structs import replace as replace_of_overdue

from replicas.protocol.frames import LoadSnapshot, RefusalCode
from replicas.protocol.status import Adapter, ReplicaId
from router.caller import Caller, Tenant
from router.dispatch.generation_run import GenerationRun
from router.dispatch.overdue import OverdueWatch
from router.dispatch.pick import Pick
from router.dispatch.progress_monitor import STEPS_OF_PATIENCE, UNMEASURED_FACTOR, ProgressMonitor
from router.dispatch.retries import Patience, RetryBudget, RetryPolicy
from router.dispatch.waiting_room import WaitingRoom
from router.errors import GenerationFailed, NoReplicaAvailable, Overloaded, RouterError, TooLate
from router.fleet.fleet_health import FleetHealth
from router.generation import Generation
from router.observation.trace_points import NO_TRACE
from router.programs.book import ProgramBook, Turn
from router.programs.name import ProgramName
from router.queue import gate
from router.queue.fair_queue import FairQueue
from router.queue.held import QueueRules
from router.queue.holding import Holding
from router.queue.room import NUM_NEXT
from router.queue.standing_delay import TARGET_SECONDS
from router.shared.instruments import Reading
from tests.router.dispatched_fleet import (
    GENERATION,
    PROMPT,
    DispatchedFleet,
    assert_complete,
    changed,
    generate,
    long_generation,
)
from tests.router.scripted_replica import CARD, eventually

PATIENT = RetryPolicy(first_wait_seconds=0.01, wait_seconds=50)
AWAY_SECONDS = 12.5


@pytest.fixture
async def emptied(fleet: DispatchedFleet) -> AsyncIterator[DispatchedFleet]:
    """Its replica has gone, and others are said to come."""
    await (await fleet.add("gone")).kill()
    await eventually(lambda: fleet.clients["gone"].lost is not None)  # type: ignore[index]
    fleet.outlook = FleetHealth(is_coming=True, away_seconds=AWAY_SECONDS)
    use(fleet, wait_seconds=50)
    yield fleet


def use(
    fleet: DispatchedFleet, *, wait_seconds: float, max_waiting: int = 1000, max_bytes: int = 1 << 30
) -> None:
    room = WaitingRoom(max_waiting=max_waiting, max_bytes=max_bytes)
    fleet.dispatcher = fleet.new_dispatcher(room, retry=replace(PATIENT, wait_seconds=wait_seconds))


def numbered(number: int) -> Generation:
    return changed(GENERATION, token_ids=[*PROMPT, number], bucket=str(number).encode())


def num_waiting(fleet: DispatchedFleet) -> int:
    """For a replica to come, or for room at one."""
    statistics = fleet.dispatcher
    return statistics.room.num_waiting + statistics.holding.num_waiting


async def ask(fleet: DispatchedFleet, numbers: Sequence[int]) -> list[asyncio.Task[None]]:
    """Requests that wait, in this order."""

    async def one(number: int) -> None:
        assert_complete(await generate(fleet, numbered(number)), 1)

    tasks: list[asyncio.Task[None]] = []
    for number in numbers:
        before = num_waiting(fleet)
        tasks.append(asyncio.create_task(one(number)))
        await eventually(lambda before=before: num_waiting(fleet) == before + 1)  # type: ignore[misc]
    return tasks


def unplaced(fleet: DispatchedFleet) -> dict[str, dict[str, float]]:
    found = {}
    for name in ("requests", "tokens"):
        (gauge,) = [each for each in fleet.dispatcher.instruments() if each.name == f"router_unplaced_{name}"]
        assert isinstance(gauge, Reading)
        found[name] = dict(gauge.read())  # type: ignore[call-overload]
    return found


async def test_autoscalers_are_told_how_much_waits_for_a_replica_or_for_room_at_one(
    emptied: DispatchedFleet,
) -> None:
    assert unplaced(emptied) == {"requests": {"toy": 0}, "tokens": {"toy": 0}}
    tasks = await ask(emptied, range(30))
    assert unplaced(emptied) == {"requests": {"toy": 30}, "tokens": {"toy": 30 * (len(PROMPT) + 1)}}
    first = await emptied.add("first", max_running=4, holding=True)
    await eventually(lambda: first.num_live == 4 + NUM_NEXT)
    left = num_waiting(emptied)
    assert left == 30 - 4 - NUM_NEXT
    assert unplaced(emptied) == {"requests": {"toy": left}, "tokens": {"toy": left * (len(PROMPT) + 1)}}
    first.script.holding = False
    await asyncio.gather(*tasks)


async def test_they_are_called_at_once_and_in_the_order_in_which_they_came(emptied: DispatchedFleet) -> None:
    tasks = await ask(emptied, range(20))
    back = await emptied.add("back")
    await asyncio.gather(*tasks)
    assert [submit.token_ids()[-1] for submit in back.submits] == list(range(20))
    assert emptied.dispatcher.num_retries == 0


async def test_the_first_that_comes_back_gets_no_more_than_it_can_begin_soon(
    emptied: DispatchedFleet,
) -> None:
    tasks = await ask(emptied, range(30))
    first = await emptied.add("first", max_running=4, holding=True)
    most = 4 + NUM_NEXT
    await eventually(lambda: first.num_live == most)
    for _ in range(5):
        await asyncio.sleep(0.05)
        assert first.num_live == most
    assert num_waiting(emptied) == 30 - most
    second = await emptied.add("second", max_running=4)
    await eventually(lambda: num_waiting(emptied) == 0)
    first.script.holding = False
    await asyncio.gather(*tasks)
    assert len(second.submits) > most


async def test_who_comes_later_does_not_pass_those_that_wait(emptied: DispatchedFleet) -> None:
    tasks = await ask(emptied, range(10))
    first = await emptied.add("first", max_running=2, holding=True)
    await eventually(lambda: first.num_live == 4)
    late = await ask(emptied, [99])
    first.script.holding = False
    await asyncio.gather(*tasks, *late)
    assert [submit.token_ids()[-1] for submit in first.submits] == [*range(10), 99]


async def test_after_the_wait_it_is_a_refusal_that_says_how_long_there_has_been_nobody(
    fleet: DispatchedFleet,
) -> None:
    await (await fleet.add("gone")).kill()
    await eventually(lambda: fleet.clients["gone"].lost is not None)  # type: ignore[index]
    fleet.outlook = FleetHealth(is_coming=True, away_seconds=AWAY_SECONDS)
    use(fleet, wait_seconds=0.3)
    began = time.monotonic()
    with pytest.raises(NoReplicaAvailable) as refused:
        await generate(fleet)
    assert refused.value.retry_after_seconds == AWAY_SECONDS
    assert time.monotonic() - began >= 0.3


@pytest.mark.parametrize("bound", [{"max_waiting": 3}, {"max_bytes": 3 * 40 * (len(PROMPT) + 1)}])
async def test_beyond_the_bounds_nobody_waits(emptied: DispatchedFleet, bound: dict[str, int]) -> None:
    use(emptied, wait_seconds=50, **bound)
    tasks = await ask(emptied, range(3))
    with pytest.raises(NoReplicaAvailable):
        await generate(emptied, numbered(3))
    assert emptied.dispatcher.room.num_refused == 1
    await emptied.add("back")
    await asyncio.gather(*tasks)


async def test_who_leaves_while_waiting_is_forgotten_and_holds_up_nobody(emptied: DispatchedFleet) -> None:
    tasks = await ask(emptied, range(5))
    for task in (tasks.pop(3), tasks.pop(0)):
        task.cancel()
    await eventually(lambda: num_waiting(emptied) == 3)
    back = await emptied.add("back")
    await asyncio.gather(*tasks)
    assert [submit.token_ids()[-1] for submit in back.submits] == [1, 2, 4]


async def test_an_answer_that_has_begun_waits_as_well_and_goes_on(fleet: DispatchedFleet) -> None:
    (await fleet.add("r0")).script.step_seconds = 0.01
    fleet.outlook = FleetHealth(is_coming=True)
    use(fleet, wait_seconds=50, max_waiting=0)

    async def kill(run: GenerationRun) -> None:
        await fleet.replicas[run.replica_id].kill()

    task = asyncio.create_task(generate(fleet, changed(GENERATION, num_choices=3), after_first=kill))
    await eventually(lambda: num_waiting(fleet) == 1)
    await fleet.add("r1")
    assert_complete(await task, 3)


async def test_an_answer_that_has_begun_and_waits_in_vain_has_failed(fleet: DispatchedFleet) -> None:
    (await fleet.add("r0")).script.step_seconds = 0.01
    fleet.outlook = FleetHealth(is_coming=True)
    use(fleet, wait_seconds=0.3)

    async def kill(run: GenerationRun) -> None:
        await fleet.replicas[run.replica_id].kill()

    with pytest.raises(GenerationFailed):
        await generate(fleet, after_first=kill)


async def test_those_in_line_for_an_adapter_do_not_hold_up_those_for_the_model(
    emptied: DispatchedFleet,
) -> None:
    adapted = asyncio.create_task(generate(emptied, changed(GENERATION, adapter=Adapter("sql", "f1"))))
    await eventually(lambda: num_waiting(emptied) == 1)
    tasks = await ask(emptied, range(3))
    await emptied.add("plain")
    await asyncio.gather(*tasks)
    await emptied.add("able", Adapter("sql", "f1"))
    assert_complete(await adapted, 1)


async def test_nobody_waits_where_nothing_is_coming(fleet: DispatchedFleet) -> None:
    use(fleet, wait_seconds=50)
    with pytest.raises(NoReplicaAvailable):
        await generate(fleet)
    room = fleet.dispatcher.room
    assert (room.num_waiting, room.num_bytes, room.num_refused) == (0, 0, 0)


RULES = QueueRules(longest_seconds=30.0)


def use_of_holding(fleet: DispatchedFleet, rules: QueueRules = RULES, *, max_queued: int = 1000) -> Holding:
    """As in an overload."""
    holding = Holding(fleet.table, rules, lambda: FairQueue(max_waiting=max_queued))
    delay, now = holding._fleet("toy").delay, time.monotonic()
    for seconds_ago in (10.0, 6.0):
        delay.sees(0.0, TARGET_SECONDS + 1.0, 1, now - seconds_ago)
    delay.holds(now)
    fleet.dispatcher = fleet.new_dispatcher(
        WaitingRoom(max_waiting=1000, max_bytes=1 << 30), retry=RetryPolicy(wait_seconds=30), holding=holding
    )
    return holding


def of(tenant: str, number: int = 0, **more: object) -> Generation:
    """Its prompt's last token says whose it is, and that of nobody else begins so."""
    token_ids = [hash(tenant) % 40_000, *PROMPT, number]
    return changed(
        GENERATION,
        token_ids=token_ids,
        block_hashes=(),
        bucket=f"{tenant}/{number}".encode(),
        caller=Caller(tenant=Tenant(name=tenant)),
        **more,
    )


def num_held(fleet: DispatchedFleet) -> int:
    return fleet.dispatcher.holding.num_waiting


async def begin(fleet: DispatchedFleet, generations: Sequence[Generation]) -> list[asyncio.Task[None]]:
    async def one(generation: Generation) -> None:
        assert_complete(await generate(fleet, generation), 1)

    tasks = []
    for generation in generations:
        tasks.append(asyncio.create_task(one(generation)))
        await asyncio.sleep(0)
    return tasks


async def begin_held(fleet: DispatchedFleet, generations: Sequence[Generation]) -> list[asyncio.Task[None]]:
    before = num_held(fleet)
    tasks = await begin(fleet, generations)
    await eventually(lambda: num_held(fleet) == before + len(generations))
    return tasks


async def full(fleet: DispatchedFleet, replica_id: str = "full") -> list[asyncio.Task[None]]:
    """A replica that has as many as it may have, which make no progress."""
    replica = await fleet.add(replica_id, max_running=1, holding=True)
    tasks = await begin(fleet, [of("first", number) for number in range(1 + NUM_NEXT)])
    await eventually(lambda: replica.num_live == 1 + NUM_NEXT)
    return tasks


async def test_what_a_full_batch_has_no_place_for_is_held_also_without_an_overload(
    fleet: DispatchedFleet,
) -> None:
    tasks = await full(fleet)
    held = await begin_held(fleet, [of("red", number) for number in range(10)])
    replica = fleet.replicas[ReplicaId("full")]
    assert replica.num_live == 1 + NUM_NEXT
    replica.script.holding = False
    await asyncio.gather(*tasks, *held)
    assert len(replica.submits) == 11 + NUM_NEXT


@pytest.mark.parametrize("num_choices", [1, 8])
async def test_a_flood_of_one_key_leaves_places_for_the_next_tenant(
    fleet: DispatchedFleet, num_choices: int
) -> None:
    """Of 32 places it leaves two, though nobody else has asked, and its own wait."""
    replica = await fleet.add("only", max_running=32, holding=True)

    def asked(tenant: str, number: int, **more: object) -> asyncio.Task[object]:
        caller = Caller(tenant=Tenant(name=tenant), key_id=tenant)
        return asyncio.create_task(generate(fleet, replace(of(tenant, number, **more), caller=caller)))

    flood = [asked("red", number, num_choices=num_choices) for number in range(48 // num_choices)]
    num_gone = -(-30 // num_choices)
    await eventually(lambda: num_held(fleet) == 48 // num_choices - num_gone)
    await eventually(lambda: replica.num_live == num_gone * num_choices)
    shares = fleet.dispatcher.holding._fleet("toy").shares
    assert shares._num_places == num_gone * num_choices
    other = asked("green", 77)
    await eventually(lambda: replica.submits[-1].token_ids()[-1] == 77)
    assert num_held(fleet) == 48 // num_choices - num_gone
    replica.script.holding = False
    await asyncio.gather(*flood, other)
    assert shares._num_places == 0


async def test_a_tenant_with_one_request_goes_before_a_flood(fleet: DispatchedFleet) -> None:
    use_of_holding(fleet)
    tasks = await full(fleet)
    tasks += await begin_held(fleet, [of("red", number) for number in range(20)])
    tasks += await begin_held(fleet, [of("green", 77)])
    replica = fleet.replicas[ReplicaId("full")]
    replica.script.holding = False
    await asyncio.gather(*tasks)
    order = [submit.token_ids()[-1] for submit in replica.submits[1 + NUM_NEXT :]]
    assert order.index(77) <= 1
    red = [number for number in order if number != 77]
    assert red[:6] == [19, 18, 17, 16, 15, 0], "of equal work the newest, and a fifth for the oldest"
    assert sorted(red) == list(range(20))


async def test_what_a_grammar_took_to_work_out_is_charged_to_its_tenant(fleet: DispatchedFleet) -> None:
    holding = use_of_holding(fleet)
    replica = await fleet.add("only")
    replica.script.load = LoadSnapshot(prefill_seconds_per_token=0.001)
    await asyncio.gather(*await begin(fleet, [of("first")]))
    await asyncio.gather(*await begin(fleet, [of("red"), of("green", grammar_seconds=2.0)]))
    counters = holding._fleet("toy").queue.counters
    work = counters.counter("green") - counters.counter("red")
    assert work == pytest.approx(2000.0, abs=100)


async def test_whoever_leaves_while_held_leaves_nothing_behind(fleet: DispatchedFleet) -> None:
    holding = use_of_holding(fleet)
    tasks = await full(fleet)
    held = await begin_held(fleet, [of("red", number) for number in range(10)])
    before = holding._fleet("toy").queue.counters.counter("red")
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    assert num_held(fleet) == 0
    assert holding._fleet("toy").queue.counters.counter("red") == before, "nothing of it was charged"
    fleet.replicas[ReplicaId("full")].script.holding = False
    await asyncio.gather(*tasks)


async def test_whoever_leaves_before_much_was_computed_gets_its_share_back(
    fleet: DispatchedFleet,
) -> None:
    holding = use_of_holding(fleet)
    replica = await fleet.add("slow", holding=True)
    replica.script.load = LoadSnapshot(prefill_seconds_per_token=100.0)
    others = await begin(fleet, [of("first")])
    await eventually(lambda: fleet.table.load(replica.replica_id).prefill_seconds_per_token == 100.0)
    (task,) = await begin(fleet, [of("red")])
    await eventually(lambda: replica.num_live == 2)
    counters = holding._fleet("toy").queue.counters
    assert counters.counter_of_waiting("red") > 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert counters.counter_of_waiting("red") < 0.1
    replica.script.holding = False
    await asyncio.gather(*others)


async def test_what_was_decoded_is_charged(fleet: DispatchedFleet) -> None:
    holding = use_of_holding(fleet)
    await fleet.add("quick")
    await asyncio.gather(*await begin(fleet, [of("red")]))
    assert holding._fleet("toy").queue.counters.counter_of_waiting("red") >= 2 * 20


async def test_those_that_wait_for_a_replica_that_dies_go_elsewhere(fleet: DispatchedFleet) -> None:
    use_of_holding(fleet)
    tasks = await full(fleet)
    tasks += await begin_held(fleet, [of("red", number) for number in range(10)])
    other = await fleet.add("other", holding=True, max_running=1)
    await fleet.replicas[ReplicaId("full")].kill()
    await eventually(lambda: other.num_live > 0)
    other.script.holding = False
    await asyncio.gather(*tasks)


async def test_those_that_are_held_survive_that_all_are_away_for_a_while(fleet: DispatchedFleet) -> None:
    use_of_holding(fleet)
    tasks = await full(fleet)
    held = await begin_held(fleet, [of("red", number) for number in range(10)])
    for task in tasks:
        task.cancel()
    await fleet.replicas[ReplicaId("full")].kill()
    await asyncio.gather(*tasks, return_exceptions=True)
    await fleet.add("back")
    await asyncio.gather(*held)


async def test_a_deadline_that_passes_while_held_is_told_and_nothing_is_computed(
    fleet: DispatchedFleet,
) -> None:
    use_of_holding(fleet)
    tasks = await full(fleet)
    replica = fleet.replicas[ReplicaId("full")]
    num_submits = len(replica.submits)
    with pytest.raises(TooLate) as refused:
        await generate(fleet, of("red", timeout_seconds=0.2))
    assert refused.value.retry_after_seconds >= 1.0
    assert len(replica.submits) == num_submits
    replica.script.holding = False
    await asyncio.gather(*tasks)


async def test_a_tenants_slo_is_a_deadline_of_its_requests(fleet: DispatchedFleet) -> None:
    use_of_holding(fleet)
    tasks = await full(fleet)
    hasty = replace(of("red"), caller=Caller(tenant=Tenant(name="red", slo_seconds=0.1)))
    with pytest.raises(TooLate):
        await generate(fleet, hasty)
    fleet.replicas[ReplicaId("full")].script.holding = False
    await asyncio.gather(*tasks)


async def test_who_cannot_make_it_is_told_at_once(fleet: DispatchedFleet) -> None:
    """The replica says that it has an hour of prompts to compute."""
    use_of_holding(fleet)
    tasks = await full(fleet)
    replica = fleet.replicas[ReplicaId("full")]
    replica.script.load = LoadSnapshot(num_pending_tokens=36_000, prefill_seconds_per_token=0.1)
    await eventually(lambda: fleet.table.load(ReplicaId("full")).num_pending_tokens >= 36_000)
    with pytest.raises(TooLate) as refused:
        await generate(fleet, of("red", timeout_seconds=60.0))
    assert refused.value.retry_after_seconds == 60.0
    replica.script.load = LoadSnapshot()
    replica.script.holding = False
    await asyncio.gather(*tasks)


async def test_a_full_queue_refuses_the_flood_and_lets_another_tenant_in(fleet: DispatchedFleet) -> None:
    use_of_holding(fleet, max_queued=4)
    tasks = await full(fleet)
    flood = await begin_held(fleet, [of("red", number) for number in range(4)])
    with pytest.raises(Overloaded):
        await generate(fleet, of("red", 9))
    green = await begin(fleet, [of("green", 77)])
    await eventually(lambda: any(task.done() for task in flood))
    lost = [task for task in flood if task.done()]
    assert len(lost) == 1 and isinstance(lost[0].exception(), Overloaded)
    assert lost[0] is flood[0], "the oldest"
    fleet.replicas[ReplicaId("full")].script.holding = False
    await asyncio.gather(*tasks, *green, *flood[1:])


async def test_nobody_is_held_for_longer_than_the_rules_say(fleet: DispatchedFleet) -> None:
    use_of_holding(fleet, QueueRules(longest_seconds=0.2))
    tasks = await full(fleet)
    with pytest.raises(Overloaded):
        await generate(fleet, of("red"))
    fleet.replicas[ReplicaId("full")].script.holding = False
    await asyncio.gather(*tasks)


async def test_with_room_nothing_is_held(fleet: DispatchedFleet) -> None:
    holding = use_of_holding(fleet)
    await fleet.add("quick")
    for number in range(20):
        await asyncio.gather(*await begin(fleet, [of("red", number)]))
    assert holding.counts.num_held == 0 and holding.counts.num_passed == 20


async def test_one_whose_time_is_over_at_its_replica_is_stopped_there_and_pays_for_what_that_did(
    fleet: DispatchedFleet,
) -> None:
    holding = use_of_holding(fleet)
    replica = await fleet.add("slow", holding=True)
    counters = holding._fleet("toy").queue.counters
    asking = asyncio.create_task(generate(fleet, of("red", timeout_seconds=2.0)))
    await eventually(lambda: replica.num_live == 1)
    charged = counters.counter_of_waiting("red")
    assert charged > 0
    with pytest.raises(TooLate):
        await asking
    await eventually(lambda: replica.num_live == 0)
    assert replica.num_aborts == 1 and counters.counter_of_waiting("red") == charged
    statistics = fleet.dispatcher
    assert statistics.num_running == 0 and statistics.num_late == 1
    # The replica may have told its load just before.
    await eventually(lambda: fleet.table.load(ReplicaId("slow")).num_requests == 0)


async def test_a_prompt_whose_replica_is_lost_costs_its_tenant_nothing(fleet: DispatchedFleet) -> None:
    holding = use_of_holding(fleet)
    replica = await fleet.add("slow", holding=True)
    counters = holding._fleet("toy").queue.counters
    asking = asyncio.create_task(generate(fleet, of("red")))
    await eventually(lambda: replica.num_live == 1)
    assert counters.counter_of_waiting("red") > 0
    await replica.kill()
    with pytest.raises(RouterError):
        await asking
    assert counters.counter_of_waiting("red") == 0


async def test_what_nobody_waits_for_has_all_the_time(fleet: DispatchedFleet) -> None:
    use_of_holding(fleet)
    replica = await fleet.add("slow", holding=True)
    caller = Caller(tenant=Tenant(name="red", slo_seconds=0.1))
    task = asyncio.create_task(generate(fleet, replace(of("red"), caller=caller, is_awaited=False)))
    await asyncio.sleep(0.3)
    replica.script.holding = False
    assert_complete(await task, 1)


async def test_an_answer_that_has_begun_in_time_may_take_longer(fleet: DispatchedFleet) -> None:
    use_of_holding(fleet)
    replica = await fleet.add("slow")

    async def pause(run: object) -> None:
        replica.script.holding = True
        await asyncio.sleep(2.1)
        replica.script.holding = False

    replica.script.step_seconds = 0.01
    deltas = await generate(fleet, of("red", timeout_seconds=2.0), after_first=pause)
    assert_complete(deltas, 1)
    assert replica.num_aborts == 0


NAME = ProgramName("client", "x-session", "s1")
TURN = replace(GENERATION, program=NAME)


class CountedBook(ProgramBook):
    """Knows each turn that was begun, and how often it was ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: dict[Turn, int] = {}
        self.routes: list[ReplicaId] = []

    def begin(self, *args: object) -> Turn:  # type: ignore[override]
        turn = super().begin(*args)  # type: ignore[arg-type]
        self.ends[turn] = 0
        return turn

    def routed(self, turn: Turn, replica_id: ReplicaId, now: float) -> None:
        super().routed(turn, replica_id, now)
        self.routes.append(replica_id)

    def end(self, turn: Turn, now: float) -> None:
        super().end(turn, now)
        self.ends[turn] += 1


def use_of_program_turns(fleet: DispatchedFleet, *, wait_seconds: float = 0.2) -> CountedBook:
    book = CountedBook()
    fleet.dispatcher = fleet.new_dispatcher(
        WaitingRoom(max_waiting=10, max_bytes=1 << 30),
        retry=RetryPolicy(max_waits=3, first_wait_seconds=0.01, wait_seconds=wait_seconds),
        holding=Holding(fleet.table, QueueRules(), programs=book),
    )
    return book


def assert_over(book: CountedBook, num_turns: int = 1) -> None:
    assert list(book.ends.values()) == [1] * num_turns
    assert all(not each.num_open and each.paused_at is not None for each in book.programs())


async def succeeds(fleet: DispatchedFleet) -> None:
    await fleet.add("r0")
    assert_complete(await generate(fleet, TURN), 1)


async def is_refused(fleet: DispatchedFleet) -> None:
    (await fleet.add("r0")).script.refusal = RefusalCode.OVERLOADED
    with pytest.raises(Overloaded):
        await generate(fleet, TURN)


async def finds_no_replica(fleet: DispatchedFleet) -> None:
    fleet.table.add_replica(ReplicaId("away"), CARD, CARD.block_size)
    fleet.table.set_stalled(ReplicaId("away"), is_stalled=True)
    with pytest.raises(NoReplicaAvailable):
        await generate(fleet, TURN)


async def is_left_in_mid_answer(fleet: DispatchedFleet) -> None:
    (await fleet.add("r0")).script.step_seconds = 0.01
    async with fleet.dispatcher.run(replace(long_generation(), program=NAME)) as run:
        async for _ in run:
            break


async def is_cancelled_while_it_waits(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    replica.script.holding = True
    task = asyncio.create_task(generate(fleet, TURN))
    await eventually(lambda: replica.num_live == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def is_too_late(fleet: DispatchedFleet) -> None:
    (await fleet.add("r0")).script.holding = True
    with pytest.raises(TooLate):
        await generate(fleet, replace(TURN, timeout_seconds=0.1))


ENDS = [
    *(succeeds, is_refused, finds_no_replica, is_left_in_mid_answer, is_cancelled_while_it_waits),
    is_too_late,
]


@pytest.mark.parametrize("happens", ENDS)
async def test_a_turn_is_ended_once(
    fleet: DispatchedFleet, happens: Callable[[DispatchedFleet], Awaitable[None]]
) -> None:
    book = use_of_program_turns(fleet)
    await happens(fleet)
    assert_over(book)
    (program,) = book.programs()
    assert (program.home is None) == (happens is finds_no_replica)


async def test_one_of_a_program_that_waits_at_the_gate_leaves_it_when_it_is_cancelled_and_goes_in_its_turn(
    fleet: DispatchedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "CHEAP_SECONDS", 0.0)
    book, replica = use_of_program_turns(fleet), await fleet.add("r0")
    full = book.begin("toy", "red", structs.replace(NAME, session="full"), 10**9, (), 0.0)
    book.admit(full.program, 10**9, 0.0)
    tasks = [
        asyncio.create_task(generate(fleet, replace(TURN, program=structs.replace(NAME, session=session))))
        for session in ("s1", "s2")
    ]
    holding = fleet.dispatcher.holding
    await eventually(lambda: len(list(holding.at_gate())) == 2)
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    assert len(list(holding.at_gate())) == 1 and not replica.submits
    book.dismiss(full.program)
    assert_complete(await tasks[1], 1)
    holding.end_turn(full, 0.0)
    assert_over(book, 3)
    assert list(holding.at_gate()) == []


async def test_a_retried_turn_takes_its_home_along(fleet: DispatchedFleet) -> None:
    book = use_of_program_turns(fleet)
    for name in ("r0", "r1"):
        (await fleet.add(name)).script.holding = True
    task = asyncio.create_task(generate(fleet, TURN))
    await eventually(lambda: any(replica.num_live for replica in fleet.replicas.values()))
    dying = fleet.serving_replica()
    other = next(replica for replica in fleet.replicas.values() if replica is not dying)
    other.script.holding = False
    await dying.kill()
    assert_complete(await task, 1)
    assert_over(book)
    (program,) = book.programs()
    assert book.routes == [dying.replica_id, other.replica_id]
    assert program.home == other.replica_id and set(book._homes) == {other.replica_id}


async def test_side_calls_and_requests_without_a_program_are_no_turns(fleet: DispatchedFleet) -> None:
    book = use_of_program_turns(fleet)
    await fleet.add("r0")
    for generation in (GENERATION, replace(TURN, program=structs.replace(NAME, is_side=True))):
        assert_complete(await generate(fleet, generation), 1)
    assert len(book) == 0 and book.ends == {}
    fleet.dispatcher = fleet.new_dispatcher()
    assert_complete(await generate(fleet, TURN), 1)


async def test_a_program_is_one_through_all_its_turns_and_goes_home(fleet: DispatchedFleet) -> None:
    book = use_of_program_turns(fleet)
    for name in ("r0", "r1", "r2"):
        await fleet.add(name)
    for number in range(5):
        longer = [*TURN.token_ids, *range(number)]
        assert_complete(await generate(fleet, changed(TURN, token_ids=longer)), 1)
    assert_over(book, 5)
    (program,) = book.programs()
    assert (program.num_turns, program.num_tokens) == (5, len(longer))
    assert len(set(book.routes)) == 1 and program.home == book.routes[0]


@pytest.mark.parametrize("end", ["answered", "failed", "none may go", "cancelled"])
async def test_a_pick_is_a_turn_and_is_ended_once(fleet: DispatchedFleet, end: str) -> None:
    book = use_of_program_turns(fleet)
    await fleet.add("r0")
    admits = end != "none may go"
    pick = Pick(fleet.dispatcher, TURN, NO_TRACE, lambda card: admits)
    if end == "none may go":
        with pytest.raises(NoReplicaAvailable), pick:
            await pick.place()
        assert book.ends == {}
        return
    if end == "cancelled":
        fleet.table.set_stalled(ReplicaId("r0"), is_stalled=True)
        with pytest.raises(TimeoutError), pick:
            async with asyncio.timeout(0.05):
                await pick.place()
        assert_over(book)
        return
    with pick:
        await pick.place()
        (program,) = book.programs()
        assert (program.state, program.home) == ("active", "r0")
        if end == "answered":
            pick.first_token()
            pick.used(0, 5)
        else:
            pick.failed("503")
    assert_over(book)


def test_a_budget_is_a_share_of_the_traffic_and_a_little_each_second() -> None:
    budget = RetryBudget(share=0.2, per_second=2.0, max_retries=3.0)
    assert [budget.take(0.0) for _ in range(4)] == [True, True, True, False]
    for _ in range(5):
        budget.add_request()
    assert [budget.take(0.0) for _ in range(2)] == [True, False]
    assert [budget.take(1.0) for _ in range(3)] == [True, True, False]
    assert budget.num_refused == 3


def test_an_idle_budget_is_full_and_not_more() -> None:
    budget = RetryBudget(max_retries=3.0)
    budget.left(0.0)
    for _ in range(100):
        budget.add_request()
    assert budget.left(1000.0) == 3.0


def test_pauses_grow_with_failures_and_none_are_alike() -> None:
    patience = Patience(RetryPolicy(first_wait_seconds=1.0))
    pauses = []
    for chance in (0.5, 1.0, 0.25):
        patience.failed(ReplicaId("r0"), RefusalCode.INTERNAL, 10.0, chance)
        pauses.append(patience.not_before)
    assert pauses == [10.5, 12.0, 12.0]
    assert patience.excluded == {"r0"}


def test_who_waits_in_line_has_so_many_seconds_until_it_is_placed() -> None:
    patience = Patience(RetryPolicy())
    assert [patience.wait_in_line(now, 5.0) for now in (1.0, 4.0, 6.0, 7.0)] == [5.0, 2.0, 0.0, 0.0]
    patience.placed()
    assert patience.wait_in_line(8.0, 5.0) == 5.0


async def test_retries_at_living_replicas_are_bounded_by_the_budget(fleet: DispatchedFleet) -> None:
    for number in range(4):
        (await fleet.add(f"r{number}")).script.refusal = RefusalCode.OVERLOADED
    fleet.dispatcher.budget = RetryBudget(share=0.1, per_second=0.0, max_retries=20.0)
    tasks = [
        asyncio.create_task(generate(fleet, changed(GENERATION, bucket=str(number).encode())))
        for number in range(200)
    ]
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {Overloaded}
    assert 200 < sum(len(replica.submits) for replica in fleet.replicas.values()) <= 200 + 20 + 200 // 10
    assert fleet.dispatcher.budget.num_refused > 0


async def test_what_a_death_has_interrupted_is_tried_again_with_an_empty_budget(
    fleet: DispatchedFleet,
) -> None:
    dying = await fleet.add("r0")
    dying.script.holding = True
    fleet.dispatcher.budget = RetryBudget(share=0.0, per_second=0.0, max_retries=0.0)
    tasks = [
        asyncio.create_task(generate(fleet, changed(GENERATION, token_ids=[*GENERATION.token_ids, number])))
        for number in range(20)
    ]
    await eventually(lambda: dying.num_live == 20)
    await fleet.add("r1")
    await dying.kill()
    assert all(await asyncio.gather(*tasks))


async def test_a_refusal_says_how_long_the_idlest_replica_has_to_compute(fleet: DispatchedFleet) -> None:
    for number, pending in enumerate((300_000, 200_000)):
        replica = await fleet.add(f"r{number}")
        replica.script.refusal = RefusalCode.OVERLOADED
        replica.script.load = LoadSnapshot(num_pending_tokens=pending)
    await eventually(lambda: fleet.table.backlog_seconds("toy") == pytest.approx(20.0))
    with pytest.raises(Overloaded) as refused:
        await generate(fleet)
    assert refused.value.retry_after_seconds == pytest.approx(20.0)


MEASURED = LoadSnapshot(
    num_running=1, num_used_blocks=10, prefill_seconds_per_token=1e-4, decode_step_seconds=0.01
)


def test_a_replica_that_computes_nothing_hangs_after_the_set_time() -> None:
    pulse = ProgressMonitor(60.0)
    assert [pulse.look(MEASURED, 5, {1: 0, 2: 7}, now) for now in (0.0, 30.0, 59.0)] == [(False, set())] * 3
    assert pulse.look(MEASURED, 5, {1: 0, 2: 7}, 60.0) == (True, {1, 2})


def test_a_server_that_writes_an_answer_as_a_whole_has_longer() -> None:
    pulse = ProgressMonitor(60.0, relays=True)
    waiting = replace_of_overdue(MEASURED, num_running=0, num_waiting=1, num_pending_tokens=50)
    assert [pulse.look(waiting, 5, {1: 0}, now) for now in (0.0, 70.0, 599.0)] == [(False, set())] * 3
    assert pulse.look(waiting, 5, {1: 0}, 600.0) == (True, {1})


def test_one_with_a_queue_hangs_as_well() -> None:
    pulse = ProgressMonitor(60.0)
    queue = replace_of_overdue(MEASURED, num_waiting=50, num_pending_tokens=5_000)
    pulse.look(queue, 5, {1: 0}, 0.0)
    assert pulse.look(replace_of_overdue(queue, num_waiting=51), 5, {1: 0}, 60.0) == (True, {1})


def test_a_queue_that_moves_is_waited_for() -> None:
    pulse = ProgressMonitor(60.0)
    queue = replace_of_overdue(MEASURED, num_waiting=50, num_pending_tokens=5_000)
    for second in range(0, 100_000, 50):
        assert pulse.look(queue, second, {1: 0}, float(second)) == (False, set())


def test_a_long_prefill_that_moves_is_waited_for() -> None:
    pulse = ProgressMonitor(60.0)
    for second in range(0, 10_000, 50):
        load = replace_of_overdue(MEASURED, num_pending_tokens=1, num_used_blocks=second)
        assert pulse.look(load, 0, {1: 0}, float(second)) == (False, set())


def test_a_step_has_many_times_what_the_measured_speed_makes_of_it() -> None:
    slow = replace_of_overdue(MEASURED, num_pending_tokens=100_000, prefill_seconds_per_token=1e-3)
    assert ProgressMonitor(60.0).patience(slow) == pytest.approx(STEPS_OF_PATIENCE * 100)
    seeing = replace_of_overdue(slow, num_pending_image_tokens=4_000, encode_seconds_per_token=1e-2)
    assert ProgressMonitor(60.0).patience(seeing) == pytest.approx(STEPS_OF_PATIENCE * 140)


def test_a_first_compilation_has_many_times_the_set_time() -> None:
    assert ProgressMonitor(60.0).patience(LoadSnapshot()) == UNMEASURED_FACTOR * 60.0


def test_a_request_that_gets_nothing_while_nothing_waits_has_been_forgotten() -> None:
    pulse = ProgressMonitor(60.0)
    for second in range(0, 60, 10):
        assert pulse.look(MEASURED, second, {1: 3, 2: second}, float(second)) == (False, set())
    assert pulse.look(MEASURED, 60, {1: 3, 2: 60}, 60.0) == (False, {1})


def test_a_request_that_came_late_has_all_of_its_time() -> None:
    pulse = ProgressMonitor(60.0)
    pulse.look(MEASURED, 5, {1: 0}, 0.0)
    pulse.look(MEASURED, 5, {1: 0, 2: 0}, 50.0)
    assert pulse.look(MEASURED, 5, {1: 0, 2: 0}, 61.0) == (True, {1})


async def test_requests_leave_a_replica_that_hangs_and_go_on_elsewhere(fleet: DispatchedFleet) -> None:
    hanging = await fleet.add("r0")
    hanging.script.load = MEASURED
    hanging.script.step_seconds = 0.01
    generations = [
        changed(GENERATION, token_ids=[*GENERATION.token_ids, number], num_choices=2) for number in range(10)
    ]
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(OverdueWatch(fleet.dispatcher, 0.5).run())
        answers = [tasks.create_task(generate(fleet, generation)) for generation in generations]
        await eventually(lambda: hanging.num_tokens_sent >= 40)
        hanging.script.holding = True
        await fleet.add("r1")
        for answer in answers:
            assert_complete(await answer, 2)
        assert fleet.dispatcher.num_overdue > 0
        assert not fleet.table.has_ready("toy", exclude=["r1"])
        hanging.script.holding = False
        await eventually(lambda: fleet.table.has_ready("toy", exclude=["r1"]))
        watch.cancel()


async def test_honest_work_is_left_where_it_is(fleet: DispatchedFleet) -> None:
    replica = await fleet.add("r0")
    replica.script.load = MEASURED
    replica.script.step_seconds = 0.05
    await fleet.add("r1")
    watch = OverdueWatch(fleet.dispatcher, 10.0)
    async with fleet.dispatcher.run(long_generation()) as run:
        for _ in range(10):
            await anext(run)
            watch.look()
    assert fleet.dispatcher.num_overdue == 0
