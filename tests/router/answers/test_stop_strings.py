"""StopStrings: text ends before the first stop string, in whatever pieces it comes."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from replicas.protocol.frames import FinishReason, RequestKey, TokenDelta
from router.answers.formats import AnswerFormat, ReasoningMarks, ToolSyntax
from router.answers.parser import AnswerParser
from router.answers.stop_strings import StopStrings
from router.api.choice_output import ChoiceOutput
from router.prompt.tokenizer import Tokenizer
from tests.router import tiny_model

TOKENIZER = Tokenizer(tiny_model.bundle())
THINKS = AnswerFormat(ToolSyntax.HERMES, ReasoningMarks())

pieces = st.lists(st.text("abc ", max_size=5), max_size=20)
stop_strings = st.lists(st.text("abc ", min_size=1, max_size=5), min_size=1, max_size=4)


def _first_stop(text: str, stop: Sequence[str]) -> int | None:
    """The oracle: read character by character until a stop string is complete."""
    for end in range(1, len(text) + 1):
        found = [candidate for candidate in stop if text[:end].endswith(candidate)]
        if found:
            return end - len(max(found, key=len))
    return None


@given(pieces, stop_strings)
def test_text_ends_before_the_first_complete_stop_string(said: list[str], strings: list[str]) -> None:
    stops = StopStrings(strings)
    text = "".join(said)
    assert (
        "".join([stops.add(piece) for piece in said]) + stops.finish() == text[: _first_stop(text, strings)]
    )
    assert (stops.found is None) == (_first_stop(text, strings) is None)


def test_of_several_the_one_that_is_complete_first_counts() -> None:
    for said in (["x abcab"], [*"x abcab"]):
        stops = StopStrings(["abcab", "c", "bc"])
        assert "".join([stops.add(piece) for piece in said]) + stops.finish() == "x a"
        assert stops.found == "bc"


def test_the_possible_beginning_of_one_is_held_back_until_it_is_none() -> None:
    stops = StopStrings(["END"])
    assert [stops.add(piece) for piece in "xENxE"] == ["x", "", "", "ENx", ""]
    assert stops.finish() == "E"


def test_one_that_is_shown_is_part_of_the_text() -> None:
    stops = StopStrings(["END"], is_shown=True)
    assert [stops.add(piece) for piece in ("xE", "ND and", "more")] == ["x", "END", ""]
    assert stops.finish() == ""


def test_text_of_the_first_tokens_stops_nothing() -> None:
    stops = StopStrings(["ab"], min_tokens=2)
    assert [stops.add(piece) for piece in "abab"] == ["a", "b", "", ""]
    assert stops.found == "ab"


@given(
    st.lists(st.sampled_from(["a", " b", "\n", "<think>", "</think>", "<tool", "c"]), max_size=10),
    st.lists(st.sampled_from(["a", "\n", "b\n", "<think>", "</think>", "<t", " "]), min_size=1, max_size=3),
    st.booleans(),
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_an_answer_is_cut_where_its_text_alone_would_be(
    said: list[str], strings: list[str], begins: bool, sizes: list[int], finish: FinishReason
) -> None:
    """Behind the reasoning, which is as it is without stop strings."""
    token_ids = TOKENIZER.encode("<think>" * begins + "".join(said)) or [300]
    free = _output(None)
    free.add(_delta(token_ids, finish))
    cut = _output(strings)
    while token_ids and not cut.has_finished():
        number = sizes[len(token_ids) % len(sizes)]
        rest = token_ids[number:]
        cut.add(_delta(token_ids[:number], None if rest else finish))
        token_ids = rest
    end = _first_stop(free.text, strings)
    assert cut.reasoning == free.reasoning
    assert cut.text == free.text[:end]
    assert (cut.stop_string is None) == (end is None)
    assert cut.finish_reason == (finish if end is None else FinishReason.STOP)


def _output(strings: Sequence[str] | None) -> ChoiceOutput:
    parser = AnswerParser(THINKS, wants_calls=False, starts_in_reasoning=False)
    stops = None if strings is None else StopStrings(strings)
    return ChoiceOutput(TOKENIZER.new_detokenizer(), frozenset(), parser, stops)


def _delta(token_ids: Sequence[int], finish: FinishReason | None) -> TokenDelta:
    return TokenDelta(RequestKey(1, 0), tuple(token_ids), finish_reason=finish)
