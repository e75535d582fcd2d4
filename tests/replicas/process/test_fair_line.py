"""FairLine: no owner takes all places or the whole line, and who was given least time goes next."""

import random
from collections import Counter

import pytest

from replicas.process import fair_line
from replicas.process.fair_line import FairLine


def line(num_places: int = 3, most_waiting: int = 64) -> FairLine[str]:
    return FairLine(num_places=num_places, most_waiting=most_waiting)


def begun(waiting: FairLine[str]) -> list[str]:
    items = []
    while (found := waiting.next()) is not None:
        items.append(found[1])
    return items


def test_an_owner_leaves_one_place_to_others() -> None:
    waiting = line()
    for number in range(10):
        assert waiting.enter("flood", f"f{number}") is None
    assert begun(waiting) == ["f0", "f1"]
    waiting.enter("other", "o")
    assert begun(waiting) == ["o"]
    assert begun(waiting) == []


@pytest.mark.parametrize("num_places", [1, 2])
def test_few_places_are_used_by_an_owner_that_is_alone(num_places: int) -> None:
    waiting = line(num_places)
    for number in range(3):
        waiting.enter("alone", str(number))
    assert begun(waiting) == ["0"]
    waiting.ends("alone", 1.0)
    assert begun(waiting) == ["1"]


def test_the_owner_with_least_time_goes_next_and_nobody_saves_up() -> None:
    waiting = line(num_places=1)
    for number in range(4):
        waiting.enter("a", f"a{number}")
        waiting.enter("b", f"b{number}")
    order = []
    for _ in range(6):
        ((owner, item),) = [waiting.next() or ("", "")]
        order.append(item)
        waiting.ends(owner, 3.0 if owner == "a" else 1.0)
    assert order == ["a0", "b0", "b1", "b2", "a1", "b3"]
    waiting.enter("late", "late")
    waiting.enter("late", "late again")
    assert begun(waiting) == ["a2"]
    waiting.ends("a", 3.0)
    assert begun(waiting) == ["late"]
    waiting.ends("late", 5.0)
    assert begun(waiting) == ["a3"]


def test_an_owner_that_comes_back_while_others_wait_owes_what_it_has_used() -> None:
    waiting = line(num_places=1)
    for number in range(4):
        waiting.enter("many", f"m{number}")
    waiting.enter("single", "s0")
    order = []
    for number in range(1, 5):
        owner, item = waiting.next() or ("", "")
        order.append(item)
        waiting.ends(owner, 3.0 if owner == "single" else 1.0)
        if owner == "single":
            waiting.enter("single", f"s{number}")
    assert order == ["m0", "s0", "m1", "m2"]


def test_an_owner_beyond_its_share_of_the_line_is_refused_however_empty_that_is() -> None:
    waiting: FairLine[str] = FairLine(num_places=1, most_waiting=8, most_waiting_of_owner=2)
    assert [waiting.enter("flood", str(number)) for number in range(3)] == [None, None, "2"]
    assert waiting.enter("other", "o") is None


def test_a_full_line_takes_from_the_owner_with_most() -> None:
    waiting = line(num_places=1, most_waiting=3)
    floods = [f"f{number}" for number in range(3)]
    for item in floods:
        assert waiting.enter("flood", item) is None
    assert waiting.enter("flood", "f3") == "f3"
    assert waiting.enter("other", "o0") is floods[2]
    assert waiting.enter("other", "o1") == "o1", "both have as many then"
    assert waiting.num_waiting == 3
    assert not waiting.leave("flood", floods[2])
    assert waiting.leave("flood", floods[0])
    assert not waiting.leave("nobody", floods[0])


def test_what_is_counted_holds_for_random_use() -> None:
    rng, waiting = random.Random(4), line(num_places=3, most_waiting=10)
    inside: dict[str, str] = {}
    working: list[tuple[object, str]] = []
    for number in range(5000):
        action = rng.random()
        if action < 0.5:
            owner, item = rng.choice("abcd"), f"i{number}"
            inside[item] = owner
            lost = waiting.enter(owner, item)
            if lost is not None:
                del inside[lost]
        elif action < 0.7 and inside:
            item = rng.choice(sorted(inside))
            assert waiting.leave(inside.pop(item), item)
        elif action < 0.85:
            if (found := waiting.next()) is not None:
                assert inside.pop(found[1]) == found[0]
                working.append(found)
        elif working:
            owner_of, _ = working.pop(rng.randrange(len(working)))
            waiting.ends(owner_of, rng.random())
        assert waiting.num_waiting == len(inside) <= 10
        assert waiting.num_working == len(working) <= 3
    assert all(sum(owner == name for owner, _ in working) <= 2 for name in "abcd")


class Naive:
    """The same rules by looking at everybody each time."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, str]] = []
        self.working: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}

    def known(self) -> set[str]:
        return {owner for owner, _ in self.waiting} | set(+self.working)

    def enter(self, owner: str, item: str) -> None:
        known = self.known()
        if owner not in known:
            least = min((self.seconds[name] for name in known), default=0.0)
            self.seconds[owner] = max(least, self.seconds.get(owner, least) if known else least)
        self.waiting.append((owner, item))

    def next(self) -> tuple[str, str] | None:
        may = [each for each in self.waiting if self.working[each[0]] < 2]
        if self.working.total() >= 3 or not may:
            return None
        found = min(may, key=lambda each: self.seconds[each[0]])
        self.waiting.remove(found)
        self.working[found[0]] += 1
        return found

    def ends(self, owner: str, seconds: float) -> None:
        self.working[owner] -= 1
        self.seconds[owner] += seconds
        if not self.known():
            self.seconds.clear()


@pytest.mark.parametrize("seed", range(8))
def test_the_order_is_that_of_the_rules(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, waiting, naive = random.Random(seed), line(num_places=3, most_waiting=10_000), Naive()
    names = [f"owner {number}" for number in range(30)]
    busy: list[str] = []
    monkeypatch.setattr(fair_line, "MAX_STALE", -5 * (seed % 4))
    for number in range(4000):
        action = rng.random()
        if action < 0.4:
            owner, item = rng.choice(names), f"i{number}"
            waiting.enter(owner, item)
            naive.enter(owner, item)
        elif action < 0.6 and naive.waiting:
            left = naive.waiting.pop(rng.randrange(len(naive.waiting)))
            assert waiting.leave(*left)
            if not naive.known():
                naive.seconds.clear()
        elif action < 0.8:
            found = waiting.next()
            assert found == naive.next()
            busy += [] if found is None else [str(found[0])]
        elif busy:
            owner = busy.pop(rng.randrange(len(busy)))
            seconds = float(rng.randrange(4))
            waiting.ends(owner, seconds)
            naive.ends(owner, seconds)
