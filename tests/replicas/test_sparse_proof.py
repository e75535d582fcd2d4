"""The start-up proof of engines whose hits end at resume points."""

import random
from collections.abc import Callable

import msgspec
import pytest

from replicas.config import ReplicaConfig
from replicas.engine import Engine
from replicas.engine_process.build import build_engine
from replicas.errors import StartupError
from replicas.proof import prove_hashes
from replicas.protocol.blocks import HASH_BYTES, BlockHash
from replicas.protocol.events import CacheEvent, ResumePointsChanged
from replicas.protocol.frames import StepFrame

Change = Callable[[CacheEvent], CacheEvent]


def engine(groups: str) -> Engine:
    config = ReplicaConfig(
        engine="simulated", num_blocks=128, simulated_groups=groups, simulated_hardware="instant"
    )
    return build_engine(config)[0]


def telling(engine: Engine, change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    step = engine.step

    def changed() -> StepFrame:
        frame = step()
        return msgspec.structs.replace(frame, events=[change(event) for event in frame.events])

    monkeypatch.setattr(engine, "step", changed)


def without_points(event: CacheEvent) -> CacheEvent:
    return ResumePointsChanged() if isinstance(event, ResumePointsChanged) else event


def misnamed(event: CacheEvent) -> CacheEvent:
    if not isinstance(event, ResumePointsChanged):
        return event
    return ResumePointsChanged(tuple(BlockHash(bytes(HASH_BYTES)) for _ in event.added), event.removed)


@pytest.mark.parametrize("groups", ["window:16:40 full:16", "window:16:40"])
def test_points_and_reach_prove_the_hashes(groups: str) -> None:
    assert prove_hashes(engine(groups), random.Random(0)) > 0


@pytest.mark.parametrize("groups", ["window:16:40 full:16", "window:16:40"])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (without_points, "cannot resume the probe prompt"),
        (misnamed, "with other hashes than routers compute"),
    ],
)
def test_points_that_are_missing_or_misnamed_are_refused(
    groups: str, change: Change, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = engine(groups)
    telling(built, change, monkeypatch)
    with pytest.raises(StartupError, match=sentence):
        prove_hashes(built, random.Random(0))
