"""sent_body(): what was read of a body, encoded anew for a server that takes bodies.

Owns which fields a server is sent. What was not read could ask for more than its sender may have: more
tokens, another place in the line, tools and models that the operator pays for. So it stays here, unless the
operator lists it. No name comes twice, and none in another case, which some servers read as the same. Pure:
it also runs in the process that prepares large bodies.
"""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from router.api.completion_prompt import COMPLETION
from router.api.dialects import DIALECTS
from router.api.field_table import FieldTable
from router.api.json_body import encode_json
from router.api.sampling import StreamOptions
from router.errors import InvalidRequest

SET_HERE = frozenset({"cache", "cache_salt", "priority", "timeout"})
"""Fields for the router alone, or that are sent as they count for their sender."""

_TABLES: Mapping[str, FieldTable[Any]] = {
    **{kind: each.sent_fields for kind, each in DIALECTS.items() if each.sent_fields is not None},
    "completion": COMPLETION,
}
_READ = {
    kind: frozenset(table.kind.__struct_encode_fields__) - table.refused.keys()
    for kind, table in _TABLES.items()
}
_OPTIONS = frozenset(StreamOptions.__struct_encode_fields__)
_NESTED = ("functions", "messages", "system", "tools")
_FREE = frozenset({"arguments", "input", "input_schema", "parameters"})
"""Objects inside these whose names are the client's own."""

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def sent_body(kind: str, body: bytes, passed: Collection[str]) -> bytes:
    """Encode a body that was read before. Fields that were not read are `passed` by their names; a tool that
    runs at the server is by `tools.TYPE`. Raises InvalidRequest."""
    read = _READ[kind]
    try:
        sent: dict[str, Any] = {
            name: msgspec.json.decode(value)
            for name, value in _decoder.decode(body).items()
            if (name in read or name in passed) and name not in SET_HERE
        }
        for name in _NESTED:
            if name in sent:
                sent[name] = _as_read(sent[name], passed)
        sent["tools"] = [tool for tool in sent.get("tools") or () if _is_passed(tool, passed)]
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The request body cannot be sent on: {error}.", code="invalid_json") from error
    if sent.get("max_completion_tokens") is not None:
        sent.pop("max_tokens", None)
    if not sent["tools"]:
        del sent["tools"]
        if kind == "messages":
            sent.pop("tool_choice", None)
    if sent.get("stream_options") is not None:
        options = sent["stream_options"].items()
        sent["stream_options"] = {
            name: value for name, value in options if name in _OPTIONS or f"stream_options.{name}" in passed
        }
    return encode_json(sent)


def _as_read(value: Any, passed: Collection[str]) -> Any:
    """Leave out names that are read in another case, and tools that run at the server."""
    if isinstance(value, list):
        return [_as_read(each, passed) for each in value if not _offers_other(each, passed)]
    if isinstance(value, dict):
        return {
            name: each if type(each) is str or name in _FREE else _as_read(each, passed)
            for name, each in value.items()
            if name.isascii() and name == name.lower()
        }
    return value


def _offers_other(block: Any, passed: Collection[str]) -> bool:
    """Whether a block of a conversation offers a tool that does not pass."""
    match block:
        case {"type": "tool_addition", "tool": {"definition": definition}}:
            return not _is_passed(definition, passed)
    return False


def _is_passed(tool: Any, passed: Collection[str]) -> bool:
    """Whether a tool is the client's own, or one of the server's that is listed."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind in (None, "custom", "function") or f"tools.{kind}" in passed
