"""kvasir where: which replicas hold a prompt or a block, by Redis itself.

Owns the lookup and its table. A router computes only the block hashes, so its beliefs can be compared with
the index. Of a sparse model's replica it shows where the prompt can be resumed, and how far full attention
has it (`replicas/protocol/hits.py`).
"""

import argparse
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import redis

from cluster.commands.explain import IN_BYTES, ask_router
from cluster.commands.tables import align
from cluster.errors import ClusterError
from cluster.registry import live_names
from replicas.process.settings import without_password
from replicas.protocol.blocks import HASH_BYTES, BlockHash
from replicas.protocol.events import Tier
from replicas.protocol.keys import (
    BLOCKS_MARKER,
    POINT_MARK,
    RECORD_FIELDS,
    blocks_key,
    blocks_member,
    decode_record,
    record_fields,
    replica_key,
)
from replicas.protocol.status import ReplicaId


class IndexEntry(NamedTuple):
    """A hash that the index keeps, and the prompt tokens that it stands for."""

    num_tokens: int
    block_hash: BlockHash


class Holding(NamedTuple):
    """One replica's share: `num_tokens` of the prompt up to the first missing entry.

    The entries whose fastest copy is in host memory or on disk are counted; the others are on the device.
    `num_resumed_tokens` lie before the deepest of the prompt's `num_points` that it has; they are None where
    no points were looked for.
    """

    model: str
    replica_id: ReplicaId
    has_set: bool
    num_entries: int
    num_tokens: int
    num_in_host: int = 0
    num_on_disk: int = 0
    num_points: int | None = None
    num_resumed_tokens: int | None = None
    is_predicted: bool = False
    """Its engine does not say what it holds."""

    def as_json(self) -> Mapping[str, Any]:
        return {name: value for name, value in self._asdict().items() if value is not None}


def where(
    arguments: argparse.Namespace, router_url: Callable[[], str], redis_url: str, say: Callable[[str], None]
) -> int:
    """Run the command. Raises ClusterError."""
    block_hash = None if arguments.file is not None else _block_hash(arguments.prompt)
    is_in_bytes = False
    points: Sequence[IndexEntry] | None
    if block_hash is not None:
        model, entries = arguments.model, [IndexEntry(0, block_hash)]
        points = entries
    else:
        explained = ask_router(arguments, router_url())
        model, entries = explained["model"], _entries(explained["block_hashes"])
        is_in_bytes = explained.get("unit") == "bytes"
        if not entries:
            raise ClusterError(
                f"the prompt does not fill a block of {explained['block_size']} tokens: it has"
                f" {explained['num_tokens']}"
            )
        listed = explained.get("resume_points")
        points = None if listed is None else _entries(listed)
    server = f"Redis at {without_password(redis_url)}"
    try:
        places = find(redis_url, model, entries, points)
    except redis.RedisError as error:
        raise ClusterError(f"{server} gave no answer: {error}") from error
    if not places:
        raise ClusterError(f"{server} has no live replica{f' of {model}' if model else ''}")
    if arguments.json:
        say(json.dumps([place.as_json() for place in places], indent=2))
    else:
        if is_in_bytes:
            say(IN_BYTES)
        say(render(places, len(entries), has_depth=block_hash is None))
    return 0


def find(
    redis_url: str,
    model: str | None,
    entries: Sequence[IndexEntry],
    points: Sequence[IndexEntry] | None = None,
) -> list[Holding]:
    """Look the entries up at every live replica of one model, or of all; with `points`, the resume points of
    a sparse model as well. Raises RedisError."""
    places = []
    members = [BLOCKS_MARKER]
    for tier in Tier:
        members += [blocks_member(entry.block_hash, tier) for entry in entries]
    members += [point.block_hash + POINT_MARK for point in points or ()]
    with redis.Redis.from_url(redis_url, socket_timeout=5, socket_connect_timeout=5, protocol=2) as client:
        for name, replica_id in live_names(client):
            if model not in (None, name):
                continue
            with contextlib.suppress(redis.ResponseError, ValueError):  # `kvasir status` says what is wrong
                values = client.hmget(replica_key(name, replica_id), RECORD_FIELDS)
                if any(values):
                    record = decode_record(replica_id, record_fields(values))
                    key = blocks_key(name, replica_id, record.epoch)
                    has_set, *answers = map(bool, client.smismember(key, members))
                    size = len(entries)
                    device, host, disk = (answers[at : at + size] for at in (0, size, 2 * size))
                    held = list(map(any, zip(device, host, disk, strict=True)))
                    depth = _depth(entries, held)
                    holding = Holding(name, replica_id, has_set, sum(held), depth, sum(host), sum(disk))
                    holding = holding._replace(is_predicted=record.load.is_predicted)
                    places.append(
                        holding if points is None else _resuming(holding, points, answers[3 * size :])
                    )
    return places


def render(places: Sequence[Holding], num_asked: int, *, has_depth: bool) -> str:
    """Format the table; `has_depth` means that a prompt was looked up, not a single block."""
    is_sparse = any(place.num_resumed_tokens is not None for place in places)
    depths = (("RESUMES AT", "HELD TO") if is_sparse else ("DEPTH",)) if has_depth else ()
    rows = [("MODEL", "REPLICA", "INDEX ENTRIES", *depths)]
    for place in places:
        entries = f"{place.num_entries} of {num_asked}" if place.has_set else "no set"
        tiers = ((place.num_in_host, "in host memory"), (place.num_on_disk, "on disk"))
        remarks = [f"{number} {tier}" for number, tier in tiers if number]
        if place.num_points and not has_depth:
            remarks.append("a resume point")
        if place.is_predicted:
            remarks.append("predicted")
        entries += f" ({', '.join(remarks)})" if remarks else ""
        deep = (place.num_resumed_tokens, place.num_tokens) if is_sparse else (place.num_tokens,)
        rows.append(
            (place.model, place.replica_id, entries, *(f"{each} tokens" for each in deep[: len(depths)]))
        )
    return "\n".join(align(rows))


def _block_hash(text: str | None) -> BlockHash | None:
    """Parse a block hash in hex; None if it is not one."""
    try:
        value = bytes.fromhex(text or "")
    except ValueError:
        return None
    return BlockHash(value) if len(value) == HASH_BYTES else None


def _entries(listed: Sequence[dict[str, Any]]) -> list[IndexEntry]:
    return [IndexEntry(entry["num_tokens"], BlockHash(bytes.fromhex(entry["hash"]))) for entry in listed]


def _depth(entries: Sequence[IndexEntry], held: Sequence[bool]) -> int:
    """Count up to the first missing entry, which ends the chain."""
    depth = 0
    for entry, is_held in zip(entries, held, strict=True):
        if not is_held:
            break
        depth = entry.num_tokens
    return depth


def _resuming(holding: Holding, points: Sequence[IndexEntry], held: Sequence[bool]) -> Holding:
    """Return the holding with its resume points. What it has before the deepest is held, whatever the index,
    which keeps only some blocks, says of it."""
    found = [point.num_tokens for point, is_held in zip(points, held, strict=True) if is_held]
    deepest = max(found, default=0)
    return holding._replace(
        num_tokens=max(holding.num_tokens, deepest), num_points=len(found), num_resumed_tokens=deepest
    )
