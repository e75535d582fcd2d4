"""TakeOverService: serves calls by which other replicas hand their leases over.

Owns the bound on parallel calls, and their deadline. The store decides what it takes, and pulls it.
"""

from typing import Any

import grpc
from prometheus_client import Counter

from replicas.protocol.hand_overs import MAX_HAND_OVER_SECONDS, HandOverOutcome, TakenOver
from replicas.protocol.wire import decode_take_over
from replicas.serving.store_questions import StoreQuestions

MAX_CALLS = 4

GRACE_SECONDS = 5.0
"""More than the longest deadline allows, for clocks and for the way."""

ANSWER_SECONDS = 0.1
"""Margin before the deadline for an answer, even an empty one."""


class TakeOverService:
    """For KV of this layout; None takes nothing."""

    def __init__(self, layout: bytes | None, store: StoreQuestions, outcomes: Counter) -> None:
        """`outcomes` counts chunks."""
        self._layout = layout
        self._store = store
        self._outcomes = outcomes
        self._num_calls = 0
        self.is_draining = False

    async def serve(self, encoded: bytes, context: Any) -> TakenOver:
        try:
            take_over = decode_take_over(encoded)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if self._layout is None or self.is_draining or take_over.layout != self._layout:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "this replica takes no KV over, or none of this layout"
            )
        seconds = context.time_remaining()
        if seconds is None or seconds > MAX_HAND_OVER_SECONDS + GRACE_SECONDS:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"to take chunks over has a deadline within {MAX_HAND_OVER_SECONDS:g} seconds",
            )
        if self._num_calls >= MAX_CALLS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._num_calls} replicas hand over already"
            )
        self._num_calls += 1
        try:
            outcomes = await self._store.keep(take_over, max(0.0, seconds - ANSWER_SECONDS))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the chunks did not come in time")
        finally:
            self._num_calls -= 1
        if HandOverOutcome.BUSY in outcomes:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "too many chunks are on their way already"
            )
        if self.is_draining:  # since it was asked: what it has kept goes with it
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this replica has begun to leave")
        for outcome in outcomes:
            self._outcomes.labels(outcome.value).inc()
        return TakenOver(tuple(outcomes))
