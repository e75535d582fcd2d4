"""POST /v1/messages: the dialect of its answers.

That of the question is in `anthropic_body.py`.
"""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from replicas.protocol.frames import FinishReason, PromptUsage, TokenLogprobs
from router.answers.parts import CallArguments, CallEnd, CallStart, Part, Reasoning, Text
from router.api.answer_usage import AnswerUsage
from router.api.anthropic_body import ShownAnswer
from router.api.anthropic_caching import usage_of
from router.api.api_request import Prompt
from router.api.chats import Chat, prepare_chats
from router.api.choice_output import TOOL_CALLS, ChoiceOutput, Said, ToolCall
from router.api.json_body import encode_json

_MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


class _MessageWriter:
    """An answer has one choice, and each of its blocks ends before the next one begins."""

    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, chat: Chat) -> None:
        self._context = chat.context
        self._request = chat.request
        self._prompt = chat.prompt
        self._block_size = chat.model.card.block_size
        self._shown = msgspec.convert(chat.request.answers, ShownAnswer)
        self._id = chat.context.new_id("msg_")
        self._model = chat.model.name
        self._block = -1
        self._kind: type[Said] | None = None

    def open(self, prompt: Prompt, choice: int) -> bytes:
        usage = self._usage(prompt.usage_or_bare(), 0, 0)
        message = self._message([], None, None, usage)
        return _event("message_start", {"message": message})

    def part(self, prompt: Prompt, choice: int, part: Part, logprobs: Sequence[TokenLogprobs]) -> bytes:
        match part:
            case Text(text):
                return self._begin(Text, {"type": "text", "text": ""}) + self._delta(
                    b'"text_delta","text":', text
                )
            case Reasoning(text):
                begun = self._begin(Reasoning, {"type": "thinking", "thinking": "", "signature": ""})
                if self._shown.omits_thinking:
                    return begun
                return begun + self._delta(b'"thinking_delta","thinking":', text)
            case CallStart(_, name):
                return self._end_block() + self._begin(ToolCall, self._tool_use(name, {}))
            case CallArguments(_, text):
                return self._delta(b'"input_json_delta","partial_json":', text)
            case CallEnd():
                return self._end_block()

    def close(self, prompt: Prompt, choice: int) -> bytes:
        return self._end_block()

    def end(self, usage: AnswerUsage) -> bytes:
        reason, sequence = self._why(self._prompt.outputs[0])
        end = {
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": self._final_usage(usage),
        }
        return _event("message_delta", end) + _MESSAGE_STOP

    def whole(self, usage: AnswerUsage) -> bytes:
        (output,) = self._prompt.outputs
        content = [self._whole_block(said) for said in output.said]
        return encode_json(self._message(content, *self._why(output), self._final_usage(usage)))

    def _message(
        self, content: list[Any], reason: str | None, sequence: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }

    def _whole_block(self, said: Said) -> dict[str, Any]:
        match said:
            case Text(text):
                return {"type": "text", "text": text}
            case Reasoning(text):
                thinking = "" if self._shown.omits_thinking else text
                return {"type": "thinking", "thinking": thinking, "signature": self._id}
            case ToolCall(name, arguments):
                return self._tool_use(name, _object(arguments))

    def _tool_use(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"type": "tool_use", "id": self._context.new_id("toolu_"), "name": name, "input": arguments}

    def _begin(self, kind: type[Said], block: dict[str, Any]) -> bytes:
        """The block that what follows belongs to."""
        if self._kind is kind:
            return b""
        ended = self._end_block()
        self._kind = kind
        self._block += 1
        return ended + _event("content_block_start", {"index": self._block, "content_block": block})

    def _end_block(self) -> bytes:
        if self._kind is None:
            return b""
        # Clients send thinking back with its signature, which has to be there and means nothing here.
        signature = self._delta(b'"signature_delta","signature":', self._id)
        ended = signature if self._kind is Reasoning else b""
        self._kind = None
        return ended + _event("content_block_stop", {"index": self._block})

    def _delta(self, head: bytes, text: str) -> bytes:
        return (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":'
            b"%b%b}}\n\n" % (self._block, head, encode_json(text))
        )

    def _why(self, output: ChoiceOutput) -> tuple[str | None, str | None]:
        """The reason why the answer ends, and the stop sequence if it is one."""
        if self._request.only_prompt:
            return "max_tokens", None
        match output.finish_reason:
            case FinishReason.LENGTH.value:
                is_cut = self._prompt.generation.sampling.max_tokens < (self._request.max_tokens or 0)
                return "model_context_window_exceeded" if is_cut else "max_tokens", None
            case reason if reason == TOOL_CALLS:
                return "tool_use", None
            case _ if output.stop_string is not None:
                return "stop_sequence", output.stop_string
            case _:
                return "end_turn", None

    def _final_usage(self, usage: AnswerUsage) -> dict[str, Any]:
        num_output = 0 if self._request.only_prompt else usage.num_output_tokens
        return self._usage(usage.prompts[0], num_output, usage.num_reasoning_tokens)

    def _usage(self, prompt: PromptUsage, num_output: int, num_reasoning: int) -> dict[str, Any]:
        leases = self._prompt.wished_leases
        return {
            **usage_of(prompt, leases, self._block_size, self._shown.num_marks),
            "output_tokens": num_output,
            "output_tokens_details": {"thinking_tokens": num_reasoning},
        }


def _event(kind: str, content: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_json({"type": kind, **content}))


def _object(arguments: str) -> dict[str, Any]:
    """Of an answer that was cut off in a call nothing is known for certain."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


prepare_message = prepare_chats("messages", _MessageWriter)
