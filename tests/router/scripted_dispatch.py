"""A dispatcher that answers from a script, for tests of what lies in front of it."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from replicas.protocol.frames import FinishReason, PromptUsage, RequestKey, TokenDelta, TokenLogprobs
from replicas.protocol.status import ReplicaId
from router.fleet.inflight import Listener
from router.generation import Generation
from router.observation.trace_points import NO_TRACE, Trace
from router.routing.decision import Decision, DecisionReason
from router.routing.table import Preview
from router.shared.instruments import Instrument, gauge

NEVER = "never"
"""In a script: nothing more comes until the run is left."""

Step = Sequence[TokenDelta] | Exception | Decision | str | asyncio.Event
"""A decision is that of another attempt; an event is waited for."""

Script = Callable[[Generation], Sequence[Step]]


def says(
    token_ids: Sequence[int],
    *,
    finish: FinishReason = FinishReason.STOP,
    num_cached_tokens: int | None = 0,
    num_written_tokens: int = 0,
    num_cross_user_tokens: int = 0,
    usage_at: int = 0,
    **usage_fields: Any,
) -> Script:
    """Every choice gets one token per batch, then ends. Usage comes with one of the batches."""

    def script(generation: Generation) -> Sequence[Step]:
        usage = PromptUsage(
            len(generation.token_ids),
            num_cached_tokens,
            num_written_tokens,
            num_cross_user_tokens,
            **usage_fields,
        )
        limited = list(token_ids)[: generation.sampling.max_tokens]
        return [
            [
                TokenDelta(
                    RequestKey(1, choice),
                    (token_id,),
                    finish_reason=finish if position == len(limited) - 1 else None,
                    usage=usage if position == usage_at % len(limited) else None,
                    logprobs=_logprobs(generation, token_id),
                )
                for choice in range(generation.num_choices)
            ]
            for position, token_id in enumerate(limited)
        ]

    return script


def in_batches(
    token_ids: Sequence[int], sizes: Sequence[int], finish: FinishReason = FinishReason.STOP
) -> Script:
    """The only choice gets its tokens in batches of these sizes in turn. Usage comes with the first."""

    def script(generation: Generation) -> Sequence[Step]:
        steps: list[Step] = []
        start = 0
        while start < len(token_ids):
            end = start + sizes[len(steps) % len(sizes)]
            usage = None if steps else PromptUsage(len(generation.token_ids), 16, 32)
            reason = finish if end >= len(token_ids) else None
            batch = tuple(token_ids[start:end])
            steps.append([TokenDelta(RequestKey(1, 0), batch, finish_reason=reason, usage=usage)])
            start = end
        return steps

    return script


def _logprobs(generation: Generation, token_id: int) -> tuple[TokenLogprobs, ...] | None:
    wanted = generation.sampling.num_logprobs
    if wanted is None:
        return None
    top = tuple((token_id + rank, -0.5 - rank) for rank in range(wanted))
    return (TokenLogprobs(token_id, -0.5, top),)


class ScriptedDispatcher:
    """Set `script`, then look at `generations`, `aborted` and `num_open`."""

    def __init__(self) -> None:
        self.script: Script = says([])
        self.generations: list[Generation] = []
        self.aborted: list[int] = []
        self.num_open = 0
        self.has_started = asyncio.Event()
        self.is_silent = False
        self.num_waiting = 0
        self.run_type = ScriptedRun

    def run(self, generation: Generation, trace: Trace = NO_TRACE) -> "ScriptedRun":
        self.generations.append(generation)
        return self.run_type(self, list(self.script(generation)))

    def preview(self, generation: Generation) -> Preview:
        return Preview(ScriptedRun.decision, (ReplicaId("replica-7"),))

    def retry_after_seconds(self, model: str) -> float:
        return 7.0

    def instruments(self) -> Iterator[Instrument]:
        yield gauge("router_runs", "Generations that are being dispatched", lambda: self.num_open)


class ScriptedRun:
    decision = Decision(ReplicaId("replica-7"), 32, DecisionReason.OVERLAP, 0, ())
    decision_seconds = 0.001
    replica_id = ReplicaId("replica-7")

    def __init__(self, dispatcher: ScriptedDispatcher, steps: list[Step]) -> None:
        self._dispatcher = dispatcher
        self._steps = steps
        self._aborted: set[int] = set()
        self._listener: Listener | None = None
        self.num_waiting = dispatcher.num_waiting

    async def __aenter__(self) -> "ScriptedRun":
        self._dispatcher.num_open += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._dispatcher.num_open -= 1

    def __aiter__(self) -> "ScriptedRun":
        return self

    async def __anext__(self) -> Sequence[TokenDelta]:
        await asyncio.sleep(0)
        if not self._steps:
            raise StopAsyncIteration
        step = self._steps.pop(0)
        self._dispatcher.has_started.set()
        if isinstance(step, Exception):
            raise step
        if isinstance(step, Decision):
            self.decision = step
            return await self.__anext__()
        if isinstance(step, asyncio.Event):
            await step.wait()
            return await self.__anext__()
        if isinstance(step, str):
            self._dispatcher.is_silent = True
            await asyncio.Event().wait()
        batch = [delta for delta in step if delta.key.choice not in self._aborted]
        while batch and self._hears(batch[0]):
            del batch[0]
        return batch

    def listen(self, listener: Listener) -> None:
        self._listener = listener

    def _hears(self, delta: TokenDelta) -> bool:
        """As a real run offers what is in the middle of a choice."""
        is_middle = delta.finish_reason is None and delta.usage is None
        return is_middle and self._listener is not None and self._listener(delta)

    def abort_choice(self, choice: int) -> None:
        self._aborted.add(choice)
        self._dispatcher.aborted.append(choice)
