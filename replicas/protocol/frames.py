"""Frames: what travels between a router and a replica while requests run.

Owns the plain data of the request path. `wire.py` turns it into protobuf; nothing here knows that.
One request is one `Submit`; it asks for `num_choices` independent continuations of one prompt, each
named by a `RequestKey`.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NewType

from replicas.protocol.blocks import BlockHash, MediaSpan
from replicas.protocol.events import CacheEvent


class RequestKey(NamedTuple):
    """One choice of one request. Ids are the sender's own: unique per stream, reused never."""

    request_id: int
    choice: int


UserTag = NewType("UserTag", bytes)
"""Whom a request is from: a digest that only routers can make, or empty for nobody in particular."""

NO_USER = UserTag(b"")


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RefusalCode(enum.StrEnum):
    """Why a replica would not take, or could not finish, a request."""

    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    INVALID_REQUEST = "invalid_request"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    INTERNAL = "internal"
    ENGINE_FAILED = "engine_failed"
    """The whole engine, and with it every request there."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a prompt. Validated by the router for the client, and by the replica for itself.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 keep every token. `seed` is always set by the
    router: the n-th output token of a choice depends on (seed, choice, n) alone, whatever else is in
    the batch, so a generation can be resumed elsewhere. `num_logprobs` None means no logprobs, 0 the
    chosen token's only.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Submit:
    """Run one prompt.

    `root` is the namespace root of its block chain. The last `num_output_tokens` of `token_ids` are
    not prompt but output that another replica already produced: a resumed generation, whose limits,
    penalties and random numbers go on counting from there. Lower `priority` goes first. `adapter` names
    one of the model card's. `announced_hashes` are those of the prompt's blocks that the index would
    keep and that the router believes this replica will have to compute: the replica announces them to all
    routers under `announcement_id`, a number of the router's that no other request anywhere has. 0 is none.
    `num_expected_tokens` is how many tokens the router expects it to compute, for the load until the engine
    has counted it; 0 is not known. `origin_id` is the request's id at the router, for logs; `trace_parent`
    names the span that this submit belongs to, as W3C's traceparent does, and `trace_state` is the tracestate
    that comes with it. None of them changes what is done.
    """

    request_id: int
    token_ids: Sequence[int]
    sampling: SamplingParams
    root: BlockHash
    num_choices: int = 1
    media: tuple[MediaSpan, ...] = ()
    priority: int = 0
    num_output_tokens: int = 0
    adapter: str | None = None
    user: UserTag = NO_USER
    announced_hashes: tuple[BlockHash, ...] = ()
    announcement_id: int = 0
    num_expected_tokens: int = 0
    origin_id: str = ""
    trace_parent: str = ""
    trace_state: str = ""


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop one choice, or every choice of the request (`choice` None). Unknown requests are ignored."""

    request_id: int
    choice: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of one sampled token and of the likeliest ones, likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptUsage:
    """How a prompt was served: `num_cached_tokens` were read from cache, never computed.

    `num_written_tokens` are the tokens of full prompt blocks that this request added to the cache.
    `num_cross_user_tokens` of the cached ones lie in blocks that another user's request computed,
    `num_own_tokens` in blocks that an earlier request of the same user did; of the rest either user is not
    known. `num_slower_tier_tokens` of the cached ones were read back from a tier below the device.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_written_tokens: int
    num_cross_user_tokens: int = 0
    num_own_tokens: int = 0
    num_slower_tier_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    code: RefusalCode
    message: str


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one engine step added to one choice. A delta with a `finish_reason` is the choice's last.

    `usage` comes with the first delta of each choice. `refusal` comes with FinishReason.ERROR only.
    """

    key: RequestKey
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    usage: PromptUsage | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """How busy a replica is. Rates and times are measured from its own steps; 0.0 means not yet known.

    `num_pending_tokens` are prompt tokens of admitted requests that are still to be computed.
    `num_context_tokens` are the tokens held by running requests.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_pending_tokens: int = 0
    num_context_tokens: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    num_total_blocks: int = 0
    prefill_seconds_per_token: float = 0.0
    decode_step_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StepFrame:
    """All that one engine step said: token deltas of every request, cache events in order, load.

    `num_prefill_tokens` and `num_decode_tokens` are what the step computed, for measuring its speed.
    `started` are the requests that it was the first to compute anything of, `num_preemptions` counts those
    whose blocks it took.
    `load` counts every request whose id is at most `last_request_id`, as far as it still lives, and no
    other; the loop sets it, not the engine.
    """

    deltas: list[TokenDelta] = field(default_factory=list)
    events: list[CacheEvent] = field(default_factory=list)
    load: LoadSnapshot = LoadSnapshot()
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    last_request_id: int = 0
    started: list[RequestKey] = field(default_factory=list)
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class ClientFrame:
    """Router to replica. `knows_draining` answers a frame with `is_draining`: no submit follows."""

    submits: tuple[Submit, ...] = ()
    aborts: tuple[Abort, ...] = ()
    knows_draining: bool = False


@dataclass(frozen=True, slots=True)
class ServerFrame:
    """Replica to one router: that router's share of a StepFrame.

    `load` counts the first `num_counted_submits` submits of this stream, as far as they still live.
    `is_draining` asks for nothing new; what was sent before the router has read it is still taken.
    """

    deltas: tuple[TokenDelta, ...]
    load: LoadSnapshot
    num_counted_submits: int = 0
    is_draining: bool = False
