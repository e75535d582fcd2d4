"""The Redis schema that replicas and routers share (`kvasir:v1:…`): key names and the encoding of values.

Owns these bytes; its callers own the connections. A router's own keys are named in the stores that write
them.

All keys of one model share a hash tag, so they live in one slot of a Redis cluster and can change in one
transaction. `blocks` sets have one marker member that is no hash, so that an empty set exists and a lost one
is noticed. Every other member is a hash, with a suffix if the block's fastest copy is in host memory or on
disk, or if it is a resume point; a hash may be a block and a point.
"""

import contextlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from replicas.protocol.blocks import HASH_BYTES, BlockHash
from replicas.protocol.bounds import (
    checked_address,
    checked_id,
    checked_name,
    parsed_number,
    shown,
)
from replicas.protocol.events import Removal, Tier
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.status import Epoch, ReplicaId, ReplicaState

PREFIX = "kvasir:v1"
MODELS_KEY = f"{PREFIX}:models"
"""Set of the names of all models that any replica has served."""

_ANNOUNCEMENT_HEAD = struct.Struct("<QI")  # its id, and how many hashes follow
ID_BYTES = 8

BLOCKS_MARKER = b"\x00"
"""The member of every blocks set that is no hash."""

TIER_MARKS = {Tier.DEVICE: b"", Tier.HOST: b"h", Tier.DISK: b"d"}
"""Suffix of the hash in a member of a blocks set."""

_TIERS_BY_MARK = {mark: tier for tier, mark in TIER_MARKS.items()}

POINT_MARK = b"p"
"""Suffix of a resume point in a member of a blocks set."""

RECORD_FIELDS = (
    *("epoch", "address", "state", "card_digest", "last_change", "load", "order", "beat"),
    *("check", "signature"),
)
"""All that is read of a lease. The last two are `lease_seal.py`'s."""

MAX_LOAD_BYTES = 4096

MAX_HASHES_PER_CHANGE = 1 << 17
"""A reader believes no longer change. An announcement is as long as its prompt; this is one of 2²⁴ tokens."""

_loads = msgspec.json.Decoder(LoadSnapshot)


def replicas_key(model: str) -> str:
    """Set of replica ids. A hint of whom to ask for: only a live `replica` hash is proof of life."""
    return f"{PREFIX}:{{{model}}}:replicas"


def replica_key(model: str, replica_id: ReplicaId) -> str:
    """Hash with TTL, the lease: see `ReplicaRecord`. Its absence is death."""
    return f"{PREFIX}:{{{model}}}:replica:{replica_id}"


def blocks_key(model: str, replica_id: ReplicaId, epoch: Epoch) -> str:
    """Set of the block hashes that this incarnation holds and the index keeps, as `blocks_member` writes
    them."""
    return f"{PREFIX}:{{{model}}}:blocks:{replica_id}:{epoch}"


def blocks_member(block_hash: BlockHash, tier: Tier) -> bytes:
    """Return the member of a blocks set for a hash whose fastest copy lies in this tier."""
    return block_hash + TIER_MARKS[tier]


def decode_blocks_member(member: bytes) -> tuple[BlockHash, Tier] | None:
    """Decode a member: hash and tier; None if it is no hash with or without a suffix."""
    tier = _TIERS_BY_MARK.get(member[HASH_BYTES:])
    if tier is None or len(member) < HASH_BYTES:
        return None
    return BlockHash(member[:HASH_BYTES]), tier


def decode_point_member(member: bytes) -> BlockHash | None:
    """Decode a member that is a resume point; None for any other."""
    is_point = len(member) == HASH_BYTES + 1 and member.endswith(POINT_MARK)
    return BlockHash(member[:HASH_BYTES]) if is_point else None


def registrations_key(model: str) -> str:
    """Counter of the incarnations that have registered for this model: see `ReplicaRecord.order`."""
    return f"{PREFIX}:{{{model}}}:registrations"


def events_key(model: str) -> str:
    """Stream of `IndexChange`s of all replicas, trimmed."""
    return f"{PREFIX}:{{{model}}}:events"


def is_indexed(block_index: int, block_size: int, index_stride: int) -> bool:
    """Whether the index keeps the block at this chain position in every prompt.

    Hashes are chained, so every `index_stride` tokens is enough (the last full block of a prompt is kept
    too). A block size above the stride keeps every block.
    """
    return (block_index + 1) % blocks_per_stride(block_size, index_stride) == 0


def indexed_positions(num_blocks: int, stride: int) -> list[int]:
    """Return the positions of a prompt's blocks that the index keeps; `stride` is its `blocks_per_stride`."""
    positions = [*range(stride - 1, num_blocks, stride)]
    if num_blocks % stride:
        positions.append(num_blocks - 1)
    return positions


def blocks_per_stride(block_size: int, index_stride: int) -> int:
    return max(1, index_stride // block_size)


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """A replica's report with each heartbeat.

    `last_change` is the number of the newest IndexChange that it has written, so that a reader that missed
    the end of the stream notices. `order` ranks incarnations by registration, by a counter in Redis and no
    clock; 0 is unknown. `beat` counts an incarnation's heartbeats.
    """

    replica_id: ReplicaId
    epoch: Epoch
    address: str
    state: ReplicaState
    card_digest: str
    last_change: int
    load: LoadSnapshot
    order: int = 0
    beat: int = 0


def encode_record(record: ReplicaRecord) -> dict[str, str]:
    return {
        "epoch": record.epoch,
        "address": record.address,
        "state": record.state.value,
        "card_digest": record.card_digest,
        "last_change": str(record.last_change),
        "load": json.dumps(msgspec.structs.asdict(record.load)),
        "order": str(record.order),
        "beat": str(record.beat),
    }


def decode_record(replica_id: ReplicaId, fields: Mapping[bytes, bytes]) -> ReplicaRecord:
    """Raises ValueError if a field is missing, unreadable or out of bounds. Unknown fields are ignored."""
    try:
        return ReplicaRecord(
            replica_id=ReplicaId(checked_id(replica_id)),
            epoch=Epoch(checked_id(fields[b"epoch"].decode())),
            address=checked_address(fields[b"address"].decode()),
            state=ReplicaState(fields[b"state"].decode()),
            card_digest=checked_name(fields[b"card_digest"].decode()),
            last_change=parsed_number(fields[b"last_change"]),
            load=_decode_load(fields[b"load"]),
            order=parsed_number(fields.get(b"order", b"0")),
            beat=parsed_number(fields.get(b"beat", b"0")),
        )
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"the registry entry of replica {shown(replica_id)} is unreadable: {shown(error)}"
        ) from error


def _decode_load(encoded: bytes) -> LoadSnapshot:
    if len(encoded) > MAX_LOAD_BYTES:
        raise ValueError(f"a load has {len(encoded)} bytes, which is too many")
    try:
        return _loads.decode(encoded)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"a load is unreadable: {error}") from error


def record_fields(values: object) -> dict[bytes, bytes]:
    """Convert the answer of HMGET of RECORD_FIELDS, or of HGETALL. Raises ValueError for an error."""
    if isinstance(values, dict):
        return values
    if not isinstance(values, list):
        raise ValueError(f"it holds no lease: {shown(values)}")
    return {
        name.encode(): value for name, value in zip(RECORD_FIELDS, values, strict=True) if value is not None
    }


def decode_names(members: object) -> tuple[list[str], int]:
    """Decode a set's members that are valid model names, sorted, and count the invalid ones.

    A registry may hold anything: a non-set has no members.
    """
    return _decode_each(members, checked_name)


def decode_ids(members: object) -> tuple[list[ReplicaId], int]:
    """Return a set's members that are replica ids, sorted, and how many are not."""
    texts, num_wrong = _decode_each(members, checked_id)
    return [ReplicaId(text) for text in texts], num_wrong


def _decode_each(members: object, check: Callable[[str], str]) -> tuple[list[str], int]:
    if not isinstance(members, set | list):
        return [], 1
    texts: list[str] = []
    for member in members:
        with contextlib.suppress(ValueError):
            texts.append(check(member.decode()))
    return sorted(texts), len(members) - len(texts)


@dataclass(frozen=True, slots=True)
class Announcement:
    """Blocks that the replica does not hold, but will as soon as it has computed some request's prompt, and
    resume points that it then will have."""

    announcement_id: int
    block_hashes: tuple[BlockHash, ...]
    points: tuple[BlockHash, ...] = ()


@dataclass(frozen=True, slots=True)
class IndexChange:
    """One step's change to one replica's blocks set: `cleared` first, then `removed`, then the rest.

    `added`, `in_host` and `on_disk` are hashes of the set by the tier of the fastest copy: device, host
    memory, disk. A present hash moves there. `reasons` has a byte, a `Removal`, per hash in `removed`; it is
    empty if all were evicted.

    `points_removed` and then `points` are resume points, which are in the set beside the blocks.
    `point_reasons` are to `points_removed` as `reasons` to `removed`.

    `announced` and then `ended` follow: announcements that begin, and the ids of those that end.
    Announcements are not in the set; `cleared` ends all of the replica's. Numbered from 1 per epoch without
    gaps: a reader that sees a gap rereads the set.
    """

    replica_id: ReplicaId
    epoch: Epoch
    number: int
    added: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    cleared: bool = False
    announced: tuple[Announcement, ...] = ()
    ended: tuple[int, ...] = ()
    in_host: tuple[BlockHash, ...] = ()
    on_disk: tuple[BlockHash, ...] = ()
    reasons: bytes = b""
    points: tuple[BlockHash, ...] = ()
    points_removed: tuple[BlockHash, ...] = ()
    point_reasons: bytes = b""

    def removed_by_reason(self) -> Iterator[tuple[Removal, Sequence[BlockHash]]]:
        """`removed` in groups; an unknown reason counts as EVICTED."""
        return _by_reason(self.removed, self.reasons)

    def points_removed_by_reason(self) -> Iterator[tuple[Removal, Sequence[BlockHash]]]:
        """`points_removed` likewise."""
        return _by_reason(self.points_removed, self.point_reasons)


def _by_reason(removed: Sequence[BlockHash], reasons: bytes) -> Iterator[tuple[Removal, Sequence[BlockHash]]]:
    if not reasons:
        if removed:
            yield Removal.EVICTED, removed
        return
    groups: dict[Removal, list[BlockHash]] = {}
    for block_hash, reason in zip(removed, reasons, strict=True):
        groups.setdefault(Removal(reason), []).append(block_hash)
    yield from groups.items()


def encode_change(change: IndexChange) -> dict[str, str | bytes]:
    fields: dict[str, str | bytes] = {
        "replica": change.replica_id,
        "epoch": change.epoch,
        "number": str(change.number),
        "added": b"".join(change.added),
        "removed": b"".join(change.removed),
        "cleared": "1" if change.cleared else "0",
    }
    if change.in_host:
        fields["in_host"] = b"".join(change.in_host)
    if change.reasons:
        fields["reasons"] = change.reasons
    if change.on_disk:
        fields["on_disk"] = b"".join(change.on_disk)
    if change.points:
        fields["points"] = b"".join(change.points)
    if change.points_removed:
        fields["points_removed"] = b"".join(change.points_removed)
    if change.point_reasons:
        fields["point_reasons"] = change.point_reasons
    if change.announced:
        pairs = [(each.announcement_id, each.block_hashes) for each in change.announced]
        fields["announced"] = b"".join(map(_pack_announced, pairs))
        points = [(each.announcement_id, each.points) for each in change.announced if each.points]
        if points:
            fields["announced_points"] = b"".join(map(_pack_announced, points))
    if change.ended:
        fields["ended"] = struct.pack(f"<{len(change.ended)}Q", *change.ended)
    return fields


def decode_change(fields: Mapping[bytes, bytes]) -> IndexChange:
    """Raises ValueError if a field is missing, unreadable or out of bounds. Without announcements, tiers
    below the device, reasons or resume points it has no such fields."""
    num_bytes = sum(map(len, fields.values()))
    if num_bytes > MAX_HASHES_PER_CHANGE * HASH_BYTES:
        raise ValueError(f"an index change has {num_bytes} bytes, which is too many")
    try:
        removed, reasons = _removed(fields[b"removed"], fields.get(b"reasons", b""))
        points_removed, point_reasons = _removed(
            fields.get(b"points_removed", b""), fields.get(b"point_reasons", b"")
        )
        return IndexChange(
            replica_id=ReplicaId(checked_id(fields[b"replica"].decode())),
            epoch=Epoch(checked_id(fields[b"epoch"].decode())),
            number=parsed_number(fields[b"number"]),
            added=split_hashes(fields[b"added"]),
            removed=removed,
            reasons=reasons,
            in_host=split_hashes(fields.get(b"in_host", b"")),
            on_disk=split_hashes(fields.get(b"on_disk", b"")),
            cleared=fields[b"cleared"] == b"1",
            points=split_hashes(fields.get(b"points", b"")),
            points_removed=points_removed,
            point_reasons=point_reasons,
            announced=_announcements(fields.get(b"announced", b""), fields.get(b"announced_points")),
            ended=_unpack_ids(fields.get(b"ended", b"")),
        )
    except KeyError as error:
        raise ValueError(f"an index change has no field {error}") from error


def _removed(packed: bytes, reasons: bytes) -> tuple[tuple[BlockHash, ...], bytes]:
    hashes = split_hashes(packed)
    if len(reasons) not in (0, len(hashes)):
        raise ValueError(f"an index change has {len(reasons)} reasons for {len(hashes)} removed hashes")
    return hashes, reasons


def _pack_announced(announced: tuple[int, Sequence[BlockHash]]) -> bytes:
    announcement_id, hashes = announced
    return _ANNOUNCEMENT_HEAD.pack(announcement_id, len(hashes)) + b"".join(hashes)


def _announcements(packed: bytes, packed_points: bytes | None) -> tuple[Announcement, ...]:
    points = {} if packed_points is None else dict(_unpack_announced(packed_points))
    return tuple(
        Announcement(each, hashes, points.get(each, ())) for each, hashes in _unpack_announced(packed)
    )


def _unpack_announced(packed: bytes) -> Iterator[tuple[int, tuple[BlockHash, ...]]]:
    at = 0
    while at < len(packed):
        if len(packed) - at < _ANNOUNCEMENT_HEAD.size:
            raise ValueError("an announcement ends before its hashes begin")
        announcement_id, num_hashes = _ANNOUNCEMENT_HEAD.unpack_from(packed, at)
        at += _ANNOUNCEMENT_HEAD.size
        end = at + num_hashes * HASH_BYTES
        if end > len(packed):
            raise ValueError(f"an announcement of {num_hashes} hashes has only {len(packed) - at} bytes")
        yield announcement_id, split_hashes(packed[at:end])
        at = end


def _unpack_ids(packed: bytes) -> tuple[int, ...]:
    if len(packed) % ID_BYTES:
        raise ValueError(f"{len(packed)} bytes are not a whole number of announcement ids")
    return struct.unpack(f"<{len(packed) // ID_BYTES}Q", packed)


def split_hashes(packed: bytes) -> tuple[BlockHash, ...]:
    """Concatenated hashes, apart again. Raises ValueError if the length is no multiple of 16."""
    if len(packed) % HASH_BYTES:
        raise ValueError(f"{len(packed)} bytes are not a whole number of block hashes")
    return tuple(BlockHash(packed[at : at + HASH_BYTES]) for at in range(0, len(packed), HASH_BYTES))
