"""A scheduler over a model that only counts, step by step."""

from typing import Any

from replicas.protocol.events import BlockStored
from replicas.protocol.frames import PromptUsage, RequestKey, StepFrame
from tests.replicas.builders import FakeModel, engine_request, scheduler


def key(serial: int) -> RequestKey:
    return RequestKey(serial, 0)


def model(**limits: Any) -> FakeModel:
    return FakeModel(scheduler(**limits))


def plan(model: FakeModel) -> list[tuple[int, int, int, bool]]:
    """The chunks of the latest step: serial, first token, tokens, whether it samples."""
    return [
        (chunk.request.key.number, chunk.start, chunk.num_tokens, chunk.samples) for chunk in model.chunks
    ]


def usage(frame: StepFrame) -> PromptUsage:
    [found] = [delta.usage for delta in frame.deltas if delta.usage is not None]
    return found


def add(model: FakeModel, serial: int, num_tokens: int, **fields: Any) -> None:
    """A prompt of its own: no other serial shares a block with it."""
    start = 100 + 50 * serial
    token_ids = [start + position % 50 for position in range(num_tokens)]
    model.scheduler.add(engine_request(token_ids, serial=serial, **fields))


def stored(frame: StepFrame) -> list[BlockStored]:
    return [event for event in frame.events if isinstance(event, BlockStored)]
