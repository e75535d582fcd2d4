"""The requests of a workload as bodies of streamed chats: the same content gives the same words everywhere.

Owns what stands for a content's name. Pure and seeded. A word is a token, or a little more; where only
prefixes are known, they are one long message. Pages go as images, in `data:` URLs.
"""

import hashlib
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from loadtests.workloads import Message, TraceRequest
from loadtests.workloads.pages import Pages
from loadtests.workloads.prompts import SAMPLE_WORDS

TOOLS_ROLE = "tools"
"""Not a message: it becomes the request's tool definitions."""
WORDS_PER_TOOL = 40
CACHED_TEXTS = 16384


@dataclass(slots=True)
class ChatBodies:
    """Makes bodies. With `is_standard`, only of fields that OpenAI's own API takes."""

    model: str
    block_tokens: int
    seed: int
    is_standard: bool = False
    _texts: dict[tuple[str, int], str] = field(default_factory=dict)
    _pages: Pages = field(init=False)

    def __post_init__(self) -> None:
        self._pages = Pages(self.seed)

    def body(self, request: TraceRequest) -> bytes:
        options: dict[str, object] = {
            "model": self.model,
            "messages": self._messages(request),
            "max_tokens": request.num_output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "safety_identifier": request.user,
        }
        if tools := self._tools(request.messages):
            options["tools"] = tools
        if request.prompt_cache_key is not None:
            options["prompt_cache_key"] = request.prompt_cache_key
        if not self.is_standard:
            options["ignore_eos"] = True
            if request.tenant is not None:
                options["cache_salt"] = request.tenant
        return json.dumps(options, separators=(",", ":")).encode()

    def _messages(self, request: TraceRequest) -> list[dict[str, object]]:
        if not request.messages:
            return [{"role": "user", "content": " ".join(self._blocks(request))}]
        messages: list[dict[str, object]] = []
        pieces = [message for message in request.messages if message.role != TOOLS_ROLE]
        call_id = ""
        for role, group in itertools.groupby(pieces, key=lambda message: message.role):
            parts = list(group)
            if role == "tool":
                messages[-1]["tool_calls"] = [_call(call_id)]
                messages.append({"role": role, "content": self._joined(parts), "tool_call_id": call_id})
            else:
                call_id = parts[-1].content
                messages.append({"role": role, "content": self._content(parts)})
        return messages

    def _content(self, parts: Sequence[Message]) -> str | list[dict[str, object]]:
        """Return a text, or parts where there are images."""
        if all(part.page is None for part in parts):
            return self._joined(parts)
        content: list[dict[str, object]] = []
        for is_text, group in itertools.groupby(parts, key=lambda part: part.page is None):
            if is_text:
                content.append({"type": "text", "text": self._joined(list(group))})
            else:
                content += [
                    {"type": "image_url", "image_url": {"url": self._pages.url(part.content, part.page)}}
                    for part in group
                    if part.page is not None
                ]
        return content

    def _joined(self, parts: Sequence[Message]) -> str:
        return "\n\n".join(self._text(part.content, part.num_tokens) for part in parts)

    def _tools(self, messages: Sequence[Message]) -> list[dict[str, object]]:
        tools: list[dict[str, object]] = []
        for message in messages:
            if message.role == TOOLS_ROLE:
                words = self._text(message.content, message.num_tokens).split(" ")
                for start in range(0, len(words), WORDS_PER_TOOL):
                    tools.append(_tool(len(tools), " ".join(words[start : start + WORDS_PER_TOOL])))
        return tools

    def _blocks(self, request: TraceRequest) -> Iterator[str]:
        left = request.num_input_tokens
        for prefix_id in request.prefix_ids:
            yield self._text(str(prefix_id), min(left, self.block_tokens))
            left -= self.block_tokens

    def _text(self, content: str, num_words: int) -> str:
        """The same in every process that has the same seed."""
        text = self._texts.get((content, num_words))
        if text is None:
            digest = hashlib.blake2b(f"{self.seed}:{content}".encode(), digest_size=16).digest()
            text = " ".join(random.Random(digest).choices(SAMPLE_WORDS, k=num_words))
            if len(self._texts) >= CACHED_TEXTS:
                del self._texts[next(iter(self._texts))]
            self._texts[content, num_words] = text
        return text


def _tool(number: int, description: str) -> dict[str, object]:
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    function = {"name": f"tool_{number}", "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _call(call_id: str) -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": {"name": "tool_0", "arguments": '{"input": ""}'}}
