"""Frames: what travels between a router and a replica while requests run, and to the engine's own process.

Owns these structs, which are the wire format: `wire.py` encodes them as they stand, and the annotations are
checked where they are decoded. One request is one `Submit`; it asks for `num_choices` independent
continuations of one prompt, each named by a `RequestKey`.

Structs that are encoded by name may get a field anywhere, those that are `array_like` at their end only, and
each new field has a default: so two versions still understand each other.
"""

import enum
from typing import Annotated, NamedTuple, NewType

from msgspec import Meta, Struct, field

from replicas.protocol.blocks import (
    HASH_BYTES,
    BlockHash,
    MediaSpan,
    PublishedBeginning,
    unpack_token_ids,
)
from replicas.protocol.bounds import (
    MAX_BLOCKS,
    MAX_BYTES,
    MAX_REQUESTS,
    MAX_SECONDS,
    MAX_TOKENS,
    Int32,
    Uint32,
    Uint64,
)
from replicas.protocol.events import CacheEvent
from replicas.protocol.grammar_bounds import MAX_GRAMMAR_CHARACTERS
from replicas.protocol.hand_overs import MAX_BUCKET_BYTES, StoreAnswer
from replicas.protocol.media import MediaAnswer
from replicas.protocol.prefix_leases import MAX_LEASES, LeaseAnswer, LeaseBreak, LeaseTotals, PrefixLease
from replicas.protocol.pulls import PullHint
from replicas.protocol.tier_figures import TierFigures

MAX_DELTAS_PER_FRAME = 4096
"""This many deltas stay under a few MiB even with twenty logprobs each."""

MAX_USER_TAG_BYTES = 16
MAX_LISTED = 1 << 20
"""Entries of any list in a submit, and tokens in a delta."""

NumRequests = Annotated[int, Meta(ge=0, le=MAX_REQUESTS)]
NumTokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
NumBlocks = Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]
NumBytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_SECONDS)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class RequestKey(NamedTuple):
    """One choice of one request. `number` is the submit id on a stream, and the serial inside a replica."""

    number: Uint64
    choice: Uint32


UserTag = NewType("UserTag", bytes)
"""Which user a request is from: a digest that only routers can make, or empty if the request names none."""

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
    MEDIA_MISSING = "media_missing"
    """What the prompt refers to has not come, or is forgotten: to be sent again, and the request after it."""


class SamplingParams(Struct, frozen=True, omit_defaults=True):
    """How to continue a prompt. Validated by the router for the client, and by the replica for itself.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 keep every token. `seed` is always set by the
    router: the n-th output token of a choice depends on (seed, choice, n) alone, whatever else is in
    the batch, so a generation can be resumed elsewhere. `num_logprobs` None means no logprobs, 0 the
    chosen token's only. The output follows `grammar`, in llguidance's notation, and ends where it is
    complete, whatever `min_tokens` and `ignore_eos` say; "" is none. `grammar_bytes` is the memory that
    following it takes, as the router found when it worked it out; 0 is not known.
    """

    max_tokens: Uint32
    min_tokens: Uint32 = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Uint32 = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: Uint64 = 0
    logit_bias: Annotated[tuple[tuple[Uint32, float], ...], Meta(max_length=MAX_LISTED)] = ()
    stop_token_ids: Annotated[tuple[Uint32, ...], Meta(max_length=MAX_LISTED)] = ()
    ignore_eos: bool = False
    num_logprobs: Uint32 | None = None
    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARACTERS)] = ""
    grammar_bytes: NumBytes = 0


class Submit(Struct, frozen=True, omit_defaults=True):
    """Run one prompt. `submit_id` counts the submits of a stream, from 1.

    `packed_tokens` is what `pack_token_ids` makes of the prompt: it is packed once in the router and unpacked
    once beside the engine. `root` is the namespace root of its block chain, but for the beginning that is
    `published`, if any. The last `num_output_tokens` of
    the tokens are not prompt but output that another replica already produced: a resumed generation, whose
    limits, penalties and random numbers go on counting from there. Lower `priority` goes first. `adapter`
    names one of the model card's. `announced_hashes` are those of the prompt's blocks that the index would
    keep and that the router believes this replica will have to compute: the replica announces them to all
    routers under `announcement_id`, a number of the router's that no other request anywhere has. 0 is none.
    `num_expected_tokens` is how many tokens the router expects it to compute, for the load until the engine
    has counted it; 0 is not known. `leases` are wishes for how long the prompt's KV is kept, and with them
    comes the `bucket`, by which a replica that drains finds who should keep it then. `tenant` is
    a digest of whose request it is, empty where there are no keys; the shares are that tenant's own, of the
    room for leases and of each tier below the device, and 0 is no bound of its own. `pull` says who
    has more of it, where it should be sooner to read it there than to compute it. `request_id` is
    that of the client's request, for logs; `trace_parent` names the span that this submit belongs to, as
    W3C's traceparent does, and `trace_state` is the tracestate that comes with it. None of these three
    changes what is done.

    Raises ValueError for tokens that are torn, and for more announced blocks than tokens.
    """

    submit_id: Uint64
    packed_tokens: bytes
    sampling: SamplingParams
    root: Annotated[BlockHash, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
    num_choices: Annotated[int, Meta(ge=1, le=2**32 - 1)] = 1
    media: Annotated[tuple[MediaSpan, ...], Meta(max_length=MAX_LISTED)] = ()
    priority: Int32 = 0
    num_output_tokens: Uint32 = 0
    adapter: str | None = None
    user: Annotated[UserTag, Meta(max_length=MAX_USER_TAG_BYTES)] = NO_USER
    announced_hashes: tuple[
        Annotated[BlockHash, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)], ...
    ] = ()
    announcement_id: Uint64 = 0
    num_expected_tokens: Uint32 = 0
    leases: Annotated[tuple[PrefixLease, ...], Meta(max_length=MAX_LEASES)] = ()
    bucket: Annotated[bytes, Meta(max_length=MAX_BUCKET_BYTES)] = b""
    tenant: Annotated[bytes, Meta(max_length=MAX_USER_TAG_BYTES)] = b""
    lease_share: Share = 0.0
    store_share: Share = 0.0
    pull: PullHint | None = None
    published: PublishedBeginning | None = None
    request_id: str = ""
    trace_parent: str = ""
    trace_state: str = ""

    def __post_init__(self) -> None:
        if len(self.packed_tokens) % 4:
            raise ValueError(f"{len(self.packed_tokens)} bytes are not tokens of 4 bytes each")
        if len(self.announced_hashes) > self.num_tokens:
            raise ValueError(
                f"{self.num_tokens} tokens cannot become {len(self.announced_hashes)} announced blocks"
            )

    @property
    def num_tokens(self) -> int:
        return len(self.packed_tokens) // 4

    def token_ids(self) -> list[int]:
        """Unpacked anew with every call."""
        return unpack_token_ids(self.packed_tokens)


class Abort(Struct, frozen=True, array_like=True):
    """Stop one choice, or every choice of the request (`choice` None). Unknown requests are ignored."""

    submit_id: Uint64
    choice: Uint32 | None = None


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Natural-log probabilities of one sampled token and of the likeliest ones, likeliest first."""

    token_id: Uint32
    logprob: float
    top: tuple[tuple[Uint32, float], ...] = ()


class PromptUsage(Struct, frozen=True, omit_defaults=True):
    """How a prompt was served: `num_cached_tokens` were read from cache, never computed.

    `num_written_tokens` are the tokens of full prompt blocks that this request added to the cache.
    `num_cross_user_tokens` of the cached ones lie in blocks that another user's request computed,
    `num_own_tokens` in blocks that an earlier request of the same user did; of the rest either user is not
    known. `num_slower_tier_tokens` of the cached ones were read back from a tier below the device, of these
    `num_disk_tokens` from disk and `num_pulled_tokens` from a peer, for this request.

    `leases` answers those of the submit, in their order; none of them means that nobody has looked at them.
    `num_evicted_early_tokens` of those that were not cached had been leased and went before their time, the
    first of them for the reason `broken_by`. Of the rest of those that were not cached, `num_unmoved_tokens`
    lay below the device, where computing them was sooner than moving them; `num_lost_tokens` were to be moved
    and did not come, or not in time; and `num_expired_tokens` had been leased, and went when that was over.
    """

    num_prompt_tokens: Uint32
    num_cached_tokens: Uint32
    num_written_tokens: Uint32
    num_cross_user_tokens: Uint32 = 0
    num_own_tokens: Uint32 = 0
    num_slower_tier_tokens: Uint32 = 0
    num_disk_tokens: Uint32 = 0
    num_pulled_tokens: Uint32 = 0
    leases: Annotated[tuple[LeaseAnswer, ...], Meta(max_length=MAX_LEASES)] = ()
    num_evicted_early_tokens: Uint32 = 0
    broken_by: LeaseBreak | None = None
    num_unmoved_tokens: Uint32 = 0
    num_lost_tokens: Uint32 = 0
    num_expired_tokens: Uint32 = 0

    @property
    def num_device_tokens(self) -> int:
        return self.num_cached_tokens - self.num_slower_tier_tokens

    @property
    def num_host_tokens(self) -> int:
        """Of the cached ones, those from a peer among them; with those of the device and of the disk they
        are all of them.
        """
        return self.num_slower_tier_tokens - self.num_disk_tokens


class Refusal(Struct, frozen=True):
    code: RefusalCode
    message: str


class TokenDelta(Struct, frozen=True, array_like=True):
    """What one engine step added to one choice. A delta with a `finish_reason` is the choice's last.

    `usage` comes with the first delta of each choice. `refusal` comes with FinishReason.ERROR only.
    """

    key: RequestKey
    token_ids: Annotated[tuple[Uint32, ...], Meta(max_length=MAX_LISTED)] = ()
    finish_reason: FinishReason | None = None
    usage: PromptUsage | None = None
    logprobs: Annotated[tuple[TokenLogprobs, ...], Meta(max_length=MAX_LISTED)] | None = None
    refusal: Refusal | None = None


class LoadSnapshot(Struct, frozen=True, omit_defaults=True):
    """How busy a replica is. Rates and times are measured from its own steps; 0.0 means not yet known.

    A replica with memory below its device says what bringing a token's KV to the device takes, from host
    memory, and to host memory, from disk or from a peer; `move_backlog_seconds` is how long what moves
    already takes. `num_host_bytes` and `num_disk_bytes` are in use there, of at most `max_host_bytes` and
    `max_disk_bytes`, which are 0 where there is no such tier.

    `num_pending_tokens` are prompt tokens of admitted requests that are still to be computed, and
    `num_pending_image_tokens` are those of images that are still to be encoded for them, of which each takes
    `encode_seconds_per_token` more. `num_context_tokens` are the tokens held by running requests.
    """

    num_running: NumRequests = 0
    num_waiting: NumRequests = 0
    num_pending_tokens: NumTokens = 0
    num_context_tokens: NumTokens = 0
    num_used_blocks: NumBlocks = 0
    num_cached_blocks: NumBlocks = 0
    num_total_blocks: NumBlocks = 0
    prefill_seconds_per_token: Seconds = 0.0
    decode_step_seconds: Seconds = 0.0
    host_seconds_per_token: Seconds = 0.0
    disk_seconds_per_token: Seconds = 0.0
    pull_seconds_per_token: Seconds = 0.0
    move_backlog_seconds: Seconds = 0.0
    num_host_bytes: NumBytes = 0
    max_host_bytes: NumBytes = 0
    num_disk_bytes: NumBytes = 0
    max_disk_bytes: NumBytes = 0
    encode_seconds_per_token: Seconds = 0.0
    num_pending_image_tokens: NumTokens = 0


class StepFrame(Struct, frozen=True, array_like=True):
    """All that one engine step said: token deltas of every request, cache events in order, load.

    `num_prefill_tokens` and `num_decode_tokens` are what the step computed, and `num_encoded_tokens` those of
    the images that it encoded, for measuring its speed.
    `started` are the requests that it was the first to compute anything of, `num_preemptions` counts those
    whose blocks it took.
    `load` counts every request whose serial is at most `last_serial`, as far as it still lives, and no
    other; the loop sets it, not the engine. `look_again_seconds` is when to step again though nothing has
    come: something moves that ends by itself. None is never. `leases` and `tiers` come when they
    have changed. `answers` are the store's, to what it was asked; `media` says what became of items that
    were to be taken.
    """

    deltas: list[TokenDelta] = field(default_factory=list)
    events: list[CacheEvent] = field(default_factory=list)
    load: LoadSnapshot = LoadSnapshot()
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    last_serial: int = 0
    started: list[RequestKey] = field(default_factory=list)
    num_preemptions: int = 0
    look_again_seconds: float | None = None
    leases: LeaseTotals | None = None
    tiers: TierFigures | None = None
    answers: list[StoreAnswer] = field(default_factory=list)
    media: list[MediaAnswer] = field(default_factory=list)
    num_encoded_tokens: int = 0


class ClientFrame(Struct, frozen=True, array_like=True):
    """Router to replica. `knows_draining` answers a frame with `is_draining`: no submit follows."""

    submits: tuple[Submit, ...] = ()
    aborts: tuple[Abort, ...] = ()
    knows_draining: bool = False


class ServerFrame(Struct, frozen=True, array_like=True):
    """Replica to one router: that router's share of a StepFrame.

    `load` counts the first `num_counted_submits` submits of this stream, as far as they still live.
    `is_draining` asks for nothing new; what was sent before the router has read it is still taken.
    """

    deltas: Annotated[tuple[TokenDelta, ...], Meta(max_length=MAX_DELTAS_PER_FRAME)]
    load: LoadSnapshot
    num_counted_submits: Uint64 = 0
    is_draining: bool = False
