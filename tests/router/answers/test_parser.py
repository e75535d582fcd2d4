"""AnswerParser: the same parts however an answer is cut, those of a slow twin, and nothing lost."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.answers import json_call, xml_call
from router.answers.formats import AnswerFormat, ReasoningMarks, ToolSyntax
from router.answers.parser import MAX_HELD_BLANKS, AnswerParser, new_parser
from router.answers.parts import CallArguments, CallEnd, CallStart, Part, Reasoning, Text
from tests.router.answers.slow_parser import Unknown, slow_parts
from tests.router.answers.spoken import TOOLS, broken, call, check_order, cut, parts_of

MARKS = ReasoningMarks()
HERMES = AnswerFormat(ToolSyntax.HERMES, MARKS)
LLAMA = AnswerFormat(ToolSyntax.LLAMA)
QWEN_XML = AnswerFormat(ToolSyntax.QWEN_XML, MARKS)
FORMATS = [HERMES, LLAMA, QWEN_XML]

F_CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'

XML_CALL = (
    "<tool_call>\n<function=f>\n<parameter=text>\n1\n</parameter>\n<parameter=maybe>null</parameter>\n"
    "<parameter=count>\n2\n</parameter>\n</function>\n</tool_call>"
)

GOLDEN: list[tuple[AnswerFormat, str, list[Part]]] = [
    (HERMES, "Hello.\n", [Text("Hello.\n")]),
    (HERMES, F_CALL, call(0, "f", '{"a": 1}')),
    (
        HERMES,
        f"<think>\nWhat now?\n</think>\n\nI look it up.\n\n{F_CALL}\n{F_CALL}\n",
        [
            Reasoning("What now?"),
            Text("I look it up."),
            *call(0, "f", '{"a": 1}'),
            *call(1, "f", '{"a": 1}'),
        ],
    ),
    (HERMES, f"One {F_CALL} two.", [Text("One"), *call(0, "f", '{"a": 1}'), Text("two.")]),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>\\"", "b": [{}, []]}}</tool_call>',
        call(0, "f", '{"a": "}</tool_call>\\"", "b": [{}, []]}'),
    ),
    (
        HERMES,
        '<tool_call>{"arguments": {"a": 1.50}, "name": "f"}</tool_call>',
        call(0, "f", '{"a": 1.50}'),
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\\\n\\u00e9\\ud83d\\ude00\\"}"}</tool_call>',
        call(0, "f", '{"a": "\\né😀"}'),
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": ""}</tool_call>', call(0, "f", "{}")),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', call(0, "f", "{}")),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', call(0, "f", "{}")),
    (HERMES, '<tool_call>{"id": [7], "name": "f", "arguments": {}, "x": 1}</tool_call>', call(0, "f", "{}")),
    # A brace too few, a brace too many, no end of the block at all.
    (HERMES, '<tool_call>{"name": "f", "arguments": {}\n</tool_call>', call(0, "f", "{}")),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>', [*call(0, "f", "{}"), Text("}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}', call(0, "f", "{}")),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}\n More.', [*call(0, "f", "{}"), Text("More.")]),
    # Broken off after the name was said, and before.
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "x',
        broken(0, "f", '{"a": "x'),
    ),
    (
        HERMES,
        f'<tool_call>{{"name": "f", "arguments": {{"a": [1\n</tool_call>\n{F_CALL}',
        [*broken(0, "f", '{"a": [1\n'), *call(1, "f", '{"a": 1}')],
    ),
    (HERMES, '\n<tool_call>{"name": "f", ', [Text('\n<tool_call>{"name": "f", ')]),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": [1]}',
        [Text('<tool_call>{"name": "f", "arguments": [1]}')],
    ),
    (HERMES, "The mark is \n<tool_call>, so.", [Text("The mark is \n<tool_call>, so.")]),
    (HERMES, f"<tool_call>\n{F_CALL}", [Text("<tool_call>"), *call(0, "f", '{"a": 1}')]),
    (HERMES, "Stray </tool_call> mark.", [Text("Stray </tool_call> mark.")]),
    # Reasoning.
    (HERMES, "<think></think>Yes.", [Text("Yes.")]),
    (HERMES, "<think>\n\n</think>\n\nYes.", [Text("Yes.")]),
    (HERMES, "\n<think>no end ", [Reasoning("no end")]),
    (HERMES, "Not at the beginning: <think>x</think>", [Text("Not at the beginning: <think>x</think>")]),
    (HERMES, "a</think>b", [Text("a</think>b")]),
    # Llama.
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', call(0, "f", '{"a": 1}')),
    (LLAMA, '<|python_tag|>{"name": "g", "parameters": {"a": 1}}', call(0, "g", '{"a": 1}')),
    (
        LLAMA,
        '\n{"type": "function", "name": "f", "parameters": {}}; {"name": "look_up", "parameters": {"a": 1}};',
        [*call(0, "f", "{}"), *call(1, "look_up", '{"a": 1}')],
    ),
    (LLAMA, '{"name": "f", "parameters": {}}\nDone.', [*call(0, "f", "{}"), Text("Done.")]),
    (LLAMA, ' {"name": "Ada", "age": 36}', [Text(' {"name": "Ada", "age": 36}')]),
    (LLAMA, '{"name": "Ada", "parameters": {}}', [Text('{"name": "Ada", "parameters": {}}')]),
    (LLAMA, '{"answer": {"name": "f"}}', [Text('{"answer": {"name": "f"}}')]),
    (LLAMA, 'See {"name": "f", "parameters": {}}', [Text('See {"name": "f", "parameters": {}}')]),
    (
        LLAMA,
        'I call it. <|python_tag|>{"name": "f", "parameters": {}}',
        [Text("I call it."), *call(0, "f", "{}")],
    ),
    (LLAMA, '<|python_tag|>search.call(query="x")', [Text('search.call(query="x")')]),
    # Qwen's XML.
    (
        QWEN_XML,
        (
            'Now.\n\n<tool_call>\n<function=f>\n<parameter=text>\n1 < "2"\n\n</parameter>\n'
            "<parameter=count>\n3\n</parameter>\n<parameter=list>\n[1,\n2]\n</parameter>\n"
            "<parameter=flag>\nTrue\n</parameter>\n<parameter=maybe>\n3\n</parameter>\n"
            "</function>\n</tool_call>"
        ),
        [
            Text("Now."),
            *call(
                0,
                "f",
                '{"text": "1 < \\"2\\"\\n", "count": 3, "list": [1,\n2], "flag": true, "maybe": "3"}',
            ),
        ],
    ),
    (QWEN_XML, "<tool_call>\n<function=f>\n</function>\n</tool_call>", call(0, "f", "{}")),
    (
        QWEN_XML,
        "<tool_call><function=new><parameter=x>7</parameter><parameter=y>seven</parameter></function>",
        call(0, "new", '{"x": 7, "y": "seven"}'),
    ),
    (
        QWEN_XML,
        "<tool_call><function=f><parameter=count>many</parameter></tool_call> and on",
        [*call(0, "f", '{"count": "many"}'), Text("and on")],
    ),
    (
        QWEN_XML,
        "<tool_call>\n<function=f>\n<parameter=text>\ncut of",
        call(0, "f", '{"text": "cut of"}'),
    ),
    (QWEN_XML, "<tool_call>\n<fun", [Text("<tool_call>\n<fun")]),
    (QWEN_XML, "<tool_call>\n{}</tool_call>", [Text("<tool_call>\n{}</tool_call>")]),
]

TOKENS = {
    ToolSyntax.HERMES: [
        *['{"name": "f", "arguments": {"a": 1}}', '{"arguments": {"b": "}"}, "name": "g"}', '{"name": "f'],
        *['{"name": "f", "arguments": "{\\"a\\": 1}"}', '", "arguments": {', '"a": "\\u00e', "]}"],
        *["<tool_call>", "</tool_call>", "<tool_call>\n", F_CALL, f"{F_CALL}\n", F_CALL.replace("\n", "")],
        *['<tool_call>\n{"arguments": {"b": ["}", {}]}, "name": "look_up"}', "\n</tool_call>\n", F_CALL],
    ],
    ToolSyntax.LLAMA: [
        *['{"name": "f", "parameters": {"a": 1}}', '{"name": "look_up", "parameters": {}}', '{"name": "'],
        *['{"name": "f", "arguments": {"a": "}"}}', "<|python_tag|>", ";", "; "],
    ],
    ToolSyntax.QWEN_XML: [
        *["<tool_call>", "</tool_call>", "<tool_call>\n<function=f>\n", "<function=g>", "</function>\n"],
        *["<parameter=text>\n", "<parameter=count>", "\n</parameter>\n", "<parameter=maybe>", "</parameter>"],
        *["[1, 2]", "7", XML_CALL, XML_CALL + "\n", XML_CALL.replace("\n", ""), XML_CALL],
        *["<tool_call><function=look_up></function>", "\n</tool_call>", XML_CALL.replace("=f", "=unknown")],
    ],
}
COMMON = ["<think>", "</think>", "\n", " ", "text", "<", ">", "{", "}", '"', "\\", "é", "12", "<too", "</"]


def answers(syntax: ToolSyntax) -> st.SearchStrategy[str]:
    tokens = st.sampled_from(TOKENS[syntax] + COMMON)
    return st.lists(tokens, max_size=14).map("".join)


spoken = st.sampled_from(FORMATS).flatmap(
    lambda each: st.tuples(st.just(each), answers(each.tools or ToolSyntax.HERMES))
)
sizes = st.lists(st.integers(1, 9), max_size=60)


@pytest.mark.parametrize(("answer_format", "text", "parts"), GOLDEN)
def test_an_answer_is_what_it_should_be_however_it_is_cut(
    answer_format: AnswerFormat, text: str, parts: list[Part]
) -> None:
    assert parts_of(answer_format, [text]) == parts
    assert parts_of(answer_format, list(text)) == parts
    for place in range(len(text)):
        assert parts_of(answer_format, [text[:place], text[place:]]) == parts


@given(spoken, sizes, st.booleans(), st.booleans())
def test_every_cut_of_any_text_gives_the_same_parts(
    answer: tuple[AnswerFormat, str], sizes: list[int], is_opened: bool, wants_calls: bool
) -> None:
    answer_format, text = answer
    whole = parts_of(answer_format, [text], starts_in_reasoning=is_opened, wants_calls=wants_calls)
    for pieces in (cut(text, sizes), list(text)):
        parts = parts_of(answer_format, pieces, starts_in_reasoning=is_opened, wants_calls=wants_calls)
        assert parts == whole


@given(spoken, sizes, st.booleans(), st.booleans())
def test_the_parts_are_those_of_a_slow_reading(
    answer: tuple[AnswerFormat, str], sizes: list[int], is_opened: bool, wants_calls: bool
) -> None:
    answer_format, text = answer
    has_reasoning = answer_format.reasoning is not None
    syntax = answer_format.tools if wants_calls else None
    try:
        expected = slow_parts(
            syntax, text, has_reasoning=has_reasoning, is_opened=is_opened and has_reasoning
        )
    except Unknown:
        return
    pieces = cut(text, sizes)
    parts = parts_of(answer_format, pieces, starts_in_reasoning=is_opened, wants_calls=wants_calls)
    assert parts == expected


@given(spoken, sizes)
def test_an_answer_without_a_call_loses_nothing_but_blanks_and_marks_of_reasoning(
    answer: tuple[AnswerFormat, str], sizes: list[int]
) -> None:
    answer_format, text = answer
    parts = parts_of(answer_format, cut(text, sizes))
    if any(isinstance(part, CallStart) for part in parts):
        return
    said = "".join(part.text for part in parts if isinstance(part, Text | Reasoning))
    left = text.replace("<|python_tag|>", "")
    if answer_format.reasoning is not None and left.lstrip().startswith("<think>"):
        left = left.replace("<think>", "", 1).replace("</think>", "", 1)
    assert said.replace("<|python_tag|>", "").split() == left.split() or "".join(
        said.replace("<|python_tag|>", "").split()
    ) == "".join(left.split())


@given(st.sampled_from(FORMATS), st.text(max_size=200), sizes, st.booleans())
def test_no_text_is_an_error(
    answer_format: AnswerFormat, text: str, sizes: list[int], is_opened: bool
) -> None:
    parts_of(answer_format, cut(text, sizes), starts_in_reasoning=is_opened)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=8,
    ).map(lambda value: {"value": value}),
    st.booleans(),
    sizes,
)
def test_arguments_come_out_to_the_character(arguments: object, is_ascii: bool, sizes: list[int]) -> None:
    source = json.dumps(arguments, ensure_ascii=is_ascii)
    bare = f'{{"name": "f", "parameters": {source}}}'
    assert parts_of(LLAMA, cut(bare, sizes)) == call(0, "f", source)
    marked = f'<tool_call>\n{{"name": "f", "arguments": {source}}}\n</tool_call>'
    assert parts_of(HERMES, cut(marked, sizes)) == call(0, "f", source)
    quoted = f'<tool_call>{{"arguments": {json.dumps(source)}, "name": "f"}}</tool_call>'
    assert parts_of(HERMES, cut(quoted, sizes)) == call(0, "f", source)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_arguments_that_python_alone_can_read_are_not_whole(value: float) -> None:
    source = json.dumps({"value": [value]})
    marked = f'<tool_call>\n{{"name": "f", "arguments": {source}}}\n</tool_call>'
    for answer_format, text in (
        (LLAMA, f'{{"name": "f", "parameters": {source}}}'),
        (HERMES, marked),
    ):
        assert parts_of(answer_format, list(text)) == broken(0, "f", source)


def test_a_call_is_announced_when_its_arguments_begin_and_streamed_as_it_comes() -> None:
    parser = AnswerParser(HERMES, wants_calls=True, starts_in_reasoning=False)
    pieces = ["Hm", "m \n", "<tool", '_call>\n{"na', 'me": "f"', ', "arguments": ', '{"a"', ": 1", "}", "}"]
    assert [parser.feed(piece) for piece in pieces] == [
        [Text("Hm")],
        [Text("m")],
        *([[]] * 4),
        [CallStart(0, "f"), CallArguments(0, '{"a"')],
        [CallArguments(0, ": 1")],
        [CallArguments(0, "}"), CallEnd(0)],
        [],
    ]
    assert parser.num_calls == 1


def test_reasoning_is_known_as_such_while_it_lasts() -> None:
    parser = AnswerParser(HERMES, wants_calls=False, starts_in_reasoning=False)
    states = []
    for piece in ("\n", "<think>", "\nso", "</thi", "nk>", "\n", "Yes"):
        parser.feed(piece)
        states.append(parser.is_reasoning)
    assert states == [False, True, True, True, False, False, False]
    opened = AnswerParser(HERMES, wants_calls=False, starts_in_reasoning=True)
    assert opened.is_reasoning
    assert opened.feed("<think>x") == [Reasoning("x")]
    assert opened.feed("\n</think>\n\n") == []
    assert not opened.is_reasoning
    assert opened.feed(F_CALL) == [Text(F_CALL)]


def test_where_there_is_nothing_to_find_there_is_no_parser() -> None:
    hermes = AnswerFormat(ToolSyntax.HERMES)
    for answer_format, wants_calls in ((AnswerFormat(), True), (hermes, False)):
        assert new_parser(answer_format, wants_calls=wants_calls, starts_in_reasoning=True) is None
    assert new_parser(hermes, wants_calls=True, starts_in_reasoning=False) is not None
    assert new_parser(HERMES, wants_calls=False, starts_in_reasoning=False) is not None


def test_what_is_held_back_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    blanks = " " * 3 * MAX_HELD_BLANKS
    for pieces in ([blanks + F_CALL], list(blanks + F_CALL)):
        assert parts_of(HERMES, pieces) == [Text(blanks[:-MAX_HELD_BLANKS]), *call(0, "f", '{"a": 1}')]
    monkeypatch.setattr(json_call, "MAX_UNSAID_CHARACTERS", 40)
    long = '<tool_call>{"arguments": {"a": "' + "x" * 50 + '"}, "name": "f"}'
    for pieces in ([long], list(long)):
        assert parts_of(HERMES, pieces) == [Text(long)]
    monkeypatch.setattr(xml_call, "MAX_VALUE_CHARACTERS", 8)
    call_of_list = (
        "<tool_call><function=f><parameter=list>\n[1, 2, 3, 4]\n</parameter></function></tool_call>"
    )
    for pieces in ([call_of_list], list(call_of_list)):
        assert parts_of(QWEN_XML, pieces) == call(0, "f", '{"list": "[1, 2, 3, 4]"}')
    for name in ("n" * 257, "n" * 5000):
        text = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}'
        assert parts_of(HERMES, [text]) == parts_of(HERMES, list(text)) == [Text(text)]
    text = '<tool_call>{"name": "' + "n" * 300
    for pieces in ([text + F_CALL], list(text + F_CALL)):
        assert parts_of(HERMES, pieces) == [Text(text), *call(0, "f", '{"a": 1}')]


@pytest.mark.parametrize("answer_format", FORMATS)
@pytest.mark.parametrize(
    "unit",
    ["<", "<tool_call>", "<tool_call>{", '<tool_call>{"name":"', " ", "\n<|python_tag|>", "{", "<think>"],
)
def test_hostile_text_is_read_to_its_end(answer_format: AnswerFormat, unit: str) -> None:
    text = unit * (100_000 // len(unit))
    parser = AnswerParser(answer_format, wants_calls=True, starts_in_reasoning=False, tools=TOOLS)
    parts = [*parser.feed(text), *parser.finish()]
    check_order(parts, parser.num_calls)
    assert len(parts) <= len(text)
