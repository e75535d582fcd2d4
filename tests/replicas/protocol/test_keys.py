"""The Redis schema: what is written can be read, and what cannot be read is refused."""

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.protocol import keys
from replicas.protocol.blocks import HASH_BYTES, BlockHash
from replicas.protocol.bounds import MAX_REQUESTS, MAX_SECONDS, MAX_TOKENS
from replicas.protocol.events import Removal
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.status import Epoch, ReplicaId, ReplicaState

HASHES = st.lists(st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES).map(BlockHash), max_size=5).map(tuple)
IDS = st.integers(0, 2**64 - 1)
COUNTS = st.integers(0, 2**31)
TOKENS = st.integers(0, MAX_TOKENS)
SECONDS = st.floats(0, MAX_SECONDS, allow_nan=False)
REQUESTS = st.integers(0, MAX_REQUESTS)
LOADS = st.builds(LoadSnapshot, REQUESTS, REQUESTS, TOKENS, TOKENS, *[COUNTS] * 3, SECONDS, SECONDS)
IDENTIFIERS = st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True)
ADDRESSES = st.builds("{}:{}".format, IDENTIFIERS, st.integers(1, 2**16 - 1)) | st.just("[::1]:50051")
RECORDS = st.builds(
    keys.ReplicaRecord,
    replica_id=st.just(ReplicaId("r0")),
    epoch=IDENTIFIERS.map(Epoch),
    address=ADDRESSES,
    state=st.sampled_from(ReplicaState),
    card_digest=IDENTIFIERS,
    last_change=COUNTS,
    load=LOADS,
)


@st.composite
def removals(draw: st.DrawFn) -> tuple[tuple[BlockHash, ...], bytes]:
    """Hashes, and why they went, which may not be said."""
    hashes = draw(HASHES)
    return hashes, draw(st.sampled_from([b"", draw(st.binary(min_size=len(hashes), max_size=len(hashes)))]))


def _id(announcement: keys.Announcement) -> int:
    return announcement.announcement_id


@st.composite
def changes(draw: st.DrawFn) -> keys.IndexChange:
    (removed, reasons), (points_removed, point_reasons) = draw(removals()), draw(removals())
    return keys.IndexChange(
        replica_id=ReplicaId(draw(IDENTIFIERS)),
        epoch=Epoch(draw(IDENTIFIERS)),
        number=draw(COUNTS),
        added=draw(HASHES),
        removed=removed,
        cleared=draw(st.booleans()),
        announced=tuple(
            draw(st.lists(st.builds(keys.Announcement, IDS, HASHES, HASHES), max_size=4, unique_by=_id))
        ),
        ended=tuple(draw(st.lists(IDS, max_size=4))),
        in_host=draw(HASHES),
        on_disk=draw(HASHES),
        reasons=reasons,
        points=draw(HASHES),
        points_removed=points_removed,
        point_reasons=point_reasons,
    )


CHANGES = changes()
LOAD = LoadSnapshot(num_running=2)
RECORD = keys.ReplicaRecord(ReplicaId("r0"), Epoch("e"), "a:1", ReplicaState.READY, "d", 1, LOAD)
NOT_ALWAYS = {b"announced", b"announced_points", b"ended", b"in_host", b"on_disk", b"points"}
NOT_ALWAYS |= {b"points_removed", b"point_reasons", b"reasons"}
"""Fields that only a change has which needs them."""


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
    del fields[data.draw(st.sampled_from(sorted(fields.keys() - {b"order", b"beat"})))]
    with pytest.raises(ValueError, match="replica 'r0' is unreadable"):
        keys.decode_record(record.replica_id, fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"state", b"asleep"),
        (b"last_change", b"many"),
        (b"load", b"{"),
        (b"load", b"[]"),
        (b"load", b"[" * 100_000),
        (b"load", b'{"x":' + b"[" * 4000),
        (b"load", json.dumps({"num_running": "3"}).encode()),
        (b"load", json.dumps({"num_running": [3]}).encode()),
        (b"load", json.dumps({"num_running": True}).encode()),
        (b"load", json.dumps({"num_running": -1}).encode()),
        (b"load", json.dumps({"num_waiting": 10**30}).encode()),
        (b"load", json.dumps({"num_pending_tokens": 10**400}).encode()),
        (b"load", json.dumps({"num_pending_tokens": 1.5}).encode()),
        (b"load", b'{"decode_step_seconds": NaN}'),
        (b"load", b'{"decode_step_seconds": 1e999}'),
        (b"load", b'{"prefill_seconds_per_token": -0.1}'),
        (b"load", b"\xff"),
        (b"last_change", b"-1"),
        (b"last_change", b"1_0"),
        (b"last_change", b"9" * 30),
        (b"last_change", "\u0663".encode()),
        (b"epoch", b""),
        (b"epoch", b"e 1"),
        (b"epoch", b"e" * 1000),
        (b"epoch", b"\xff"),
        (b"address", b"unix:/tmp/socket"),
        (b"address", b"dns:///elsewhere:1"),
        (b"address", b"a:65536"),
        (b"address", b"a:1\nb"),
        (b"address", b""),
        (b"card_digest", b"d\nforged line"),
    ],
)
def test_a_record_with_an_unreadable_field_is_refused(name: bytes, value: bytes) -> None:
    fields = as_redis_returns(keys.encode_record(RECORD)) | {name: value}
    with pytest.raises(ValueError):
        keys.decode_record(ReplicaId("r0"), fields)


def test_a_loads_field_that_a_later_version_adds_is_ignored() -> None:
    fields = as_redis_returns(keys.encode_record(RECORD))
    fields[b"load"] = json.dumps({"num_running": 2, "num_sheep": 3}).encode()
    assert keys.decode_record(ReplicaId("r0"), fields) == RECORD


@pytest.mark.parametrize("replica_id", ["", "r 0", "r0\nforged line", "r" * 1000, "r{0}"])
def test_what_is_no_id_is_no_replica(replica_id: str) -> None:
    with pytest.raises(ValueError):
        keys.decode_record(ReplicaId(replica_id), as_redis_returns(keys.encode_record(RECORD)))


def test_of_a_set_only_names_are_taken_and_the_rest_is_counted() -> None:
    assert keys.decode_ids({b"r1", b"r0", b"\xff", b"r 2"}) == (["r0", "r1"], 2)
    assert keys.decode_names({"org/model:tag \u00e9".encode(), b"a\x00b", b""}) == (
        ["org/model:tag \u00e9"],
        2,
    )
    assert keys.decode_names(TypeError("WRONGTYPE")) == ([], 1)


def test_a_change_that_no_writer_would_make_so_large_is_refused() -> None:
    hashes = (BlockHash(bytes(HASH_BYTES)),) * (keys.MAX_HASHES_PER_CHANGE + 1)
    change = keys.IndexChange(ReplicaId("r0"), Epoch("e"), 1, added=hashes)
    with pytest.raises(ValueError, match="an index change has"):
        keys.decode_change(as_redis_returns(keys.encode_change(change)))


@given(CHANGES, st.data())
def test_a_change_that_lacks_a_field_is_refused(change: keys.IndexChange, data: st.DataObject) -> None:
    fields = as_redis_returns(keys.encode_change(change))
    del fields[data.draw(st.sampled_from(sorted(fields.keys() - NOT_ALWAYS)))]
    with pytest.raises(ValueError, match="has no field"):
        keys.decode_change(fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({b"announced": bytes(11)}, "announcement"),
        ({b"announced": struct.pack("<QI", 7, 2) + bytes(31)}, "announcement"),
        ({b"announced": struct.pack("<QI", 7, 2**32 - 1)}, "announcement"),
        ({b"ended": bytes(9)}, "announcement"),
        *(
            ({name: bytes(17)}, "not a whole number")
            for name in (b"added", b"removed", b"in_host", b"on_disk")
        ),
        *(
            ({removed: bytes(2 * HASH_BYTES), reasons: bytes(number)}, "reasons for 2 removed hashes")
            for removed, reasons in ((b"removed", b"reasons"), (b"points_removed", b"point_reasons"))
            for number in (1, 3)
        ),
    ],
)
def test_a_change_with_a_torn_field_is_refused(fields: dict[bytes, bytes], words: str) -> None:
    change = keys.IndexChange(ReplicaId("r0"), Epoch("e"), 1)
    with pytest.raises(ValueError, match=words):
        keys.decode_change(as_redis_returns(keys.encode_change(change)) | fields)


@given(removals())
def test_removed_hashes_are_grouped_by_their_reason(made: tuple[tuple[BlockHash, ...], bytes]) -> None:
    removed, reasons = made
    change = keys.IndexChange(ReplicaId("r0"), Epoch("e"), 1, removed=removed, reasons=reasons)
    groups = [*change.removed_by_reason()]
    assert len({reason for reason, _ in groups}) == len(groups)
    pairs = sorted((each, reason) for reason, some in groups for each in some)
    known = {reason.value: reason for reason in Removal}
    told = [known.get(each, Removal.EVICTED) for each in reasons or bytes(len(removed))]
    assert pairs == sorted(zip(removed, told, strict=True))


def test_the_numbers_of_reasons_never_change() -> None:
    assert [(each.name, each.value) for each in Removal] == [
        ("EVICTED", 0),
        ("EXPIRED", 1),
        ("BROKEN", 2),
        ("LOST", 3),
        ("CLEARED", 4),
    ]


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
