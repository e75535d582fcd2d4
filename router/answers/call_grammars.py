"""Grammar rules for each model's form of tool calls.

Owns the rules of every tool syntax, `calls` and `text_or_calls`, and the grammars of their arguments. Calls
are written as the model's own chat template writes a call that it shows again.

Arguments in JSON follow the tool's schema. In Qwen's XML, properties come in the schema's order; those that
are no strings follow their schemas, and of a string's only `enum` and `const` count, since it is bare text.
"""

import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from router.answers.formats import CALL_BEGIN, CALL_END, PYTHON_TAG, ToolSyntax
from router.answers.literals import is_special, literal, mark
from router.answers.parameter_kinds import STRING_ONLY, followed, kinds_of
from router.answers.schemas import argument_schema, arguments_schema
from router.errors import InvalidRequest

Rules = list[str]
Named = list[dict[str, Any]]
"""Grammars beside the rules, which name them."""

_BETWEEN_MARKS = r"""
calls: call%(more)s
call: %(begin)s "\n" body "\n" %(end)s
text_or_calls: %(mixed)s
said_and_called: opened "\n" body "\n" %(end)s
opened%(lazy)s: TEXT %(begin)s
TEXT: /(?s:.*)/
"""

_BARE = r"""
calls: body%(more)s
text_or_calls: TEXT | %(tag)s calls
TEXT: /(?s:.*)/ & ~/\s*\{\s*"name"(?s:.*)/
"""

_ANY_PARAMETER = r'("<parameter=" /[A-Za-z0-9_.-]{1,64}/ ">\n" value)*'


class CallableTool(NamedTuple):
    """`number` is its place among the request's tools, `parameter` where the request has its schema."""

    number: int
    name: str
    schema: Any
    strict: bool
    parameter: str

    @property
    def rule(self) -> str:
        return f"{'strict' if self.strict else 'loose'}_{self.number}"


def call_rules(
    syntax: ToolSyntax,
    tools: Sequence[CallableTool],
    special_tokens: Collection[str],
    *,
    several: bool,
    beside_json: bool,
) -> tuple[Rules, Named]:
    """Write the rules; `several` calls may follow one another. `beside_json`: the answer may be other JSON as
    well. Raises InvalidRequest."""
    if syntax is ToolSyntax.LLAMA:
        tag = f"{PYTHON_TAG}?" if is_special(PYTHON_TAG, special_tokens) else ""
        frame = _BARE % {"more": ' ("; " body)*' if several else "", "tag": tag}
    else:
        mixed = "said_and_called* TEXT" if several else "TEXT | said_and_called"
        is_token = is_special(CALL_BEGIN, special_tokens)  # and then TEXT does not match it
        frame = _BETWEEN_MARKS % {
            "more": r' ("\n" call)*' if several else "",
            "mixed": mixed,
            "begin": mark(CALL_BEGIN, special_tokens),
            "end": mark(CALL_END, special_tokens),
            "lazy": "" if is_token else "[lazy]",
        }
    rules = frame.strip().splitlines()
    if syntax is ToolSyntax.QWEN_XML:
        bodies, named = _xml_bodies(tools)
        rules.append(r'value[suffix="\n</parameter>\n"]: /(?s:.*)/')
    else:
        key = "parameters" if syntax is ToolSyntax.LLAMA else "arguments"
        bodies = [f'{_head(tool.name, key, in_pieces=beside_json)} @{tool.rule} "}}"' for tool in tools]
        named = [
            {
                "name": tool.rule,
                "json_schema": arguments_schema(tool.schema, tool.parameter, strict=tool.strict),
            }
            for tool in tools
        ]
    return [*rules, f"body: {' | '.join(bodies)}"], named


def _head(name: str, key: str, *, in_pieces: bool) -> str:
    """Write a call up to its arguments; in pieces, so that it can begin like JSON text."""
    pieces = ["{", '"name"', ": ", json.dumps(name, ensure_ascii=False), ", ", f'"{key}"', ": "]
    return " ".join(map(literal, pieces)) if in_pieces else literal("".join(pieces))


def _xml_bodies(tools: Sequence[CallableTool]) -> tuple[list[str], Named]:
    bodies: list[str] = []
    named: Named = []
    for tool in tools:
        if any(mark in tool.name for mark in "<>\n"):
            raise InvalidRequest(f"a tool cannot be called {tool.name!r} here", parameter="tools")
        parameters, its_named = _xml_parameters(tool)
        named += its_named
        bodies.append(f"{literal(f'<function={tool.name}>{chr(10)}')} {parameters} {literal('</function>')}")
    return bodies, named


def _xml_parameters(tool: CallableTool) -> tuple[str, Named]:
    schema = arguments_schema(tool.schema, tool.parameter, strict=tool.strict)
    described = followed({key: schema[key] for key in schema if key != "type"}, schema)
    described = described if isinstance(described, dict) else {}
    properties, required = described.get("properties"), described.get("required")
    if not isinstance(properties, dict) or not properties:
        return (_ANY_PARAMETER if described.get("additionalProperties") is not False else ""), []
    rules: list[str] = []
    named: Named = []
    for number, (name, its_schema) in enumerate(properties.items()):
        if any(mark in name for mark in "<>\n"):
            raise InvalidRequest(f"a parameter cannot be called {name!r} here", parameter=tool.parameter)
        value = _xml_value(its_schema, schema)
        if value is None:
            rule = f"{tool.rule}_{number}"
            value = rf'@{rule} "\n</parameter>\n"'
            alone = argument_schema(_by_itself(its_schema, schema), schema)
            named.append({"name": rule, "json_schema": alone})
        written = f"{literal(f'<parameter={name}>{chr(10)}')} {value}"
        is_required = isinstance(required, list) and name in required
        rules.append(written if is_required else f"({written})?")
    return " ".join(rules), named


def _xml_value(schema: Any, root: Any) -> str | None:
    """Return the rule of a value that is bare text; None of one that is JSON."""
    kinds = kinds_of(schema, root)
    if kinds is not None and "string" not in kinds:
        return None
    schema = followed(schema, root)
    if kinds != STRING_ONLY or not isinstance(schema, dict):
        return "value"
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return "value"
    ended = (literal(value + "\n</parameter>\n") for value in values)
    return f"({' | '.join(ended)})"


def _by_itself(schema: Any, root: Any) -> Any:
    """Remove references to what is not included."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    comes_with_it = isinstance(reference, str) and reference.startswith(("#/$defs/", "#/definitions/"))
    return schema if reference is None or comes_with_it else followed(schema, root)
