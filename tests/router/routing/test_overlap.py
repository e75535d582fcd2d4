"""The prefix index by examples: depth, gaps, announcements and predictions, replicas that come and go."""

from collections.abc import Sequence
from typing import Any

import pytest

from replicas.protocol.blocks import BlockHash
from replicas.protocol.keys import Announcement, IndexChange, is_indexed
from replicas.protocol.status import Epoch, ReplicaId
from router.routing.overlap import ChangeOutcome, PrefixIndex
from tests.router.routing.chains import chain

A, B = ReplicaId("a"), ReplicaId("b")
E1, E2 = Epoch("e1"), Epoch("e2")


def thinned(hashes: Sequence[BlockHash], stride: int) -> set[BlockHash]:
    """What a replica reports of a prompt: the stride, and the last full block."""
    return {h for i, h in enumerate(hashes) if is_indexed(i, 1, stride) or i == len(hashes) - 1}


def test_an_empty_index_knows_nothing() -> None:
    index = PrefixIndex(1, 4)
    assert index.overlaps(chain("abcdefgh")) == {}
    assert index.overlaps([]) == {}


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 8, 100])
def test_the_same_prompt_overlaps_with_all_its_full_blocks(stride: int) -> None:
    for length in range(1, 20):
        hashes = chain("abcdefghijklmnopqrstuvwxyz"[:length])
        index = PrefixIndex(1, stride)
        index.replace(A, E1, thinned(hashes, stride))
        assert index.overlaps(hashes) == {A: length}


@pytest.mark.parametrize("stride", [1, 2, 4])
def test_a_longer_prompt_overlaps_as_far_as_the_cached_one_went(stride: int) -> None:
    for length in range(1, 12):
        index = PrefixIndex(1, stride)
        index.replace(A, E1, thinned(chain("abcdefghijkl"[:length]), stride))
        assert index.overlaps(chain("abcdefghijklmnop")) == {A: length}


def test_a_diverging_prompt_overlaps_to_the_last_common_stride() -> None:
    index = PrefixIndex(1, 4)
    index.replace(A, E1, thinned(chain("abcdefghij"), 4))
    assert index.overlaps(chain("abcdefghXY")) == {A: 8}
    assert index.overlaps(chain("abcdefXYZW")) == {A: 4}
    assert index.overlaps(chain("abXXXXXX")) == {}


def test_each_replica_has_its_own_depth() -> None:
    index = PrefixIndex(1, 4)
    index.replace(A, E1, thinned(chain("abcdefghij"), 4))
    index.replace(B, E1, thinned(chain("abcdeX"), 4))
    assert index.overlaps(chain("abcdefghijkl")) == {A: 10, B: 4}
    assert index.overlaps(chain("abcdeX")) == {A: 4, B: 6}


def test_what_lies_behind_a_hole_is_not_believed() -> None:
    hashes = chain("abcdefghijkl")
    index = PrefixIndex(1, 4)
    index.replace(A, E1, {hashes[3], hashes[11]})
    assert index.overlaps(hashes) == {A: 4}


def test_the_probe_goes_no_further_than_one_stride() -> None:
    hashes = chain("abcdefghijkl")
    index = PrefixIndex(1, 4)
    index.replace(A, E1, {hashes[3], hashes[8]})
    assert index.overlaps(hashes) == {A: 4}
    index.replace(A, E1, {hashes[3], hashes[6]})
    assert index.overlaps(hashes) == {A: 7}


def test_changes_of_another_epoch_or_replica_are_ignored() -> None:
    index = PrefixIndex(1, 1)
    index.replace(A, E2, ())
    added = tuple(chain("a"))
    assert index.apply(IndexChange(A, E1, 1, added)) is ChangeOutcome.UNKNOWN
    assert index.apply(IndexChange(B, E1, 1, added)) is ChangeOutcome.UNKNOWN
    assert index.num_entries == 0


def test_a_number_that_is_missing_is_a_gap_and_an_old_one_is_stale() -> None:
    index = PrefixIndex(1, 1)
    index.replace(A, E1, (), last_change=5)
    added = tuple(chain("a"))
    assert index.apply(IndexChange(A, E1, 5, added)) is ChangeOutcome.STALE
    assert index.apply(IndexChange(A, E1, 7, added)) is ChangeOutcome.GAP
    assert index.num_entries == 0
    assert index.apply(IndexChange(A, E1, 6, added)) is ChangeOutcome.APPLIED
    assert index.num_entries == 1
    assert index.last_change(A) == 6


def test_changes_that_a_set_already_contained_change_nothing_when_they_come_again() -> None:
    changes = [
        IndexChange(A, E1, 1, added=tuple(chain("abc"))),
        IndexChange(A, E1, 2, removed=tuple(chain("abc")[2:])),
        IndexChange(A, E1, 3, added=tuple(chain("xy")), cleared=True),
        IndexChange(A, E1, 4, added=tuple(chain("abc")[:1])),
    ]
    index = PrefixIndex(1, 1)
    index.replace(A, E1, {*chain("xy"), *chain("a")}, last_change=0)  # read after the last of them
    for change in changes:
        assert index.apply(change) is ChangeOutcome.APPLIED
    assert index.stored(A) == {*chain("xy"), *chain("a")}


def test_a_new_epoch_ends_what_was_predicted_for_the_old_one() -> None:
    index = PrefixIndex(1, 1)
    index.predict(1, A, chain("abc"))
    index.replace(A, E1, ())
    assert index.overlaps(chain("abc")) == {A: 3}  # made before the first set had been read
    index.replace(A, E2, ())
    assert index.overlaps(chain("abc")) == {}
    index.end_prediction(1)


def test_what_is_missing_is_what_the_index_would_gain() -> None:
    index = PrefixIndex(1, 4)
    hashes = chain("abcdefghij")
    assert set(index.missing(A, hashes)) == thinned(hashes, 4)
    index.replace(A, E1, {hashes[3], hashes[4]})
    assert index.missing(A, hashes) == (hashes[7], hashes[9])
    assert index.missing(A, hashes[:8]) == (hashes[7],)
    assert index.missing(A, hashes[:5]) == ()
    assert index.missing(A, []) == ()


def test_predictions_count_like_stored_blocks_and_end() -> None:
    index = PrefixIndex(1, 4)
    index.predict(7, A, index.missing(A, chain("abcdefg")))
    assert index.overlaps(chain("abcdefg")) == {A: 7}
    assert index.overlaps(chain("abcdefX")) == {A: 4}
    index.end_prediction(7)
    assert index.overlaps(chain("abcdefg")) == {}
    index.end_prediction(7)
    assert index.num_predictions == 0


def announced(number: int, announcement_id: int, text: str) -> IndexChange:
    return IndexChange(A, E1, number, announced=(Announcement(announcement_id, tuple(chain(text))),))


def ended(number: int, *announcement_ids: int, **rest: Any) -> IndexChange:
    return IndexChange(A, E1, number, ended=announcement_ids, **rest)


def test_an_announcement_counts_until_its_replica_ends_it() -> None:
    index = PrefixIndex(1, 1)
    index.replace(A, E1, ())
    index.apply(announced(1, 7, "abc"))
    assert index.overlaps(chain("abcd")) == {A: 3}
    assert index.num_entries == 0
    index.end_prediction(7)  # it is not ours to end
    assert index.overlaps(chain("abcd")) == {A: 3}
    index.apply(ended(2, 7, added=tuple(chain("ab"))))
    assert index.overlaps(chain("abcd")) == {A: 2}
    assert index.num_predictions == 0


def test_an_announcement_takes_the_place_of_the_prediction_with_its_id() -> None:
    index = PrefixIndex(1, 1)
    index.replace(A, E1, ())
    index.predict(7, A, chain("abc"))
    index.apply(announced(1, 7, "abc"))
    assert index.num_predictions == 1
    index.end_prediction(7)
    assert index.overlaps(chain("abc")) == {A: 3}
    index.apply(ended(2, 7))
    assert index.overlaps(chain("abc")) == {}


def test_the_end_of_an_announcement_ends_a_prediction_that_still_waits_for_it() -> None:
    index = PrefixIndex(1, 1)
    index.replace(A, E1, (), last_change=3)  # the announcement was among the changes before
    index.predict(7, A, chain("abc"))
    index.apply(ended(4, 7))
    assert index.overlaps(chain("abc")) == {}
    index.end_prediction(7)


def test_the_end_of_another_replicas_announcement_is_none_of_its_business() -> None:
    index = PrefixIndex(1, 1)
    index.replace(A, E1, ())
    index.predict(7, B, chain("abc"))
    index.apply(ended(1, 7, 8))
    assert index.overlaps(chain("abc")) == {B: 3}


def test_an_id_that_two_replicas_use_belongs_to_the_latest() -> None:
    index = PrefixIndex(1, 1)
    index.replace(A, E1, ())
    index.predict(7, B, chain("xyz"))
    index.apply(announced(1, 7, "abc"))
    assert index.overlaps(chain("xyz")) == {}
    index.predict(7, B, chain("x"))
    assert index.overlaps(chain("abc")) == {}
    assert index.num_predictions == 1


def test_what_was_announced_before_a_gap_is_forgotten_and_what_we_predict_stays() -> None:
    index = PrefixIndex(1, 1)
    index.replace(A, E1, ())
    index.predict(8, A, chain("xyz"))
    index.apply(announced(1, 7, "abc"))
    index.apply(announced(2, 8, "xyzz"))
    assert index.apply(announced(4, 9, "ddd")) is ChangeOutcome.GAP
    assert index.overlaps(chain("abc")) == index.overlaps(chain("ddd")) == {}
    assert index.overlaps(chain("xyzz")) == {A: 4}
    index.end_prediction(8)
    assert index.num_predictions == 0


@pytest.mark.parametrize("how", ["replaced", "restarted", "lost"])
def test_announcements_do_not_outlive_the_stream_that_would_end_them(how: str) -> None:
    index = PrefixIndex(1, 1)
    index.replace(A, E1, ())
    index.apply(announced(1, 7, "abc"))
    if how == "lost":
        index.forget_announcements()
    else:
        index.replace(A, E1 if how == "replaced" else E2, (), last_change=5)
    assert index.num_predictions == 0
    assert index.overlaps(chain("abc")) == {}


def test_a_removal_cancels_an_announced_block_and_ends_what_has_no_block_left() -> None:
    index = PrefixIndex(1, 1)
    index.replace(A, E1, ())
    index.apply(announced(1, 7, "ab"))
    index.apply(IndexChange(A, E1, 2, removed=tuple(chain("ab")[1:])))
    assert index.overlaps(chain("ab")) == {A: 1}
    index.apply(IndexChange(A, E1, 3, removed=tuple(chain("a"))))
    assert index.num_predictions == 0
    index.apply(ended(4, 7))


def test_what_is_announced_in_a_change_is_not_cancelled_by_its_removals() -> None:
    index = PrefixIndex(1, 1)
    index.replace(A, E1, chain("ab"))
    again = Announcement(7, tuple(chain("ab")))
    index.apply(IndexChange(A, E1, 1, removed=tuple(chain("ab")), announced=(again,)))
    assert index.overlaps(chain("ab")) == {A: 2}
    index.apply(IndexChange(A, E1, 2, cleared=True, announced=(again,)))
    assert index.overlaps(chain("ab")) == {A: 2}
    index.apply(IndexChange(A, E1, 3, cleared=True))
    assert index.overlaps(chain("ab")) == {}


def test_announcements_and_predictions_share_one_limit() -> None:
    index = PrefixIndex(1, 1, max_predicted_blocks=10)
    index.replace(A, E1, ())
    index.apply(announced(1, 7, "aaaaaa"))
    index.predict(8, A, chain("bbbbbb"))
    assert index.overlaps(chain("aaaaaa")) == {}
    index.apply(announced(2, 9, "c" * 30))
    assert index.overlaps(chain("c" * 30)) == {A: 10}
    assert index.num_predictions == 1


def test_a_stored_block_outlives_the_prediction_that_foretold_it() -> None:
    index = PrefixIndex(1, 1)
    index.replace(A, E1, ())
    index.predict(1, A, chain("abc"))
    index.apply(IndexChange(A, E1, 1, added=tuple(chain("ab"))))
    index.end_prediction(1)
    assert index.overlaps(chain("abc")) == {A: 2}


def test_a_removal_cancels_the_prediction_of_that_block_but_not_a_later_one() -> None:
    index = PrefixIndex(1, 1)
    index.replace(A, E1, ())
    index.predict(1, A, chain("abc"))
    index.apply(IndexChange(A, E1, 1, removed=(chain("abc")[1],)))
    assert index.overlaps(chain("abc")) == {A: 1}
    index.predict(2, A, chain("abc"))
    assert index.overlaps(chain("abc")) == {A: 3}
    index.end_prediction(1)
    assert index.overlaps(chain("abc")) == {A: 3}
    index.end_prediction(2)
    assert index.overlaps(chain("abc")) == {}


def test_a_block_of_several_predictions_counts_until_the_last_of_them_ends() -> None:
    index = PrefixIndex(1, 1)
    for announcement_id in (1, 2, 3):
        index.predict(announcement_id, A, chain("x"))
    for announcement_id in (1, 2):
        index.end_prediction(announcement_id)
        assert index.overlaps(chain("x")) == {A: 1}
    index.end_prediction(3)
    assert not index.overlaps(chain("x"))


def test_a_block_that_was_removed_from_several_predictions_may_be_foretold_again() -> None:
    index = PrefixIndex(1, 1)
    index.replace(A, E1, [])
    for announcement_id in (1, 2):
        index.predict(announcement_id, A, chain("xy"))
    index.apply(IndexChange(A, E1, 1, removed=(chain("x")[0],)))
    assert not index.overlaps(chain("x"))
    index.predict(3, A, chain("x"))
    assert index.overlaps(chain("x")) == {A: 1}
    index.end_prediction(3)
    assert not index.overlaps(chain("x"))


def test_predictions_are_bounded_and_the_oldest_goes_first() -> None:
    index = PrefixIndex(1, 1, max_predicted_blocks=10)
    index.predict(1, A, chain("aaaaaa"))
    index.predict(2, A, chain("bbbb"))
    index.predict(3, A, chain("cc"))
    assert index.overlaps(chain("aaaaaa")) == {}
    assert index.overlaps(chain("bbbb")) == {A: 4}
    index.predict(4, B, chain("d" * 30))
    assert index.overlaps(chain("d" * 30)) == {B: 10}
    assert index.num_predictions == 1


@pytest.mark.parametrize("num_sweeps", [0, 1, 2, 3, 1000])
def test_nobody_inherits_what_a_replica_had_that_is_gone(num_sweeps: int) -> None:
    index = PrefixIndex(1, 1)
    index.replace(A, E1, chain("abc"))
    index.predict(1, A, chain("xyz"))
    index.forget(A)
    for _ in range(num_sweeps):
        index.sweep()
    index.replace(B, E1, chain("d"))
    assert index.overlaps(chain("abc")) == {}
    assert index.overlaps(chain("xyz")) == {}
    assert index.overlaps(chain("d")) == {B: 1}
    index.apply(IndexChange(B, E1, 1, added=tuple(chain("ab"))))
    assert index.stored(B) == {*chain("d"), *chain("ab")}
    index.replace(A, E2, ())
    assert index.overlaps(chain("abc")) == {B: 2}
    assert index.missing(A, chain("abc")) == tuple(chain("abc"))


def test_changes_alone_clear_away_what_was_left_behind() -> None:
    index = PrefixIndex(1, 1)
    index.replace(A, E1, chain("a" * 2000))
    index.replace(B, E1, chain("a" * 1000))
    index.forget(A)
    for number in range(1, 2000):
        index.apply(IndexChange(B, E1, number))
    assert sum(map(len, index._holders.shards)) == 1000
    assert not index.sweep()
    assert index.overlaps(chain("a" * 2000)) == {B: 1000}


def test_a_set_that_is_staged_counts_when_it_takes_the_old_ones_place_and_not_before() -> None:
    index = PrefixIndex(1, 1)
    index.replace(A, E1, chain("ab"), last_change=3)
    with index.stage() as staged:
        staged.add(chain("xyz")[:2])
        assert index.overlaps(chain("xyz")) == {}
        index.apply(IndexChange(A, E1, 4, added=tuple(chain("abc"))))
        staged.add(chain("xyz"))
        assert index.overlaps(chain("abc")) == {A: 3}
        index.replace(A, E1, staged, last_change=4)
    assert index.overlaps(chain("abc")) == {}
    assert index.overlaps(chain("xyz")) == {A: 3}
    assert index.num_stored(A) == 3


def test_a_set_that_was_staged_in_vain_leaves_nothing_behind() -> None:
    index = PrefixIndex(1, 1)
    with pytest.raises(ConnectionError), index.stage() as staged:
        staged.add(chain("xyz"))
        raise ConnectionError
    while index.sweep():
        pass
    assert not any(index._holders.shards)
    assert index.num_entries == 0


def test_overlaps_stay_what_they_were_when_replicas_come_and_go() -> None:
    index = PrefixIndex(1, 1)
    index.replace(A, E1, chain("ab"))
    index.replace(B, E1, chain("abc"))
    before = index.overlaps(chain("abcd"))
    index.forget(A)
    while index.sweep():
        pass
    index.replace(ReplicaId("c"), E1, chain("abcd"))
    assert before == {A: 2, B: 3}
    assert index.overlaps(chain("abcd")) == {B: 3, "c": 4}
