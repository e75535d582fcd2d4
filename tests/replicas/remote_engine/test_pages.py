"""Pages become blocks: whole ones, once, also where prompts part inside one."""

import pytest

from replicas.kvcache.hash_map import UnknownBlock
from replicas.remote_engine.pages import Block, Pages
from tests.replicas.builders import ROOT

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
