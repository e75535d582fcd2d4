"""The Engine protocol: scheduler and model loop of one replica, driven by one thread.

Owns the contract that every engine keeps. Knows nothing of threads, gRPC, Redis or text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from replicas.protocol.blocks import BlockHash, MediaSpan
from replicas.protocol.frames import (
    NO_USER,
    RefusalCode,
    RequestKey,
    SamplingParams,
    StepFrame,
    Submit,
    UserTag,
)
from replicas.protocol.status import ModelCard


class RequestRefused(Exception):
    """The engine will not run this request, and has kept nothing of it."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One continuation of one prompt: a `Submit` with n choices becomes n of these.

    The last `num_output_tokens` of `token_ids` are output of an earlier run, not prompt.
    `sampling.seed` is this choice's own.
    """

    key: RequestKey
    token_ids: Sequence[int]
    sampling: SamplingParams
    root: BlockHash
    media: tuple[MediaSpan, ...] = ()
    priority: int = 0
    num_output_tokens: int = 0
    adapter: str | None = None
    user: UserTag = NO_USER


class Engine(Protocol):
    """What `loop.py` drives. Not thread-safe: one thread calls everything but `card`."""

    @property
    def card(self) -> ModelCard: ...

    def add(self, request: EngineRequest) -> None:
        """Take a request. Raises RequestRefused if it can never run (too long, bad token id, …)."""

    def abort(self, key: RequestKey) -> None:
        """Forget a request and free its blocks now; no delta of it follows. Unknown keys are ignored."""

    def has_work(self) -> bool:
        """Whether `step` has anything to do: a waiting or running request, or an event to report."""

    def step(self) -> StepFrame:
        """Compute one batch and say what came of it. Never blocks for work; may be called when idle."""

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block. False, and nothing happens, while any request holds blocks."""

    def close(self) -> None:
        """Give back memory and devices. Nothing may be called afterwards."""


def expand(submit: Submit, request_id: int) -> list[EngineRequest]:
    """The choices of a Submit as engine requests, under the replica's own `request_id`.

    The first choice prefills; the others find its blocks in the cache, in the same step even.
    Choice i samples with seed + i, so choices differ and choice 0 equals a request for one choice.
    """
    token_ids = submit.token_ids()
    return [
        EngineRequest(
            key=RequestKey(request_id, choice),
            token_ids=token_ids,
            sampling=replace(submit.sampling, seed=(submit.sampling.seed + choice) % 2**64),
            root=submit.root,
            media=submit.media,
            priority=submit.priority,
            num_output_tokens=submit.num_output_tokens,
            adapter=submit.adapter,
            user=submit.user,
        )
        for choice in range(submit.num_choices)
    ]
