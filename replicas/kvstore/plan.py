"""Plans which of a request's chunks to bring to the device, and from where.

Used by real replicas and the simulation. Pure: the directory says what is present, the caller what moving and
computing cost.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from replicas.kvstore.chunk import ChunkName
from replicas.kvstore.directory import ChunkPlace, Directory
from replicas.kvstore.tenant_shares import NOBODYS, Tenancy
from replicas.protocol.blocks import BlockHash
from replicas.protocol.ways import MoveSpeeds, Reach, Way, cheapest_way


def chunk_names(
    block_hashes: Sequence[BlockHash], blocks_per_chunk: int, first_chunk: int = 0
) -> list[ChunkName]:
    """Return the full chunks of a chain, from this one on."""
    names: list[ChunkName] = []
    for last in range((first_chunk + 1) * blocks_per_chunk - 1, len(block_hashes), blocks_per_chunk):
        parent = block_hashes[last - blocks_per_chunk] if last >= blocks_per_chunk else None
        names.append(ChunkName(block_hashes[last], parent, last))
    return names


PATIENCE = 4.0
"""A request stops waiting for KV when that has taken this many times as long as was expected."""

MIN_PATIENCE_SECONDS = 0.5
"""Shortest wait: a disk or a machine that is busy now is no reason to compute."""


class ArrivalPlan(NamedTuple):
    """`to_read` lie on disk alone, `to_pull` only at a peer; both in the order of the chain. `transfer` is
    the number of the one that pulls them, once it is under way. A binding plan has `binding_seconds`.
    """

    way: Way
    to_read: list[BlockHash]
    to_pull: list[ChunkName]
    transfer: int | None = None
    binding_seconds: float = 0.0

    def patience_seconds(self, wait_seconds: float) -> float:
        """How long the request should wait for KV at most, in a queue of `wait_seconds`."""
        return self.binding_seconds or max(
            MIN_PATIENCE_SECONDS, PATIENCE * (wait_seconds + self.way.extra_seconds)
        )


def plan_arrival(
    directory: Directory,
    names: Sequence[ChunkName],
    *,
    chunk_tokens: int,
    num_device_tokens: int,
    num_findable_tokens: int,
    speeds: MoveSpeeds,
    wait_seconds: float,
    token_seconds: float,
    encode_seconds: Callable[[int], float] | None = None,
    num_at_peer: int = 0,
    binding_seconds: float = 0.0,
    tenancy: Tenancy = NOBODYS,
) -> ArrivalPlan:
    """For a request of which the device has `num_device_tokens`, and that computes all but at most
    `num_findable_tokens` itself. A peer has its first `num_at_peer` chunks. They count as used now.

    With `binding_seconds` all of these that are lacking are to come, whatever is sooner.
    """
    directory.use([name.key for name in names], tenancy)
    first = num_device_tokens // chunk_tokens
    lacking = names[first:]
    places = directory.find(name.key for name in lacking)
    num_host = next((n for n, place in enumerate(places) if place is ChunkPlace.DISK), len(places))
    num_anywhere = max(len(places), num_at_peer - first)

    def reached(num_chunks: int) -> int:
        return max(num_device_tokens, min((first + num_chunks) * chunk_tokens, num_findable_tokens))

    reach = Reach(num_device_tokens, reached(num_host), reached(len(places)), reached(num_anywhere))
    way = cheapest_way(
        reach,
        speeds,
        wait_seconds=wait_seconds,
        token_seconds=token_seconds,
        encode_seconds=encode_seconds,
    )
    if binding_seconds:
        num_bound = min(num_at_peer, len(names)) - first
        way = Way(max(way.num_ready_tokens, reached(num_bound)), way.extra_seconds)
    num_wanted = max(0, -(-way.num_ready_tokens // chunk_tokens) - first)
    here = min(num_wanted, len(places))
    to_read = [
        name.key
        for name, place in zip(lacking[:here], places[:here], strict=True)
        if place is ChunkPlace.DISK
    ]
    return ArrivalPlan(way, to_read, list(lacking[here:num_wanted]), binding_seconds=binding_seconds)


def left_below(
    directory: Directory,
    names: Sequence[ChunkName],
    *,
    chunk_tokens: int,
    num_found_tokens: int,
    num_findable_tokens: int,
    num_planned_tokens: int,
) -> tuple[int, int]:
    """For a request that starts with that many tokens on the device: count tokens that were planned and did
    not come, and later tokens that are below the device anyway."""
    first = num_found_tokens // chunk_tokens
    num_below = len(directory.find(name.key for name in names[first:]))
    end = min((first + num_below) * chunk_tokens, num_findable_tokens)
    num_lost = max(0, num_planned_tokens - num_found_tokens)
    return num_lost, max(0, end - num_found_tokens - num_lost)


def num_ready_blocks(
    directory: Directory,
    names: Sequence[ChunkName],
    *,
    blocks_per_chunk: int,
    num_device_blocks: int,
    num_findable_blocks: int,
) -> tuple[int, bool]:
    """Return the leading blocks on the device or in host memory, and whether more of them are coming
    there."""
    first = num_device_blocks // blocks_per_chunk
    places = directory.find(name.key for name in names[first:])
    num_host = next((n for n, place in enumerate(places) if place is not ChunkPlace.HOST), len(places))
    is_more_coming = num_host < len(places) and places[num_host] is ChunkPlace.COMING
    num_ready = min((first + num_host) * blocks_per_chunk, num_findable_blocks)
    return max(num_device_blocks, num_ready), is_more_coming
