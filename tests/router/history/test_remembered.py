"""RememberedHistory: what is found is what was remembered, within its bytes, whoever else is there."""

from hypothesis import given
from hypothesis import strategies as st

from router.history.canonical import ENDING_BYTES, ConversationKey, thought_digest
from router.history.remembered import LARGEST_SHARE, RECORD_BYTES, TENANT_SHARE, Found, RememberedHistory

LARGE = 2**20


def _key(name: str) -> ConversationKey:
    return ConversationKey(name.encode())


conversations = st.lists(st.integers(0, 2), min_size=1, max_size=5)
"""As paths in a tree: every beginning is another conversation."""

steps = st.lists(
    st.tuples(conversations, st.binary(max_size=40), st.sampled_from("abc"), st.booleans()), max_size=40
)


def _keys(path: list[int]) -> list[ConversationKey]:
    return [_key(str(path[: end + 1])) for end in range(len(path))]


def _run(max_bytes: int, steps: list[tuple[list[int], bytes, str, bool]]) -> tuple[int, int]:
    """How many were found of those that the twin has."""
    history = RememberedHistory(max_bytes)
    twin: dict[ConversationKey, bytes] = {}  # forgets nothing, and keeps everything whole
    num_found = num_known = 0
    for path, added, tenant, is_told_apart in steps:
        keys = _keys(path)
        found = history.find(keys)
        known = [position for position, key in enumerate(keys) if key in twin]
        num_known += bool(known)
        num_found += found is not None
        if found is not None:
            assert found.key == keys[found.position] and found.position in known
            assert found.token_ids == twin[found.key]
            assert max_bytes < LARGE or found.position == known[-1]
        parent = None if found is None or found.position == len(path) - 1 else found
        before = b"" if parent is None else parent.token_ids
        added = added if is_told_apart else b"x"
        num_refused = history.num_refused
        history.remember(tenant, keys[-1], added, parent)
        if history.num_refused == num_refused:
            twin[keys[-1]] = before + added
        assert history.num_records * RECORD_BYTES <= history.num_bytes <= max_bytes
    return num_found, num_known


@given(steps)
def test_with_room_it_finds_what_a_twin_that_forgets_nothing_has(
    steps: list[tuple[list[int], bytes, str, bool]],
) -> None:
    # Each once: a conversation that is answered anew may leave those that went on from it unusable.
    once = {tuple(step[0]): step for step in steps}
    num_found, num_known = _run(LARGE, list(once.values()))
    assert num_found == num_known


@given(steps, st.integers(4 * RECORD_BYTES, 30 * RECORD_BYTES))
def test_whatever_it_forgets_it_never_finds_other_tokens(
    steps: list[tuple[list[int], bytes, str, bool]], max_bytes: int
) -> None:
    _run(max_bytes, steps)


def _found(history: RememberedHistory, name: str) -> Found:
    found = history.find([_key(name)])
    assert found is not None
    return found


def test_a_long_conversation_is_kept_once() -> None:
    history = RememberedHistory(LARGE)
    found = None
    for turn in range(50):
        history.remember("", _key(f"{turn}"), bytes([turn]) * 1000, found)
        found = _found(history, f"{turn}")
    assert found is not None and len(found.token_ids) == 50_000
    assert history.num_bytes == 50 * (1000 + RECORD_BYTES)
    assert history.find([_key("7"), _key("8"), _key("unknown")]) == (
        1,
        _key("8"),
        b"".join(bytes([turn]) * 1000 for turn in range(9)),
        9,
    )


def test_one_that_is_used_keeps_those_before_it() -> None:
    room = 8 * (1000 + RECORD_BYTES)
    history = RememberedHistory(room)
    history.remember("", _key("a"), b"a" * 1000)
    history.remember("", _key("b"), b"b" * 1000, _found(history, "a"))
    for other in range(30):
        history.remember("", _key(f"other {other}"), b"o" * 1000)
        assert _found(history, "b").token_ids == b"a" * 1000 + b"b" * 1000
    assert history.num_evicted == 30 + 2 - 8


def test_an_answer_anew_makes_what_went_on_from_the_old_one_a_miss() -> None:
    history = RememberedHistory(LARGE)
    history.remember("", _key("a"), b"old")
    history.remember("", _key("b"), b"on", _found(history, "a"))
    history.remember("", _key("a"), b"old")
    assert _found(history, "b").token_ids == b"oldon"
    old = _found(history, "a")
    history.remember("", _key("a"), b"new")
    found = history.find([_key("a"), _key("b")])
    assert found is not None and (found.position, found.token_ids) == (0, b"new")
    assert history.num_records == 1
    history.remember("", _key("b"), b"late", old)
    assert _found(history, "b").token_ids == b"oldlate"


def test_who_holds_more_than_a_share_makes_room_from_its_own() -> None:
    size = 1000 + RECORD_BYTES
    history = RememberedHistory(20 * size)
    history.remember("quiet", _key("quiet"), b"q" * 1000)
    for each in range(100):
        history.remember("loud", _key(f"loud {each}"), b"l" * 1000)
    assert history.find([_key("quiet")]) is not None
    assert history.num_records == 20
    for each in range(10):
        history.remember("third", _key(f"third {each}"), b"t" * 1000)
    held = {
        name: sum(history.find([_key(f"{name} {each}")]) is not None for each in range(100))
        for name in ("third", "loud")
    }
    assert held["third"] == 10 and held["loud"] >= 20 * TENANT_SHARE - 1


def test_what_is_too_large_is_refused_and_no_room_remembers_nothing() -> None:
    history = RememberedHistory(10_000)
    history.remember("", _key("a"), b"a" * int(10_000 * LARGEST_SHARE))
    assert history.find([_key("a")]) is None
    assert history.num_refused == 1
    nothing = RememberedHistory(0)
    nothing.remember("", _key("a"), b"a")
    assert nothing.find([_key("a")]) is None and nothing.find([]) is None


def _thinking(history: RememberedHistory, *thoughts: str) -> None:
    """Answers to the same, in the same words, one after the other."""
    for number, thought in enumerate(thoughts):
        history.remember("", _key("a"), bytes([number]), None, thought_digest(thought))


def test_reasoning_that_comes_back_is_what_was_generated_or_the_ending_of_it() -> None:
    history = RememberedHistory(LARGE)
    thought = f"{'Well. ' * 100}She wants the wéather."
    _thinking(history, f"\n{thought} ")
    for same in (thought, f" {thought}\n", ".", "ather.", " the wéather.\n", "éather.", thought[-100:]):
        assert not history.is_other(_key("a"), thought_digest(same)), same
    for other in ("!", "the weather", "The wéather.", f"{thought} So.", f"x{thought}", thought[:-1]):
        assert history.is_other(_key("a"), thought_digest(other)), other
    # An ending that is longer than what is kept of one may be of another one.
    assert history.is_other(_key("a"), thought_digest(thought[-ENDING_BYTES:]))
    assert not history.is_other(_key("b"), thought_digest("!"))


def test_an_ending_names_no_answer_that_was_given_twice_with_other_reasoning() -> None:
    """As to two users of a tenant who both say hello."""
    history = RememberedHistory(LARGE)
    _thinking(history, "A greeting. I greet her.", "A greeting. I greet her.")
    assert not history.is_other(_key("a"), thought_digest("her."))
    _thinking(history, "She says hello. I greet her.")
    for shared in (".", "her.", "says hello. I greet her.", "A greeting. I greet her."):
        assert history.is_other(_key("a"), thought_digest(shared)), shared
    assert not history.is_other(_key("a"), thought_digest("She says hello. I greet her."))
    _thinking(history, "")
    assert history.is_other(_key("a"), thought_digest("."))
