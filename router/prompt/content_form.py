"""ContentForm: the form in which a chat template reads content, as text or as a list of parts.

Owns the conversion. A template that reads only parts silently ignores plain text: the model would get an
empty question. vLLM looks for this in the template's syntax tree (vllm/renderers/hf.py); here the template is
tried out.

It also handles the arguments of calls. Arguments that are no JSON object are a text, as when a model's answer
was cut off. A template that iterates over arguments refuses a text, which would end the conversation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

Messages = Sequence[Mapping[str, Any]]

_SAID = ("kvasir-one", "kvasir-two", "kvasir-three")

_TURNS: Sequence[tuple[str, ...]] = ((), ("user", "assistant"), ("user",), ("assistant",))
"""Roles that take turns and may be read as parts alone, the most usual first."""

_IMAGE = {"type": "image", "digest": "0123456789abcdef"}

ARGUMENTS_TEXT = "arguments"
"""The parameter under which a template that walks over arguments shows a text of them."""


class ContentForm(msgspec.Struct, frozen=True):
    """Form of content that a template reads. Content with images is always parts."""

    in_parts: tuple[str, ...] = ()
    """Roles whose texts it reads only as parts."""
    reads_parts: bool = False
    walks_arguments: bool = False
    """It iterates over the arguments of calls, and ignores arguments that are a text."""
    shows_found_images: bool = False
    """It writes images in the results of tools."""

    def of_messages(self, messages: Messages) -> Messages:
        """Return the same, as this template reads them."""
        if self.in_parts:
            messages = [
                {**message, "content": _parts(message["content"])}
                if message.get("role") in self.in_parts and isinstance(message.get("content"), str)
                else message
                for message in messages
            ]
        if self.walks_arguments:
            messages = [_with_objects(message) for message in messages]
        return messages


def find_content_form(show: Callable[[Messages], str]) -> ContentForm:
    """Find the form; `show` renders a conversation, or returns nothing if the template refuses it. Each role
    is tried, since templates read some as parts and others as text. A tool's result is text unless the
    template shows parts alone, as in vLLM."""

    def num_shown(in_parts: tuple[str, ...], *conversations: Messages) -> int:
        form = ContentForm(in_parts)
        shown = [show(form.of_messages(messages)) for messages in conversations]
        return max(0 if in_parts and _is_data(each) else _num_said(each) for each in shown)

    turns = _saying("user", "assistant", "user")
    in_parts = max(_TURNS, key=lambda roles: num_shown(roles, turns))
    results = [_calling(arguments, _SAID[2]) for arguments in ({"said": "it"}, "it")]
    for role, conversations in (
        ("system", [_saying("system", "user")]),
        ("developer", [_saying("developer", "user")]),
        ("tool", results),
    ):
        num_as_text, num_as_parts = (
            num_shown(roles, *conversations) for roles in (in_parts, (*in_parts, role))
        )
        is_as_users = role != "tool" and "user" in in_parts
        if num_as_parts > num_as_text or (is_as_users and num_as_parts == num_as_text):
            in_parts = (*in_parts, role)
    reads_parts = any(num_shown(roles, turns) for roles in _TURNS if "user" in roles)
    form = ContentForm(in_parts, reads_parts=reads_parts)
    return msgspec.structs.replace(
        form,
        walks_arguments=_walks_arguments(show, form),
        shows_found_images=reads_parts and _shows_found_images(show, form),
    )


def _saying(*roles: str) -> Messages:
    return [{"role": role, "content": said} for role, said in zip(roles, _SAID, strict=False)]


def _walks_arguments(show: Callable[[Messages], str], form: ContentForm) -> bool:
    said = _SAID[1]
    as_text, as_object = (show(form.of_messages(_calling(arguments))) for arguments in (said, {"said": said}))
    return said in as_object and said not in as_text


def _shows_found_images(show: Callable[[Messages], str], form: ContentForm) -> bool:
    text = _parts("Said.")
    shown, without = (show(form.of_messages(_calling({}, result))) for result in ([_IMAGE, *text], text))
    return bool(shown) and not _is_data(shown) and shown != without


def _calling(arguments: Any, result: Any = "Said.") -> Messages:
    """Return a conversation whose answer calls a tool. Its id has a form that every template takes."""
    function = {"name": "say", "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    return [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "name": "say", "content": result},
        {"role": "user", "content": "Thanks."},
    ]


def _with_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not any(_has_text(call) for call in calls):
        return message
    return {**message, "tool_calls": [_with_object(call) if _has_text(call) else call for call in calls]}


def _has_text(call: Mapping[str, Any]) -> bool:
    return isinstance(call["function"]["arguments"], str)


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": {ARGUMENTS_TEXT: function["arguments"]}}}


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _num_said(shown: str) -> int:
    return sum(said in shown for said in _SAID)


def _is_data(shown: str) -> bool:
    """The list itself was written out, as Python or as JSON."""
    return "'type'" in shown or '"type"' in shown
