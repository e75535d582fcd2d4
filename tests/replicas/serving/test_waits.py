"""How long requests wait: told from frames and a clock, and nothing is kept of what has ended."""

import pytest
from prometheus_client import CollectorRegistry

from replicas.observation.metrics import ReplicaMetrics
from replicas.protocol.frames import FinishReason, Refusal, RefusalCode, RequestKey, StepFrame, TokenDelta
from replicas.serving.waits import Waits


class Clocked:
    def __init__(self) -> None:
        self.now = 100.0
        self.metrics = ReplicaMetrics(CollectorRegistry())
        self.waits = Waits(self.metrics, lambda: self.now)

    def sample(self, name: str) -> float:
        value = self.metrics.registry.get_sample_value(name)
        assert value is not None
        return value


@pytest.fixture
def clocked() -> Clocked:
    return Clocked()


def token(serial: int, choice: int = 0) -> TokenDelta:
    return TokenDelta(RequestKey(serial, choice), (7,))


def test_a_request_waits_until_the_step_begins_that_starts_it(clocked: Clocked) -> None:
    clocked.waits.begin(1)
    clocked.now += 5
    clocked.waits.take(StepFrame(started=[RequestKey(1, 0)]), step_seconds=2)
    assert clocked.sample("replica_queue_seconds_sum") == 3
    assert clocked.sample("replica_ttft_seconds_count") == 0
    clocked.now += 4
    clocked.waits.take(StepFrame([token(1)]), step_seconds=1)
    assert clocked.sample("replica_ttft_seconds_sum") == 9


def test_of_several_choices_and_tokens_the_first_counts(clocked: Clocked) -> None:
    clocked.waits.begin(1)
    clocked.now += 1
    for _ in range(3):
        clocked.waits.take(
            StepFrame([token(1, 0), token(1, 1)], started=[RequestKey(1, 0), RequestKey(1, 1)]), 0.5
        )
        clocked.now += 1
    assert clocked.sample("replica_queue_seconds_sum") == 0.5
    assert clocked.sample("replica_queue_seconds_count") == 1
    assert clocked.sample("replica_ttft_seconds_sum") == 1
    assert clocked.sample("replica_ttft_seconds_count") == 1


def test_a_refusal_is_no_first_token(clocked: Clocked) -> None:
    clocked.waits.begin(1)
    refusal = Refusal(RefusalCode.OVERLOADED, "too many wait")
    delta = TokenDelta(RequestKey(1, 0), finish_reason=FinishReason.ERROR, refusal=refusal)
    clocked.waits.take(StepFrame([delta]), 0.0)
    assert clocked.sample("replica_ttft_seconds_count") == 0


def test_what_has_ended_waits_no_more(clocked: Clocked) -> None:
    clocked.waits.begin(1)
    clocked.waits.end(1)
    clocked.waits.end(2)
    clocked.waits.take(StepFrame([token(1)], started=[RequestKey(1, 0)]), 0.0)
    assert clocked.sample("replica_ttft_seconds_count") == 0
    assert clocked.sample("replica_queue_seconds_count") == 0
