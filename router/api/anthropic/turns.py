"""Anthropic's system prompt and messages → messages as chat templates expect them.

Owns the kinds of content blocks, which of them a text model can read, and the rule that each call of a tool
is followed by its result. Consecutive messages of one role become one, as at Anthropic. Every error names the
block. No block of a tool's result or of an earlier answer is refused for its kind.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from router.api.anthropic.caching import MarkPosition, Marks, mark_seconds
from router.api.images import Images, content_of, read_or_unread
from router.api.json_body import missing, read_arguments
from router.errors import InvalidRequest
from router.prompt.unread import is_silent, noun_of, unread

Piece = TypeVar("Piece")

BILLING_HEADER = "x-anthropic-billing-header"
"""A text block of a coding agent that begins with this is for Anthropic's accounts. It changes with every
request, and stands before all else: a prompt that had it would never be found in a cache."""

_ROLES = ("user", "assistant", "system")
_CHANGES = ("tool_addition", "tool_removal")
_READ = ("search_result", "tool_reference", "mcp_tool_result")
"""Kinds of an answer that are read, besides texts and those that words may stand for."""
_JOINED = ("search_result", "tool_reference", "document")
"""Kinds of an answer that the text behind them continues."""


class Turns:
    """Feed it the system prompt, then the messages, then `finish`; `messages` are the chat's. Every method
    raises InvalidRequest."""

    def __init__(self, marks: Marks) -> None:
        self.messages: list[dict[str, Any]] = []
        self.tool_changes: list[tuple[str, Mapping[str, Any]]] = []
        """Blocks that add or remove a tool, with their paths."""
        self._marks = marks
        self._role = ""
        self.images = Images()
        self._texts: list[str | dict[str, Any]] = []
        """And images, as parts, among them."""
        self._num_characters = 0
        self._reasoning: list[str] = []
        self._calls: dict[str, str] = {}
        """Names of the tools called in the assistant's latest turn, by call id."""
        self._unanswered: dict[str, None] = {}
        self._calls_path = ""

    def system(self, system: str | Sequence[Mapping[str, Any]] | None, *, has_tools: bool) -> None:
        """With tools a mark on a block stands for all that comes before the messages, since it depends on the
        template which of the two comes first."""
        if system is None:
            return
        blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
        for number, block in enumerate(blocks):
            path = f"system[{number}]"
            self._system_text(path, block, MarkPosition(-1) if has_tools else None)
        self._close()

    def message(self, position: int, message: Mapping[str, Any]) -> None:
        path = f"messages[{position}]"
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            wanted = "'user', 'assistant' or 'system'"
            raise missing(f"{path}.role") if role is None else _wrong(f"{path}.role", wanted)
        if content is None:
            raise missing(f"{path}.content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        elif not isinstance(content, list):
            raise _wrong(f"{path}.content", "text or a list of content blocks")
        if role == "assistant":
            self._assistant(path, content)
        elif role == "user":
            self._user(path, content)
        else:
            self._system_message(path, content)

    def finish(self) -> None:
        self._close()
        self._check_answered()

    def _user(self, path: str, content: Sequence[Any]) -> None:
        if not content:
            self._turn("user")
        for number, block in enumerate(content):
            here = f"{path}.content[{number}]"
            kind = _kind(here, block)
            if kind == "tool_result":
                self._result(here, block)
            elif kind == "text" or not self._passes_over(here, block, is_silent(kind)):
                self._turn("user")
                piece = self._piece(here, block)
                if isinstance(piece, str):
                    self._say(piece)
                else:
                    self._texts.append(piece)
                self._mark(here, block)

    def _result(self, path: str, block: Mapping[str, Any]) -> None:
        call_id = block.get("tool_use_id")
        if not isinstance(call_id, str):
            raise missing(f"{path}.tool_use_id")
        if call_id not in self._calls:
            raise InvalidRequest(
                f"unexpected `tool_use_id` found in `tool_result` blocks: {call_id[:80]}. Each `tool_result`"
                " block must have a corresponding `tool_use` block in the previous message.",
                parameter=path,
            )
        if call_id not in self._unanswered:
            raise InvalidRequest(
                "each `tool_use` must have a single result. Found multiple `tool_result` blocks with id:"
                f" {call_id[:80]}",
                parameter=path,
            )
        del self._unanswered[call_id]
        read = partial(read_or_unread, read=self._piece)
        pieces = _pieces(f"{path}.content", block.get("content"), read)
        if block.get("is_error"):
            first, *others = pieces or [""]
            pieces = [f"Error: {first}", *others] if isinstance(first, str) else ["Error:", first, *others]
        self._close()
        name = self._calls[call_id]
        content = content_of(pieces)
        self.messages.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": content})
        self._marks.block(path, block, MarkPosition(len(self.messages) - 1))

    def _piece(self, path: str, block: Any) -> str | dict[str, Any]:
        """Return a text, or an image as a part of a message."""
        if _kind(path, block) != "image":
            return _read_text(path, block)
        match block.get("source"):
            case {"type": "base64", **source}:
                return self.images.add_base64(path, source.get("media_type"), source.get("data"))
            case {"type": "url" | "file"}:
                raise InvalidRequest(
                    "Images are read from 'base64' sources only: nothing is fetched, and there are no files.",
                    parameter=f"{path}.source",
                )
        raise _wrong(f"{path}.source", "an object with the type 'base64'")

    def _assistant(self, path: str, content: Sequence[Any]) -> None:
        if self._role != "assistant":
            self._check_answered()
            self._turn("assistant")
            self._calls = {}
        for number, block in enumerate(content):
            here = f"{path}.content[{number}]"
            match _kind(here, block):
                case "thinking":
                    thinking = block.get("thinking")
                    if not isinstance(thinking, str):
                        raise _wrong(f"{here}.thinking", "text")
                    self._reasoning.append(thinking)
                    _no_mark(here, block, "thinking")
                case "redacted_thinking":
                    _no_mark(here, block, "thinking")
                case "tool_use":
                    self._call(path, here, block)
                    self._mark(here, block, MarkPosition(len(self.messages) - 1))
                case "text":
                    self._say(_text(here, block))
                    self._mark(here, block)
                case kind:
                    if self._passes_over(here, block, kind not in _READ and noun_of(block) is None):
                        continue
                    text = read_or_unread(here, block, _read_text)
                    self._say(
                        text if not text or (kind in _JOINED and text != unread(block)) else f"{text}\n"
                    )
                    self._mark(here, block)

    def _passes_over(self, path: str, block: Mapping[str, Any], says_nothing: bool) -> bool:
        """Note a block's changes of tools. Return whether no prompt has it: then its mark is noted, too."""
        changes = block.get("tool_changes") if block["type"] == "compaction" else None
        for number, change in enumerate(changes if isinstance(changes, list) else ()):
            self.tool_changes.append((f"{path}.tool_changes[{number}]", change))
        if block["type"] in _CHANGES:
            self.tool_changes.append((path, block))
        elif not says_nothing:
            return False
        num_characters = self._num_characters if self._role else None
        self._marks.block(path, block, MarkPosition(len(self.messages) - 1, num_characters))
        return True

    def _call(self, path: str, here: str, block: Mapping[str, Any]) -> None:
        call_id, name, arguments = block.get("id"), block.get("name"), read_arguments(block.get("input", 0))
        for field, value in (("id", call_id), ("name", name)):
            if not isinstance(value, str) or not value:
                raise missing(f"{here}.{field}")
        assert isinstance(call_id, str) and isinstance(name, str)
        if arguments is None:
            raise _wrong(f"{here}.input", "an object")
        if call_id in self._calls:
            raise InvalidRequest("`tool_use` ids must be unique", parameter=here)
        self._calls[call_id] = name
        self._unanswered[call_id] = None
        self._calls_path = path
        function = {"name": name, "arguments": arguments}
        calls = self.messages[-1].setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def _system_message(self, path: str, content: Sequence[Any]) -> None:
        """In the middle of the conversation, where it may stand between a call and its result."""
        self._close()
        for number, block in enumerate(content):
            self._system_text(f"{path}.content[{number}]", block, None)
        self._close()

    def _system_text(self, path: str, block: Any, place: MarkPosition | None) -> None:
        if _kind(path, block) in _CHANGES and self._passes_over(path, block, True):
            return
        text = _text(path, block)
        if text.startswith(BILLING_HEADER):
            return
        if text:
            self._turn("system")
            self._say(text)
        self._mark(path, block, place)

    def _check_answered(self) -> None:
        if self._unanswered:
            ids = ", ".join(call_id[:80] for call_id in list(self._unanswered)[:10])
            raise InvalidRequest(
                f"`tool_use` ids were found without `tool_result` blocks immediately after: {ids}. Each"
                " `tool_use` block must have a corresponding `tool_result` block in the next message.",
                parameter=self._calls_path,
            )

    def _turn(self, role: str) -> None:
        """The message that what follows belongs to."""
        if self._role != role:
            self._close()
            self._role = role
            self.messages.append({"role": role, "content": ""})

    def _say(self, text: str) -> None:
        if self._texts and self._role != "assistant":
            self._num_characters += 1
        self._texts.append(text)
        self._num_characters += len(text)

    def _mark(self, path: str, block: Mapping[str, Any], place: MarkPosition | None = None) -> None:
        """A block of the message that is open. An empty text cannot be cached."""
        if block.get("type") == "text" and not block["text"]:
            _no_mark(path, block, "empty text")
            return
        self._marks.block(path, block, place or MarkPosition(len(self.messages) - 1, self._num_characters))

    def _close(self) -> None:
        """Close a message. An assistant's text continues across blocks; others' blocks are lines."""
        if self._role:
            message = self.messages[-1]
            message["content"] = content_of(self._texts, "" if self._role == "assistant" else "\n")
            if self._reasoning:
                message["reasoning_content"] = "".join(self._reasoning)
        self._role = ""
        self._texts, self._reasoning, self._num_characters = [], [], 0


def _kind(path: str, block: Any) -> str:
    if not isinstance(block, dict):
        raise _wrong(path, "a content block")
    kind = block.get("type")
    if not isinstance(kind, str):
        raise missing(f"{path}.type")
    return kind


def _text(path: str, block: Any) -> str:
    if _kind(path, block) != "text":
        raise _wrong(f"{path}.type", "'text'")
    text = block.get("text")
    if not isinstance(text, str):
        raise missing(f"{path}.text") if text is None else _wrong(f"{path}.text", "text")
    return text


def _read_text(path: str, block: Any) -> str:
    """Read a block whose content is text in some form."""
    match _kind(path, block):
        case "text":
            return _text(path, block)
        case "document":
            return _document(path, block)
        case "search_result":
            found = _joined(f"{path}.content", block.get("content"), _text)
            return "\n".join([*_filled(block, "title", "source"), found])
        case "tool_reference":
            return "\n".join(_filled(block, "tool_name"))
        case "compaction" if block.get("content") is None:
            return ""
        case "compaction" | "mcp_tool_result":
            return _joined(f"{path}.content", block.get("content"), partial(read_or_unread, read=_read_text))
        case "image" | "container_upload" | "browser_state" as kind:
            raise InvalidRequest(f"'{kind}' blocks are not supported here.", parameter=path)
        case kind:
            raise InvalidRequest(
                f"Blocks of type '{kind[:40]}' are not supported here.", parameter=f"{path}.type"
            )


def _document(path: str, block: Mapping[str, Any]) -> str:
    match block.get("source"):
        case {"type": "text", "data": str(data)}:
            text = data
        case {"type": "content", "content": content}:
            text = _joined(f"{path}.source.content", content, _text)
        case _:
            raise InvalidRequest(
                "Documents are read as text only: the source's type is 'text' or 'content'.",
                parameter=f"{path}.source",
            )
    return "\n".join([*_filled(block, "title", "context"), text])


def _filled(block: Mapping[str, Any], *fields: str) -> list[str]:
    return [value for field in fields if isinstance(value := block.get(field), str) and value]


def _joined(path: str, content: Any, read: Callable[[str, Any], str]) -> str:
    return "\n".join(_pieces(path, content, read))


def _pieces(path: str, content: Any, read: Callable[[str, Any], Piece]) -> list[Piece | str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise _wrong(path, "text or a list of content blocks")
    return [read(f"{path}[{number}]", block) for number, block in enumerate(content)]


def _no_mark(path: str, block: Mapping[str, Any], what: str) -> None:
    if mark_seconds(path, block) is not None:
        raise InvalidRequest(
            f"cache_control cannot be set for {what} blocks", parameter=f"{path}.cache_control"
        )


def _wrong(path: str, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"Input should be {wanted}", parameter=path, code="invalid_type")
