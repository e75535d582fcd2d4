"""Grammars of answers: what follows one is read back as what was asked, in every tool syntax.

What clients put into one ends soon, as a grammar or as a refusal that names the field.
"""

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.answers.formats import AnswerFormat, ReasoningMarks, ToolSyntax
from router.answers.grammar_check import checked_grammar
from router.answers.grammars import MAX_CALLABLE_TOOLS, grammar_for
from router.answers.parts import CallArguments, CallStart, Part, Reasoning, Text
from router.answers.schemas import MAX_ARRAY_ENTRIES
from router.answers.wishes import FormatKind, OutputFormat, ToolChoice, ToolMode
from router.errors import InvalidRequest
from tests.json_schemas import random_schema
from tests.router.answers.grammar_following import follows, random_answer
from tests.router.answers.spoken import parts_of

MARKS = ReasoningMarks()
HERMES = AnswerFormat(ToolSyntax.HERMES)
LLAMA = AnswerFormat(ToolSyntax.LLAMA)
XML = AnswerFormat(ToolSyntax.QWEN_XML)
SYNTAXES = [HERMES, LLAMA, XML]
REQUIRED = ToolChoice(ToolMode.REQUIRED)
JSON = OutputFormat(
    FormatKind.JSON_SCHEMA, schema={"type": "object", "properties": {"name": {"type": "string"}}}
)

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 9},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Any = None, *, strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


TOOLS = [tool("weather", WEATHER, strict=True), tool("f", WEATHER)]

HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
HERMES_F = HERMES_CALL.replace("weather", "f")
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Rome"}}'
XML_CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
CALLS = {ToolSyntax.HERMES: HERMES_CALL, ToolSyntax.LLAMA: LLAMA_CALL, ToolSyntax.QWEN_XML: XML_CALL}
BETWEEN = {ToolSyntax.HERMES: "\n", ToolSyntax.LLAMA: "; ", ToolSyntax.QWEN_XML: "\n"}


def calls_of(parts: list[Part]) -> list[tuple[str, Any]]:
    names = [part.name for part in parts if isinstance(part, CallStart)]
    arguments = [json.loads(part.text) for part in parts if isinstance(part, CallArguments)]
    assert not [part for part in parts if isinstance(part, Text)]
    return list(zip(names, arguments, strict=True))


@pytest.mark.parametrize("answer", SYNTAXES)
def test_a_required_call_is_one_of_a_tool_and_reads_back(answer: AnswerFormat) -> None:
    rng = random.Random(1)
    for number in range(30):
        schema = random_schema(rng)
        schema["properties"].pop("größe", None)  # bytes that are letters only together are not drawn here
        schema["required"] = [name for name in schema["required"] if name in schema["properties"]]
        tools = [tool("first", schema, strict=True), tool("other one"[: 5 + number % 4], WEATHER)]
        grammar = checked_grammar(grammar_for(None, tools, REQUIRED, answer), parameter=None).text
        for name, arguments in calls_of(parts_of(answer, [random_answer(grammar, rng)], tools=tools)):
            function = next(t["function"] for t in tools if t["function"]["name"] == name)
            if answer is not XML:  # in which a string's length and pattern are not held to
                jsonschema.validate(arguments, function["parameters"])
            assert set(function["parameters"].get("required", ())) <= set(arguments)
            assert set(arguments) <= set(function["parameters"]["properties"])


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "behind a reference"])
def test_values_are_held_to_types_behind_references(wrapped: bool) -> None:
    colour = {"enum": ["red", "12345"], "type": "string"}
    described = {
        "type": "object",
        "properties": {
            "colour": {"allOf": [{"$ref": "#/$defs/Colour"}]},
            "size": {"$ref": "#/$defs/Size"},
            "twin": {"$ref": "#/properties/size"},
        },
        "required": ["colour", "size", "twin"],
        "additionalProperties": False,
    }
    definitions = {"Colour": colour, "Size": {"type": "integer"}, "All": described}
    if wrapped:
        schema = {"$ref": "#/$defs/All", "$defs": {**definitions, "All": {**described, "properties": {}}}}
        schema["$defs"]["All"]["properties"] = {**described["properties"], "twin": {"$ref": "#/$defs/Size"}}
    else:
        schema = {**described, "$defs": definitions}
    grammar = checked_grammar(
        grammar_for(None, [tool("paint", schema, strict=True)], REQUIRED, XML), parameter=None
    ).text

    def written(*values: str) -> str:
        names = ("colour", "size", "twin")
        parameters = [
            f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in zip(names, values, strict=True)
        ]
        return f"<tool_call>\n<function=paint>\n{''.join(parameters)}</function>\n</tool_call>"

    assert follows(grammar, written("red", "7", "8"))
    for values in (("green", "7", "8"), ("red", "seven", "8"), ("red", "7", "eight")):
        assert not follows(grammar, written(*values))


@pytest.mark.parametrize("answer", SYNTAXES)
def test_how_many_calls_there_may_be(answer: AnswerFormat) -> None:
    assert answer.tools is not None
    call, between = CALLS[answer.tools], BETWEEN[answer.tools]
    any_number = grammar_for(None, TOOLS, REQUIRED, answer)
    one = grammar_for(None, TOOLS, ToolChoice(ToolMode.REQUIRED, parallel=False), answer)
    named = grammar_for(None, TOOLS, ToolChoice(ToolMode.REQUIRED, names=("weather",)), answer)
    other = grammar_for(None, TOOLS, ToolChoice(ToolMode.REQUIRED, names=("f",)), answer)
    assert follows(any_number, call) and follows(any_number, between.join([call] * 3))
    for grammar in (one, named):
        assert follows(grammar, call) and not follows(grammar, between.join([call] * 2))
    assert not follows(other, call) and follows(other, call.replace("weather", "f"))
    for grammar in (any_number, one, named):
        assert not follows(grammar, "") and not follows(grammar, "No.")


@pytest.mark.parametrize("answer", SYNTAXES)
def test_text_with_strict_tools_is_free_until_a_call_begins(answer: AnswerFormat) -> None:
    assert answer.tools is not None
    call = CALLS[answer.tools]
    grammar = grammar_for(None, TOOLS, ToolChoice(), answer)
    assert all(follows(grammar, text) for text in ("", "Hello.", "A {brace}", call))
    assert not follows(grammar, call.replace("weather", "climate"))
    assert not follows(grammar, call.replace("city", "town"))
    if answer is not LLAMA:
        assert follows(grammar, f"I look.\n{call} And {call}\n")
        alone = grammar_for(None, TOOLS, ToolChoice(parallel=False), answer)
        assert follows(alone, f"I look.\n{call}") and follows(alone, "Hello.")
        assert not follows(alone, f"{call}\n{call}")
    else:
        assert follows(grammar, '{"a": 1}') and not follows(grammar, '{"name": 1}')


@pytest.mark.parametrize("answer", SYNTAXES)
def test_text_of_a_format_or_calls(answer: AnswerFormat) -> None:
    assert answer.tools is not None
    grammar = checked_grammar(grammar_for(JSON, TOOLS, ToolChoice(), answer), parameter=None).text
    assert follows(grammar, CALLS[answer.tools])
    assert follows(grammar, '{"name": "x"}') and follows(grammar, '{"name":"weather"}')
    assert not follows(grammar, "Hello.") and not follows(grammar, CALLS[answer.tools] + "Hello.")


def test_nothing_is_held_to_a_grammar_that_nobody_asks_for() -> None:
    loose = [tool("f", WEATHER)]
    for answer in (*SYNTAXES, AnswerFormat(), AnswerFormat(ToolSyntax.HERMES, MARKS)):
        assert grammar_for(None, loose, ToolChoice(), answer) == ""
        assert grammar_for(None, (), ToolChoice(), answer) == ""
        assert grammar_for(None, TOOLS, ToolChoice(ToolMode.NONE), answer) == ""
    assert grammar_for(None, TOOLS, ToolChoice(), AnswerFormat()) == ""
    assert checked_grammar("", parameter=None).text == ""


def test_tools_that_may_not_be_called_are_not() -> None:
    only = grammar_for(None, [tool("weather", WEATHER), tool("f")], ToolChoice(names=("f",)), HERMES)
    assert follows(only, "Hello.") and follows(only, HERMES_F) and not follows(only, HERMES_CALL)
    none = grammar_for(JSON, TOOLS, ToolChoice(ToolMode.NONE), HERMES)
    assert follows(none, '{"name": "x"}') and not follows(none, HERMES_CALL)


@pytest.mark.parametrize("choice", [REQUIRED, ToolChoice()])
def test_reasoning_comes_first(choice: ToolChoice) -> None:
    answer = AnswerFormat(ToolSyntax.HERMES, MARKS)
    output = None if choice is REQUIRED else JSON
    grammar = grammar_for(output, TOOLS, choice, answer)
    text = f"<think>\nHm. <tool_call>\n</think>\n\n{HERMES_CALL}"
    assert follows(grammar, text) and follows(grammar, HERMES_CALL)
    assert isinstance(parts_of(answer, [text])[0], Reasoning)
    inside = grammar_for(output, TOOLS, choice, answer, starts_in_reasoning=True)
    assert follows(inside, f"Hm.\n</think>\n\n{HERMES_CALL}") and not follows(inside, HERMES_CALL)
    for unfinished in ("<think>\nHm.", f"<think></think>{HERMES_CALL}</think>{HERMES_CALL}"):
        assert not follows(grammar, unfinished)


def test_marks_that_are_special_tokens_are_tokens() -> None:
    answer = AnswerFormat(ToolSyntax.LLAMA, MARKS)
    specials = {"</think>", "<|python_tag|>", "<|eot_id|>"}
    grammar = grammar_for(
        None, TOOLS, ToolChoice(), answer, starts_in_reasoning=True, special_tokens=specials
    )
    (whole, *_) = json.loads(grammar)["grammars"]
    assert "</think>" in whole["lark_grammar"] and '"</think>"' not in whole["lark_grammar"]
    assert "<|python_tag|>?" in whole["lark_grammar"]
    assert checked_grammar(grammar, parameter=None, special_tokens=specials).text == grammar


@pytest.mark.parametrize("choice", [REQUIRED, ToolChoice()])
def test_calls_and_reasoning_whose_marks_are_tokens_are_followed_as_tokens(choice: ToolChoice) -> None:
    answer = AnswerFormat(ToolSyntax.HERMES, MARKS)
    specials = {"<think>", "</think>", "<tool_call>", "</tool_call>"}
    tools = [tool("weather", WEATHER, strict=True)]
    grammar = grammar_for(None, tools, choice, answer, special_tokens=specials)
    assert checked_grammar(grammar, parameter=None, special_tokens=specials).text == grammar
    is_free = choice is not REQUIRED
    for text, is_answer in (
        (HERMES_CALL, True),
        (f"{HERMES_CALL}\n{HERMES_CALL}", True),
        (f"<think>\nHm.\n</think>\n\n{HERMES_CALL}", True),
        (HERMES_CALL.replace("city", "town"), False),
        ("Hello.", is_free),
        (f"Hello.\n{HERMES_CALL}\n", is_free),
        ("<tool_call>\nHello.\n</tool_call>", False),
    ):
        assert follows(grammar, text, specials) == is_answer, text
        if not is_free:
            assert not follows(grammar, text.replace("<tool_call>", "<tool_call >"), specials)


@given(st.text(min_size=1, max_size=30), st.lists(st.text(max_size=20), min_size=1, max_size=5))
def test_names_and_texts_of_clients_are_only_themselves(name: str, choices: list[str]) -> None:
    tools = [tool(name)]
    call = f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {{}}}}\n</tool_call>'
    try:
        call.encode()
        "".join(choices).encode()
    except UnicodeEncodeError:
        return
    grammar = checked_grammar(grammar_for(None, tools, REQUIRED, HERMES), parameter=None).text
    assert follows(grammar, call) and not follows(grammar, call.replace("arguments", "argument"))
    output = OutputFormat(FormatKind.CHOICE, choices=tuple(choices))
    grammar = checked(output)
    assert all(follows(grammar, choice) for choice in choices)
    assert follows(grammar, "x|y") == ("x|y" in choices)


@pytest.mark.parametrize(
    ("output", "good", "bad"),
    [
        (OutputFormat(FormatKind.JSON_OBJECT), ['{"a": [1, {}]}', "{}"], ["[]", "1", '{"a"}']),
        (OutputFormat(FormatKind.JSON_SCHEMA, schema=True), ["1", '{"a":null}'], ["", "a"]),
        (OutputFormat(FormatKind.REGEX, text=r"a/b\/[\n]?" + "\n\\d"), ["a/b/\n\n7", "a/b/\n7"], ["a/b/7"]),
        (
            OutputFormat(FormatKind.REGEX, text=r"\d[\w.]\s"),
            ["7a ", "7.\t", "7_\n"],
            ["٣a ", "7é ", "7a\u2003"],
        ),
        (OutputFormat(FormatKind.REGEX, text=r"\D[^\W\d]\S"), ["٣a٣", "xyz"], ["7a ", "x3z", "xéz", "xy "]),
        (OutputFormat(FormatKind.REGEX, text=r"(?x) \s \\d # words"), [" \\d"], ["\\d", " 7"]),
        (OutputFormat(FormatKind.CHOICE, choices=("yes", "no", 'a "é"\\')), ["no", 'a "é"\\'], ["", "yesno"]),
        (OutputFormat(FormatKind.GRAMMAR, text='root ::= "a"+ b\nb ::= [0-9]'), ["aa1"], ["a", "1"]),
        (OutputFormat(FormatKind.GRAMMAR, text='start: "a"+ B\nB: /[0-9]/\n%ignore " "'), ["a a 1"], ["1"]),
    ],
)
def test_text_has_its_format(output: OutputFormat, good: list[str], bad: list[str]) -> None:
    grammar = checked(output)
    assert all(follows(grammar, text) for text in good)
    assert not any(follows(grammar, text) for text in bad)


@pytest.mark.parametrize(
    ("tools", "choice", "answer", "parameter"),
    [
        (TOOLS, ToolChoice(ToolMode.REQUIRED, names=("climate",)), HERMES, "tool_choice"),
        (TOOLS, ToolChoice(names=("climate",)), HERMES, "tool_choice"),
        ([], REQUIRED, HERMES, "tool_choice"),
        (TOOLS, REQUIRED, AnswerFormat(), "tool_choice"),
        ([tool(f"f{n}") for n in range(MAX_CALLABLE_TOOLS + 1)], REQUIRED, HERMES, "tools"),
        ([tool("f", [])], REQUIRED, HERMES, "tools[0].function.parameters"),
        ([tool("f>")], REQUIRED, XML, "tools"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    tools: list[dict[str, Any]], choice: ToolChoice, answer: AnswerFormat, parameter: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar_for(None, tools, choice, answer)
    assert caught.value.parameter == parameter


def checked(output: OutputFormat) -> str:
    grammar = grammar_for(output, (), ToolChoice(), AnswerFormat())
    return checked_grammar(grammar, parameter=output.parameter).text


def schema_format(schema: Any) -> OutputFormat:
    return OutputFormat(FormatKind.JSON_SCHEMA, schema=schema, parameter="response_format.schema")


def chain(links: int, link: dict[str, Any]) -> dict[str, Any]:
    """Definitions each of which refers to the next."""
    text = json.dumps(link)
    definitions = {f"d{n}": json.loads(text.replace("NEXT", f"d{n + 1}")) for n in range(links)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{links}": {"type": "null"}}}


NEXT = {"$ref": "#/$defs/NEXT"}
TWO_OF = [{"anyOf": [{"properties": {f"k{i}{j}": {"type": "string"}}} for j in range(2)]} for i in range(14)]

EXPLODING_SCHEMAS = {
    "two of each": {"type": "object", "allOf": TWO_OF},
    "long chain": chain(3000, {"type": "object", "properties": {"a": NEXT}}),
    "deep chain": chain(
        400, {"anyOf": [{"items": {"allOf": [{"additionalProperties": {"oneOf": [NEXT]}}]}}]}
    ),
    "deep": json.loads('{"properties": {"a": ' * 110 + "{}" + "}}" * 110),
    "many at least": {"type": "array", "minItems": 10**18},
    "many lists": {"properties": {f"p{n}": {"type": "array", "maxItems": 1999} for n in range(6)}},
    "long": {"enum": ["x" * 200_000]},
    "no type": {"type": "objekt"},
    "itself": {"allOf": [{"$ref": "#"}]},
    "elsewhere": {"$ref": "http://127.0.0.1:1/schema"},
    "never": False,
    "products": {"allOf": [{"type": "integer", "multipleOf": p} for p in (99991, 99989, 99971, 99961)]},
    "regex": {"type": "string", "pattern": "(" * 2000 + "a" + ")" * 2000},
    "look-around": {"type": "string", "pattern": "a(?=b)"},
    "text": "no schema",
    "many characters at least": {"type": "string", "minLength": 1_000_000_000},
    "too many characters within": {"properties": {"a": {"items": {"minLength": 5_001}}}},
    "many names": {"properties": {f"p{n}": {"type": "boolean"} for n in range(900)}},
    "many objects": {"anyOf": [{"properties": {f"p{n}": {"type": "boolean"}}} for n in range(500)]},
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", EXPLODING_SCHEMAS)
def test_schemas_that_explode_are_refused_soon(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked(schema_format(EXPLODING_SCHEMAS[name]))
    assert caught.value.parameter == "response_format.schema"
    assert len(caught.value.message) < 1000


TEXTS = {
    "rules in a row": (FormatKind.GRAMMAR, "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(3000))),
    "brackets in rules": (
        FormatKind.GRAMMAR,
        "start: r0\n" + "".join(f"r{n}: {'(' * 25}r{n + 1}{')' * 25}\n" for n in range(390)),
    ),
    "brackets": (FormatKind.GRAMMAR, "start: " + "(" * 9000 + '"a"' + ")" * 9000),
    "brackets in GBNF": (FormatKind.GRAMMAR, "root ::= " + "(" * 9000 + '"a"' + ")" * 9000),
    "long": (FormatKind.GRAMMAR, "start: " + '"a" ' * 20_000),
    "a schema within": (FormatKind.GRAMMAR, 'start: %json {"type": "array", "minItems": 10000000}'),
    "itself": (FormatKind.GRAMMAR, "start: @text"),
    "endless": (FormatKind.GRAMMAR, "start: a\na: a"),
    "doubling": (
        FormatKind.GRAMMAR,
        "start: T0\n" + "".join(f"T{n}: T{n + 1} T{n + 1}\n" for n in range(30)) + 'T30: "a"',
    ),
    "nothing": (FormatKind.GRAMMAR, ""),
    "regex brackets": (FormatKind.REGEX, "(" * 20_000 + "a" + ")" * 20_000),
    "regex of nothing": (FormatKind.REGEX, r"[^\x00-\x{10FFFF}]"),
    "regex ambiguous": (FormatKind.REGEX, "(a|aa){1000}"),
    "regex open": (FormatKind.REGEX, "(a"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", TEXTS)
def test_grammars_that_explode_are_refused_soon(name: str) -> None:
    kind, text = TEXTS[name]
    with pytest.raises(InvalidRequest) as caught:
        checked(OutputFormat(kind, text=text, parameter="structured_outputs"))
    assert caught.value.parameter == "structured_outputs"


NO_PATTERNS = {
    "a(?=b)": "look-around, including look-ahead and look-behind, is not supported",
    r"(a)\1": "backreferences are not supported",
    "a{9999999999999}": "decimal literal invalid",
    r"\p{Foo}": "Unicode property not found",
    "(a": "unclosed group",
    "(?=" + "long" * 500 + ")": "look-around, including look-ahead and look-behind, is not supported",
}


@pytest.mark.parametrize("pattern", NO_PATTERNS)
def test_the_refusal_of_a_pattern_says_why(pattern: str) -> None:
    for output in (
        schema_format({"type": "string", "pattern": pattern}),
        OutputFormat(FormatKind.REGEX, text=pattern, parameter="regex"),
        OutputFormat(FormatKind.GRAMMAR, text=f"start: /{pattern}/", parameter="grammar"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            checked(output)
        assert f"{NO_PATTERNS[pattern]}, in {pattern[:50]}" in caught.value.message
        assert len(caught.value.message) < 600 and "\n" not in caught.value.message


@pytest.mark.parametrize(
    "regex", ["(a+)+b", "(a|aa){50}", "(.*a){1,50}x", "(((a{1,100}){1,100}){1,100}){1,100}"]
)
def test_regular_expressions_that_backtrack_elsewhere_are_followed(regex: str) -> None:
    assert checked(OutputFormat(FormatKind.REGEX, text=regex))


def test_a_schema_keeps_what_is_valid_and_no_remark() -> None:
    schema = {
        "type": "object",
        "description": "x" * 1000,
        "properties": {
            "title": {"type": "string", "title": "A title", "format": "password"},
            "day": {"type": "string", "format": "date"},
            "list": {
                "type": "array",
                "items": {"enum": [{"title": "kept", "format": "odd"}]},
                "maxItems": 10**9,
            },
        },
        "required": ["title", "day", "list"],
        "x-guidance": {"whitespace_pattern": " *"},
    }
    grammar = checked(schema_format(schema))
    for left_out in ("description", "password", "whitespace_pattern", "A title"):
        assert left_out not in grammar
    assert f'"maxItems": {MAX_ARRAY_ENTRIES}' in grammar
    day = '"day": "2026-01-31"'
    assert follows(grammar, f'{{"title": "a", {day}, "list": [{{"title": "kept", "format": "odd"}}]}}')
    assert not follows(grammar, f'{{"title": "a", {day}, "list": [{{}}]}}')
    assert not follows(grammar, '{"title": "a", "day": "today", "list": []}')


ELSEWHERE = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"$ref": "http://127.0.0.1:1/schema"}}},
    "required": ["a"],
}
WRITTEN = {
    ToolSyntax.HERMES: '<tool_call>\n{"name": "f", "arguments": {"b": 1}}\n</tool_call>',
    ToolSyntax.LLAMA: '{"name": "f", "parameters": {"b": 1}}',
    ToolSyntax.QWEN_XML: "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n"
    "</tool_call>",
}


@pytest.mark.parametrize("syntax", ToolSyntax)
def test_a_schema_that_cannot_be_followed_is_refused_of_strict_tools_only(syntax: ToolSyntax) -> None:
    for is_strict in (False, True):
        tools = [tool("f", ELSEWHERE, strict=is_strict)]
        place = "tools.{}.input_schema"
        grammar = grammar_for(None, tools, REQUIRED, AnswerFormat(syntax), tool_parameter=place)
        if is_strict:
            with pytest.raises(InvalidRequest) as caught:
                checked_grammar(grammar, parameter=None, tool_parameter=place)
            assert caught.value.parameter == "tools.0.input_schema"
        else:
            assert follows(checked_grammar(grammar, parameter=None).text, WRITTEN[syntax])
