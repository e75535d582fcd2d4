"""The cause that a router names for a miss is the one that there was, in real processes."""

import pytest

from loadtests.benches.causes import SCENES, what_is_said

EACH = 4
AT_ONCE = ("lost_in_transfer",)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "cause",
    [pytest.param(cause, marks=() if cause in AT_ONCE else pytest.mark.slow) for cause in SCENES],
)
def test_misses_of_our_own_engine_have_their_cause_named(cause: str) -> None:
    said = what_is_said(cause, "torch", EACH)
    assert said.share == 1, said


@pytest.mark.parametrize("cause", ["evicted", "held_elsewhere", "not_yet_written", "replica_restarted"])
def test_so_have_those_of_simulated_replicas(cause: str) -> None:
    said = what_is_said(cause, "simulated", EACH)
    assert said.share == 1, said


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("cause", ["held_elsewhere", "not_yet_written", "replica_restarted"])
def test_and_those_of_vllm(cause: str) -> None:
    said = what_is_said(cause, "vllm", EACH)
    assert said.share == 1, said
