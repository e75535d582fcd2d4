"""Layouts and headers: golden bytes, round trips, and everything that is not the chunk that was asked for."""

import dataclasses
import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from replicas.kvstore import layout
from replicas.kvstore.chunk import ChunkName
from replicas.kvstore.layout import (
    HEADER_BYTES,
    MAX_WRITERS,
    ChunkError,
    ChunkHeader,
    LayoutId,
    MalformedHeader,
    NotAChunk,
    OtherKey,
    OtherLayout,
    OtherVersion,
    WrongChecksum,
    WrongLength,
    decode,
    decode_header,
    encode,
    file_bytes,
)
from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import UserTag
from tests.replicas.kvstore.chunk_images import LAYOUT, PAYLOAD_BYTES, fill, header, image, payload, slots
from tests.replicas.kvstore.chunk_names import key, name

ID = LAYOUT.digest()

hashes = st.binary(min_size=16, max_size=16).map(BlockHash)
tags = st.binary(max_size=16)
headers = st.builds(
    ChunkHeader,
    layout=st.just(ID),
    name=st.builds(ChunkName, hashes, st.none() | hashes, st.integers(0, 2**64 - 1)),
    num_tokens=st.integers(0, 2**32 - 1),
    payload_bytes=st.integers(0, 9000),
    writers=st.lists(tags.map(UserTag), max_size=MAX_WRITERS).map(tuple),
    ends_prompt=st.booleans(),
    tenant=tags,
    created_seconds=st.integers(0, 2**62),
)


def test_the_layout_has_the_digest_that_files_are_named_by() -> None:
    assert ID.hex() == "b26ff0952a7e2a0798b8cb98d3e54778"


def test_every_field_of_a_layout_tells_layouts_apart() -> None:
    digests = {ID}
    for field in dataclasses.fields(LAYOUT):
        value = getattr(LAYOUT, field.name)
        other = value + (1 if isinstance(value, int) else "x")
        digests.add(dataclasses.replace(LAYOUT, **{field.name: other}).digest())
    assert len(digests) == len(dataclasses.fields(LAYOUT)) + 1


def test_what_moves_from_one_field_to_the_next_is_another_layout() -> None:
    one = dataclasses.replace(LAYOUT, engine="ab", engine_version="c")
    other = dataclasses.replace(LAYOUT, engine="a", engine_version="bc")
    assert one.digest() != other.digest()


def test_a_file_has_the_bytes_that_earlier_versions_wrote() -> None:
    assert xxhash.xxh3_128_hexdigest(image("ab")) == "460ed59abea4da87a5d487afb156601a"


def test_a_file_is_a_page_of_header_and_whole_pages_of_kv() -> None:
    assert [file_bytes(each) for each in (0, 1, 4096, 4097)] == [4096, 8192, 8192, 12288]


def test_what_is_written_is_read_again_and_nothing_else_of_the_slot() -> None:
    [slot] = slots(1)
    written = fill(slot, "ab")
    total = encode(written, slot)
    assert total == len(slot) and decode(slot, ID, key("ab")) == written
    assert bytes(slot[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES]) == payload("ab")
    assert not any(slot[HEADER_BYTES + PAYLOAD_BYTES :])


def test_a_larger_slot_keeps_what_lies_behind_the_file() -> None:
    [slot] = slots(1, file_bytes(PAYLOAD_BYTES) + 4096)
    total = encode(fill(slot, "a"), slot)
    assert bytes(slot[total:]) == b"\xa5" * 4096
    assert decode(slot[:total], ID, key("a")) == header("a")


@given(headers)
def test_every_header_survives(written: ChunkHeader) -> None:
    slot = memoryview(bytearray(b"\x5a" * file_bytes(written.payload_bytes)))
    encode(written, slot)
    assert decode(slot, ID, written.name.key) == written
    assert decode_header(slot[:HEADER_BYTES], ID, written.name.key) == written


def test_a_flipped_bit_anywhere_that_counts_is_found() -> None:
    whole = image("a", 100)
    counted = HEADER_BYTES + 100
    for at in range(counted):
        whole[at] ^= 1 << at % 8
        with pytest.raises(ChunkError):
            decode(memoryview(whole), ID, key("a"))
        if at < HEADER_BYTES - 16:
            with pytest.raises(ChunkError):
                decode_header(memoryview(whole), ID, key("a"))
        whole[at] ^= 1 << at % 8
    decode(memoryview(whole), ID, key("a"))


def test_a_file_that_was_cut_anywhere_is_found() -> None:
    whole = memoryview(image("a", 100))
    for length in range(len(whole)):
        with pytest.raises(WrongLength):
            decode(whole[:length], ID, key("a"))
    with pytest.raises(WrongLength):
        decode(memoryview(bytes(whole) + b"x"), ID, key("a"))


def test_each_way_to_be_wrong_has_its_name() -> None:
    whole = image("a")
    with pytest.raises(OtherLayout, match="has the layout"):
        decode(memoryview(whole), LayoutId(bytes(16)), key("a"))
    with pytest.raises(OtherKey, match="is 612e"):
        decode(memoryview(whole), ID, key("b"))
    for at, error in ((0, NotAChunk), (8, OtherVersion), (60, MalformedHeader), (-4000, WrongChecksum)):
        changed = bytearray(whole)
        changed[at] ^= 1
        with pytest.raises(error):
            decode(memoryview(changed), ID, key("a"))


@given(st.binary(min_size=layout._FIELDS.size - 12, max_size=600))
def test_a_header_of_nonsense_with_a_right_checksum_is_refused_or_means_what_it_says(fields: bytes) -> None:
    begin = struct.pack("<8sI", layout.MAGIC, layout.FORMAT_VERSION)
    written = bytearray((begin + fields).ljust(HEADER_BYTES, b"\0"))
    written[-24:-16] = xxhash.xxh3_64_digest(written[:-24])
    view = memoryview(written)
    try:
        decoded = decode_header(view, LayoutId(bytes(view[48:64])), BlockHash(bytes(view[64:80])))
    except ChunkError:
        return
    assert layout._encode_fields(decoded) == view[:-24]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"writers": (UserTag(b""),) * (MAX_WRITERS + 1)}, "room for"),
        ({"writers": (UserTag(b"u" * 17),)}, "at most 16 bytes"),
        ({"tenant": b"t" * 17}, "at most 16 bytes"),
        ({"layout": LayoutId(b"short")}, "16 bytes each"),
        ({"name": name("a")._replace(parent=BlockHash(b"short"))}, "16 bytes each"),
        ({"num_tokens": -1}, "cannot hold"),
        ({"payload_bytes": 10**6}, "too small"),
    ],
)
def test_what_no_header_can_hold_is_refused(changes: dict[str, object], sentence: str) -> None:
    wrong = dataclasses.replace(header("a"), **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=sentence):
        encode(wrong, slots(1)[0])
