"""Calls that models write carelessly are read as they are meant; what is text of a value stays text; and no
call is whole whose arguments are no JSON object."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.answers.early_calls import MAX_EARLY_CALLS, MAX_EARLY_CHARACTERS
from router.answers.formats import AnswerFormat, ToolSyntax
from router.answers.json_strings import ControlEscaper, is_object, with_escapes
from router.answers.parser import AnswerParser
from router.answers.parts import CallArguments, CallEnd, CallStart, Part, Reasoning, Text
from router.answers.xml_call import MAX_STRAY_CHARACTERS
from tests.router.answers.spoken import TOOLS, broken, call, cut, parts_of
from tests.router.answers.test_parser import COMMON, FORMATS, HERMES, LLAMA, TOKENS
from tests.router.answers.test_parser import QWEN_XML as XML

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


def check(answer: AnswerFormat, text: str, parts: list[Part], **fields: Any) -> None:
    assert parts_of(answer, [text], **fields) == parts
    assert parts_of(answer, list(text), **fields) == parts
    for place in range(len(text)):
        assert parts_of(answer, [text[:place], text[place:]], **fields) == parts


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


@pytest.mark.parametrize(("answer", "text", "parts"), MALFORMED)
def test_a_call_without_all_of_its_arguments_is_not_whole(
    answer: AnswerFormat, text: str, parts: list[Part]
) -> None:
    check(answer, text, parts)


@pytest.mark.parametrize(("answer", "text", "parts"), JSON_CALLS)
def test_calls_in_json_are_read_one_after_the_other(
    answer: AnswerFormat, text: str, parts: list[Part]
) -> None:
    check(answer, text, parts)


@pytest.mark.parametrize(("answer", "text", "parts"), EARLY)
def test_a_call_within_reasoning_counts_if_nothing_else_follows(
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
spoken = st.sampled_from(FORMATS).flatmap(
    lambda each: st.tuples(
        st.just(each),
        st.lists(
            st.sampled_from([*TOKENS[each.tools], *EXTRA[each.tools], *COMMON]),  # type: ignore[index]
            max_size=14,
        ).map("".join),
    )
)
sizes = st.lists(st.integers(1, 9), max_size=60)


@given(spoken, sizes, st.booleans(), st.booleans())
def test_every_cut_gives_the_same_calls_and_only_whole_ones_are_json(
    answer: tuple[AnswerFormat, str], sizes: list[int], is_opened: bool, is_whole: bool
) -> None:
    answer_format, text = answer
    fields: dict[str, Any] = {"starts_in_reasoning": is_opened, "is_whole": is_whole}
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
