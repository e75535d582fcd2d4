"""Hand-overs: messages between a leaving replica and one that keeps its leases.

Owns these structs, the outcomes of chunks, and the bounds of one call. They carry no KV: the receiver pulls
it.
"""

import enum
from typing import Annotated

from msgspec import Meta, Struct

from replicas.protocol.blocks import HASH_BYTES, BlockHash
from replicas.protocol.bounds import Uint32, Uint64
from replicas.protocol.prefix_leases import MAX_LEASE_SECONDS
from replicas.protocol.pulls import PullHint

MAX_HANDED_CHUNKS = 256
"""In one call."""

MAX_LISTED_CHUNKS = 1 << 14
"""Leased chunks of one replica that are handed over, the longest leases first."""

MAX_HAND_OVER_SECONDS = 60.0
"""A call has a deadline, and none that is further away."""

MAX_TAG_BYTES = 16
MAX_BUCKET_BYTES = 16

_Key = Annotated[BlockHash, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
_Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class HandOverOutcome(enum.StrEnum):
    """The outcome of one chunk's lease. All but the first two leave it where it was, or nowhere."""

    TAKEN = "taken"
    NOTED = "noted"
    """Recorded: the chunk is lost, and requests that miss it here are told so; or another replica keeps it,
    and this one need not."""
    BUDGET = "budget"
    """The room for leases is used up."""
    TENANT_SHARE = "tenant_share"
    NO_TIER = "no_tier"
    """No tier keeps KV for that long: no disk, or one that takes nothing now."""
    NO_ROOM = "no_room"
    """No host memory, or the source's part of it is used up."""
    NOT_SENT = "not_sent"
    """It could not be pulled, whole and in time."""
    INCOMPLETE = "incomplete"
    """An earlier chunk of its prompt is not leased any more, so the rest is useless."""
    OVER = "over"
    """The lease has ended."""
    LATE = "late"
    """The peer did not answer in time, or the drain was over before it was asked."""
    BUSY = "busy"
    """The peer took over from as many others as it can, whenever it was asked."""
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    """The peer takes nothing: it drains too, or its KV has another layout."""
    NO_PEER = "no_peer"
    """No other replica of the model is ready."""
    TOO_MUCH = "too_much"
    """More is leased than may be handed over."""


class LeasedChunk(Struct, frozen=True, array_like=True):
    """A chunk to keep for `seconds_left` more, and for `seconds` after each use.

    `tenant`, its shares and `bucket` are those of the request that leased it. `has_file`: the leaving replica
    has it on disk, too.
    """

    key: _Key
    parent: _Key | None
    last_block: Uint32
    seconds: Annotated[int, Meta(ge=1, le=MAX_LEASE_SECONDS)]
    seconds_left: Annotated[float, Meta(gt=0.0, le=MAX_LEASE_SECONDS)]
    tenant: Annotated[bytes, Meta(max_length=MAX_TAG_BYTES)] = b""
    lease_share: _Share = 0.0
    store_share: _Share = 0.0
    bucket: Annotated[bytes, Meta(max_length=MAX_BUCKET_BYTES)] = b""
    has_file: bool = False


class TakeOver(Struct, frozen=True, array_like=True):
    """Keep these chunks of KV in this layout, which `source` still has. A chain's chunks are in order.

    With `are_lost` no replica kept them: requests that miss them are to be told that they went before their
    time. With `are_elsewhere` another replica keeps them: leases held only for the source are dropped.
    """

    source: PullHint
    layout: Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
    chunks: Annotated[tuple[LeasedChunk, ...], Meta(min_length=1, max_length=MAX_HANDED_CHUNKS)]
    are_lost: bool = False
    are_elsewhere: bool = False


class TakenOver(Struct, frozen=True, array_like=True):
    """One for each chunk, in their order."""

    outcomes: Annotated[tuple[HandOverOutcome, ...], Meta(max_length=MAX_HANDED_CHUNKS)]


class ListLeases(Struct, frozen=True, tag=True):
    """Ask an engine's store for its leased chunks that it has."""

    number: Uint64


class KeepChunks(Struct, frozen=True, tag=True):
    """Ask an engine's store to do what a peer requests."""

    number: Uint64
    take_over: TakeOver


StoreQuestion = ListLeases | KeepChunks


class StoreAnswer(Struct, frozen=True, array_like=True):
    """Answers the question with this number: the leased chunks, or the outcome of each chunk."""

    number: Uint64
    leased: tuple[LeasedChunk, ...] = ()
    outcomes: tuple[HandOverOutcome, ...] = ()
