"""The Redis schema: what is written can be read, and what cannot be read is refused."""

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.protocol import keys
from replicas.protocol.blocks import HASH_BYTES, BlockHash
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.status import Epoch, ReplicaId, ReplicaState

HASHES = st.lists(st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES).map(BlockHash), max_size=5).map(tuple)
IDS = st.integers(0, 2**64 - 1)
COUNTS = st.integers(0, 2**31)
SECONDS = st.floats(0, 1e6, allow_nan=False)
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=10)
LOADS = st.builds(LoadSnapshot, *[COUNTS] * 7, SECONDS, SECONDS)
RECORDS = st.builds(
    keys.ReplicaRecord,
    replica_id=st.just(ReplicaId("r0")),
    epoch=NAMES.map(Epoch),
    address=NAMES,
    state=st.sampled_from(ReplicaState),
    card_digest=NAMES,
    last_change=COUNTS,
    load=LOADS,
)
CHANGES = st.builds(
    keys.IndexChange,
    replica_id=NAMES.map(ReplicaId),
    epoch=NAMES.map(Epoch),
    number=COUNTS,
    added=HASHES,
    removed=HASHES,
    cleared=st.booleans(),
    announced=st.lists(st.builds(keys.Announcement, IDS, HASHES), max_size=4).map(tuple),
    ended=st.lists(IDS, max_size=4).map(tuple),
)


def as_redis_returns(fields: dict[str, Any]) -> dict[bytes, bytes]:
    return {
        name.encode(): value if isinstance(value, bytes) else value.encode() for name, value in fields.items()
    }


@given(RECORDS)
def test_a_record_survives_the_round_trip(record: keys.ReplicaRecord) -> None:
    assert keys.decode_record(record.replica_id, as_redis_returns(keys.encode_record(record))) == record


@given(CHANGES)
def test_a_change_survives_the_round_trip(change: keys.IndexChange) -> None:
    assert keys.decode_change(as_redis_returns(keys.encode_change(change))) == change


@given(RECORDS, st.data())
def test_a_record_that_lacks_a_field_is_refused(record: keys.ReplicaRecord, data: st.DataObject) -> None:
    fields = as_redis_returns(keys.encode_record(record))
    del fields[data.draw(st.sampled_from(sorted(fields)))]
    with pytest.raises(ValueError, match="replica r0 is unreadable"):
        keys.decode_record(record.replica_id, fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"state", b"asleep"),
        (b"last_change", b"many"),
        (b"load", b"{"),
        (b"load", json.dumps({"num_sheep": 3}).encode()),
        (b"load", b"[]"),
    ],
)
def test_a_record_with_an_unreadable_field_is_refused(name: bytes, value: bytes) -> None:
    record = keys.ReplicaRecord(
        ReplicaId("r0"), Epoch("e"), "a:1", ReplicaState.READY, "d", 1, LoadSnapshot()
    )
    fields = as_redis_returns(keys.encode_record(record)) | {name: value}
    with pytest.raises(ValueError):
        keys.decode_record(ReplicaId("r0"), fields)


@given(CHANGES, st.data())
def test_a_change_that_lacks_a_field_is_refused(change: keys.IndexChange, data: st.DataObject) -> None:
    fields = as_redis_returns(keys.encode_change(change))
    del fields[data.draw(st.sampled_from(sorted(fields.keys() - {b"announced", b"ended"})))]
    with pytest.raises(ValueError, match="has no field"):
        keys.decode_change(fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"announced", bytes(11)),
        (b"announced", struct.pack("<QI", 7, 2) + bytes(31)),
        (b"announced", struct.pack("<QI", 7, 2**32 - 1)),
        (b"ended", bytes(9)),
    ],
)
def test_a_torn_announcement_is_refused(name: bytes, value: bytes) -> None:
    change = keys.IndexChange(ReplicaId("r0"), Epoch("e"), 1)
    fields = as_redis_returns(keys.encode_change(change)) | {name: value}
    with pytest.raises(ValueError, match="announcement"):
        keys.decode_change(fields)


def test_torn_hashes_are_refused() -> None:
    with pytest.raises(ValueError, match="no whole number"):
        keys.split_hashes(bytes(HASH_BYTES + 1))


def test_all_keys_of_a_model_share_one_hash_tag_and_no_two_are_equal() -> None:
    replica, epoch = ReplicaId("r0"), Epoch("e1")
    names = [
        keys.replicas_key("m"),
        keys.replica_key("m", replica),
        keys.blocks_key("m", replica, epoch),
        keys.blocks_key("m", replica, Epoch("e2")),
        keys.events_key("m"),
    ]
    assert len({*names}) == 5
    assert all("{m}" in name for name in names)


@given(st.integers(0, 10_000), st.sampled_from([1, 16, 32, 100]), st.sampled_from([1, 16, 128, 1000]))
def test_the_index_keeps_a_block_per_stride_and_never_leaves_a_longer_gap(
    position: int, block_size: int, stride: int
) -> None:
    gap = keys.blocks_per_stride(block_size, stride)
    assert gap * block_size <= max(stride, block_size)
    window = [keys.is_indexed(position + offset, block_size, stride) for offset in range(gap)]
    assert sum(window) == 1


@pytest.mark.parametrize("block_size", [16, 32, 128, 256])
@pytest.mark.parametrize("num_blocks", [0, 1, 7, 8, 9, 16, 100])
def test_the_index_keeps_what_lies_on_the_stride_and_a_prompts_last_block(
    block_size: int, num_blocks: int
) -> None:
    kept = [
        position
        for position in range(num_blocks)
        if keys.is_indexed(position, block_size, 128) or position == num_blocks - 1
    ]
    assert keys.indexed_positions(num_blocks, keys.blocks_per_stride(block_size, 128)) == kept
