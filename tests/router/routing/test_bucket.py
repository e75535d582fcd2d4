"""Buckets and affinity order."""

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest

from replicas.protocol.affinity import AffinityRanking
from replicas.protocol.blocks import BlockHash, ImageTokens, pack_token_ids
from replicas.protocol.status import ReplicaId
from router.routing import bucket as buckets

ROOT = BlockHash(b"r" * 16)
TOKENS = list(range(1000, 1600))
REPLICAS = [ReplicaId(f"replica-{number}") for number in range(8)]


def bucket_of(
    root: BlockHash,
    key: str | None,
    token_ids: Sequence[int],
    num_stable_tokens: int | None,
    block_size: int,
    media: Sequence[ImageTokens] = (),
) -> bytes:
    packed = pack_token_ids(token_ids)
    return buckets.bucket_of(root, key, packed, num_stable_tokens, block_size, media)


def affinity_order(bucket: bytes, replica_ids: Iterable[ReplicaId]) -> list[ReplicaId]:
    return AffinityRanking(replica_ids).of(bucket).whole()


def bucket_number(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_the_first_256_tokens_decide_and_no_later_one() -> None:
    bucket = bucket_of(ROOT, None, TOKENS, None, 16)
    assert bucket_of(ROOT, None, TOKENS[:256], None, 16) == bucket
    assert bucket_of(ROOT, None, TOKENS[:257], None, 16) == bucket
    assert bucket_of(ROOT, None, [*TOKENS[:256], 7, 8, 9], None, 16) == bucket
    assert bucket_of(ROOT, None, TOKENS[:255], None, 16) != bucket
    for position in (0, 100, 255):
        assert bucket_of(ROOT, None, [*TOKENS[:position], 7, *TOKENS[position + 1 :]], None, 16) != bucket


def test_only_whole_blocks_count() -> None:
    bucket = bucket_of(ROOT, None, TOKENS, None, 100)
    assert bucket_of(ROOT, None, [*TOKENS[:200], 7, 8], None, 100) == bucket
    assert bucket_of(ROOT, None, [*TOKENS[:199], 7, 8], None, 100) != bucket
    one_big_block = bucket_of(ROOT, None, TOKENS, None, 512)
    assert bucket_of(ROOT, None, TOKENS[:512], None, 512) == one_big_block
    assert bucket_of(ROOT, None, TOKENS[:511], None, 512) != one_big_block


def test_a_short_conversation_keeps_its_bucket_as_it_grows() -> None:
    buckets = {bucket_of(ROOT, "key", TOKENS[:length], 40, 16) for length in (40, 60, 255, 256, 257, 600)}
    assert len(buckets) == 1
    assert bucket_of(ROOT, "key", [*TOKENS[:39], 7], 40, 16) not in buckets


def test_media_that_begin_in_the_head_count_and_no_other() -> None:
    def bucket(image: bytes, start: int, length: int = 64, stable: int | None = None) -> bytes:
        return bucket_of(ROOT, None, TOKENS, stable, 16, [ImageTokens(image, start, length)])

    text = bucket_of(ROOT, None, TOKENS, None, 16)
    with_image_ids = {text, bucket(b"a", 10), bucket(b"b", 10), bucket(b"a", 11), bucket(b"a", 10, 65)}
    assert len(with_image_ids) == 5
    assert bucket(b"a", 256) == text
    assert bucket(b"a", 40, stable=40) == bucket_of(ROOT, None, TOKENS, 40, 16)


def test_a_long_stable_head_changes_nothing() -> None:
    assert bucket_of(ROOT, None, TOKENS, 500, 16) == bucket_of(ROOT, None, TOKENS, None, 16)
    assert bucket_of(ROOT, None, TOKENS, 0, 16) == bucket_of(ROOT, None, TOKENS, None, 16)


def test_namespace_key_and_head_are_told_apart() -> None:
    other = BlockHash(b"s" * 16)
    buckets = [
        bucket_of(root, key, tokens, None, 16)
        for root in (ROOT, other)
        for key in (None, "", "a", "b", "a\ud800")
        for tokens in ([], [1], [1, 2], TOKENS)
    ]
    assert len(set(buckets)) == len(buckets)


def test_every_replica_is_home_to_an_equal_share_of_the_buckets() -> None:
    for rank in (0, 1, 7):
        homes = Counter(affinity_order(bucket_number(number), REPLICAS)[rank] for number in range(8000))
        assert set(homes) == set(REPLICAS)
        assert all(850 < count < 1150 for count in homes.values()), homes


def test_the_order_does_not_depend_on_how_replicas_are_listed() -> None:
    for permutation in itertools.permutations(REPLICAS[:4]):
        assert affinity_order(b"bucket", permutation) == affinity_order(b"bucket", REPLICAS[:4])


def test_a_replica_that_leaves_moves_only_its_own_buckets() -> None:
    for number in range(500):
        order = affinity_order(bucket_number(number), REPLICAS)
        without = affinity_order(bucket_number(number), [r for r in REPLICAS if r != REPLICAS[3]])
        assert without == [replica_id for replica_id in order if replica_id != REPLICAS[3]]


@pytest.mark.parametrize("size", [1, 2, 5, 300])
def test_first_ranks_and_the_whole_order_agree(size: int) -> None:
    ranking = AffinityRanking(ReplicaId(f"r{number}") for number in range(size))
    for number in range(20):
        order = ranking.of(bucket_number(number))
        whole = order.whole()
        for count in (1, 2, 4, 5, 299, 300, 301):
            assert order.first(count) == whole[:count]
        shuffled = random.Random(number).sample(whole, min(size, 12))
        assert order.ranks(shuffled) == [whole.index(each) for each in shuffled]
        assert order.ranks([]) == []


def test_in_a_large_fleet_a_newcomer_takes_from_all_and_moves_nothing_else() -> None:
    replica_ids = [ReplicaId(f"r{number}") for number in range(100)]
    before, after = AffinityRanking(replica_ids), AffinityRanking([*replica_ids, ReplicaId("new")])
    robbed = set()
    for number in range(10_000):
        home, now = (each.of(bucket_number(number)).first(1) for each in (before, after))
        if home != now:
            assert now == ["new"]
            robbed.update(home)
    assert len(robbed) > 50


def test_the_second_choices_of_one_home_are_spread_over_the_others() -> None:
    orders = [affinity_order(bucket_number(number), REPLICAS) for number in range(8000)]
    seconds = Counter(order[1] for order in orders if order[0] == REPLICAS[0])
    assert len(seconds) == 7
    assert max(seconds.values()) < 1.5 * min(seconds.values())


def test_golden_values_so_that_routers_of_two_versions_agree() -> None:
    bucket = bucket_of(ROOT, "key", TOKENS, None, 16)
    assert bucket.hex() == "720ec27df86b35a97b712da43dd465af"
    assert affinity_order(bucket, REPLICAS[:4]) == ["replica-2", "replica-3", "replica-1", "replica-0"]


@pytest.mark.parametrize(
    ("num_head", "num_shared"), [(15, None), (16, 16), (60, 48), (127, 112), (128, None)]
)
def test_a_short_head_has_a_bucket_of_its_whole_blocks(num_head: int, num_shared: int | None) -> None:
    one, other = pack_token_ids(TOKENS), pack_token_ids([*TOKENS[: num_shared or 0], 7, *TOKENS])
    bucket = buckets.head_bucket_of(ROOT, None, one, num_head, 16)
    assert bucket == (None if num_shared is None else bucket_of(ROOT, None, TOKENS, num_shared, 16))
    assert bucket == buckets.head_bucket_of(ROOT, None, other, num_head, 16)
    assert buckets.head_bucket_of(ROOT, None, one, None, 16) is None
    assert buckets.head_bucket_of(ROOT, "key", one, num_head, 16) is None
