"""The hashing function that replicas, router and index share: golden vectors and what they must mean.

The vectors in `tests/golden/block_hashes.json` were made by other code than the code under test. They
name what lies in every Redis: if one of them changes, the schema's version has to change with it.
"""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.protocol.blocks import (
    HASH_BYTES,
    BlockHash,
    ImageTokens,
    Namespace,
    PublishedBeginning,
    hash_blocks,
    namespace_root,
    pack_token_ids,
    unpack_token_ids,
)

GOLDEN: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "golden" / "block_hashes.json").read_text()
)
SECRET = b"a secret of the cluster"
PLAIN = Namespace(b"weights and tokenizer", 4)

OTHER_ROOT = BlockHash(b"of everyone   !!")

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)
block_sizes = st.integers(1, 9)
texts = st.one_of(st.none(), st.text(max_size=3))
namespaces = st.builds(Namespace, st.binary(max_size=3), st.integers(1, 3), texts, texts, texts)


def root(**fields: Any) -> BlockHash:
    return namespace_root(SECRET, Namespace(PLAIN.model_fingerprint, PLAIN.block_size, **fields))


ROOT = root()


@pytest.mark.parametrize("vector", GOLDEN, ids=lambda vector: vector["name"])
def test_hashes_equal_the_golden_vectors(vector: dict[str, Any]) -> None:
    fields = vector["namespace"] | {
        "model_fingerprint": bytes.fromhex(vector["namespace"]["model_fingerprint"])
    }
    namespace = Namespace(**fields)
    media = [
        ImageTokens(bytes.fromhex(span["content_hash"]), span["start"], span["length"])
        for span in vector["media"]
    ]
    chain_root = namespace_root(bytes.fromhex(vector["secret"]), namespace)
    assert chain_root.hex() == vector["root"]
    hashes = hash_blocks(chain_root, vector["token_ids"], namespace.block_size, media=media)
    assert [block_hash.hex() for block_hash in hashes] == vector["block_hashes"]


def test_the_golden_vectors_are_all_there_and_no_two_name_the_same_blocks() -> None:
    assert len(GOLDEN) == 21
    roots_and_hashes = [(vector["root"], tuple(vector["block_hashes"])) for vector in GOLDEN]
    with_blocks = [hashes[-1] for _, hashes in roots_and_hashes if len(hashes) > 1]
    assert len(set(with_blocks)) == len(with_blocks)


def test_a_hash_is_sha256_of_key_parent_and_tokens_truncated() -> None:
    key = ROOT + b"kvasir block hash" + bytes(31)
    first = hashlib.sha256(key + bytes(16) + struct.pack("<4I", 5, 6, 7, 8)).digest()[:HASH_BYTES]
    second = hashlib.sha256(key + first + struct.pack("<4I", 9, 8, 7, 6)).digest()[:HASH_BYTES]
    assert hash_blocks(ROOT, [5, 6, 7, 8, 9, 8, 7, 6, 5], 4) == [first, second]


@given(token_lists, block_sizes, texts, texts)
def test_each_link_takes_the_root_not_only_the_first(
    token_ids: list[int], block_size: int, one: str | None, other: str | None
) -> None:
    parent = BlockHash(b"p" * HASH_BYTES)
    roots = root(salt=one), root(salt=other)
    links = [hash_blocks(each, [*token_ids, *range(block_size)], block_size, parent=parent) for each in roots]
    assert bool(set(links[0]) & set(links[1])) == (one == other)


@given(token_lists, block_sizes, st.data())
def test_hashing_in_pieces_equals_hashing_at_once(
    token_ids: list[int], block_size: int, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(token_ids) // block_size))
    media = [ImageTokens(b"image", 2, 11), ImageTokens(b"sound", 20, 5)]
    whole = hash_blocks(ROOT, token_ids, block_size, media=media)
    head = hash_blocks(ROOT, token_ids[: cut * block_size], block_size, media=media)
    tail = hash_blocks(
        ROOT,
        token_ids[cut * block_size :],
        block_size,
        parent=head[-1] if head else None,
        start=cut * block_size,
        media=media,
    )
    assert head + tail == whole
    assert len(whole) == len(token_ids) // block_size
    assert all(len(block_hash) == HASH_BYTES for block_hash in whole)


@given(token_lists, token_lists, token_lists, block_sizes)
def test_two_prompts_share_exactly_the_blocks_of_their_common_prefix(
    common: list[int], one: list[int], other: list[int], block_size: int
) -> None:
    first, second = common + one, common + other
    num_common = 0
    while num_common < min(len(first), len(second)) and first[num_common] == second[num_common]:
        num_common += 1
    hashes, others = hash_blocks(ROOT, first, block_size), hash_blocks(ROOT, second, block_size)
    num_shared = num_common // block_size
    assert hashes[:num_shared] == others[:num_shared]
    assert not set(hashes[num_shared:]) & set(others[num_shared:])


@given(token_lists, block_sizes)
def test_no_hash_occurs_twice_in_a_chain(token_ids: list[int], block_size: int) -> None:
    hashes = hash_blocks(ROOT, token_ids, block_size)
    assert len({ROOT, *hashes}) == len(hashes) + 1


@given(namespaces, namespaces)
def test_different_namespaces_never_share(one: Namespace, other: Namespace) -> None:
    same = one == other
    roots = namespace_root(SECRET, one), namespace_root(SECRET, other)
    assert (roots[0] == roots[1]) == same
    chains = [hash_blocks(chain_root, [1, 2, 3], 1) for chain_root in roots]
    assert bool(set(chains[0]) & set(chains[1])) == same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"adapter": "x"}, {"salt": "x"}),
        ({"adapter": "x"}, {"tenant": "x"}),
        ({"tenant": "x"}, {"salt": "x"}),
        ({"salt": ""}, {}),
        ({"tenant": "ab", "salt": "c"}, {"tenant": "a", "salt": "bc"}),
        ({"tenant": "a\x04salt\x01\x00\x00\x00b"}, {"tenant": "a", "salt": "b"}),
    ],
)
def test_no_field_can_be_taken_for_another(one: dict[str, str], other: dict[str, str]) -> None:
    assert root(**one) != root(**other)


def test_another_secret_is_another_root() -> None:
    assert namespace_root(b"another cluster secret", PLAIN) != ROOT


@pytest.mark.parametrize("num_bytes", [0, 15, 65])
def test_a_secret_of_an_unfit_length_is_refused(num_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"has {num_bytes} bytes"):
        namespace_root(b"x" * num_bytes, PLAIN)


def test_placeholders_of_different_images_never_match() -> None:
    token_ids = [1, 2, 3, 4, *[9] * 8, 5, 6, 7, 8]
    cat = hash_blocks(ROOT, token_ids, 4, media=[ImageTokens(b"cat", 4, 8)])
    dog = hash_blocks(ROOT, token_ids, 4, media=[ImageTokens(b"dog", 4, 8)])
    none = hash_blocks(ROOT, token_ids, 4)
    assert cat[0] == dog[0] == none[0]
    assert len({*cat[1:], *dog[1:], *none[1:]}) == 9


@given(
    st.lists(
        st.tuples(st.sampled_from([b"cat", b"dog", b"c"]), st.integers(0, 10), st.integers(1, 8)), max_size=3
    ),
    st.lists(
        st.tuples(st.sampled_from([b"cat", b"dog", b"c"]), st.integers(0, 10), st.integers(1, 8)), max_size=3
    ),
)
def test_blocks_match_only_with_the_same_media_in_the_same_places(
    one: list[tuple[bytes, int, int]], other: list[tuple[bytes, int, int]]
) -> None:
    """Where a span ends is told by the tokens; what it is and where it starts, by the hash."""

    def chain(spans: list[tuple[bytes, int, int]]) -> list[BlockHash]:
        return hash_blocks(ROOT, [9] * 20, 4, media=[ImageTokens(*span) for span in spans])

    def seen(spans: list[tuple[bytes, int, int]], block: int) -> list[tuple[bytes, int]]:
        return [
            (content, start)
            for content, start, length in spans
            if start < block * 4 + 4 and start + length > block * 4
        ]

    same = True
    for block, (block_hash, other_hash) in enumerate(zip(chain(one), chain(other), strict=True)):
        same = same and seen(one, block) == seen(other, block)
        assert (block_hash == other_hash) == same


@given(token_lists)
def test_packed_token_ids_come_back(token_ids: list[int]) -> None:
    assert pack_token_ids(token_ids) == struct.pack(f"<{len(token_ids)}I", *token_ids)
    assert unpack_token_ids(pack_token_ids(token_ids)) == token_ids


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_a_token_id_that_is_no_unsigned_32_bit_integer_is_refused(token_id: int) -> None:
    with pytest.raises(OverflowError):
        hash_blocks(ROOT, [token_id], 1)


def test_packed_token_ids_of_a_broken_length_are_refused() -> None:
    with pytest.raises(ValueError):
        unpack_token_ids(b"abc")


@given(token_lists, block_sizes, st.integers(1, 6), st.integers(0, 5))
def test_published_blocks_have_their_own_root_and_the_chain_goes_on_behind_them(
    token_ids: list[int], block_size: int, num_blocks: int, num_known: int
) -> None:
    cut = num_blocks * block_size
    expected = hash_blocks(OTHER_ROOT, token_ids[:cut], block_size)
    if len(token_ids) > cut:
        expected += hash_blocks(ROOT, token_ids[cut:], block_size, parent=expected[-1])
    published = PublishedBeginning(OTHER_ROOT, num_blocks)
    assert hash_blocks(ROOT, token_ids, block_size, published=published) == expected
    known = expected[:num_known]
    start = len(known) * block_size
    rest = hash_blocks(
        ROOT,
        token_ids[start:],
        block_size,
        parent=known[-1] if known else None,
        start=start,
        published=published,
    )
    assert known + rest == expected
