"""What clients put into a grammar: all of it ends soon, as a grammar or as a refusal that names the field."""

import json
from typing import Any

import pytest

from router.answers.formats import AnswerFormat, ToolSyntax
from router.answers.grammar_check import checked_grammar
from router.answers.grammars import grammar_for
from router.answers.schemas import MAX_ARRAY_ENTRIES
from router.answers.wishes import FormatKind, OutputFormat, ToolChoice, ToolMode
from router.errors import InvalidRequest
from tests.router.answers.grammar_following import follows

REQUIRED = ToolChoice(ToolMode.REQUIRED)


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
        tools = [{"function": {"name": "f", "parameters": ELSEWHERE, "strict": is_strict}}]
        place = "tools.{}.input_schema"
        grammar = grammar_for(None, tools, REQUIRED, AnswerFormat(syntax), tool_parameter=place)
        if is_strict:
            with pytest.raises(InvalidRequest) as caught:
                checked_grammar(grammar, parameter=None, tool_parameter=place)
            assert caught.value.parameter == "tools.0.input_schema"
        else:
            assert follows(checked_grammar(grammar, parameter=None).text, WRITTEN[syntax])
