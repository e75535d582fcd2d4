from hypothesis import given
from hypothesis import strategies as st

from cluster.engines.belief import EMPTY_SECONDS, STALE_SECONDS, Belief, Failed, believed

URLS = st.sets(st.sampled_from([f"http://10.0.0.{number}:8000" for number in range(6)]))
ANSWERS = st.one_of(URLS, st.just(Failed("away")))
STEPS = st.lists(st.tuples(st.sampled_from([0.0, 1.0, 30.0, 61.0, 4000.0]), ANSWERS), max_size=12)


def told(*steps: tuple[float, set[str] | Failed], linger: float = 0.0, at_most: int = 9) -> Belief:
    belief, now = Belief(), 0.0
    for seconds, answer in steps:
        now += seconds
        belief = believed(belief, answer, now, linger_seconds=linger, at_most=at_most)
    return belief


@given(STEPS, st.sampled_from([0.0, 5.0, 30.0]), st.integers(1, 6))
def test_what_is_believed_was_named_and_not_too_long_ago(
    steps: list[tuple[float, set[str] | Failed]], linger: float, at_most: int
) -> None:
    belief, now = Belief(), 0.0
    named: dict[str, float] = {}
    for seconds, answer in steps:
        now += seconds
        before, belief = belief, believed(belief, answer, now, linger_seconds=linger, at_most=at_most)
        assert len(belief.named_at) <= at_most
        kept = list(belief.named_at)
        assert [url for url in before.named_at if url in kept] == kept[: len(before.named_at.keys() & kept)]
        if isinstance(answer, Failed):
            assert kept == [url for url in before.named_at if now - before.named_at[url] <= STALE_SECONDS]
        elif not answer:
            assert kept == [url for url in before.named_at if now - before.named_at[url] <= EMPTY_SECONDS]
        else:
            named |= dict.fromkeys(answer, now)
            assert all(now - named[url] <= linger for url in kept)
            assert answer <= belief.named_at.keys() or len(kept) == at_most
            assert before.named_at.keys() & answer <= belief.named_at.keys()
        assert all(url in named for url in kept)


def test_no_single_bad_answer_takes_a_server_away() -> None:
    a, b = "http://a:1", "http://b:1"
    for bad in (set(), Failed("away")):
        belief = told((0, {a, b}), (30, bad))
        assert set(belief.named_at) == {a, b}
        assert belief.complaint is not None
        assert "the 2 known before stay" in belief.complaint
        assert told((0, {a, b}), (30, bad), (1, {a, b})).complaint is None
    assert told((0, {a}), (EMPTY_SECONDS + 1, set())).named_at == {}
    assert told((0, {a}), (STALE_SECONDS + 1, Failed("away"))) == Belief({}, "away; none is known")


def test_a_server_that_an_answer_leaves_out_goes_at_once_or_lingers() -> None:
    a, b = "http://a:1", "http://b:1"
    assert list(told((0, {a, b}), (1, {b})).named_at) == [b]
    assert list(told((0, {a, b}), (1, {b}), linger=5).named_at) == [a, b]
    assert list(told((0, {a, b}), (6, {b}), linger=5).named_at) == [b]


def test_beyond_the_bound_known_ones_stay_and_it_is_said() -> None:
    belief = told((0, {"http://b:1"}), (1, {"http://a:1", "http://b:1", "http://c:1"}), at_most=2)
    assert list(belief.named_at) == ["http://b:1", "http://a:1"]
    assert belief.complaint == "3 servers are named, and at most 2 are taken"
