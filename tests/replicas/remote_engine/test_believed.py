"""What is believed of a server that does not say what it holds: bounded, whole from the start, corrected."""

import random

from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from replicas.protocol.frames import UserTag
from replicas.remote_engine.believed import SHARE_BELIEVED, BelievedResidency
from tests.replicas.builders import ROOT

SIZE = 4
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
