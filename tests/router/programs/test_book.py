"""What a book knows of programs: their keys, where they run, what they need, how probably they return."""

import random
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest

from replicas.protocol.blocks import BlockHash
from replicas.protocol.status import ReplicaId
from router.programs import pauses as pauses_module
from router.programs.book import (
    FORGOTTEN_SECONDS,
    MAX_PARALLEL,
    MAX_TENANTS,
    ROOM_SHARE,
    STRANGE_IN_A_ROW,
    SUM_SECONDS,
    Program,
    ProgramBook,
    Turn,
)
from router.programs.name import ProgramName
from router.programs.pauses import (
    BOUNDS,
    GONE_SHARE,
    MOST_COUNTED,
    PRIOR_PAUSES,
    QUANTILES,
    SHARES,
    Pause,
    Pauses,
)

A, B, C = (ReplicaId(name) for name in "abc")


def blocks(*numbers: int) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(16, "big")) for number in numbers]


def name_of(session: str, agent: str = "", parent: str | None = None) -> ProgramName:
    return ProgramName("client", "x-session", session, agent=agent, parent=parent)


def begin(
    book: ProgramBook,
    session: str = "s",
    now: float = 0.0,
    num_tokens: int = 100,
    tenant: str = "red",
    hashes: Sequence[BlockHash] = (),
) -> Turn:
    turn = book.begin("m", tenant, name_of(session), num_tokens, hashes, now)
    book.admit(turn.program, num_tokens, now)
    return turn


def run(book: ProgramBook, session: str, now: float, home: ReplicaId = A, **more: object) -> Program:
    """A turn of a second."""
    turn = begin(book, session, now, **more)  # type: ignore[arg-type]
    book.routed(turn, home, now)
    book.end(turn, now + 1.0)
    return turn.program


def beyond(
    book: ProgramBook, turn: Turn, capacity: int | None = 1000, now: float = 0.0
) -> dict[ReplicaId, int]:
    return book.beyond(turn, lambda replica_id: capacity, now)


def weight(book: ProgramBook, program: Program, now: float) -> float:
    if program.admitted_at is None:
        return 0.0
    if program.paused_at is None:
        return 1.0
    pauses = book._pauses.get(program.tenant) or Pauses()
    return pauses.return_probability(program.pause, now - program.paused_at)


def assert_empty(book: ProgramBook) -> None:
    assert len(book) == 0 and list(book.programs()) == []
    assert not book._of and not book._homes
    assert all(not each.tokens_of and not each.num_tokens for each in book._admitted.values())
    assert len(book._pauses) <= MAX_TENANTS


def test_a_turn_makes_its_replica_the_home_and_what_it_took_is_attained() -> None:
    book = ProgramBook()
    turn = begin(book, now=5.0)
    program = turn.program
    assert (program.state, program.home, program.num_turns, program.seen_at) == ("active", None, 1, 5.0)
    book.routed(turn, A, 6.0)
    book.end(turn, 10.0)
    assert (program.state, program.home, program.attained_seconds) == ("paused", A, 4.0)
    assert (program.paused_at, program.pause) == (10.0, Pause.UNKNOWN)
    run(book, "s", 20.0, B)
    assert (program.home, book.num_moved, book.num_begun) == (B, 1, 1)
    assert set(book._homes) == {B}
    assert book.known("m", "red", name_of("s")) is program
    assert book.known("m", "green", name_of("s")) is book.known("n", "red", name_of("s")) is None


def test_a_turn_that_went_nowhere_attains_nothing_and_a_clock_that_jumps_back_harms_nothing() -> None:
    book = ProgramBook()
    book.end(begin(book, now=5.0), 9.0)
    turn = begin(book, now=3.0)
    book.routed(turn, A, 3.0)
    assert beyond(book, turn, now=-50.0) == {}
    book.end(turn, 1.0)
    assert turn.program.attained_seconds == 0.0
    book.forget_old(-1e9)
    book.forget_old(1.0 + FORGOTTEN_SECONDS)
    assert_empty(book)


def test_subagents_attain_for_the_program_that_began_them_all() -> None:
    book = ProgramBook()
    run(book, "s", 0.0)
    main = book.known("m", "red", name_of("s"))
    assert main is not None and main.root is None
    turns = [
        book.begin("m", tenant, name, 10, (), 1.0)
        for tenant, name in [
            ("red", name_of("s", "child", "")),
            ("red", name_of("s", "grandchild", "child")),
            ("green", name_of("s", "child", "")),
            ("red", name_of("s", "self", "self")),
            ("red", name_of("s", "orphan", "unknown")),
        ]
    ]
    assert [turn.program.root for turn in turns] == [main, main, None, None, None]
    book.routed(turns[1], B, 1.0)
    book.end(turns[1], 8.0)
    assert main.attained_seconds == 1.0 + 7.0


def test_turns_at_once_or_prompts_that_share_nothing_are_a_crowd() -> None:
    book = ProgramBook()
    turns = [begin(book) for _ in range(MAX_PARALLEL)]
    assert not turns[0].program.is_crowd
    turns.append(begin(book))
    assert turns[0].program.is_crowd
    for turn in turns:
        book.end(turn, 1.0)
    assert not turns[0].program.is_crowd, "they are one agent's again"

    grown = [blocks(*range(length)) for length in range(1, 60, 3)]
    for hashes in grown:
        program = run(book, "grows", 0.0, hashes=hashes)
        assert program.num_strange == 0
    for number in range(STRANGE_IN_A_ROW):
        assert not program.is_crowd
        run(book, "grows", 0.0, hashes=blocks(*range(1000 * (number + 1), 1000 * (number + 1) + 10)))
    assert program.is_crowd
    run(book, "grows", 0.0, hashes=blocks(*range(4000, 4012)))
    assert not program.is_crowd, "a compacted conversation is none"


@pytest.mark.parametrize("seed", range(4))
def test_sums_are_those_of_a_twin_that_adds_up_all_programs(seed: int) -> None:
    """Weights are at most as old as the interval of sums; the rest is exact at any time."""
    rng, book, now = random.Random(seed), ProgramBook(max_programs=30), 0.0
    open_turns: list[Turn] = []
    capacity = {A: 500, B: 3000, C: None}
    for _ in range(600):
        step = rng.choice([0.0, 0.3, 2.0, 30.0])
        now += step
        match rng.randrange(8):
            case 0 | 1 | 2:
                turn = begin(book, f"s{rng.randrange(50)}", now, rng.randrange(1, 900), rng.choice("rg"))
                open_turns.append(turn)
            case 3 | 4 if open_turns:
                book.routed(rng.choice(open_turns), rng.choice([A, B, C]), now)
            case 5 | 6 if open_turns:
                turn = open_turns.pop(rng.randrange(len(open_turns)))
                book.end(turn, now)
                book.paused(turn.program, rng.choice(list(Pause)))
            case 7:
                idle = [each for each in book.programs() if not each.num_open]
                if idle:
                    rng.choice([book.dismiss, book.forget])(rng.choice(idle))
                if rng.random() < 0.1:
                    book.forget_replica(rng.choice([A, B, C]))
        if not open_turns:
            continue
        asks = rng.choice(open_turns)
        found = book.beyond(asks, capacity.get, now)
        for home in book._homes.values():
            assert home.tokens == pytest.approx(sum(each.counted for each in home.programs), abs=1e-6)
        for replica_id, room in capacity.items():
            homed = [each for each in book.programs() if each.home == replica_id]
            if room is None or not homed:
                assert replica_id not in found
            elif step >= SUM_SECONDS:
                needed = sum(
                    weight(book, each, now) * each.num_tokens for each in homed if each is not asks.program
                )
                if asks.program in homed and asks.program.admitted_at is None:
                    needed += weight(book, asks.program, now) * asks.program.num_tokens
                over = needed + asks.num_tokens - ROOM_SHARE * room
                assert found.get(replica_id, 0) == pytest.approx(max(0.0, over), abs=1.01)
        assert len(book) <= 30 + len(open_turns)
        admitted = book.admitted("m")
        assert set(admitted.tokens_of) == {each for each in book.programs() if each.admitted_at is not None}
        assert admitted.num_tokens == sum(admitted.tokens_of.values()) >= 0
    for turn in open_turns:
        book.end(turn, now)
    book.forget_old(now + FORGOTTEN_SECONDS + 1.0)
    assert_empty(book)


def test_a_flood_of_one_tenants_programs_leaves_those_of_others() -> None:
    book = ProgramBook(max_programs=500)
    mine = run(book, "mine", 0.0, tenant="green")
    busy = begin(book, "busy", 0.0)
    for number in range(10_000):
        run(book, f"s{number}", 1.0 + number)
        assert len(book) <= 500
    assert book.known("m", "green", name_of("mine")) is mine
    assert book.known("m", "red", name_of("busy")) is busy.program, "it runs"
    assert book.known("m", "red", name_of("s9999")) is not None
    assert book.num_forgotten == 10_002 - 500
    book.end(busy, 2.0)
    book.forget_old(1e6)
    assert_empty(book)


def test_many_tenants_leave_no_trace_and_cost_no_more_than_few() -> None:
    book = ProgramBook()
    for number in range(3 * MAX_TENANTS):
        run(book, "s", 0.0, tenant=f"tenant-{number}")
        run(book, "s", 10.0, tenant=f"tenant-{number}")
        assert len(book._pauses) <= MAX_TENANTS
    known = list(book._pauses)
    book.paused(run(book, "s", 20.0, tenant=known[0]), Pause.TOOL)
    run(book, "new", 0.0, tenant="another")
    run(book, "new", 10.0, tenant="another")
    assert known[0] in book._pauses and known[1] not in book._pauses, "the one that learned least recently"
    beyond(book, begin(book, "s2", 500.0), now=500.0)
    assert "red" not in book._pauses, "to look makes nothing"


def test_what_has_paused_for_long_is_forgotten_wherever_it_stands() -> None:
    book = ProgramBook()
    long = begin(book, "long", 0.0)
    run(book, "short", 1.0)
    begun = begin(book, "open", 2.0)
    book.end(long, 3000.0)
    book.forget_old(2.0 + FORGOTTEN_SECONDS)
    assert {each.name.session for each in book.programs()} == {"long", "open"}
    book.forget_old(3000.0 + FORGOTTEN_SECONDS)
    assert {each.name.session for each in book.programs()} == {"open"}
    book.end(begun, 9000.0)


def test_a_program_with_an_open_turn_is_kept_and_one_of_the_same_name_is_another() -> None:
    book = ProgramBook()
    turn = begin(book)
    book.routed(turn, A, 0.0)
    book.forget(turn.program)
    assert len(book) == 1 and turn.program.home == A
    book.end(turn, 1.0)
    book.forget(turn.program)
    assert_empty(book)
    again = run(book, "s", 2.0)
    assert again is not turn.program
    book.forget(turn.program)
    assert len(book) == 1 and book.num_forgotten == 1 and again.home == A


def test_other_routers_are_told_of_what_they_should_know() -> None:
    book, told = ProgramBook(), []
    book.on_change = lambda program: told.append((program.home, program.admitted_at is not None))
    program = run(book, "s", 0.0)
    assert told == [(None, False), (None, True), (A, True), (A, True)]
    book.dismiss(program)
    assert told[-1] == (A, False)


NAME = ProgramName("claude-code", "x-claude-code-session-id", "s1", agent="a1", parent="")


def test_a_key_is_the_same_in_all_routers_and_releases() -> None:
    assert NAME.key("m", "red").hex() == "4ac8ca8d00d8a5497ec4595ba7b9d37d"
    assert NAME.parent_key("m", "red") == ProgramName("claude-code", "other", "s1").key("m", "red")


def test_no_two_programs_have_one_key() -> None:
    """Nor where the parts of one read like those of another one when they are put together."""
    parts = ["", "a", "b", "ab", "\x00", "a\x00", "\ud800", "1"]
    keys = {
        ProgramName(source, "field", session, agent=agent).key(model, tenant)
        for model in parts
        for tenant in parts
        for source in parts
        for session in parts
        for agent in parts
    }
    assert len(keys) == len(parts) ** 5


def test_what_is_no_part_of_its_identity_does_not_change_a_key() -> None:
    other = msgspec.structs.replace(NAME, field="metadata", parent=None, parent_session="s0", is_side=True)
    assert other.key("m", "red") == NAME.key("m", "red")


def test_a_parent_may_have_a_session_of_its_own_and_never_another_tenant() -> None:
    child = ProgramName("opencode", "x", "s2", parent="", parent_session="s1")
    parent = ProgramName("opencode", "x", "s1")
    assert child.parent_key("m", "red") == parent.key("m", "red") != parent.key("m", "green")
    assert parent.parent_key("m", "red") is None


class Twin:
    """Slow and obvious: keeps each pause with its weight, as the ends of a stretch that it is spread over."""

    def __init__(self) -> None:
        self.stretches: dict[Pause, list[tuple[float, float, float]]] = {pause: [] for pause in Pause}
        self.gone = dict.fromkeys(Pause, 0.0)
        for pause, quantiles in QUANTILES.items():
            for (low, high), (below, above) in zip(pairwise(quantiles), pairwise(SHARES), strict=True):
                for start, end in pairwise(BOUNDS):
                    share = max(0.0, min(high, end) - max(low, start)) / (high - low)
                    self.stretches[pause].append((start, end, PRIOR_PAUSES * (above - below) * share))

    def ended(self, pause: Pause, seconds: float) -> None:
        for start, end in pairwise(BOUNDS):
            if start <= min(max(seconds, 0.0), BOUNDS[-1] - 1.0) < end:
                self.stretches[pause].append((start, end, 1.0))

    def return_probability(self, pause: Pause, seconds: float) -> float:
        longer = total = 0.0
        for start, end, weight in self.stretches[pause]:
            total += weight
            longer += weight * min(1.0, max(0.0, (end - seconds) / (end - start)))
        return longer / (longer + max(self.gone[pause], GONE_SHARE * total))


@pytest.mark.parametrize("seed", range(3))
def test_probabilities_are_those_of_a_twin_that_keeps_every_pause(seed: int) -> None:
    rng = random.Random(seed)
    pauses, twin = Pauses(), Twin()
    for _ in range(1000):
        pause = rng.choice(list(Pause))
        if rng.random() < 0.2:
            pauses.gone(pause)
            twin.gone[pause] += 1
        else:
            seconds = rng.choice([rng.expovariate(0.02), rng.choice(BOUNDS), -5.0, 1e9])
            pauses.ended(pause, seconds)
            twin.ended(pause, seconds)
        at = rng.choice([rng.uniform(0, 4000), rng.choice(BOUNDS), -1.0])
        assert pauses.return_probability(pause, at) == pytest.approx(twin.return_probability(pause, at))


@pytest.mark.parametrize("pause", Pause)
def test_a_probability_falls_with_time_to_nothing(pause: Pause) -> None:
    at = [-10.0, *(seconds / 2 for seconds in range(8000))]
    found = [Pauses().return_probability(pause, seconds) for seconds in at]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.97 and found[-1] == 0.0


def test_a_tool_is_awaited_for_less_long_than_a_user() -> None:
    pauses = Pauses()
    tool, user = (pauses.return_probability(pause, 300.0) for pause in (Pause.TOOL, Pause.USER))
    assert tool < 0.8 < 0.9 < user


def test_a_million_that_never_returned_are_soon_outweighed() -> None:
    pauses = Pauses()
    for _ in range(100_000):
        pauses.gone(Pause.UNKNOWN)
    assert pauses._gone[Pause.UNKNOWN] <= MOST_COUNTED
    for _ in range(20_000):
        pauses.ended(Pause.UNKNOWN, 5.0)
    assert pauses.return_probability(Pause.UNKNOWN, 0.0) > 0.95


def test_no_tenant_learns_into_what_all_begin_with() -> None:
    Pauses().ended(Pause.TOOL, 5.0)
    for counts in pauses_module._PRIORS.values():
        assert sum(counts) == pytest.approx(PRIOR_PAUSES)
