"""What an explanation says of KV below the device: the depths, both ways, and the words for them."""

import json

import pytest
from hypothesis import given

from cluster.commands.explain import render
from replicas.protocol.status import ReplicaId
from replicas.protocol.ways import MoveSpeeds, Reach
from router.explain.preview import because, candidates_by_cost
from router.routing.cost import cost_of
from router.routing.decision import Candidate, Decision, DecisionReason
from router.routing.load import ReplicaLoad
from tests.router.routing.fleets import BLOCK_SIZE
from tests.router.routing.test_decision import (
    FAST,
    LOADS,
    PARAMETERS,
    RATES,
    REACHES,
    in_tiers,
    seconds_of,
)

NUM_TOKENS = 5000


def explained(load: ReplicaLoad, reach: Reach, name: str = "replica-1") -> dict[str, object]:
    """The only candidate's part of an explanation."""
    cost = cost_of(load, num_tokens=NUM_TOKENS, reach=reach, rates=RATES, parameters=PARAMETERS)
    candidate = Candidate(ReplicaId(name), 0, cost.num_ready_tokens, load, cost, reach)
    decision = Decision(ReplicaId(name), cost.num_ready_tokens, DecisionReason.ONLY_REPLICA, 0, (candidate,))
    (told,) = json.loads(json.dumps(candidates_by_cost(decision, 16)))
    assert isinstance(told, dict)
    return told


def tiers(load: ReplicaLoad, reach: Reach) -> dict[str, object]:
    found = explained(load, reach)["tiers"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("load", "reach", "sentence"),
    [
        (FAST, Reach(1000, 1000, 1000, 1000), None),
        (FAST, Reach(0, 0, 0, 0), None),
        (
            ReplicaLoad(speeds=MoveSpeeds(1e-6, 7e-6, None)),
            Reach(0, 0, 4100, 4100),
            "on disk at replica-1, 37 ms to load, 410 ms to compute",
        ),
        (
            FAST,
            Reach(1000, 2000, 2000, 2000),
            "in host memory at replica-1, 6.0 ms to load, 100 ms to compute",
        ),
        (
            ReplicaLoad(speeds=MoveSpeeds(1e-3, None, None)),
            Reach(0, 1000, 1000, 1000),
            "in host memory at replica-1, 1001 ms to load, 100 ms to compute: it would be computed",
        ),
        (
            ReplicaLoad(speeds=MoveSpeeds(1e-6, None, None)),
            Reach(0, 1000, 3000, 3000),
            (
                "on disk at replica-1, not known how long to load, 300 ms to compute:"
                " 2,000 tokens of it would be computed"
            ),
        ),
    ],
)
def test_the_words_follow_the_decision(load: ReplicaLoad, reach: Reach, sentence: str | None) -> None:
    assert tiers(load, reach)["sentence"] == sentence


def test_a_replica_that_says_nothing_of_tiers_looks_as_before() -> None:
    assert explained(ReplicaLoad(), Reach(1000, 1000, 1000, 1000))["tiers"] is None


@given(LOADS, REACHES)
def test_the_numbers_are_those_that_the_decision_used(load: ReplicaLoad, reach: Reach) -> None:
    told = explained(load, reach)
    found = told["tiers"]
    if load.speeds.host is None:
        assert found is None
        return
    assert isinstance(found, dict)
    wait, move = told["wait_seconds"], told["move_seconds"]
    num_ready, load_seconds = told["overlap_tokens"], found["load_seconds"]
    assert isinstance(wait, float) and isinstance(move, float)
    if num_ready == reach.local > reach.device:
        assert load_seconds is not None
        assert max(0.0, load_seconds - wait) == pytest.approx(move)
    if load_seconds is not None:
        whole = seconds_of(load, reach, NUM_TOKENS, reach.local)
        rest = (NUM_TOKENS - reach.local) * 1e-4 * (1 + PARAMETERS.delay_price * load.num_requests)
        assert max(wait, load_seconds) + rest == pytest.approx(whole)
    assert found["compute_seconds"] == pytest.approx((reach.local - reach.device) * 1e-4)


def test_a_prediction_is_called_one() -> None:
    loads = {"r0": ReplicaLoad(is_predicted=True), "r1": ReplicaLoad()}
    made = in_tiers({"r0": (4, 4, 4)}, loads)
    assert "The overlap at r0 is predicted: no cache events say what is held there." in rendered(made)


def rendered(decision: Decision) -> str:
    return render(
        {
            **{"model": "m", "adapter": None, "num_tokens": 8000, "block_size": BLOCK_SIZE, "bucket": "ab"},
            "affinity_order": ["r0", "r1"],
            "decision": {
                "replica": decision.replica_id,
                "reason": decision.reason.value,
                "because": because(decision),
                "overlap_tokens": decision.overlap_tokens,
            },
            "candidates": candidates_by_cost(decision, 16),
        }
    )


def columns(text: str) -> dict[str, dict[str, str]]:
    """The table's cells, by replica and title. No cell but a time has a space."""
    lines = text.replace(" ms", "ms").splitlines()
    titles = next(line.split() for line in lines if line.startswith("REPLICA"))
    rows = [line.split() for line in lines if line.startswith(("r0 ", "r1 "))]
    return {row[0]: dict(zip(titles, row, strict=True)) for row in rows}


def test_the_table_has_the_depth_of_every_tier_and_a_line_for_what_lies_below_the_device() -> None:
    text = rendered(in_tiers({"r0": (10, 20, 400), "r1": (30, 30, 30)}, {"r0": FAST, "r1": ReplicaLoad()}))
    cells = columns(text)
    assert [cells["r0"][title] for title in ("DEVICE", "HOST", "DISK")] == ["160", "320", "6400"]
    assert [cells["r1"][title] for title in ("OVERLAP", "DEVICE", "HOST", "DISK")] == ["480", "-", "-", "-"]
    assert cells["r0"]["MOVE"] != "0.0ms" == cells["r1"]["MOVE"]
    assert "on disk at r0, 219 ms to load, 624 ms to compute." in text.splitlines()


def test_without_tiers_the_table_is_as_it_was() -> None:
    text = rendered(in_tiers({"r0": (400, 400, 400)}, {"r0": ReplicaLoad(), "r1": ReplicaLoad()}))
    assert list(columns(text)["r0"]) == [
        *("REPLICA", "RANK", "OVERLAP", "REQUESTS", "PENDING", "WAIT", "PREFILL", "DELAY", "ROOM", "COST")
    ]
    assert "to load" not in text
