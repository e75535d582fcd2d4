"""Taking chunks over: what is answered by a replica that begins to leave itself."""

from collections.abc import Sequence
from typing import Any, NoReturn

import grpc
import pytest
from prometheus_client import CollectorRegistry, Counter

from replicas.protocol.hand_overs import HandOverOutcome, LeasedChunk, StoreAnswer, StoreQuestion, TakeOver
from replicas.protocol.pulls import PullHint
from replicas.protocol.status import Epoch, ReplicaId
from replicas.protocol.wire import encode
from replicas.serving.store_questions import StoreQuestions
from replicas.serving.take_over_service import TakeOverService
from tests.replicas.kvstore.chunk_names import name

LAYOUT = bytes(16)
SOURCE = PullHint(ReplicaId("there"), Epoch("e"), "127.0.0.1:1", 0)


class Aborted(Exception):
    pass


class Call:
    """What a desk sees of a call."""

    def time_remaining(self) -> float:
        return 30.0

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise Aborted(code)


class ScriptedStore:
    """Its engine answers as soon as it is asked, after `then` was done."""

    def __init__(self, outcomes: Sequence[HandOverOutcome]) -> None:
        self.questions = StoreQuestions(self)
        self.outcomes = outcomes
        self.then: Any = lambda: None

    def ask_store(self, question: StoreQuestion) -> None:
        self.then()
        self.questions.take([StoreAnswer(question.number, outcomes=tuple(self.outcomes))])


def asking() -> bytes:
    return encode(TakeOver(SOURCE, LAYOUT, (LeasedChunk(*name("a"), 600, 300.0),)))


def desk_of(store: ScriptedStore) -> tuple[TakeOverService, CollectorRegistry]:
    registry = CollectorRegistry()
    return TakeOverService(
        LAYOUT, store.questions, Counter("taken", "", ["outcome"], registry=registry)
    ), registry


async def test_where_too_much_is_on_its_way_a_peer_is_told_to_come_again() -> None:
    desk, registry = desk_of(ScriptedStore([HandOverOutcome.BUSY]))
    with pytest.raises(Aborted) as aborted:
        await desk.serve(asking(), Call())
    assert aborted.value.args == (grpc.StatusCode.RESOURCE_EXHAUSTED,)
    assert not registry.get_sample_value("taken_total", {"outcome": "busy"})
    assert desk._num_calls == 0


async def test_one_that_begins_to_leave_meanwhile_has_taken_nothing() -> None:
    store = ScriptedStore([HandOverOutcome.TAKEN])
    desk, registry = desk_of(store)
    taken_over = await desk.serve(asking(), Call())
    assert taken_over.outcomes == (HandOverOutcome.TAKEN,)

    def begin_to_leave() -> None:
        desk.is_draining = True

    store.then = begin_to_leave
    with pytest.raises(Aborted) as aborted:
        await desk.serve(asking(), Call())
    assert aborted.value.args == (grpc.StatusCode.FAILED_PRECONDITION,)
    assert registry.get_sample_value("taken_total", {"outcome": "taken"}) == 1
    assert desk._num_calls == 0
