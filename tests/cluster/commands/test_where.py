"""What `kvasir where` reads from a real Redis, by tier."""

from collections.abc import Sequence

import redis

from cluster.commands.where import Holding, IndexEntry, find, render
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import Tier
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.keys import (
    BLOCKS_MARKER,
    MODELS_KEY,
    POINT_MARK,
    ReplicaRecord,
    blocks_key,
    blocks_member,
    encode_record,
    replica_key,
    replicas_key,
)
from replicas.protocol.status import Epoch, ReplicaId, ReplicaState

MODEL, REPLICA, EPOCH = "m", ReplicaId("replica-0"), Epoch("e")
HASHES = [BlockHash(bytes([number]) * 16) for number in range(5)]
ENTRIES = [IndexEntry(128 * (number + 1), block_hash) for number, block_hash in enumerate(HASHES)]


def register(
    url: str, tiers: dict[BlockHash, Tier], points: Sequence[BlockHash] = (), *, is_predicted: bool = False
) -> None:
    load = LoadSnapshot(is_predicted=is_predicted)
    record = ReplicaRecord(REPLICA, EPOCH, "127.0.0.1:1", ReplicaState.READY, "card", 1, load)
    with redis.Redis.from_url(url, protocol=2) as client:
        client.sadd(MODELS_KEY, MODEL)
        client.sadd(replicas_key(MODEL), REPLICA)
        client.hset(replica_key(MODEL, REPLICA), mapping=encode_record(record))
        members = [BLOCKS_MARKER, *(blocks_member(*each) for each in tiers.items())]
        members += [point + POINT_MARK for point in points]
        client.sadd(blocks_key(MODEL, REPLICA, EPOCH), *members)


def test_a_prompt_is_found_in_whatever_tier_its_blocks_lie(redis_url: str) -> None:
    device, host, disk = Tier
    register(redis_url, {HASHES[0]: device, HASHES[1]: host, HASHES[2]: disk, HASHES[4]: disk})
    [holding] = find(redis_url, MODEL, ENTRIES)
    assert holding == Holding(MODEL, REPLICA, True, 4, 3 * 128, num_in_host=1, num_on_disk=2)
    text = render([holding], 5, has_depth=True)
    assert "4 of 5 (1 in host memory, 2 on disk)" in text and "384 tokens" in text


def test_of_a_sparse_model_the_deepest_point_is_found_behind_holes(redis_url: str) -> None:
    every_block = [IndexEntry(16 * number, BlockHash(bytes([100 + number]) * 16)) for number in range(1, 30)]
    kept = dict.fromkeys([HASHES[0], HASHES[1], HASHES[3]], Tier.DEVICE)
    register(redis_url, kept, [every_block[at].block_hash for at in (3, 17)])
    [holding] = find(redis_url, MODEL, ENTRIES, every_block)
    assert holding == Holding(MODEL, REPLICA, True, 3, 288, num_points=2, num_resumed_tokens=288)
    [shallow] = find(redis_url, MODEL, ENTRIES, every_block[:17])
    assert (shallow.num_resumed_tokens, shallow.num_tokens) == (64, 256)
    header, row = render([shallow], 5, has_depth=True).splitlines()
    assert header.split()[-4:] == ["RESUMES", "AT", "HELD", "TO"]
    assert row.split()[-4:] == ["64", "tokens", "256", "tokens"]
