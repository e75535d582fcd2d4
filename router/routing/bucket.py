"""Buckets and affinity order: where a prompt belongs when nothing is known of anyone's cache.

Owns the bucket's definition and the rendezvous ranking. Knows no load, no index and no fleet state:
two routers that see the same replicas rank them alike without ever having talked.
"""

import functools
import hashlib
from collections.abc import Iterable, Sequence

from replicas.protocol.blocks import BlockHash, pack_token_ids
from replicas.protocol.status import ReplicaId

BUCKET_TOKENS = 256
"""A prompt is pinned by so many of its first tokens, in whole blocks."""

BUCKET_BYTES = 16


def bucket_of(
    root: BlockHash,
    prompt_cache_key: str | None,
    token_ids: Sequence[int],
    num_stable_tokens: int | None,
    block_size: int,
) -> bytes:
    """What a request is pinned by: its namespace, its `prompt_cache_key` and the head of its prompt.

    `num_stable_tokens` is the length of the part that later turns of the conversation repeat (tools,
    system, first user message). Where that is shorter than the usual head it *is* the head, so that a
    short conversation keeps its bucket as it grows. None or 0: nothing is known of later turns.
    """
    num_head_tokens = max(block_size, BUCKET_TOKENS // block_size * block_size)
    if num_stable_tokens:
        num_head_tokens = min(num_head_tokens, num_stable_tokens)
    digest = hashlib.blake2b(digest_size=BUCKET_BYTES, person=b"kvasir-bucket-v1")
    digest.update(_tagged(b"root", root))
    if prompt_cache_key is not None:
        digest.update(_tagged(b"key", prompt_cache_key.encode("utf-8", "surrogatepass")))
    digest.update(_tagged(b"head", pack_token_ids(token_ids[:num_head_tokens])))
    return digest.digest()


def affinity_order(bucket: bytes, replica_ids: Iterable[ReplicaId]) -> list[ReplicaId]:
    """The bucket's ranking of the replicas, home first (rendezvous hashing).

    Taking a replica away moves nothing but what it was first for; adding one takes an equal share
    from each.
    """
    scored = []
    for replica_id in replica_ids:
        digest = _replica_state(replica_id).copy()
        digest.update(bucket)
        scored.append((digest.digest(), replica_id))
    scored.sort()
    return [replica_id for _, replica_id in scored]


@functools.lru_cache(maxsize=4096)
def _replica_state(replica_id: ReplicaId) -> "hashlib.blake2b":
    """The hash with the replica's id already in it: a copy of it is cheaper than starting afresh."""
    state = hashlib.blake2b(digest_size=8, person=b"kvasir-affinity1")
    state.update(_tagged(b"replica", replica_id.encode()))
    return state


def _tagged(tag: bytes, value: bytes) -> bytes:
    return len(tag).to_bytes(1, "little") + tag + len(value).to_bytes(4, "little") + value
