"""SentBody: what was read of a body, for a server behind a gateway, with what is set here.

Owns which fields such a server gets. Fields that are honoured go as they came, each once. Hints and unknown
ones stay here, and tools that run at a server, unless `pass_fields` lists them. Only the top is encoded anew,
so the largest body costs milliseconds. Pure.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec

from router.api.anthropic.body import MESSAGE
from router.api.completion_prompt import COMPLETION
from router.api.field_table import FieldTable
from router.api.json_body import encode_json
from router.api.openai.chat_body import CHAT
from router.api.responses.body import RESPONSE


class _Form(NamedTuple):
    """`own_tools` are the types of tools that run at the client. `lengths` name the most tokens of an answer;
    the first is set."""

    table: FieldTable[Any]
    own_tools: frozenset[str | None] = frozenset()
    lengths: tuple[str, ...] = ("max_tokens",)


FORMS: Mapping[str, _Form] = {
    "/v1/chat/completions": _Form(CHAT, frozenset({"function"}), ("max_tokens", "max_completion_tokens")),
    "/v1/completions": _Form(COMPLETION),
    "/v1/messages": _Form(MESSAGE, frozenset({None, "custom"})),
    "/v1/responses": _Form(RESPONSE, frozenset({"function", "namespace"}), ("max_output_tokens",)),
}


class _ToolType(msgspec.Struct):
    type: str | None = None


_tools_decoder = msgspec.json.Decoder(list[msgspec.Raw] | None)
_tool_decoder = msgspec.json.Decoder(_ToolType)


class SentBody:
    """For one path. `passed` are names of fields that are not read, or `tools.TYPE`."""

    def __init__(self, path: str, passed: Collection[str]) -> None:
        form = FORMS[path]
        self._lengths = form.lengths
        tools = {name for name in passed if name.startswith("tools.")}
        names = dict.fromkeys([*form.table.names, *(name for name in passed if name not in tools)])
        self._attributes = {name: f"field_{number}" for number, name in enumerate(names)}
        self._decoder = msgspec.json.Decoder(_kind(self._attributes, form.table.inner))
        self._kinds = form.own_tools | {name.removeprefix("tools.") for name in tools}

    def write(
        self, body: bytes, fields: Mapping[str, bytes | None], max_tokens: int | None, num_kept: int
    ) -> bytes:
        """Encode a body that was read before. `fields` replace its own, or leave them out. `max_tokens` is
        an answer's limit, if its tenant has one; `num_kept` are the tokens of its prompt."""
        sent = self._decoder.decode(body)
        self._set(sent, "tools", self._tools(self._get(sent, "tools")))
        if self._get(sent, "tools") is None:
            self._set(sent, "tool_choice", None)
        if self._get(sent, "truncate_prompt_tokens") is not None:  # a server's context may be larger
            self._set(sent, "truncate_prompt_tokens", b"%d" % num_kept)
        if max_tokens is not None:
            for name in self._lengths:
                self._set(sent, name, None)
            self._set(sent, self._lengths[0], b"%d" % max_tokens)
        for name, value in fields.items():
            self._set(sent, name, value)
        return encode_json(sent)

    def _get(self, sent: msgspec.Struct, name: str) -> bytes | None:
        """None: it is not there."""
        value = getattr(sent, self._attributes[name], None) if name in self._attributes else None
        return None if value is None or bytes(value) == b"null" else bytes(value)

    def _set(self, sent: msgspec.Struct, name: str, value: bytes | None) -> None:
        if name in self._attributes:
            setattr(sent, self._attributes[name], None if value is None else msgspec.Raw(value))

    def _tools(self, tools: bytes | None) -> bytes | None:
        listed = () if tools is None else _tools_decoder.decode(tools) or ()
        own = [tool for tool in listed if _tool_decoder.decode(tool).type in self._kinds]
        return encode_json(own) if own else None


def _kind(attributes: Mapping[str, str], inner: Mapping[str, FieldTable[Any]]) -> type[msgspec.Struct]:
    """Make a Struct of fields that are not looked into."""
    fields: list[tuple[str, Any, Any]] = []
    for name, attribute in attributes.items():
        kind: Any = msgspec.Raw
        if name in inner:
            kind = _kind({each: each for each in inner[name].names}, inner[name].inner) | None
        fields.append((attribute, kind, msgspec.field(default=None, name=name)))
    return msgspec.defstruct("SentBody", fields, omit_defaults=True)
