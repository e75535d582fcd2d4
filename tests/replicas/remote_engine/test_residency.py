"""What a server holds, by its events: our names, and nothing of other clients."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.protocol.blocks import hash_blocks
from replicas.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored
from replicas.protocol.frames import UserTag
from replicas.remote_engine.residency import Cleared, Removed, ServerResidency, Stored
from tests.replicas.builders import ROOT

SIZE = 4
TOKENS = list(range(10, 10 + 3 * SIZE))
OURS = hash_blocks(ROOT, TOKENS, SIZE)


def stored(hashes: list[int | bytes], first: int, *, salt: str | None = None, **fields: object) -> Stored:
    tokens = TOKENS[first * SIZE : (first + len(hashes)) * SIZE]
    keys: list[list[object] | None] | None = [[salt], *[None] * (len(hashes) - 1)] if salt else None
    return Stored(hashes, tokens, SIZE, extra_keys=keys, medium="GPU", **fields)  # type: ignore[arg-type]


def test_blocks_bear_our_hashes_also_behind_a_parent() -> None:
    residency = ServerResidency(SIZE, 16)
    residency.expect("7-0", UserTag(b"u"), len(TOKENS))
    assert residency.apply([stored([-5, 2], 0, salt=ROOT.hex())]) == [BlockStored((OURS[0], OURS[1]), 0)]
    (event,) = residency.apply([stored([3], 2, parent_block_hash=2, session_id="7-0")])
    assert event == BlockStored((OURS[2],), 2, ends_prompt=True)
    assert residency.num_copies == 3
    # The same hash as a number without its sign.
    assert residency.apply([Removed([2**64 - 5], "GPU")]) == [BlockRemoved((OURS[0],))]


def test_blocks_of_other_clients_are_left_out_and_counted() -> None:
    residency = ServerResidency(SIZE, 16)
    assert residency.apply([stored([1], 0), stored([2], 1, parent_block_hash=1)]) == []
    assert residency.apply([stored([4], 0, salt="their own salt")]) == []
    assert residency.apply([Removed([1], "GPU")]) == []
    assert residency.num_unnamed == 3


def test_copies_below_the_device_are_not_ours_to_know() -> None:
    residency = ServerResidency(SIZE, 16)
    event = stored([1], 0, salt=ROOT.hex())
    event.medium = "CPU"
    assert residency.apply([event, Removed([1], "CPU")]) == []


def test_a_clearing_forgets_all() -> None:
    residency = ServerResidency(SIZE, 16)
    residency.apply([stored([1, 2], 0, salt=ROOT.hex())])
    assert residency.apply([Cleared()]) == [AllBlocksCleared()]
    assert residency.num_copies == 0


def test_hits_are_divided_by_who_computed_them() -> None:
    residency = ServerResidency(SIZE, 16)
    residency.expect("1-0", UserTag(b"a"), 2 * SIZE)
    residency.expect("2-0", UserTag(b"b"), 3 * SIZE)
    residency.apply([stored([1, 2], 0, salt=ROOT.hex(), session_id="1-0")])
    residency.apply([stored([3], 2, parent_block_hash=2, session_id="2-0")])
    shares = residency.shares(OURS, UserTag(b"b"), num_prompt_tokens=3 * SIZE)
    assert shares == (SIZE, 2 * SIZE)


def test_what_cannot_be_followed_is_said() -> None:
    for fields, word in (
        ({"group_idx": 1}, "different caches"),
        ({"lookahead_token_ids": [[4]]}, "disable_lookahead_block_hashes"),
    ):
        residency = ServerResidency(SIZE, 16)
        assert residency.apply([stored([1], 0, salt=ROOT.hex(), **fields)]) == []
        assert word in (residency.complaint or "")
    other_size = ServerResidency(SIZE + 1, 16)
    other_size.apply([stored([1], 0, salt=ROOT.hex())])
    assert "4 tokens" in (other_size.complaint or "")


@pytest.mark.parametrize(("num_distinct", "times"), [(20, 2), (2, 4)])
def test_a_server_that_removes_nothing_is_believed_no_longer(num_distinct: int, times: int) -> None:
    residency = ServerResidency(SIZE, 2)
    for number in range(20):
        assert (residency.complaint is not None) == (number > times * 2)
        residency.apply([stored([number % num_distinct], 0, salt=ROOT.hex())])
    assert "not removed than the 2" in str(residency.complaint)


@given(st.lists(st.tuples(st.sampled_from(["store", "remove", "clear"]), st.integers(0, 2)), max_size=40))
def test_what_is_told_equals_what_is_held(steps: list[tuple[str, int]]) -> None:
    """The oracle: a list of copies per position, of which a chain's beginning is stored first."""
    residency, copies = ServerResidency(SIZE, 64), [0, 0, 0]
    told = [0, 0, 0]
    for what, place in steps:
        if what == "store" and (place == 0 or copies[place - 1]):
            parent = {} if place == 0 else {"parent_block_hash": place}
            events = residency.apply(
                [stored([place + 1], place, salt=ROOT.hex() if place == 0 else None, **parent)]
            )
            copies[place] += 1
        elif what == "remove":
            events = residency.apply([Removed([place + 1], "GPU")])
            copies[place] = max(0, copies[place] - 1)
        elif what == "clear":
            events = residency.apply([Cleared()])
            copies = [0, 0, 0]
        else:
            continue
        for event in events:
            match event:
                case BlockStored(hashes, first):
                    told[first] += 1
                    assert hashes == (OURS[first],)
                case BlockRemoved(hashes):
                    told[OURS.index(hashes[0])] -= 1
                case AllBlocksCleared():
                    told = [0, 0, 0]
        assert told == copies
        assert residency.num_copies == sum(copies)
