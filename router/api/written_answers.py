"""Answers that are written without running anything: small bodies' at once, others' beside the event loop.

Owns which is done where.
"""

import contextlib
from typing import Protocol

from starlette.requests import Request

from router.api.context import ApiContext
from router.caller import caller_of
from router.edge.connections import address_of
from router.large_bodies.body_weight import is_light
from router.large_bodies.jobs import WrittenAnswer
from router.prompt.engines import TooMuchWork
from router.prompt.text_model import TextModels


class WriteAnswer(Protocol):
    """May raise TooMuchWork only if it is to be bounded."""

    def __call__(self, models: TextModels, body: bytes, *, is_bounded: bool) -> bytes: ...


async def written_answer(
    context: ApiContext, request: Request, kind: str, body: bytes, write: WriteAnswer
) -> bytes:
    """`kind` is what the process beside the event loop knows `write` by. Raises a RouterError."""
    if is_light(body):
        with contextlib.suppress(TooMuchWork):
            return write(context.catalog.within(caller_of(request.scope).namespace), body, is_bounded=True)
    outcome = await context.worker.prepare(kind, body, address_of(request.scope.get("client")))
    assert isinstance(outcome, WrittenAnswer)
    return outcome.body
