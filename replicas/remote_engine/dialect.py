"""Dialect: how one kind of server is asked, and how its answers, cache events and load are read.

Owns the words that all kinds share. A dialect is found by asking the server (`probes.py`), and knows what it
has said of itself. All but that is pure: facts become a body, a chunk becomes deltas, an event becomes one of
`residency.py`'s.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec

from replicas.engine import EngineRequest
from replicas.errors import StartupError
from replicas.protocol.frames import FinishReason, Refusal, SamplingParams, TokenLogprobs
from replicas.protocol.sampling_defaults import PARAMETERS
from replicas.remote_engine.facts import CacheSizes, EventSource, ServerLoad, ServerModel
from replicas.remote_engine.residency import ServerEvent

Ask = Callable[[str, Mapping[str, Any] | None], bytes]
"""GET a path, or POST a body to it. Raises StartupError for anything but an answer, NotThere for a 404."""


class NotThere(StartupError):
    """The server has no such path."""


class Delta(NamedTuple):
    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


class Chunk(NamedTuple):
    """One event of an answer. `num_cached_tokens` is whatever the server says. `handover` is what it says to
    the server of a split's second part."""

    deltas: Sequence[Delta] = ()
    num_cached_tokens: object = None
    refusal: Refusal | None = None
    handover: bytes = b""


Reader = Callable[[bytes], Chunk]
"""Reads the events of one answer, in order. Raises ValueError or MsgspecError."""


class Dialect(Protocol):
    """`look_paths` answer how busy the server is. `advice` is how to have it publish cache events, and
    `advice_on_cached` how to have it report cached tokens. `defaults_in_file` are the sampling defaults in a
    model's file that the server does not apply by itself to what we send. `why_no_nixl`, unless it is empty,
    is why such servers take no part in splits."""

    generate_path: ClassVar[str]
    look_paths: ClassVar[Sequence[str]]
    advice: ClassVar[str]
    advice_on_cached: ClassVar[str]
    why_no_nixl: ClassVar[str]

    @property
    def model(self) -> ServerModel: ...

    @property
    def sizes(self) -> CacheSizes: ...

    @property
    def source(self) -> EventSource | None: ...

    @property
    def defaults_in_file(self) -> Sequence[str]: ...

    def body(self, request: EngineRequest, name: str, eos_token_ids: tuple[int, ...]) -> dict[str, Any]:
        """Return the body of a request; `name` comes back with the events of its blocks, if the server tells
        it. Raises RequestRefused."""
        ...

    def reader(self, request: EngineRequest) -> Reader: ...

    def most_bytes(self, request: EngineRequest) -> int:
        """Return the longest event of an answer."""
        ...

    def cache_event(self, raw: msgspec.Raw) -> ServerEvent:
        """Raises MsgspecError."""
        ...

    def load(self, answers: Sequence[bytes]) -> ServerLoad:
        """Read the answers of `look_paths`. Raises ValueError."""
        ...


def said_parameters(sampling: SamplingParams) -> dict[str, Any]:
    """Return those that a request sets; the server's own defaults hold for the others."""
    return {name: getattr(sampling, name) for name in PARAMETERS if name not in sampling.unsaid}
