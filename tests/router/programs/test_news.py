"""ProgramNews: what several books come to by messages that are late, lost and repeated."""

import random
from collections.abc import Callable, Sequence

import msgspec
import pytest

from replicas.protocol.status import ReplicaId
from router.caller import Tenant
from router.programs.book import FORGOTTEN_SECONDS, Program, ProgramBook, Turn
from router.programs.name import ProgramName
from router.programs.news import (
    HEARTBEAT_SECONDS,
    MAX_ENTRIES,
    MAX_MESSAGE_CHARACTERS,
    QUIET_SECONDS,
    REFRESH_SECONDS,
    News,
    ProgramNews,
    decode_news,
    encode_news,
)
from router.programs.pauses import Pause
from router.queue import gate
from router.queue.gate import GRACE_SECONDS, QUANTUM_SECONDS
from router.queue.held import Asking, Held, QueueRules
from router.queue.holding import Holding
from router.routing.decision import RoutingRequest
from router.routing.table import RoutedRequest
from tests.examples import examples
from tests.router.routing.tables import BLOCK_SIZE, CARD, table_of

MODEL, TENANT = "toy", "acme"
R0, R1 = ReplicaId("replica-0"), ReplicaId("replica-1")


def named(session: str, agent: str = "", parent: str | None = None) -> ProgramName:
    return ProgramName("claude-code", "x-session", session, agent, parent)


class Router:
    """A book and its news, and what is left of the turns that came here."""

    def __init__(self, number: int = 0, **bounds: int) -> None:
        self.book = ProgramBook(**bounds)
        self.news = ProgramNews(self.book, f"router-{number}")
        self.turns: list[Turn] = []

    def turn(
        self, name: ProgramName, now: float, *, tokens: int = 100, home: ReplicaId = R0, tenant: str = TENANT
    ) -> Turn:
        turn = self.book.begin(MODEL, tenant, name, tokens, [], now)
        self.book.admit(turn.program, tokens, now)
        self.book.routed(turn, home, now)
        self.turns.append(turn)
        return turn

    def program(self, name: ProgramName, tenant: str = TENANT) -> Program:
        program = self.book.known(MODEL, tenant, name)
        assert program is not None
        return program

    def check(self) -> None:
        """What must hold at any time."""
        programs = list(self.book.programs())
        for program in programs:
            assert program.num_open >= 0
            assert program.num_elsewhere >= 0
            assert program.paused_at is None or not program.num_running
            assert program.paused_at is not None or program.num_running
            assert program.home is None or program in self.book._homes[program.home].programs
        tokens_of = self.book.admitted(MODEL).tokens_of
        assert self.book.admitted(MODEL).num_tokens == sum(tokens_of.values())
        assert set(tokens_of) == {each for each in programs if each.admitted_at is not None}
        assert all(home.programs for home in self.book._homes.values())


def told(router: Router, now: float) -> list[News]:
    found = []
    while (news := router.news.tell(now)) is not None:
        assert len(news.entries) <= MAX_ENTRIES
        found.append(decode_news(encode_news(news)))
    return found


def exchange(routers: Sequence[Router], now: float) -> None:
    """Each tells all others at once."""
    for router in routers:
        router.news.forget_quiet(now)
    for router in routers:
        for news in told(router, now):
            for each in routers:
                each.news.hear(news, now)


NAMES = (named("s1"), named("s1", "sub", ""), named("s2"))

OFTEN = ("begin", "go", "end", "tell", "deliver")
SELDOM = ("wait", "dismiss", "lose replica", "repeat", "lose", "time")


class Rooms:
    """Three routers, and messages on their way to each."""

    def __init__(self) -> None:
        self.routers = [Router(number) for number in range(3)]
        self.on_way: list[list[News]] = [[] for _ in self.routers]
        self.now = 1000.0

    def step(self, what: str, number: int, detail: int) -> None:
        router, on_way = self.routers[number], self.on_way[number]
        if what == "begin":
            name = NAMES[detail % len(NAMES)]
            turn = router.book.begin(MODEL, TENANT, name, detail, [], self.now)
            if turn.program.admitted_at is not None:  # it passes the gate
                router.book.admit(turn.program, detail, self.now)
            router.turns.append(turn)
        elif what == "time":
            self.now += detail / 50
            router.news.forget_quiet(self.now)
        elif what == "lose replica":
            router.book.forget_replica((R0, R1)[detail % 2])
        elif what == "tell":
            for news in told(router, self.now):
                for other, messages in enumerate(self.on_way):
                    if other != number:
                        messages.append(news)
        elif what in ("deliver", "repeat", "lose") and on_way:
            news = on_way[detail % len(on_way)]
            if what != "repeat":
                on_way.remove(news)
            if what != "lose":
                router.news.hear(news, self.now)
        elif router.turns:
            self.step_of_turn(what, router, detail)

    def step_of_turn(self, what: str, router: Router, detail: int) -> None:
        turn = router.turns[detail % len(router.turns)]
        program = turn.program
        if what == "go":
            router.book.admit(program, program.num_tokens, self.now)
            router.book.routed(turn, (R0, R1)[detail % 2], self.now)
        elif what == "end":
            router.turns.remove(turn)
            router.book.waits(program, None)
            router.book.end(turn, self.now)
            router.book.paused(program, (Pause.TOOL, Pause.USER)[detail % 2])
        elif what == "wait" and program.admitted_at is None:
            router.book.waits(program, self.now)
        elif what == "dismiss" and not program.num_open:
            router.book.dismiss(program)

    def become_quiet(self) -> None:
        for number, router in enumerate(self.routers):
            for news in self.on_way[number]:
                router.news.hear(news, self.now)
            for turn in router.turns:
                router.book.waits(turn.program, None)
                router.book.end(turn, self.now)
        for _ in range(int(4 * REFRESH_SECONDS)):
            self.now += 1.0
            exchange(self.routers, self.now)


@pytest.mark.parametrize("seed", range(examples(160)))
def test_after_late_lost_and_repeated_messages_all_books_say_the_same(seed: int) -> None:
    rng, rooms = random.Random(seed), Rooms()
    for _ in range(rng.choice((10, 50, 200, 600))):
        rooms.step(rng.choice((*OFTEN, *OFTEN, *SELDOM)), rng.randrange(3), rng.randrange(1000))
        for router in rooms.routers:
            router.check()
    rooms.become_quiet()
    found = []
    for router in rooms.routers:
        router.check()
        admitted = router.book.admitted(MODEL)
        assert not admitted.wait_elsewhere
        assert not router.news._open
        found.append(
            {
                program.key: (
                    *(program.home, program.version, program.num_turns, program.num_tokens),
                    *(program.num_admissions, admitted.tokens_of.get(program), program.num_running),
                    *(program.attained_seconds, program.state),
                )
                for program in router.book.programs()
            }
        )
    assert found[0] == found[1] == found[2]


def test_another_router_knows_all_that_a_turn_needs() -> None:
    here, there = Router(0), Router(1)
    main, sub = named("s"), named("s", "sub", "")
    first = here.turn(main, 10.0, tokens=500, home=R1)
    here.book.end(first, 14.0)
    here.book.paused(first.program, Pause.TOOL)
    second = here.turn(sub, 14.0, tokens=70)
    for news in reversed(told(here, 20.0)):  # by a clock that has nothing in common with ours
        there.news.hear(News(news.router_id, news.entries[::-1]), 5020.0)  # its child first
    program = there.program(main)
    assert (program.home, program.num_tokens, program.num_turns) == (R1, 500, 1)
    assert (program.attained_seconds, program.admitted_at) == (4.0, 5010.0)
    assert (program.pause, program.paused_at, program.state) == (Pause.TOOL, 5014.0, "paused")
    child = there.program(sub)
    assert (child.state, child.num_running, child.is_crowd) == ("active", 1, False)
    assert there.book.admitted(MODEL).num_tokens == 570
    again = there.book.begin(MODEL, TENANT, sub, 80, [], 5021.0)
    assert again.program is child
    assert child.root is program
    assert there.book.num_begun == 0
    here.book.end(second, 22.0)
    for news in told(here, 22.0):
        there.news.hear(news, 5022.0)
    assert (child.num_running, child.state) == (1, "active")
    assert program.attained_seconds == 12.0
    there.book.end(again, 5023.0)
    for news in told(there, 5023.0):
        here.news.hear(news, 23.0)
    assert (second.program.paused_at, second.program.num_turns) == (23.0, 2)


def test_what_was_lost_is_told_again() -> None:
    here, there = Router(0), Router(1)
    turn = here.turn(named("s"), 0.0)
    turn.program.weight = 3.0
    [old] = told(here, 0.0)
    there.news.hear(old, 0.0)
    here.book.end(turn, 1.0)
    assert told(here, 1.0)
    exchange([here, there], 2.0)
    assert there.program(named("s")).num_running == 1
    exchange([here, there], 1.0 + REFRESH_SECONDS)
    program = there.program(named("s"))
    assert (program.num_running, program.version, program.weight) == (0, turn.program.version, 3.0)
    there.turn(named("s"), 100.0, home=R1)
    there.news.hear(old, 100.0)  # late, or once more
    assert (program.home, program.num_turns, program.num_tokens) == (R1, 2, 100)
    assert told(there, 100.0)
    here.book.forget_replica(R0)
    exchange([there, here], 100.0 + HEARTBEAT_SECONDS)
    assert (turn.program.num_running, turn.program.paused_at, turn.program.state) == (1, None, "active")
    assert (here.book.num_begun, there.book.num_begun) == (1, 0)


def test_a_root_is_found_again_and_is_no_child_of_its_own() -> None:
    router = Router(max_programs=2)
    one, two = named("s", "one", "two"), named("s", "two", "one")
    for now in range(4):
        router.book.end(router.turn((one, two)[now % 2], float(now)), float(now))
    programs = [router.program(name) for name in (one, two)]
    assert all(program.root is not program for program in programs)
    child, root = named("t", "child", ""), named("t")
    router.book.end(router.turn(root, 10.0), 10.0)
    turn = router.turn(child, 11.0)
    assert turn.program.root is router.program(root)
    router.book.forget(router.program(root))
    router.book.end(router.turn(root, 12.0), 12.0)
    router.turn(child, 13.0)
    assert turn.program.root is router.program(root)


def test_a_turn_that_passed_keeps_its_room_though_another_router_gave_it_away() -> None:
    here, there = Router(0), Router(1)
    name = named("s")
    here.book.end(here.turn(name, 0.0), 1.0)
    exchange([here, there], 1.0)
    turn = here.turn(name, 50.0)
    there.book.dismiss(there.program(name))
    for _ in range(3):
        exchange([there, here], 50.0)
    for router in (here, there):
        assert router.book.admitted(MODEL).num_tokens == 100
    here.book.end(turn, 51.0)
    here.book.dismiss(turn.program)
    exchange([here, there], 51.0)
    for router in (here, there):
        assert router.book.admitted(MODEL).num_tokens == 0


def test_turns_of_a_router_that_vanishes_end_and_their_programs_pause() -> None:
    here, there, silent = Router(0), Router(1), Router(2)
    waiting = here.book.begin(MODEL, TENANT, named("waits"), 10, [], 0.0)
    here.book.waits(waiting.program, 0.0)
    here.turn(named("s"), 0.0)
    now = 0.0
    while now < 3 * QUIET_SECONDS:  # as long as it lives, its turns are open
        exchange([here, there, silent], now)
        assert there.program(named("s")).state == "active"
        assert there.book.admitted(MODEL).wait_elsewhere
        assert there.news.num_routers == 1
        now += 0.2
    last = now - 0.2
    while there.program(named("s")).num_running:
        now += 0.2
        exchange([there, silent], now)
    assert QUIET_SECONDS - HEARTBEAT_SECONDS <= now - last <= QUIET_SECONDS + 0.3
    program = there.program(named("s"))
    assert (program.state, program.paused_at, program.home) == ("paused", now, R0)
    assert not there.book.admitted(MODEL).wait_elsewhere
    assert there.news.num_routers == 0
    there.book.end(there.turn(named("s"), now + 1), now + 2)
    assert there.book.admitted(MODEL).num_tokens == 100


@pytest.mark.parametrize("jump", [-5000.0, FORGOTTEN_SECONDS - 100, 5000.0])
def test_a_clock_that_jumps_hurts_for_no_longer_than_a_heartbeat(jump: float) -> None:
    here, there = Router(0), Router(1)
    names = [named("one"), named("two")]
    here.turn(names[0], 10_000.0)
    here.book.end(here.turn(names[1], 10_000.0), 10_000.0)
    exchange([here, there], 10_000.0)
    now = 10_000.0 + jump
    for _ in range(40):
        there.book.forget_old(now)
        exchange([here, there], now)
        now += 0.1
    for router in (here, there):
        assert router.program(names[0]).state == "active"
        router.check()
    here.book.end(here.turns[0], now)
    exchange([here, there], now)
    assert there.program(names[0]).state == "paused"


def test_a_flood_of_one_tenants_programs_pushes_out_its_own() -> None:
    here, there = Router(0, max_programs=512), Router(1, max_programs=512)
    others = [named(f"other-{number}") for number in range(50)]
    for name in others:
        here.book.end(here.turn(name, 1.0, tenant="quiet"), 2.0)
    exchange([here, there], 3.0)
    late = named("late")
    for number in range(10_000):
        here.book.end(here.turn(named(f"flood-{number}" + "x" * 200), 4.0, tenant="loud"), 5.0)
        if not number % 500:
            exchange([here, there], 5.0)
    here.book.end(here.turn(late, 6.0, tenant="new"), 7.0)
    for second in range(200):
        exchange([here, there], 8.0 + second)
    for router in (here, there):
        assert len(router.book) == 512
        for name in others:
            assert router.program(name, "quiet").home == R0
        assert router.program(late, "new").home == R0
        router.check()
    assert len(here.news._resting) + len(here.news._changed) + len(here.news._running) <= 512
    late_router = Router(2, max_programs=512)  # its book is full of what began just now
    for number in range(512):
        late_router.book.end(late_router.turn(named(f"{number}"), 300.0, tenant="loud"), 300.0)
    for second in range(100):
        exchange([here, late_router], 300.0 + second)
    assert len(late_router.book) == 512
    for name in others:
        assert late_router.program(name, "quiet").home == R0
    assert late_router.book.known(MODEL, "loud", named("511")) is not None
    assert late_router.book.known(MODEL, "loud", named("flood-9999" + "x" * 200)) is None
    for number in range(1000):  # none of them gives way
        late_router.turn(named(f"open-{number}"), 500.0)
    here.turn(named("new"), 500.0, tenant="another")
    exchange([here, late_router], 500.0)
    assert late_router.book.known(MODEL, "another", named("new")) is None
    assert late_router.book.num_begun == 1512


def test_a_message_is_bounded_and_what_nobody_could_read_is_not_sent() -> None:
    router, other = Router(), Router(1)
    for number in range(600):
        router.turn(named(f"{number:0400d}"), 0.0)
    for name in (named("\ud800"), named("x" * 513), named("a\nb")):
        router.turn(name, 0.0)
    messages = told(router, 0.0)
    assert max(len(encode_news(news)) for news in messages) < 2 * MAX_MESSAGE_CHARACTERS
    assert sum(len(news.entries) for news in messages) == 600
    assert router.news.num_passed_over == 3
    assert router.news.tell(0.1) is None
    lost = messages[0]
    router.news.untell(lost)
    assert {entry.session for news in told(router, 0.2) for entry in news.entries} == {
        entry.session for entry in lost.entries
    }
    other.news.hear(
        News("x", (msgspec.structs.replace(lost.entries[0], paused_seconds=1e9, num_open=0),)), 1.0
    )
    assert len(other.book) == 0


def entry_with(**fields: object) -> bytes:
    router = Router()
    router.turn(named("s"), 0.0)
    entry = told(router, 0.0)[0].entries[0]
    return encode_news(News("x", (msgspec.structs.replace(entry, **fields),)))


@pytest.mark.parametrize(
    "nonsense",
    [
        lambda: entry_with(num_tokens=-1),
        lambda: entry_with(version=2**60),
        lambda: entry_with(session="x" * 1000),
        lambda: entry_with(attained_seconds=float("nan")),
        lambda: entry_with(paused_seconds=float("inf")),
        lambda: entry_with(weight=0.0),
        lambda: entry_with(pause=7),
        lambda: entry_with(home=3),
        lambda: encode_news(["x" * 65, []]),
        lambda: b"\xc1",
    ],
)
def test_numbers_out_of_range_and_long_names_are_no_message(nonsense: Callable[[], bytes]) -> None:
    decode_news(entry_with())
    with pytest.raises(msgspec.MsgspecError):
        decode_news(nonsense())


class Gated(Router):
    """A router whose gate admits programs to one replica, of which others know as well."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.holding = Holding(table_of(1), QueueRules(), programs=self.book)

    def ask(self, session: str, num_tokens: int, now: float) -> tuple[Turn, RoutedRequest | Held]:
        tenant = Tenant(name=TENANT)
        turn = self.holding.begin_turn(CARD.name, tenant, named(session), num_tokens, [], now)
        assert turn is not None
        request = RoutingRequest(b"bucket", num_tokens, BLOCK_SIZE)
        return turn, self.holding.ask(Asking(CARD.name, TENANT, request, (), turn=turn), now, lambda: None)


def test_programs_of_all_routers_share_one_room_and_give_way_to_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "CHEAP_SECONDS", 0.0)
    here, there = routers = Gated(0), Gated(1)
    num_tokens = int(0.6 * CARD.num_blocks * BLOCK_SIZE)
    now = 0.0
    first, routed = here.ask("first", num_tokens, now)
    assert isinstance(routed, RoutedRequest)
    exchange(routers, now)
    now = 100.0
    exchange(routers, now)
    second, held = there.ask("second", num_tokens, now)
    assert isinstance(held, Held)
    while now < QUANTUM_SECONDS - 50:  # it runs on at its own router, and has the room
        exchange(routers, now)
        there.holding.look_at(held, now)
        assert held in there.holding.at_gate()
        now += 1.0
    here.holding.end_turn(first, now)
    exchange(routers, now)
    there.holding.look_at(held, now)
    assert held in there.holding.at_gate()
    first, routed = here.ask("first", num_tokens, now)
    assert isinstance(routed, RoutedRequest)
    now += 51.0
    exchange(routers, now)
    here.holding.end_turn(first, now)  # nobody waits here, and it gives way all the same
    assert first.program not in here.book.admitted(CARD.name).tokens_of
    exchange(routers, now)
    there.holding.look_at(held, now)
    assert not [*there.holding.at_gate(), *here.holding.at_gate()]
    exchange(routers, now)
    first, held = here.ask("first", num_tokens, now)
    assert isinstance(held, Held)
    there.holding.end_turn(second, now)
    exchange(routers, now + GRACE_SECONDS)
    here.holding.look_at(held, now + GRACE_SECONDS + 1)
    assert not [*there.holding.at_gate(), *here.holding.at_gate()]
    exchange(routers, now + GRACE_SECONDS + 1)
    assert set(here.book.admitted(CARD.name).tokens_of.values()) == {num_tokens}
    for router in routers:
        assert router.book.admitted(CARD.name).num_tokens == num_tokens
