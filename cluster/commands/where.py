"""kvasir where: which replicas hold a prompt or a block, by Redis itself.

Owns the lookup and its table. A router computes only the block hashes, so its beliefs can be compared with
the index.
"""

import argparse
import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import redis

from cluster.commands.explain import ask_router
from cluster.commands.tables import align
from cluster.errors import ClusterError
from cluster.registry import live_names
from replicas.process.settings import without_password
from replicas.protocol.blocks import HASH_BYTES, BlockHash
from replicas.protocol.events import Tier
from replicas.protocol.keys import (
    BLOCKS_MARKER,
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
    """

    model: str
    replica_id: ReplicaId
    has_set: bool
    num_entries: int
    num_tokens: int
    num_in_host: int = 0
    num_on_disk: int = 0


def where(
    arguments: argparse.Namespace, router_url: Callable[[], str], redis_url: str, say: Callable[[str], None]
) -> int:
    """Run the command. Raises ClusterError."""
    block_hash = None if arguments.file is not None else _block_hash(arguments.prompt)
    if block_hash is not None:
        model, entries = arguments.model, [IndexEntry(0, block_hash)]
    else:
        explained = ask_router(arguments, router_url())
        model, entries = explained["model"], _entries(explained["block_hashes"])
        if not entries:
            raise ClusterError(f"the prompt does not fill a block: it has {explained['num_tokens']} tokens")
    server = f"Redis at {without_password(redis_url)}"
    try:
        places = find(redis_url, model, entries)
    except redis.RedisError as error:
        raise ClusterError(f"{server} gave no answer: {error}") from error
    if not places:
        raise ClusterError(f"{server} has no live replica{f' of {model}' if model else ''}")
    if arguments.json:
        say(json.dumps([place._asdict() for place in places], indent=2))
    else:
        say(render(places, len(entries), has_depth=block_hash is None))
    return 0


def find(redis_url: str, model: str | None, entries: Sequence[IndexEntry]) -> list[Holding]:
    """Look the entries up at every live replica of one model, or of all. Raises RedisError."""
    places = []
    members = [BLOCKS_MARKER]
    for tier in Tier:
        members += [blocks_member(entry.block_hash, tier) for entry in entries]
    with redis.Redis.from_url(redis_url, socket_timeout=5, socket_connect_timeout=5, protocol=2) as client:
        for name, replica_id in live_names(client):
            if model not in (None, name):
                continue
            with contextlib.suppress(redis.ResponseError, ValueError):  # `kvasir status` says what is wrong
                values = client.hmget(replica_key(name, replica_id), RECORD_FIELDS)
                if any(values):
                    epoch = decode_record(replica_id, record_fields(values)).epoch
                    key = blocks_key(name, replica_id, epoch)
                    has_set, *answers = map(bool, client.smismember(key, members))
                    size = len(entries)
                    device, host, disk = (answers[at : at + size] for at in (0, size, 2 * size))
                    held = list(map(any, zip(device, host, disk, strict=True)))
                    depth = _depth(entries, held)
                    holding = Holding(name, replica_id, has_set, sum(held), depth, sum(host), sum(disk))
                    places.append(holding)
    return places


def render(places: Sequence[Holding], num_asked: int, *, has_depth: bool) -> str:
    """Format the table; `has_depth` means that a prompt was looked up, not a single block."""
    rows = [("MODEL", "REPLICA", "INDEX ENTRIES", *(("DEPTH",) if has_depth else ()))]
    for place in places:
        entries = f"{place.num_entries} of {num_asked}" if place.has_set else "no set"
        tiers = ((place.num_in_host, "in host memory"), (place.num_on_disk, "on disk"))
        below = ", ".join(f"{number} {tier}" for number, tier in tiers if number)
        entries += f" ({below})" if below else ""
        depth = (f"{place.num_tokens} tokens",) if has_depth else ()
        rows.append((place.model, place.replica_id, entries, *depth))
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
