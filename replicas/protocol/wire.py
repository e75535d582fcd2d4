"""The messages of the gRPC service: the structs of `frames.py` and `status.py` in msgpack.

Owns the encoder, the decoders, and checks beyond a struct's annotations. Every decoder raises ValueError for
a message that breaks the contract. A ServerFrame is read whole in one call, or part by part, so that one
wrong part costs no other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from replicas.protocol.bounds import (
    MAX_BLOCKS,
    MAX_CARD_NAMES,
    MAX_MESSAGE_CHARACTERS,
    MAX_NAME_CHARACTERS,
    MAX_TOKENS,
    Uint64,
    checked_address,
    checked_count,
    checked_id,
    checked_name,
    shown,
)
from replicas.protocol.frames import (
    MAX_DELTAS_PER_FRAME,
    Abort,
    ClientFrame,
    LoadSnapshot,
    PromptUsage,
    RequestKey,
    ServerFrame,
    Submit,
    TokenDelta,
    TokenLogprobs,
)
from replicas.protocol.hand_overs import TakenOver, TakeOver
from replicas.protocol.image_rules import MAX_RULE_CHARACTERS
from replicas.protocol.media import ImagePart, ImageTaken
from replicas.protocol.pulls import PullPart, PullRequest
from replicas.protocol.status import Epoch, ModelCard, ReplicaId

SERVICE_NAME = "kvasir.v2.Replica"

MAX_SERVER_FRAME_BYTES = 32 << 20
"""A router reads no larger frame; the channel allows more, for descriptions."""

Kind = TypeVar("Kind")


class DescribeRequest(Struct, frozen=True):
    include_tokenizer: bool = False


class DescribeResponse(Struct, frozen=True):
    """The model card and, if asked for, the model's tokenizer files: a router needs no model on disk."""

    card: ModelCard
    replica_id: ReplicaId
    epoch: Epoch
    tokenizer_files: Mapping[str, bytes] = {}


class BlockList(Struct, frozen=True):
    """Some of the hashes that the index should hold for a replica, one after another."""

    hashes: bytes


class Nothing(Struct, frozen=True):
    """A message without content."""


@dataclass(frozen=True, slots=True)
class BrokenDelta:
    """Stands for a delta of this choice that breaks the contract."""

    key: RequestKey
    problem: str


class LooseFrame(Struct, frozen=True, array_like=True):
    """A ServerFrame of which load and deltas are still to be read."""

    deltas: tuple[Raw, ...]
    load: Raw
    num_counted_submits: Uint64 = 0
    is_draining: bool = False


class _Addressed(Struct, frozen=True, array_like=True):
    """How every delta begins."""

    key: RequestKey


encode = msgspec.msgpack.Encoder().encode


def _decoder(kind: type[Kind]) -> Callable[[bytes | Raw], Kind]:
    decode = msgspec.msgpack.Decoder(kind).decode

    def decoded(encoded: bytes | Raw) -> Kind:
        try:
            return decode(encoded)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"this is not a {kind.__name__}: {shown(str(error))}") from error

    return decoded


decode_client_frame = _decoder(ClientFrame)
decode_server_frame = _decoder(ServerFrame)
decode_describe_request = _decoder(DescribeRequest)
decode_block_list = _decoder(BlockList)
decode_pull_request = _decoder(PullRequest)
decode_pull_part = _decoder(PullPart)
decode_take_over = _decoder(TakeOver)
decode_taken_over = _decoder(TakenOver)
decode_media_part = _decoder(ImagePart)
decode_media_taken = _decoder(ImageTaken)
decode_load = _decoder(LoadSnapshot)
_decode_submit = _decoder(Submit)
_decode_delta = _decoder(TokenDelta)
_decode_addressed = _decoder(_Addressed)
_decode_loose_frame = _decoder(LooseFrame)
_decode_description = _decoder(DescribeResponse)


def encode_submit(submit: Submit) -> bytes:
    """Encode a submit for a client frame. Raises ValueError, OverflowError or TypeError for values that no
    replica would accept."""
    encoded = encode(submit)
    _decode_submit(encoded)
    return encoded


def encode_client_frame(
    submits: Sequence[bytes], aborts: Sequence[Abort] = (), *, knows_draining: bool = False
) -> bytes:
    """Return a ClientFrame of submits that are encoded already."""
    raw: tuple[Any, ...] = tuple(map(Raw, submits))
    return encode(ClientFrame(raw, tuple(aborts), knows_draining))


def decode_loose_frame(encoded: bytes) -> LooseFrame:
    frame = _decode_loose_frame(encoded)
    if len(frame.deltas) > MAX_DELTAS_PER_FRAME:
        raise ValueError(f"a frame has {len(frame.deltas)} deltas, which is too many")
    return frame


def decode_loose_delta(encoded: Raw) -> TokenDelta | BrokenDelta:
    """Decode a delta that may be broken. Raises ValueError if its recipient is unreadable."""
    try:
        return _decode_delta(encoded)
    except ValueError as error:
        return BrokenDelta(_decode_addressed(encoded).key, str(error))


def decode_description(encoded: bytes) -> DescribeResponse:
    description = _decode_description(encoded)
    checked_id(description.replica_id)
    checked_id(description.epoch)
    _check_card(description.card)
    return description


def checked_delta(delta: "TokenDelta | BrokenDelta", vocab_size: int | None = None) -> TokenDelta:
    """Return the delta, a long refusal cut short. `vocab_size`, if it is known, bounds the tokens. Raises
    ValueError."""
    if isinstance(delta, BrokenDelta):
        raise ValueError(delta.problem)
    token_ids = delta.token_ids
    if vocab_size is not None and token_ids and max(token_ids) >= vocab_size:
        raise ValueError(f"token {max(token_ids)} is outside a vocabulary of {vocab_size}")
    if delta.usage is not None:
        _check_usage(delta.usage)
    if delta.logprobs is not None:
        for logprobs in delta.logprobs:
            _check_logprobs(logprobs, vocab_size)
    if delta.refusal is not None and len(delta.refusal.message) > MAX_MESSAGE_CHARACTERS:
        message = delta.refusal.message[:MAX_MESSAGE_CHARACTERS]
        refusal = msgspec.structs.replace(delta.refusal, message=message)
        return msgspec.structs.replace(delta, refusal=refusal)
    return delta


def _check_card(card: ModelCard) -> None:
    checked_name(card.name)
    checked_name(card.fingerprint)
    checked_name(card.engine)
    checked_count(len(card.kv_layout), MAX_NAME_CHARACTERS, "the length of a KV layout")
    for name in (*card.takes_bodies, *card.routes):
        checked_name(name)
    for what, value, most in (
        ("a block size", card.block_size, 1 << 16),
        ("a context length", card.context_length, MAX_TOKENS),
        ("the context that clients are told", card.told_context_length, MAX_TOKENS),
        ("a vocabulary's size", card.vocab_size, MAX_TOKENS),
    ):
        checked_count(value - 1, most, f"{what} less one")
    checked_count(card.capacity_tokens, MAX_BLOCKS << 16, "a capacity in tokens")
    checked_count(card.retention_interval, MAX_TOKENS, "a retention interval")
    checked_count(card.state_tokens, MAX_TOKENS, "the tokens of a state")
    if card.peek_tokens not in (0, card.block_size):
        raise ValueError(f"a draft model peeks {shown(card.peek_tokens)} tokens, not a block or nothing")
    if (
        len(card.eos_token_ids) > MAX_NAME_CHARACTERS
        or max(len(card.adapters), len(card.aliases)) > MAX_CARD_NAMES
    ):
        raise ValueError(f"a model card is too long: {shown(card)}")
    if card.endpoint:
        checked_address(card.endpoint)
    checked_count(len(card.image_rule), MAX_RULE_CHARACTERS, "the length of an image rule")
    for alias in card.aliases:
        checked_name(alias)
    for adapter in card.adapters:
        checked_name(adapter.name)
        checked_name(adapter.fingerprint)


def _check_usage(usage: PromptUsage) -> None:
    """Parts are no larger than the whole."""
    if usage.answer_id:
        checked_name(usage.answer_id)
    cached = usage.num_cached_tokens or 0
    if not (
        cached <= usage.num_prompt_tokens
        and usage.num_cross_user_tokens + usage.num_own_tokens <= cached
        and usage.num_disk_tokens + usage.num_pulled_tokens <= usage.num_slower_tier_tokens <= cached
        and usage.num_evicted_early_tokens
        + usage.num_unmoved_tokens
        + usage.num_lost_tokens
        + usage.num_expired_tokens
        + usage.num_unresumable_tokens
        <= usage.num_prompt_tokens - cached
    ):
        raise ValueError(f"a usage does not add up: {shown(usage)}")


def _check_logprobs(logprobs: TokenLogprobs, vocab_size: int | None) -> None:
    entries = ((logprobs.token_id, logprobs.logprob), *logprobs.top)
    if vocab_size is not None and max(token_id for token_id, _ in entries) >= vocab_size:
        raise ValueError(f"log probabilities of tokens outside a vocabulary of {vocab_size}")
    for _, logprob in entries:
        # Minus infinity is that of a token that was not allowed; rounding may lift one a little above 0.
        if not logprob <= 1.0:
            raise ValueError(f"a log probability is {logprob}")
