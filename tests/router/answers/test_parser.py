"""AnswerParser: the same parts however an answer is cut, those of a slow twin, and nothing lost.

Calls that models write carelessly are read as they are meant; what is text of a value stays text; and no
call is whole whose arguments are no JSON object.
"""

import json
import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.answers import json_call, xml_call
from router.answers.early_calls import MAX_EARLY_CALLS, MAX_EARLY_CHARACTERS
from router.answers.formats import AnswerFormat, ReasoningMarks, ToolSyntax
from router.answers.json_strings import ControlEscaper, is_object, with_escapes
from router.answers.parser import MAX_HELD_BLANKS, AnswerParser, new_parser
from router.answers.parts import CallArguments, CallEnd, CallStart, Part, Reasoning, Text
from router.answers.xml_call import MAX_STRAY_CHARACTERS
from tests.router.answers.slow_parser import Unknown, slow_parts
from tests.router.answers.spoken import TOOLS, broken, call, check_order, cut, parts_of

MARKS = ReasoningMarks()
HERMES = AnswerFormat(ToolSyntax.HERMES, MARKS)
LLAMA = AnswerFormat(ToolSyntax.LLAMA)
XML = AnswerFormat(ToolSyntax.QWEN_XML, MARKS)
FORMATS = [HERMES, LLAMA, XML]

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
        XML,
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
    (XML, "<tool_call>\n<function=f>\n</function>\n</tool_call>", call(0, "f", "{}")),
    (
        XML,
        "<tool_call><function=new><parameter=x>7</parameter><parameter=y>seven</parameter></function>",
        call(0, "new", '{"x": 7, "y": "seven"}'),
    ),
    (
        XML,
        "<tool_call><function=f><parameter=count>many</parameter></tool_call> and on",
        [*call(0, "f", '{"count": "many"}'), Text("and on")],
    ),
    (
        XML,
        "<tool_call>\n<function=f>\n<parameter=text>\ncut of",
        call(0, "f", '{"text": "cut of"}'),
    ),
    (XML, "<tool_call>\n<fun", [Text("<tool_call>\n<fun")]),
    (XML, "<tool_call>\n{}</tool_call>", [Text("<tool_call>\n{}</tool_call>")]),
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


def check(answer: AnswerFormat, text: str, parts: list[Part], **fields: Any) -> None:
    assert parts_of(answer, [text], **fields) == parts
    assert parts_of(answer, list(text), **fields) == parts
    for place in range(len(text)):
        assert parts_of(answer, [text[:place], text[place:]], **fields) == parts


def answers(syntax: ToolSyntax) -> st.SearchStrategy[str]:
    tokens = st.sampled_from(TOKENS[syntax] + COMMON)
    return st.lists(tokens, max_size=14).map("".join)


spoken = st.sampled_from(FORMATS).flatmap(
    lambda each: st.tuples(st.just(each), answers(each.tools or ToolSyntax.HERMES))
)
sizes = st.lists(st.integers(1, 9), max_size=60)


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
        assert parts_of(XML, pieces) == call(0, "f", '{"list": "[1, 2, 3, 4]"}')
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


BEGIN = "<tool_call>\n<function=f>\n"
TEXT = f"{BEGIN}<parameter=text>\n"
TAIL = "\n</function>\n</tool_call>"
END = f"\n</parameter>{TAIL}"
COUNT = "<parameter=count>\n2"
ONE = '{"name": "f", "arguments": {"a": 1}}'
TWO = '{"name": "look_up", "arguments": {}}'


def f(position: int = 0, **arguments: Any) -> list[Part]:
    return call(position, "f", json.dumps(arguments, ensure_ascii=False))


MARKS_LEFT_OUT: list[tuple[str, list[Part]]] = [
    # The next parameter, the end of the function, the call or the answer ends a value.
    (f"{TEXT}a\n{COUNT}{END}", f(text="a", count=2)),
    (f"{TEXT}a\n{COUNT}\n<parameter=flag>\ntrue{TAIL}", f(text="a", count=2, flag=True)),
    (f"{TEXT}a{TAIL}", f(text="a")),
    (f"{TEXT}a\n</tool_call>", f(text="a")),
    (f"{TEXT}a\n</function>", f(text="a")),
    (f"{TEXT}a\n", f(text="a")),
    (TEXT, f(text="")),
    (TEXT[:-1], f(text="")),
    (f"{BEGIN}{COUNT}", f(count=2)),
    (f"{BEGIN}<parameter=list>\n[1, 2", f(list="[1, 2")),
    (f"{TEXT}a{END[: END.index('</tool')]}", f(text="a")),
    (f"{TEXT}a{TAIL} Done.", [*f(text="a"), Text("Done.")]),
    (f"{TEXT}a{TAIL}\n{TEXT}b{END}", [*f(text="a"), *f(1, text="b")]),
    (f"{TEXT}a\n</tool_call>\n{TEXT}b{END}", [*f(text="a"), *f(1, text="b")]),
    (f"{TEXT}a\n</function>\n<function=f>\n{COUNT}{END}", [*f(text="a"), *f(1, count=2)]),
    (f"{TEXT}a\n</parameter>\n{TEXT}b{END}", [*f(text="a"), *f(1, text="b")]),
    (f"{TEXT}a\n</parameter>\n</parameter>{TAIL}", f(text="a")),
    (f"{TEXT}a{TAIL[1:]}", f(text="a")),
    (f"{TEXT}a</tool_call>\n", f(text="a")),
    (f"{TEXT}a</function>", f(text="a")),
    (f"{TEXT}a</function> b</tool_call> c", f(text="a</function> b</tool_call> c")),
    # Written in one line.
    (
        "<tool_call><function=f><parameter=text>a<parameter=count>2</function></tool_call>",
        f(text="a", count=2),
    ),
    ("<tool_call><function=f><parameter=text>a</tool_call>", f(text="a")),
    # No block around the function.
    ("<function=f>\n<parameter=text>\na\n</parameter>\n</function>\n</tool_call>", f(text="a")),
    ("I look.\n\n<function=f>\n</function>", [Text("I look."), *f()]),
    (f"{TEXT}a{END}\n<function=look_up>\n</function>", [*f(text="a"), *call(1, "look_up", "{}")]),
    # Several in one block.
    (
        f"{TEXT}a\n</parameter>\n</function>\n<function=f>\n{COUNT}\n</parameter>\n</function>\n</tool_call>",
        [*f(text="a"), *f(1, count=2)],
    ),
    # Marks in another spelling.
    (f'{BEGIN}<parameter="text">\na{END}', f(text="a")),
    (f"{BEGIN}<parameter = text >\na{END}", f(text="a")),
    (f'{BEGIN}<parameter name="text">\na{END}', f(text="a")),
    (f"{BEGIN}<parameter=text\n7{END}", f(text="7")),
    (f"<tool_call>\n<function=f\n{COUNT}{END}", f(count=2)),
    # What stands between parameters is none of them.
    (f"{TEXT}a\n</parameter>,\n{COUNT}{END}", [*f(text="a", count=2), Text(",\n")]),
    (f"{TEXT}a\n</parameter> and on", [*f(text="a"), Text("and on")]),
]

MALFORMED: list[tuple[AnswerFormat, str, list[Part]]] = [
    # A parameter that cannot be read: without it the call would look complete.
    (
        XML,
        f"{TEXT}a\n</parameter>\n<parameter>\n2\n</parameter>{TAIL}",
        [*broken(0, "f", '{"text": "a"'), Text(f"<parameter>\n2\n</parameter>{TAIL[:-13]}")],
    ),
    (
        XML,
        f"{TEXT}a\n</parameter>\n<parameter=<b>\n2",
        [*broken(0, "f", '{"text": "a"'), Text("<parameter=<b>\n2")],
    ),
    (XML, f"{TEXT}a\n</parameter>\n<parameter=co", [*broken(0, "f", '{"text": "a"'), Text("<parameter=co")]),
    (
        XML,
        f"{TEXT}a\n</parameter>\n{'x' * 1025}{TAIL}",
        [*broken(0, "f", '{"text": "a"'), Text(f"{'x' * 1025}\n</function>")],
    ),
    # JSON that is none.
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "say "hi" now"}}</tool_call>',
        broken(0, "f", '{"a": "say "hi" now"}'),
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": NaN}}', broken(0, "f", '{"a": NaN}')),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a" 1}}', broken(0, "f", '{"a" 1}')),
    (HERMES, '<tool_call>{"name": "f", "arguments": "[1]"}', broken(0, "f", "[1]")),
    (HERMES, '<tool_call>{"arguments": {"a": 01}, "name": "f"}', broken(0, "f", '{"a": 01}')),
    (LLAMA, '{"name": "f", "parameters": {"a": tru}}', broken(0, "f", '{"a": tru}')),
]

JSON_CALLS: list[tuple[AnswerFormat, str, list[Part]]] = [
    # Several in one block, and lists.
    (HERMES, f"<tool_call>\n{ONE}\n{TWO}\n</tool_call>", [*f(a=1), *call(1, "look_up", "{}")]),
    (
        HERMES,
        f"<tool_call>{ONE}, {TWO};{ONE}</tool_call> x",
        [*f(a=1), *call(1, "look_up", "{}"), *f(2, a=1), Text("x")],
    ),
    (HERMES, f"<tool_call>\n[{ONE}, {TWO}]\n</tool_call>", [*f(a=1), *call(1, "look_up", "{}")]),
    (HERMES, f"<tool_call>[\n{ONE}\n]</tool_call>\n<tool_call>[{ONE}]", [*f(a=1), *f(1, a=1)]),
    (HERMES, f"<tool_call>{ONE}\n{ONE[:-3]}", [*f(a=1), *broken(1, "f", '{"a": ')]),
    (HERMES, f'<tool_call>{ONE} {{"x": 1}}', [*f(a=1), Text('{"x": 1}')]),
    (HERMES, f"<tool_call>{ONE}]", [*f(a=1), Text("]")]),
    (HERMES, "<tool_call>[1]</tool_call>", [Text("<tool_call>[1]</tool_call>")]),
    (LLAMA, f"[{ONE}, {TWO}]", [*f(a=1), *call(1, "look_up", "{}")]),
    (LLAMA, f"<|python_tag|>[{ONE}]", f(a=1)),
    (LLAMA, f"{ONE}, {TWO}", [*f(a=1), *call(1, "look_up", "{}")]),
    (LLAMA, "[1, 2]", [Text("[1, 2]")]),
    (LLAMA, '[{"name": "Ada"}]', [Text('[{"name": "Ada"}]')]),
    # Raw control characters in strings.
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "1\n2\t3\\\\\n\\"", "b":\n[\n"\\\n"]}}',
        call(0, "f", '{"a": "1\\n2\\t3\\\\\\n\\"", "b":\n[\n"\\n"]}'),
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"1\\n2\\"}"}',
        call(0, "f", '{"a": "1\\n2"}'),
    ),
    (LLAMA, '{"name": "f", "parameters": {"a": "1\n2"}}', call(0, "f", '{"a": "1\\n2"}')),
    (XML, f'{BEGIN}<parameter=list>\n["1\n2",\n3]{END}', call(0, "f", '{"list": ["1\\n2",\n3]}')),
]

EARLY: list[tuple[AnswerFormat, str, list[Part]]] = [
    (HERMES, f"<think>Hm.\n<tool_call>\n{ONE}\n</tool_call>", [Reasoning("Hm."), *f(a=1)]),
    (HERMES, f"<think><tool_call>{ONE}</tool_call>\n</think>\n", f(a=1)),
    (XML, f"<think>Hm.\n\n{TEXT}a{END}\n{TEXT}b", [Reasoning("Hm."), *f(text="a"), *f(1, text="b")]),
    # Thought of, and called later or not at all.
    (
        HERMES,
        f"<think>Hm <tool_call>{ONE}</tool_call></think>\n\nNo.",
        [Reasoning(f"Hm <tool_call>{ONE}</tool_call>"), Text("No.")],
    ),
    (
        HERMES,
        f"<think><tool_call>{ONE}</tool_call>\n</think>\n<tool_call>{ONE}</tool_call>",
        [Reasoning(f"<tool_call>{ONE}</tool_call>"), *f(a=1)],
    ),
    (
        HERMES,
        f"<think>So <tool_call>{ONE}</tool_call> it is.</think>Yes.",
        [Reasoning(f"So <tool_call>{ONE}</tool_call> it is."), Text("Yes.")],
    ),
    (
        HERMES,
        f"<think>By <tool_call> I call.\n<tool_call>{ONE}",
        [Reasoning("By <tool_call> I call."), *f(a=1)],
    ),
    (XML, f"<think>{TEXT}a</think>b", [Reasoning(f"{TEXT}a"), Text("b")]),
    (HERMES, f"<think>x <tool_call>{ONE[:-4]}", [Reasoning(f"x <tool_call>{ONE[:-4]}")]),
]

STAYS_TEXT = [
    "See <parameter=count> and </function> and </tool_call> here.",
    "<parameter=other>\nno parameter of the tool",
    "<parameter=text>\ngiven already",
    "an example:\n<tool_call>\n<function=g>\n</function>\n</tool_call>\nends here",
    "<function=g>\n</function>\n</tool_call>",
    "</function>\n  <function name='next'>",
    "</function>\n</tool_call>",
    "x\n</tool_call>\ny",
    "x\n</function> y",
    "<tool_call>",
    "<think>\n</think>",
    "a\n\n",
    "\n<parameter=count",
    "<parameter",
]


@pytest.mark.parametrize(("text", "parts"), MARKS_LEFT_OUT)
def test_marks_that_are_left_out_are_read_as_if_they_stood_there(text: str, parts: list[Part]) -> None:
    check(XML, text, parts)


@pytest.mark.parametrize(
    ("schema", "is_end"),
    [
        (None, True),
        ({"type": "object"}, True),
        ({"type": "object", "properties": {}}, True),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"b": {}}}}}, True),
        ({"type": "object", "additionalProperties": False}, False),
        ({"properties": {"a": {"type": "string"}}}, False),
    ],
)
def test_the_next_parameter_ends_a_value_if_the_tool_may_have_it(schema: Any, is_end: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    text = f"{BEGIN}<parameter=a>\nx\n<parameter=b>\ny{END}"
    check(XML, text, f(a="x", b="y") if is_end else f(a="x\n<parameter=b>\ny"), tools=tools)


@pytest.mark.parametrize(("answer", "text", "parts"), [*GOLDEN, *MALFORMED, *JSON_CALLS, *EARLY])
def test_an_answer_is_what_it_should_be_however_it_is_cut(
    answer: AnswerFormat, text: str, parts: list[Part]
) -> None:
    check(answer, text, parts)


@pytest.mark.parametrize("value", STAYS_TEXT)
@pytest.mark.parametrize("name", ["text", "maybe"])
def test_what_is_text_of_a_value_stays_text(value: str, name: str) -> None:
    text = f"{BEGIN}<parameter={name}>\n{value}\n</parameter>\n<parameter=flag>\ntrue{END}"
    given = f"<parameter={name}>"
    arguments = {name: value.replace("<parameter=text>", given), "flag": True}
    check(XML, text.replace("<parameter=text>", given), call(0, "f", json.dumps(arguments)))


@pytest.mark.parametrize(
    "text",
    [
        "A call begins with <function=f>, as you see.",
        "<function=unknown>\n<parameter=text>\na\n</parameter>\n</function>",
        "<function=f>\nSo it is.",
        "<function=",
        "<function=f",
        "<function=f>\n<para",
    ],
)
def test_a_function_without_a_block_is_text_unless_it_is_a_call_of_a_tool(text: str) -> None:
    check(XML, text, [Text(text)])


@pytest.mark.parametrize(
    ("answer", "text", "parts"),
    [
        (XML, f"{TEXT}a", broken(0, "f", '{"text": "a')),
        (XML, f"{TEXT}a\n</parameter>\n", broken(0, "f", '{"text": "a"')),
        (XML, f"{TEXT}a{END[:-1]}", [*f(text="a"), Text("</tool_call")]),
        (XML, f"{TEXT}a{TAIL[:-13]}", broken(0, "f", '{"text": "a\\n</function>')),
        (HERMES, f"<think>Hm <tool_call>{ONE}", [Reasoning(f"Hm <tool_call>{ONE}")]),
        (HERMES, f"<think>Hm <tool_call>{ONE}</think>", [Reasoning(f"Hm <tool_call>{ONE}")]),
        (HERMES, f"<tool_call>{ONE}", f(a=1)),
    ],
)
def test_nothing_is_made_whole_where_an_answer_was_cut_off(
    answer: AnswerFormat, text: str, parts: list[Part]
) -> None:
    check(answer, text, parts, is_whole=False)


EXTRA = {
    ToolSyntax.HERMES: [ONE, TWO, "[", "]", ", ", f"<tool_call>[{ONE},{TWO}]", '"a\nb"', "\\"],
    ToolSyntax.LLAMA: [ONE, TWO, "[", "]", ", ", f"[{ONE},{TWO}]", '"a\nb"', "\\"],
    ToolSyntax.QWEN_XML: [
        *[TEXT, TAIL, END, BEGIN, COUNT, "<function=f>\n", "</tool_call>", "<parameter", "<parameter=", "="],
        *["\n<parameter=flag>\n", "<parameter=text\n", '<parameter name="count">', "\n</function>", ","],
    ],
}
written = st.sampled_from(FORMATS).flatmap(
    lambda each: st.tuples(
        st.just(each),
        st.lists(
            st.sampled_from([*TOKENS[each.tools], *EXTRA[each.tools], *COMMON]),  # type: ignore[index]
            max_size=14,
        ).map("".join),
    )
)


@given(written, sizes, st.booleans(), st.booleans(), st.booleans())
def test_every_cut_gives_the_same_calls_and_only_whole_ones_are_json(
    answer: tuple[AnswerFormat, str], sizes: list[int], is_opened: bool, is_whole: bool, wants_calls: bool
) -> None:
    answer_format, text = answer
    fields: dict[str, Any] = {
        "starts_in_reasoning": is_opened,
        "is_whole": is_whole,
        "wants_calls": wants_calls,
    }
    whole = parts_of(answer_format, [text], **fields)
    for pieces in (cut(text, sizes), list(text)):
        assert parts_of(answer_format, pieces, **fields) == whole
    for place in range(0, len(text), 1 + len(text) // 20):
        assert parts_of(answer_format, [text[:place], text[place:]], **fields) == whole
    said = ""
    for part in whole:
        if isinstance(part, CallStart):
            said = ""
        elif isinstance(part, CallArguments):
            said = part.text
        elif isinstance(part, CallEnd):
            assert is_object(said) == part.is_whole


plain_text = st.text(st.sampled_from('ab <>/=\n"\\{}é'), max_size=40) | st.sampled_from(STAYS_TEXT)


@given(plain_text, plain_text, sizes)
def test_any_value_of_a_well_written_call_comes_out_as_it_is(text: str, maybe: str, sizes: list[int]) -> None:
    maybe = "".join(("x", maybe.replace("<parameter=text>", "<parameter=maybe>")))
    written = f"{TEXT}{text}\n</parameter>\n<parameter=maybe>\n{maybe}{END}"
    assert parts_of(XML, cut(written, sizes)) == f(text=text, maybe=maybe)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=8,
    ),
    sizes,
)
def test_raw_control_characters_in_strings_are_escaped_however_they_are_cut(
    value: Any, sizes: list[int]
) -> None:
    proper = json.dumps(value, ensure_ascii=False, indent=1)
    raw = proper.replace("\\n", "\n").replace("\\u0000", "\0").replace("\\t", "\t")
    escaper = ControlEscaper()
    escaped = "".join(escaper.feed(piece) for piece in cut(raw, sizes))
    assert escaped == with_escapes(raw)
    if "\\\n" not in raw.replace("\\\\", "") and "\\" not in proper.replace("\\n", ""):
        assert json.loads(escaped) == value


@pytest.mark.parametrize("answer", FORMATS)
@pytest.mark.parametrize(
    "unit",
    [
        *["<function=", "<function=f>", "<function=f><parameter=", TEXT, f"{TEXT}\n</function>\n", "[", "[{"],
        *[
            f"<tool_call>{ONE}",
            f"{ONE}, ",
            "<tool_call>[",
            "</function>\n",
            "\n<parameter=count",
            "</parameter>",
        ],
    ],
)
@pytest.mark.parametrize("opening", ["", "<think>", TEXT])
def test_hostile_text_costs_little(answer: AnswerFormat, unit: str, opening: str) -> None:
    text = opening + unit * (100_000 // len(unit))
    begun = time.thread_time()
    parser = AnswerParser(answer, wants_calls=True, starts_in_reasoning=False, tools=TOOLS)
    for start in range(0, len(text), 16):
        parser.feed(text[start : start + 16])
    parser.finish()
    assert time.thread_time() - begun < 5


def test_what_is_held_back_within_reasoning_has_a_bound() -> None:
    long = '{"name": "f", "arguments": {"a": "' + "x" * MAX_EARLY_CHARACTERS + '"}}'
    assert parts_of(HERMES, [f"<think><tool_call>{long}"]) == [Reasoning(f"<tool_call>{long}")]
    marks = "<tool_call>, " * MAX_EARLY_CALLS
    assert parts_of(HERMES, [f"<think>{marks}<tool_call>{ONE}"]) == [Reasoning(f"{marks}<tool_call>{ONE}")]
    stray = "x" * (MAX_STRAY_CHARACTERS - 1)
    assert parts_of(XML, [f"{TEXT}a\n</parameter>\n{stray}{TAIL}"]) == [*f(text="a"), Text(stray + "\n")]
