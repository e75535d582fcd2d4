"""What a reader of the index makes of it: from the sets alone, and from the stream alone."""

from typing import Any

from redis.asyncio import Redis

from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import Tier
from replicas.protocol.keys import (
    BLOCKS_MARKER,
    IndexChange,
    ReplicaRecord,
    blocks_key,
    decode_blocks_member,
    decode_change,
    decode_point_member,
    decode_record,
    events_key,
    replica_key,
)
from replicas.protocol.status import Epoch, ReplicaId


def connect(url: str) -> Any:
    """Without a timeout of its own, as a replica's clients."""
    return Redis.from_url(url, protocol=2, socket_timeout=None, socket_connect_timeout=None)


async def read_set(redis: Any, model: str, replica_id: ReplicaId, epoch: Epoch) -> set[BlockHash] | None:
    """The hashes in the blocks set; None if there is no set."""
    members = await redis.smembers(blocks_key(model, replica_id, epoch))
    if not members:
        return None
    assert BLOCKS_MARKER in members
    points = {each for each in members if decode_point_member(each) is not None}
    return set(map(_block_hash, members - {BLOCKS_MARKER} - points))


async def read_points(redis: Any, model: str, replica_id: ReplicaId, epoch: Epoch) -> set[BlockHash]:
    """The resume points in the blocks set."""
    members = await redis.smembers(blocks_key(model, replica_id, epoch))
    return {point for point in map(decode_point_member, members) if point is not None}


async def read_tiers(redis: Any, model: str, replica_id: ReplicaId, epoch: Epoch) -> dict[BlockHash, Tier]:
    """The hashes in the blocks set, and where the fastest copy of each lies; each is there once."""
    members = await redis.smembers(blocks_key(model, replica_id, epoch))
    decoded = [decode_blocks_member(member) for member in members - {BLOCKS_MARKER}]
    tiers = dict(each for each in decoded if each is not None)
    assert len(tiers) == len(decoded)
    return tiers


def _block_hash(member: bytes) -> BlockHash:
    decoded = decode_blocks_member(member)
    assert decoded is not None
    return decoded[0]


async def read_changes(redis: Any, model: str, epoch: Epoch) -> list[IndexChange]:
    changes = [decode_change(fields) for _, fields in await redis.xrange(events_key(model))]
    return [change for change in changes if change.epoch == epoch]


def replay(changes: list[IndexChange]) -> set[BlockHash]:
    """What a mirror holds that starts with the newest `cleared` and applies what follows."""
    mirrored: set[BlockHash] = set()
    previous: int | None = None
    for change in changes:
        if change.cleared:
            mirrored.clear()
        else:
            assert previous is not None
            assert change.number == previous + 1, "a gap that no rewrite explains"
        previous = change.number
        mirrored.difference_update(change.removed)
        mirrored.update(change.added, change.in_host, change.on_disk)
    return mirrored


def replay_points(changes: list[IndexChange]) -> set[BlockHash]:
    """The resume points that such a mirror holds."""
    points: set[BlockHash] = set()
    for change in changes:
        if change.cleared:
            points.clear()
        assert points.issuperset(change.points_removed) and points.isdisjoint(change.points)
        points.difference_update(change.points_removed)
        points.update(change.points)
    return points


def live_announcements(changes: list[IndexChange]) -> dict[int, tuple[BlockHash, ...]]:
    """What a mirror that heard all of this believes to be announced."""
    live: dict[int, tuple[BlockHash, ...]] = {}
    for change in changes:
        if change.cleared:
            live.clear()
        live |= {it.announcement_id: it.block_hashes for it in change.announced}
        for announcement_id in change.ended:
            del live[announcement_id]  # each end had a beginning
    return live


async def read_record(redis: Any, model: str, replica_id: ReplicaId) -> ReplicaRecord | None:
    fields = await redis.hgetall(replica_key(model, replica_id))
    return decode_record(replica_id, fields) if fields else None
