"""A peer that is slow or busy for a moment, and what it is offered all the same."""

from collections.abc import Callable, Sequence
from typing import cast

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from replicas.leaving import hand_over, pace
from replicas.leaving.hand_over import HandOver
from replicas.leaving.live_peers import LivePeers
from replicas.leaving.peer_calls import CallFailed, PeerCalls
from replicas.observation.leaving_metrics import LeavingMetrics
from replicas.protocol.affinity import AffinityRanking
from replicas.protocol.hand_overs import HandOverOutcome, LeasedChunk, TakeOver
from replicas.protocol.pulls import PullHint
from replicas.protocol.status import Epoch, ReplicaId
from replicas.serving.store_questions import StoreQuestions
from tests.replicas.kvstore.chunk_names import key

SOURCE = PullHint(ReplicaId("here"), Epoch("e"), "127.0.0.1:1", 0)
PEER = PullHint(ReplicaId("there"), Epoch("f"), "127.0.0.1:2", 0)
TAKEN, LATE, BUSY = HandOverOutcome.TAKEN, HandOverOutcome.LATE, HandOverOutcome.BUSY
NUM_CHUNKS = 16
Answer = Callable[[int], Sequence[HandOverOutcome]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_over, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(hand_over, "SEND_AGAIN_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(pace, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(pace, "MAX_PAUSE_SECONDS", 0.001)


class Scripted:
    """The engine, Redis and the peer of a hand-over; `answers` are the peer's, the last one for ever."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = [*answers]
        self.asked: list[int] = []
        self.told: list[int] = []
        self.given_back: list[tuple[PullHint, int]] = []
        self.peers = [PEER]
        self.chunks = [chunk(number) for number in range(NUM_CHUNKS)]
        self.registry = CollectorRegistry()
        self.hand_over = HandOver(
            cast("StoreQuestions", self),
            cast("LivePeers", self),
            cast("PeerCalls", self),
            source=lambda: SOURCE,
            layout=bytes(16),
            chunk_bytes=1 << 10,
            max_bytes=None,
            metrics=LeavingMetrics(self.registry),
        )

    async def leased(self, seconds: float) -> list[LeasedChunk]:
        return self.chunks

    async def read(self) -> list[PullHint]:
        return self.peers

    async def take_over(
        self, peer: PullHint, take_over: TakeOver, seconds: float
    ) -> Sequence[HandOverOutcome]:
        if take_over.are_elsewhere:
            self.given_back.append((peer, len(take_over.chunks)))
            return (HandOverOutcome.NOTED,) * len(take_over.chunks)
        if take_over.are_lost:
            self.told.append(len(take_over.chunks))
            return (HandOverOutcome.NOTED,) * len(take_over.chunks)
        self.asked.append(len(take_over.chunks))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer(len(take_over.chunks))

    def num(self, outcome: HandOverOutcome) -> float | None:
        return self.registry.get_sample_value("replica_handed_over_chunks_total", {"outcome": outcome.value})


def chunk(number: int) -> LeasedChunk:
    return LeasedChunk(key(chr(ord("a") + number)), None, 7, 600, 300.0)


def takes(count: int) -> Sequence[HandOverOutcome]:
    return (TAKEN,) * count


def fails(outcome: HandOverOutcome) -> Answer:
    def answer(count: int) -> Sequence[HandOverOutcome]:
        raise CallFailed(outcome, "as the test wants it")

    return answer


async def test_one_that_is_busy_for_a_moment_is_asked_again() -> None:
    scripted = Scripted(fails(BUSY), fails(BUSY), takes)
    await scripted.hand_over.run(30.0)
    assert scripted.asked == [NUM_CHUNKS] * 3
    assert scripted.num(TAKEN) == NUM_CHUNKS


async def test_one_that_is_always_busy_is_asked_a_bounded_number_of_times() -> None:
    scripted = Scripted(fails(BUSY))
    await scripted.hand_over.run(30.0)
    assert len(scripted.asked) == pace.MAX_BUSY + 1
    assert scripted.num(BUSY) == NUM_CHUNKS


async def test_one_that_is_late_is_asked_for_half_as_much() -> None:
    scripted = Scripted(fails(LATE), takes)
    await scripted.hand_over.run(30.0)
    assert scripted.asked == [16, 8, 8]
    assert scripted.num(TAKEN) == NUM_CHUNKS and not scripted.num(LATE)


async def test_one_that_is_late_again_is_left_alone_until_there_is_more_to_hand_over() -> None:
    scripted = Scripted(takes, fails(LATE))
    scripted.hand_over._chunks_per_call = 8
    await scripted.hand_over.run(30.0)
    assert scripted.asked == [8, 8, 4]
    assert (scripted.num(TAKEN), scripted.num(LATE)) == (8, 8)
    assert scripted.told == [], "it answers nothing"
    scripted.answers = [takes]
    scripted.chunks = [*scripted.chunks, chunk(NUM_CHUNKS)]
    await scripted.hand_over.run(30.0)
    assert scripted.num(TAKEN) == NUM_CHUNKS + 1
    assert scripted.num(LATE) == 8, "what has failed is counted once"


@pytest.mark.parametrize(
    "answers", [[fails(LATE)] * 2, [fails(LATE), *[fails(BUSY)] * (pace.MAX_BUSY + 1)]], ids=["late", "busy"]
)
async def test_one_that_was_late_is_told_what_another_has_taken_instead(answers: list[Answer]) -> None:
    scripted = Scripted(*answers, takes)
    scripted.peers = [PEER, replace(PEER, replica_id=ReplicaId("other"), epoch=Epoch("g"))]
    scripted.chunks = [LeasedChunk(key("a"), None, 7, 600, 300.0, bucket=b"b" * 16)]
    await scripted.hand_over.run(30.0)
    assert scripted.num(TAKEN) == 1
    home = AffinityRanking(sorted(each.replica_id for each in scripted.peers)).of(b"b" * 16).first(1)[0]
    assert [(peer.replica_id, number) for peer, number in scripted.given_back] == [(home, 1)]


async def test_what_could_not_be_pulled_is_asked_for_again_a_few_times_and_nothing_else() -> None:
    budget, not_sent = HandOverOutcome.BUDGET, HandOverOutcome.NOT_SENT
    scripted = Scripted(
        lambda count: (TAKEN, budget) + (not_sent,) * (count - 2),
        lambda count: (TAKEN,) * (count - 4) + (not_sent,) * 4,
        lambda count: (not_sent,) * count,
    )
    await scripted.hand_over.run(30.0)
    assert scripted.asked == [16, 14, 4]
    assert [scripted.num(each) for each in (TAKEN, budget, not_sent)] == [11, 1, 4]


async def test_what_fails_in_every_run_is_counted_once() -> None:
    scripted = Scripted(lambda count: (HandOverOutcome.BUDGET,) * count)
    for number in range(3):
        scripted.chunks = [*scripted.chunks, chunk(NUM_CHUNKS + number)]
        await scripted.hand_over.run(30.0)
    assert scripted.num(HandOverOutcome.BUDGET) == NUM_CHUNKS + 3
