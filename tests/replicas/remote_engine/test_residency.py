"""What a server holds: by its events, in pages, or as it is believed to."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.kvcache.hash_map import UnknownBlock
from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from replicas.protocol.frames import UserTag
from replicas.remote_engine.believed import SHARE_BELIEVED, BelievedResidency
from replicas.remote_engine.pages import Block, Pages
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


KEYS: list[object] = [ROOT.hex()]


def joined() -> Pages:
    """Blocks of two pages of two tokens; one is whole, and a page follows it."""
    pages = Pages(2, 2)
    assert pages.stored([1, 2, 3], None, [10, 11, 12, 13, 14, 15], KEYS) == [
        Block(2, None, [10, 11, 12, 13], KEYS)
    ]
    return pages


def test_a_block_is_whole_with_its_last_page_which_may_come_later() -> None:
    pages = joined()
    assert pages.stored([4], 3, [16, 17], None) == [Block(4, 2, [14, 15, 16, 17], None)]


def test_prompts_that_part_inside_a_block_share_its_first_pages() -> None:
    pages = joined()
    pages.stored([4], 3, [16, 17], None)
    assert pages.stored([5], 3, [18, 19], None) == [Block(5, 2, [14, 15, 18, 19], None)]
    assert pages.removed([5]) == [5]
    assert sorted(pages.removed([3]), key=str) == [4]
    assert pages.removed([4, 3]) == []
    assert pages.removed([1]) == [2]


def test_a_shared_page_takes_all_its_blocks_with_it() -> None:
    pages = joined()
    pages.stored([4], 3, [16, 17], None)
    pages.stored([5], 3, [18, 19], None)
    assert set(pages.removed([3])) == {4, 5}
    assert pages.removed([4, 5]) == []


def test_a_page_that_is_told_twice_is_held_once() -> None:
    pages = joined()
    assert pages.stored([1, 2], None, [10, 11, 12, 13], KEYS) == []
    assert pages.removed([2]) == [2]
    assert pages.removed([2]) == []


def test_a_block_is_whole_again_once_its_page_is_back() -> None:
    pages = joined()
    assert pages.removed([2]) == [2]
    assert pages.stored([2], 1, [12, 13], None) == [Block(2, None, [10, 11, 12, 13], KEYS)]


def test_a_run_without_a_beginning_is_not_ours() -> None:
    pages = joined()
    for parent, keys in ((9, KEYS), (None, None), (None, ["their salt"])):
        with pytest.raises(UnknownBlock):
            pages.stored([7], parent, [1, 2], keys)
    pages.clear()
    with pytest.raises(UnknownBlock):
        pages.stored([4], 3, [16, 17], None)


ANN, BOB = UserTag(b"ann"), UserTag(b"bob")


def chain(*words: int) -> list[BlockHash]:
    return hash_blocks(ROOT, [word for word in words for _ in range(SIZE)], SIZE)


class Told:
    """A reader of the events, as the index is one."""

    def __init__(self) -> None:
        self.held: dict[BlockHash, int] = {}

    def take(self, events: list[CacheEvent]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    for place, block_hash in enumerate(event.block_hashes, event.first_block_index):
                        assert block_hash not in self.held
                        self.held[block_hash] = place
                case BlockRemoved():
                    for block_hash in event.block_hashes:
                        del self.held[block_hash]
                case AllBlocksCleared():
                    self.held.clear()


def test_a_random_history_stays_bounded_and_whole_and_balances() -> None:
    rng = random.Random(3)
    believed, told = BelievedResidency(SIZE, 40), Told()
    asked: list[list[BlockHash]] = []
    for _ in range(600):
        words = [rng.randrange(3) for _ in range(rng.randrange(1, 14))]
        blocks = chain(*words)
        asked.append(blocks)
        found = believed.num_leading(blocks)
        told.take(believed.computed(blocks, rng.randrange(len(blocks) + 1), ANN))
        if rng.random() < 0.3:
            told.take(believed.corrected(blocks, rng.randrange(found + 1), ANN))
        assert believed.num_copies == len(told.held) <= SHARE_BELIEVED * 40
        assert believed.num_leading(blocks) == len(blocks)
        for each in asked:
            held = [block in told.held for block in each]
            assert held == sorted(held, reverse=True), "a block is held without those before it"
            assert all(told.held[block] == place for place, block in enumerate(each) if block in told.held)
    told.take([believed.clear()])
    assert believed.num_copies == len(told.held) == 0


def test_ends_of_what_was_used_longest_ago_go_first() -> None:
    believed = BelievedResidency(SIZE, 10)
    old, new = chain(1, 2, 3, 4, 5), chain(1, 2, 7, 7, 7, 7, 7)
    believed.computed(old, 5, ANN)
    events = believed.computed(new, 7, ANN)
    assert events[0] == BlockRemoved((old[4],))
    assert believed.num_leading(old) == 4 and believed.num_copies == 9


def test_a_chain_that_is_longer_than_the_cache_is_believed_from_its_start() -> None:
    believed = BelievedResidency(SIZE, 4)
    (event,) = believed.computed(chain(*range(9)), 9, ANN)
    assert event == BlockStored(tuple(chain(*range(9))[:3]), 0)


def test_a_prompts_end_is_told_once() -> None:
    believed = BelievedResidency(SIZE, 100)
    prompt, whole = chain(1, 2, 3), chain(1, 2, 3, 4, 5)
    assert believed.computed(prompt, 3, ANN) == [BlockStored(tuple(prompt), 0, ends_prompt=True)]
    assert believed.computed(whole, 3, ANN) == [BlockStored(tuple(whole[3:]), 3)]
    assert believed.computed(whole, 3, ANN) == []
    other = chain(6, 7, 8)
    assert believed.computed(other, 2, ANN) == [
        BlockStored(tuple(other[:2]), 0, ends_prompt=True),
        BlockStored(tuple(other[2:]), 2),
    ]


def test_a_shorter_hit_forgets_what_followed_in_other_prompts_and_not_what_was_computed_again() -> None:
    believed = BelievedResidency(SIZE, 100)
    for words in ((1, 2, 3, 4), (1, 2, 3, 5, 6), (1, 9), (8, 2, 3)):
        believed.computed(chain(*words), 1, ANN)
    again = chain(1, 2, 3, 4)
    assert believed.computed(again, 4, BOB) == []
    (event,) = believed.corrected(again, 1, BOB)
    assert isinstance(event, BlockRemoved)
    assert set(event.block_hashes) == set(chain(1, 2, 3, 5, 6)[3:])
    assert believed.num_leading(again) == 4
    assert believed.num_leading(chain(1, 9)) == 2 and believed.num_leading(chain(8, 2, 3)) == 3
    shares = believed.shares(again, ANN, num_prompt_tokens=16)
    assert (shares.own, shares.cross_user) == (SIZE, 3 * SIZE), "computed again is by the last"
    assert believed.corrected(again, 4, BOB) == []
