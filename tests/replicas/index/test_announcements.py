"""What the writer tells of announcements, against a reader that keeps score."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replicas.index.announcements import Announcements
from replicas.protocol.blocks import BlockHash
from tests.examples import examples


def hashes(*numbers: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(number.to_bytes(16, "big")) for number in numbers)


def test_what_began_and_ended_between_two_writes_is_never_told() -> None:
    announcements = Announcements()
    assert announcements.begin(1, hashes(1))
    announcements.end(1)
    assert not announcements.has_change
    assert announcements.take_change() == ((), ())


def test_an_id_that_lives_begins_no_second_announcement() -> None:
    announcements = Announcements()
    assert announcements.begin(1, hashes(1))
    assert not announcements.begin(1, hashes(2))
    (announced,), _ = announcements.take_change()
    assert announced.block_hashes == hashes(1)


def test_an_id_begins_anew_only_when_its_end_was_told() -> None:
    announcements = Announcements()
    announcements.begin(1, hashes(1))
    announcements.take_change()
    announcements.end(1)
    assert not announcements.begin(1, hashes(2))  # readers would take the end for that of the second
    assert announcements.take_change() == ((), (1,))
    assert announcements.begin(1, hashes(2))


class Reader(RuleBasedStateMachine):
    """Hears every write, or is told everything anew; and always knows exactly what lived then."""

    def __init__(self) -> None:
        super().__init__()
        self.announcements = Announcements()
        self.live: dict[int, tuple[BlockHash, ...]] = {}
        self.heard: dict[int, tuple[BlockHash, ...]] = {}
        self.num_begun = 0

    @rule(number=st.integers(0, 5))
    def begin(self, number: int) -> None:
        self.num_begun += 1
        assert self.announcements.begin(self.num_begun, hashes(number))
        self.live[self.num_begun] = hashes(number)

    @rule(announcement_id=st.integers(1001, 1003))
    def begin_with_an_id_that_was_there_before(self, announcement_id: int) -> None:
        is_free = announcement_id not in self.live and announcement_id not in self.heard
        assert self.announcements.begin(announcement_id, hashes(9)) == is_free
        if is_free:
            self.live[announcement_id] = hashes(9)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        announcement_id = data.draw(st.sampled_from(sorted(self.live)))
        self.announcements.end(announcement_id)
        del self.live[announcement_id]

    @rule()
    def hear(self) -> None:
        announced, ended = self.announcements.take_change()
        for announcement in announced:
            assert announcement.announcement_id not in self.heard
            self.heard[announcement.announcement_id] = announcement.block_hashes
        for announcement_id in ended:
            del self.heard[announcement_id]  # one that was never begun is never ended
        assert self.heard == self.live
        assert not self.announcements.has_change

    @rule()
    def hear_all(self) -> None:
        self.heard = {it.announcement_id: it.block_hashes for it in self.announcements.take_all()}
        assert self.heard == self.live

    @invariant()
    def memory_is_bounded_by_what_lives_and_what_was_heard(self) -> None:
        assert len(self.announcements) == len(self.live)
        assert len(self.announcements._begun) + len(self.announcements._ended) <= len(self.live) + len(
            self.heard
        )


TestReader = Reader.TestCase
TestReader.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
