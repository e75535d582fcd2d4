"""Frames: messages between a router and a replica while requests run, and to the engine's own process.

Owns these structs, which are the wire format: `wire.py` encodes them as they are, and annotations are checked
at decoding. One request is one `Submit`; it asks for `num_choices` independent continuations of one prompt,
each named by a `RequestKey`.

Structs encoded by name may get a field anywhere, `array_like` ones only at the end, and each new field has a
default: so two versions still understand each other.
"""

import enum
from collections.abc import Iterable
from typing import Annotated, NamedTuple, NewType

from msgspec import Meta, Struct, field

from replicas.protocol.blocks import (
    HASH_BYTES,
    BlockHash,
    ImageTokens,
    PublishedBeginning,
    unpack_token_ids,
)
from replicas.protocol.bounds import (
    MAX_BLOCKS,
    MAX_BYTES,
    MAX_NAME_CHARACTERS,
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
from replicas.protocol.media import ImageQueryAnswer
from replicas.protocol.passed_routes import MOST_TYPE_CHARACTERS
from replicas.protocol.prefix_leases import MAX_LEASES, LeaseAnswer, LeaseBreak, LeaseTotals, PrefixLease
from replicas.protocol.pulls import PullHint
from replicas.protocol.tier_figures import TierFigures

MAX_DELTAS_PER_FRAME = 4096
"""This many deltas stay under a few MiB even with twenty logprobs each."""

MAX_USER_TAG_BYTES = 16
MAX_BODY_BYTES = 48 * 2**20
"""Longest body of a client in a submit, and piece of an answer in a delta."""
MAX_ERROR_BYTES = 16 * 2**10
"""Longest error of a server that is passed on whole."""
MAX_RETRY_AFTER_SECONDS = 1e7
MAX_UNSAID = 16
MAX_HANDOVER_BYTES = 256 * 2**10
"""Block ids of a million tokens."""
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
"""A request's user: a digest that only routers can make; empty if the request names none."""

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
    """An image that the prompt refers to is missing or forgotten; send it and the request again."""


class BodyForm(enum.StrEnum):
    """The form of a client's body, one for each path of OpenAI's and Anthropic's APIs; PASSED is that of a
    route which is passed on."""

    CHAT = "chat"
    COMPLETION = "completion"
    MESSAGES = "messages"
    PASSED = "passed"


class SamplingParams(Struct, frozen=True, omit_defaults=True):
    """How to continue a prompt. Validated by the router for the client, and by the replica for itself.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 keep every token. The router always sets `seed`: the
    n-th output token of a choice depends on (seed, choice, n) alone, not on the batch, so a generation can be
    resumed elsewhere; `is_seeded` if the client chose it. `num_logprobs` None means no logprobs, 0 the chosen
    token's only. The output follows `grammar`, in llguidance's notation, and ends where it is complete,
    regardless of `min_tokens` and `ignore_eos`; "" is none. `grammar_bytes` is its memory as the router
    measured it; 0 is unknown. `unsaid` names parameters on which neither the client nor the model's card has
    a word: a server takes its own default instead of ours.
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
    is_seeded: bool = False
    unsaid: Annotated[tuple[str, ...], Meta(max_length=MAX_UNSAID)] = ()


class Submit(Struct, frozen=True, omit_defaults=True):
    """Run one prompt. `submit_id` counts the submits of a stream, from 1.

    - `packed_tokens`: the prompt by `pack_token_ids`, packed once in the router and unpacked once beside the
      engine. The last `num_output_tokens` were generated by another replica: a resumed generation, whose
      limits, penalties and random numbers continue from there.
    - `root`: the namespace root of the block chain, except for the `published` beginning, if any.
    - `priority`: lower goes first. `adapter`: one of the model card's.
    - `announced_hashes`: the prompt's blocks that the index would keep and that the router expects this
      replica to compute. The replica announces them to all routers under `announcement_id`, which is unique
      in the cluster; 0 is none. `announced_points`: likewise the resume points, for a sparse model.
    - `num_expected_tokens`: tokens that the router expects it to compute, for the load until the engine has
      counted them; 0 is unknown.
    - `leases`: how long the prompt's KV should be kept. `bucket`: finds their next keeper when this replica
      drains.
    - `tenant`: a digest of the request's tenant, empty without keys. The shares are that tenant's, of the
      room for leases and of each tier below the device; 0 is unbounded.
    - `pull`: a peer with more of the prompt, if reading it there should be sooner than computing it.
    - `split_id`: the prompt is computed here for another replica, which takes its KV and answers; the one
      token that is sampled here is of no use. Unique in the cluster; 0 is an ordinary request.
    - `handover`: what the server of the first part of a split has said to the server of the second.
    - `request_id`: the client's request, for logs. `trace_parent`, `trace_state`: as W3C's headers. These
      three change nothing.
    - `body`: the client's, of the form `body_form`, for a replica whose card `takes_bodies`; its answer is
      not resumed elsewhere. One that is passed on goes to `route`, one of the card's, as `content_type`.

    Raises ValueError for torn tokens, and for more announced blocks than tokens.
    """

    submit_id: Uint64
    packed_tokens: bytes
    sampling: SamplingParams
    root: Annotated[BlockHash, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
    num_choices: Annotated[int, Meta(ge=1, le=2**32 - 1)] = 1
    media: Annotated[tuple[ImageTokens, ...], Meta(max_length=MAX_LISTED)] = ()
    priority: Int32 = 0
    num_output_tokens: Uint32 = 0
    adapter: str | None = None
    user: Annotated[UserTag, Meta(max_length=MAX_USER_TAG_BYTES)] = NO_USER
    announced_hashes: tuple[
        Annotated[BlockHash, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)], ...
    ] = ()
    announced_points: tuple[
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
    split_id: Uint64 = 0
    handover: Annotated[bytes, Meta(max_length=MAX_HANDOVER_BYTES)] = b""
    published: PublishedBeginning | None = None
    request_id: str = ""
    trace_parent: str = ""
    trace_state: str = ""
    body: Annotated[bytes, Meta(max_length=MAX_BODY_BYTES)] = b""
    body_form: BodyForm | None = None
    route: Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)] = ""
    content_type: Annotated[str, Meta(max_length=MOST_TYPE_CHARACTERS)] = ""

    def __post_init__(self) -> None:
        if len(self.packed_tokens) % 4:
            raise ValueError(f"{len(self.packed_tokens)} bytes are not tokens of 4 bytes each")
        num_announced = max(len(self.announced_hashes), len(self.announced_points))
        if num_announced > self.num_tokens:
            raise ValueError(f"{self.num_tokens} tokens cannot become {num_announced} announced blocks")

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

    None is an engine that does not say; then every other count but the prompt's own is 0.

    `num_written_tokens` are tokens of full prompt blocks that this request added to the cache.
    `num_cross_user_tokens` of the cached ones lie in blocks that another user's request computed,
    `num_own_tokens` in blocks of the same user's earlier requests; for the rest either user is unknown.
    `num_slower_tier_tokens` of the cached ones were read back from below the device for this request,
    `num_disk_tokens` of these from disk and `num_pulled_tokens` from a peer.

    `leases` answers those of the submit in order; empty if the engine does not report on them. Of the tokens
    that were not cached, `num_evicted_early_tokens` had been leased and went before their time, the first for
    the reason `broken_by`. Of the others, `num_unmoved_tokens` lay below the device, where computing was
    sooner than moving; `num_lost_tokens` were to be moved and did not come in time; `num_expired_tokens` were
    evicted after their lease ended; `num_unresumable_tokens`, the first of all, were held by some layers, but
    no resume point lay behind them.

    `num_split_tokens` were pulled from the replica that computed the prompt for this request; a router sets
    it, for its client, and the replica of a server that was handed the prompt over. They are neither cached
    nor computed twice. `handover` is what the server of a split's first part says to that of the second.

    `answer_id` is the id that a server has given an answer which it wrote itself; empty if there is none.
    """

    num_prompt_tokens: Uint32
    num_cached_tokens: Uint32 | None
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
    num_unresumable_tokens: Uint32 = 0
    answer_id: str = ""
    num_split_tokens: Uint32 = 0
    handover: Annotated[bytes, Meta(max_length=MAX_HANDOVER_BYTES)] = b""

    @property
    def num_device_tokens(self) -> int:
        return (self.num_cached_tokens or 0) - self.num_slower_tier_tokens

    @property
    def num_host_tokens(self) -> int:
        """Cached tokens in host memory, including a peer's; with those on the device and on disk they add up
        to all."""
        return self.num_slower_tier_tokens - self.num_disk_tokens


def num_cached_of(usages: Iterable[PromptUsage]) -> int | None:
    """Sum what prompts read from cache; None if it is not known of all of them."""
    num_cached = 0
    for usage in usages:
        if usage.num_cached_tokens is None:
            return None
        num_cached += usage.num_cached_tokens
    return num_cached


ErrorWord = Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)]


class ServerError(Struct, frozen=True, omit_defaults=True):
    """The error of a server beside a replica, or of an engine in its stead, for the client. `body` is all of
    it as JSON, if that is in the form of the client's API; `retry_after_seconds` is when the server says to
    come back."""

    status: Annotated[int, Meta(ge=400, le=599)]
    type: ErrorWord | None = None
    param: ErrorWord | None = None
    code: ErrorWord | None = None
    retry_after_seconds: Annotated[float, Meta(ge=0.0, le=MAX_RETRY_AFTER_SECONDS)] | None = None
    body: Annotated[bytes, Meta(max_length=MAX_ERROR_BYTES)] = b""


class Refusal(Struct, frozen=True, omit_defaults=True):
    """`error` is the server's own, in whose words `message` then is. A client gets it as it is: at once for
    a request that is to blame itself, else once no other replica has served the request."""

    code: RefusalCode
    message: str
    error: ServerError | None = None


class TokenDelta(Struct, frozen=True, array_like=True):
    """One engine step's output for one choice. A delta with a `finish_reason` is the choice's last.

    `usage` comes with the first delta of each choice. `refusal` comes with FinishReason.ERROR only. `body` is
    more of the answer to a submit with a body, in whole events if it streams; its tokens have no ids, and
    `num_counted` says how many they are. Where a route is passed on, the first `body` is the content type of
    what follows.
    """

    key: RequestKey
    token_ids: Annotated[tuple[Uint32, ...], Meta(max_length=MAX_LISTED)] = ()
    finish_reason: FinishReason | None = None
    usage: PromptUsage | None = None
    logprobs: Annotated[tuple[TokenLogprobs, ...], Meta(max_length=MAX_LISTED)] | None = None
    refusal: Refusal | None = None
    body: Annotated[bytes, Meta(max_length=MAX_BODY_BYTES)] | None = None
    num_counted: Uint32 = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_counted


class LoadSnapshot(Struct, frozen=True, omit_defaults=True):
    """How busy a replica is. Rates and times are measured from its own steps; 0.0 means unknown.

    A replica with memory below its device reports the seconds per token from host memory to the device, and
    to host memory from disk and from a peer. `move_backlog_seconds` is the time of moves under way.
    `num_host_bytes` and `num_disk_bytes` are in use, of at most `max_host_bytes` and `max_disk_bytes`, which
    are 0 without such a tier.

    `is_predicted`: what the replica says it holds is believed, not reported by its engine.

    `num_places`: as many requests as the engine computes at a time, where it says so, else 0. Each has its
    place for `place_seconds` on average.

    `num_pending_tokens` are prompt tokens of admitted requests still to be computed, and
    `num_pending_image_tokens` those of images still to be encoded, each of which takes
    `encode_seconds_per_token` more. `num_context_tokens` are held by running requests.

    `num_room_tokens` of KV are free beyond what the prompts of its requests still need; below 0, that many
    are lacking, and None is unknown. Requests that end give room for a token back every
    `room_seconds_per_token`.
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
    is_predicted: bool = False
    num_places: NumRequests = 0
    place_seconds: Seconds = 0.0
    num_room_tokens: Annotated[int, Meta(ge=-MAX_TOKENS, le=MAX_TOKENS)] | None = None
    room_seconds_per_token: Seconds = 0.0

    @property
    def has_speeds(self) -> bool:
        """Whether the engine has measured its speeds itself."""
        return bool(self.prefill_seconds_per_token or self.decode_step_seconds)


class StepFrame(Struct, frozen=True, array_like=True):
    """One engine step's output: token deltas of all requests, cache events in order, load.

    `num_prefill_tokens`, `num_decode_tokens` and `num_encoded_tokens` (of images) are the step's work, for
    measuring its speed. `started` are requests that it computed for the first time; `num_preemptions` counts
    requests that lost their blocks. `load` counts exactly the live requests with serials up to `last_serial`;
    the loop sets it, not the engine. `look_again_seconds` is when to step again without input, because a move
    ends by itself; None is never. `leases` and `tiers` come when they changed. `answers` are the store's;
    `media` reports on images to receive.
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
    media: list[ImageQueryAnswer] = field(default_factory=list)
    num_encoded_tokens: int = 0


class ClientFrame(Struct, frozen=True, array_like=True):
    """Router to replica. `knows_draining` answers a frame with `is_draining`: no submit follows."""

    submits: tuple[Submit, ...] = ()
    aborts: tuple[Abort, ...] = ()
    knows_draining: bool = False


class ServerFrame(Struct, frozen=True, array_like=True):
    """Replica to one router: that router's share of a StepFrame.

    `load` counts the live ones of the first `num_counted_submits` submits of this stream. `is_draining` asks
    for no new submits; those sent before the router has read it are still taken.
    """

    deltas: Annotated[tuple[TokenDelta, ...], Meta(max_length=MAX_DELTAS_PER_FRAME)]
    load: LoadSnapshot
    num_counted_submits: Uint64 = 0
    is_draining: bool = False
