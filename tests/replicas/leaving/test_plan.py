"""Handing leases over: which chain goes where, and at which pace."""

import pytest

from replicas.leaving.pace import MAX_LATE, MAX_PAUSE_SECONDS, Pace, busy_pauses
from replicas.leaving.plan import MAX_TRIES, HandOverPlan, Offer
from replicas.protocol.affinity import AffinityRanking
from replicas.protocol.hand_overs import HandOverOutcome, LeasedChunk
from replicas.protocol.pulls import PullHint
from replicas.protocol.status import Epoch, ReplicaId
from tests.replicas.kvstore.chunk_names import key

PEERS = [PullHint(ReplicaId(f"r{number}"), Epoch("e"), f"127.0.0.1:{number + 1}", 0) for number in range(4)]


def chunk(path: str, bucket: bytes = b"b" * 16, *, has_file: bool = False) -> LeasedChunk:
    """`path` names it and, without its last letter, the one before it."""
    parent = key(path[:-1]) if len(path) > 1 else None
    return LeasedChunk(key(path), parent, 8 * len(path) - 1, 600, 300.0, bucket=bucket, has_file=has_file)


def order(bucket: bytes) -> list[ReplicaId]:
    return AffinityRanking([peer.replica_id for peer in PEERS]).of(bucket).whole()


def test_chains_of_a_bucket_go_to_its_home_each_chunk_once_and_after_what_is_before_it() -> None:
    plan = HandOverPlan([chunk("abd"), chunk("abc"), chunk("ab"), chunk("a")])
    (offer,) = plan.offers(PEERS)
    assert offer.peer.replica_id == order(b"b" * 16)[0]
    sent = [each.key for each in offer.chunks]
    assert sorted(sent) == sorted(map(key, ("a", "ab", "abc", "abd")))
    assert sent[:2] == [key("a"), key("ab")]
    for each in offer.chunks:
        plan.answered(each, HandOverOutcome.TAKEN)
    assert plan.offers(PEERS) == [] and plan.left == []


def test_what_is_not_taken_goes_to_the_next_as_a_whole_and_to_a_few_only() -> None:
    plan = HandOverPlan([chunk("a"), chunk("ab")])
    asked = []
    while offers := plan.offers(PEERS):
        (offer,) = offers
        asked.append(offer.peer.replica_id)
        assert [each.key for each in offer.chunks] == [key("a"), key("ab")]
        plan.answered(offer.chunks[0], HandOverOutcome.TAKEN)
        plan.answered(offer.chunks[1], HandOverOutcome.BUDGET)
    assert asked == order(b"b" * 16)[:MAX_TRIES]
    assert [each.key for each in plan.left] == [key("ab")]
    assert plan.outcomes[key("ab")] is HandOverOutcome.BUDGET
    (home,) = plan.homes(PEERS)
    assert home.peer.replica_id == asked[0]


def test_what_lacks_its_beginning_is_offered_to_nobody() -> None:
    plan = HandOverPlan([chunk("abc"), chunk("ab"), chunk("x")])
    (offer,) = plan.offers(PEERS)
    assert [each.key for each in offer.chunks] == [key("x")]
    assert plan.outcomes[key("abc")] is plan.outcomes[key("ab")] is HandOverOutcome.INCOMPLETE


def test_what_has_no_file_comes_before_what_has_one_where_not_all_may_go() -> None:
    plan = HandOverPlan([chunk("a", has_file=True), chunk("ab", has_file=True), chunk("x"), chunk("xy")], 3)
    (offer,) = plan.offers(PEERS)
    assert [each.key for each in offer.chunks] == [key("x"), key("xy")]
    assert plan.outcomes[key("ab")] is HandOverOutcome.TOO_MUCH


def test_without_a_bucket_the_first_chunk_says_where_a_chain_belongs() -> None:
    plan = HandOverPlan([chunk("a", b""), chunk("ab", b""), chunk("abc", b""), chunk("abd", b"")])
    (offer,) = plan.offers(PEERS)
    assert offer.peer.replica_id == order(key("a"))[0]


def test_without_peers_all_is_left() -> None:
    plan = HandOverPlan([chunk("a"), chunk("ab")])
    assert plan.offers([]) == [] and plan.homes([]) == []
    assert set(plan.outcomes.values()) == {HandOverOutcome.NO_PEER}
    assert len(plan.left) == 2


def answer(plan: HandOverPlan, offer: Offer, *outcomes: HandOverOutcome) -> None:
    for each, outcome in zip(offer.chunks, outcomes, strict=True):
        plan.answered(each, outcome, offer.peer.replica_id)


def spare(plan: HandOverPlan) -> dict[ReplicaId, list[bytes]]:
    return {offer.peer.replica_id: [each.key for each in offer.chunks] for offer in plan.spare()}


TAKEN, BUDGET, LATE, BUSY = (HandOverOutcome[name] for name in ("TAKEN", "BUDGET", "LATE", "BUSY"))


def test_what_one_has_in_vain_is_spare_once_another_has_taken_the_whole_chain() -> None:
    plan = HandOverPlan([chunk("a"), chunk("ab"), chunk("abc")])
    for outcomes in ((TAKEN, BUDGET, BUDGET), (LATE, LATE, LATE), (TAKEN, TAKEN, TAKEN)):
        (offer,) = plan.offers(PEERS)
        answer(plan, offer, *outcomes)
    first, second, _ = order(b"b" * 16)[:MAX_TRIES]
    assert spare(plan) == {first: [key("a")], second: [key("a"), key("ab"), key("abc")]}


def test_of_what_nobody_takes_whole_the_longest_beginning_stays_and_the_first_of_equals() -> None:
    plan = HandOverPlan([chunk("a"), chunk("ab"), chunk("abc")])
    for outcomes in ((TAKEN, BUDGET, BUDGET), (TAKEN, TAKEN, BUDGET), (TAKEN, TAKEN, BUDGET)):
        (offer,) = plan.offers(PEERS)
        answer(plan, offer, *outcomes)
    first, _, third = order(b"b" * 16)[:MAX_TRIES]
    assert spare(plan) == {first: [key("a")], third: [key("a"), key("ab")]}


def test_what_other_chains_begin_with_or_was_taken_before_is_not_spare() -> None:
    plan = HandOverPlan([chunk("a"), chunk("ab"), chunk("ac"), chunk("x"), chunk("xy")], taken=[key("x")])
    (offer,) = plan.offers(PEERS)
    refused = {key("ac"), key("xy")}
    answer(plan, offer, *(BUDGET if each.key in refused else TAKEN for each in offer.chunks))
    (offer,) = plan.offers(PEERS)
    answer(plan, offer, *(TAKEN for _ in offer.chunks))
    assert spare(plan) == {}, "ab needs what it begins with"
    plan = HandOverPlan([chunk("a"), chunk("ab")])
    answer(plan, plan.offers(PEERS)[0], TAKEN, TAKEN)
    assert plan.offers(PEERS) == [] and spare(plan) == {}


def test_one_that_is_late_is_asked_for_half_and_left_alone_if_it_is_late_again() -> None:
    pace = Pace(100)
    pace.failed(LATE, 100)
    assert (pace.num_chunks, pace.given_up) == (50, None)
    pace.answered()
    for _ in range(MAX_LATE):
        assert pace.given_up is None
        pace.failed(LATE, pace.num_chunks)
    assert (pace.num_chunks, pace.given_up) == (12, LATE)
    pace.recover()
    assert (pace.num_chunks, pace.given_up) == (12, None)


def test_no_less_than_one_chunk_is_asked_for() -> None:
    pace = Pace(1)
    pace.failed(LATE, 1)
    assert pace.num_chunks == 1


@pytest.mark.parametrize(("outcome", "recovers"), [(BUSY, True), (HandOverOutcome.REFUSED, False)])
def test_other_failures_end_it_and_some_for_good(outcome: HandOverOutcome, recovers: bool) -> None:
    pace = Pace(100)
    pace.failed(outcome, 100)
    assert pace.given_up is outcome
    pace.recover()
    assert (pace.given_up is None) is recovers


def test_the_pauses_for_one_that_is_busy_grow_and_end() -> None:
    pauses = [*busy_pauses()]
    assert pauses == sorted(pauses) and pauses[-1] == MAX_PAUSE_SECONDS and sum(pauses) < 6
