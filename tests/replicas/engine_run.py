"""Driving any engine in a test: what it was asked, what it said, and an engine that is empty afterwards."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from replicas.engine import Engine
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import CacheEvent
from replicas.protocol.frames import (
    FinishReason,
    PromptUsage,
    RequestKey,
    StepFrame,
    TokenDelta,
)
from tests.replicas.builders import ROOT, EventBalance, engine_request

MAX_STEPS = 20_000


class EngineRun:
    """Drives an engine and keeps what it said."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.deltas: dict[RequestKey, list[TokenDelta]] = {}
        self.frames: list[StepFrame] = []
        self.balance = EventBalance()
        self._next_id = random.Random().randrange(2**40)

    def add(self, token_ids: Sequence[int], *, root: BlockHash = ROOT, **fields: Any) -> RequestKey:
        return self.add_choices(token_ids, root=root, **fields)[0]

    def add_choices(
        self, token_ids: Sequence[int], *, root: BlockHash = ROOT, num_choices: int = 1, **fields: Any
    ) -> list[RequestKey]:
        self._next_id += 1
        fields = {"temperature": 0.0, "ignore_eos": True, "num_choices": num_choices, **fields}
        requests = [
            engine_request(token_ids, serial=self._next_id, choice=choice, root=root, **fields)
            for choice in range(num_choices)
        ]
        for request in requests:
            self.engine.add(request)
            self.deltas[request.key] = []
        return [request.key for request in requests]

    def abort(self, key: RequestKey) -> None:
        self.engine.abort(key)

    def step(self) -> StepFrame:
        frame = self.engine.step()
        self.balance.apply(frame.events)
        self.frames.append(frame)
        for delta in frame.deltas:
            self.deltas[delta.key].append(delta)
        return frame

    def finish(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def generate(self, token_ids: Sequence[int], **fields: Any) -> RequestKey:
        key = self.add(token_ids, **fields)
        self.finish()
        return key

    def tokens(self, key: RequestKey) -> list[int]:
        return [token for delta in self.deltas[key] for token in delta.token_ids]

    def usage(self, key: RequestKey) -> PromptUsage:
        (usage,) = [delta.usage for delta in self.deltas[key] if delta.usage is not None]
        assert min(usage.num_cross_user_tokens, usage.num_own_tokens) >= 0
        assert usage.num_cross_user_tokens + usage.num_own_tokens <= usage.num_cached_tokens
        assert 0 <= usage.num_slower_tier_tokens <= usage.num_cached_tokens <= usage.num_prompt_tokens
        return usage

    def finish_reason(self, key: RequestKey) -> FinishReason | None:
        return self.deltas[key][-1].finish_reason

    @property
    def events(self) -> list[CacheEvent]:
        return [event for frame in self.frames for event in frame.events]


@pytest.fixture
def run(engine: Engine) -> Iterator[EngineRun]:
    """An empty engine; whatever a test leaves in it is taken out again."""
    run = EngineRun(engine)
    yield run
    for key in run.deltas:
        engine.abort(key)
    run.finish()
    assert engine.reset_prefix_cache()
    run.finish()


def prompt_of(engine: Engine, num_tokens: int, seed: int = 0) -> list[int]:
    """Token ids without any that ends an answer."""
    rng = random.Random(f"{num_tokens} {seed}")
    return [rng.randrange(3, engine.card.vocab_size) for _ in range(num_tokens)]
