"""An engine at a server, stepped until something has come about."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from replicas.errors import EngineDied
from replicas.protocol.events import CacheEvent
from replicas.protocol.frames import RequestKey, StepFrame, TokenDelta
from tests.replicas.builders import EventBalance, engine_request

WAIT_SECONDS = 60.0
"""For one thing, on a busy machine."""


class Driven:
    """An engine that has begun, and what it has said."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.deltas: dict[RequestKey, list[TokenDelta]] = {}
        self.events: list[CacheEvent] = []
        self.balance = EventBalance()
        self.frame = StepFrame()
        self._serial = 100

    def add(self, token_ids: list[int], **fields: Any) -> RequestKey:
        self._serial += 1
        request = engine_request(token_ids, serial=self._serial, **{"ignore_eos": True, **fields})
        self.engine.add(request)
        self.deltas[request.key] = []
        return request.key

    def step(self) -> None:
        self.frame = self.engine.step()
        self.events += self.frame.events
        self.balance.apply(self.frame.events)
        for delta in self.frame.deltas:
            self.deltas[delta.key].append(delta)

    def finish(self, key: RequestKey) -> TokenDelta:
        self.step_until(lambda: bool(self.deltas[key]) and self.deltas[key][-1].finish_reason is not None)
        return self.deltas[key][-1]

    def tokens(self, key: RequestKey) -> list[int]:
        return [token for delta in self.deltas[key] for token in delta.token_ids]

    def step_until(self, condition: Callable[[], bool]) -> None:
        ends_at = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < ends_at, "it does not come about"
            time.sleep(0.002)
            self.step()

    def dies(self, match: str) -> None:
        with pytest.raises(EngineDied, match=match):
            ends_at = time.monotonic() + WAIT_SECONDS
            while time.monotonic() < ends_at:
                time.sleep(0.01)
                self.step()

    def num_tokens(self, key: RequestKey) -> int:
        return sum(delta.num_tokens for delta in self.deltas[key])
