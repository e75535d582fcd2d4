"""The headers traceparent and tracestate, as W3C's Trace Context has them."""

import pytest

from replicas.process.trace_parent import MAX_STATE_CHARACTERS, TraceParent, parse_trace_parent

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN_ID = "00f067aa0ba902b7"


@pytest.mark.parametrize("is_sampled", [False, True])
def test_what_is_written_is_read_again(is_sampled: bool) -> None:
    parent = TraceParent(TRACE_ID, SPAN_ID, is_sampled)
    assert parse_trace_parent(str(parent)) == parent


def test_other_flags_and_later_versions_are_read_as_far_as_they_are_known() -> None:
    assert parse_trace_parent(f"00-{TRACE_ID}-{SPAN_ID}-03") == (TRACE_ID, SPAN_ID, True, "")
    assert parse_trace_parent(f"00-{TRACE_ID}-{SPAN_ID}-02") == (TRACE_ID, SPAN_ID, False, "")
    assert parse_trace_parent(f"cc-{TRACE_ID}-{SPAN_ID}-01-more") == (TRACE_ID, SPAN_ID, True, "")


def test_the_state_is_kept_word_for_word_unless_it_is_too_long_and_then_the_parent_still_counts() -> None:
    header = f"00-{TRACE_ID}-{SPAN_ID}-01"
    longest = "x" * MAX_STATE_CHARACTERS
    assert parse_trace_parent(header, " a=1,, b=2") == TraceParent(TRACE_ID, SPAN_ID, True, " a=1,, b=2")
    assert parse_trace_parent(header, longest) == TraceParent(TRACE_ID, SPAN_ID, True, longest)
    assert parse_trace_parent(header, longest + "x") == TraceParent(TRACE_ID, SPAN_ID, True, "")
    assert MAX_STATE_CHARACTERS >= 512
    assert parse_trace_parent("", "a=1") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        f"00-{TRACE_ID}-{SPAN_ID}",
        f"00-{TRACE_ID}-{SPAN_ID}-01-more",
        f"00-{TRACE_ID.upper()}-{SPAN_ID}-01",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-01\n",
    ],
)
def test_a_malformed_header_is_ignored(text: str) -> None:
    assert parse_trace_parent(text) is None
