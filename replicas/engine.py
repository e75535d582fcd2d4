"""The Engine protocol: scheduler and model loop of one replica, driven by one thread.

Owns the contract that every engine keeps. Threads, gRPC, Redis and text are outside of it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from replicas.protocol.frames import (
    RefusalCode,
    RequestKey,
    SamplingParams,
    ServerError,
    StepFrame,
    Submit,
)
from replicas.protocol.hand_overs import StoreQuestion
from replicas.protocol.media import ImageQuery
from replicas.protocol.status import ModelCard, SplitWay


class RequestRefused(Exception):
    """The engine refuses this request and keeps nothing of it. `error` is what clients get of it."""

    def __init__(self, code: RefusalCode, message: str, error: ServerError | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.error = error


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One continuation of one prompt: a `Submit` with n choices becomes n of these.

    `key` has the replica's own id, not the submit's. `token_ids` are the submit's unpacked tokens; the
    choices share them, so they must not be changed.
    """

    key: RequestKey
    submit: Submit
    token_ids: Sequence[int]

    @property
    def sampling(self) -> SamplingParams:
        """With the seed of the first choice: each has a `seed` of its own."""
        return self.submit.sampling

    @property
    def seed(self) -> int:
        """Choices differ, and the first equals a request for one choice."""
        return (self.submit.sampling.seed + self.key.choice) % 2**64


@dataclass(frozen=True, slots=True)
class SharedKv:
    """An engine's host memory for KV, for readers on the same machine that bypass the engine.

    `fd` is open in the process `pid`. `layout` is the digest of the payload's layout.
    """

    pid: int
    fd: int
    num_slots: int
    payload_bytes: int
    layout: bytes


def with_layout(card: ModelCard, shared: SharedKv | None) -> ModelCard:
    """Return the card with the layout of KV that this engine can use."""
    if shared is None:
        return card
    return dataclasses.replace(card, kv_layout=shared.layout.hex(), splits_by=SplitWay.PULL)


class Engine(Protocol):
    """The engine as `loop.py` drives it. Not thread-safe: one thread calls everything but `card`."""

    @property
    def card(self) -> ModelCard:
        """Return the model's card, whose names and adapters may change."""

    @property
    def shared_kv(self) -> SharedKv | None:
        """Return the memory that others may read below the device, or None."""

    def begin(self, wake: Callable[[], None]) -> None:
        """Start serving: earlier calls were proofs, and KV of an earlier life below the device counts from
        now on. The driver calls this once, first. From then on an engine that has something to report while
        its driver waits for requests calls `wake`, in any thread."""

    def add(self, request: EngineRequest) -> None:
        """Take a request. Raises RequestRefused if it can never run (too long, bad token id, …)."""

    def abort(self, key: RequestKey) -> None:
        """Forget a request and free its blocks now; no delta of it follows. Unknown keys are ignored."""

    def ask_store(self, question: StoreQuestion) -> None:
        """Something that is answered in a frame to come. Only of an engine with `shared_kv`."""

    def take_media(self, question: ImageQuery) -> None:
        """Receive an image that prompts will refer to; a later frame reports the outcome. Only for an engine
        whose card has a rule for images."""

    def has_work(self) -> bool:
        """Whether `step` has anything to do: a waiting or running request, or an event to report."""

    def step(self) -> StepFrame:
        """Compute one batch and report it. Never blocks; may be called when idle."""

    def reset_prefix_cache(self) -> bool:
        """Clear the cache. Returns False and does nothing while a request holds blocks."""

    def close(self) -> None:
        """Free memory and devices. The last call."""


def expand(submit: Submit, serial: int) -> list[EngineRequest]:
    """Return the choices of a Submit as engine requests, under the `serial` that the replica gave it.

    The first choice prefills; the others find its blocks in the cache, in the same step even.
    """
    token_ids = submit.token_ids()
    return [EngineRequest(key, submit, token_ids) for key in keys_of(serial, submit)]


def keys_of(serial: int, submit: Submit) -> list[RequestKey]:
    """Return the key of each choice."""
    return [RequestKey(serial, choice) for choice in range(submit.num_choices)]
