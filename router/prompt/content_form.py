"""ContentForm: in which form a chat template reads what messages say, as text or as a list of parts.

Owns the change from one to the other. A template that reads parts alone shows nothing of a text, and says
nothing of it: the model would be asked an empty question. vLLM looks for this in the template's syntax tree
(vllm/renderers/hf.py); here the template is tried out.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

Messages = Sequence[Mapping[str, Any]]

_SAID = ("kvasir-one", "kvasir-two", "kvasir-three")
_ROLES = ("user", "assistant", "user")


class ContentForm(msgspec.Struct, frozen=True):
    """What a template reads. Contents with images are parts, whatever that be."""

    reads_text: bool = True
    reads_parts: bool = False

    def of_messages(self, messages: Messages) -> Messages:
        """The same, as this template reads them."""
        if self.reads_text:
            return messages
        return [
            {**message, "content": _parts(message["content"])}
            if isinstance(message.get("content"), str)
            else message
            for message in messages
        ]


def find_content_form(show: Callable[[Messages], str]) -> ContentForm:
    """`show` gives the text of a conversation, or nothing where the template refuses it."""
    as_text = show([{"role": role, "content": said} for role, said in zip(_ROLES, _SAID, strict=True)])
    as_parts = show(
        [{"role": role, "content": _parts(said)} for role, said in zip(_ROLES, _SAID, strict=True)]
    )
    reads_parts = bool(_num_said(as_parts)) and not _is_data(as_parts)
    return ContentForm(
        reads_text=not reads_parts or _num_said(as_text) >= _num_said(as_parts), reads_parts=reads_parts
    )


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _num_said(shown: str) -> int:
    return sum(said in shown for said in _SAID)


def _is_data(shown: str) -> bool:
    """The list itself was written out, as Python or as JSON."""
    return "'type'" in shown or '"type"' in shown
