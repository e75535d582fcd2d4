"""POST /v1/messages: the dialect of its answers.

That of the question is in `body.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from replicas.protocol.frames import FinishReason, PromptUsage, TokenLogprobs
from router.answers.json_strings import is_object
from router.answers.object_prefix import ObjectPrefix, completed_object
from router.answers.parts import CallArguments, CallStart, Part, Reasoning, Text
from router.api.answer_usage import AnswerUsage
from router.api.anthropic.body import ShownAnswer
from router.api.anthropic.caching import MessageUsage, ThinkingTokens, usage_of
from router.api.api_request import Prompt
from router.api.chat_request import ChatRequest
from router.api.choice_output import TOOL_CALLS, ChoiceOutput, Said, ToolCall
from router.api.context import ApiContext
from router.api.json_body import encode_json
from router.explain.diagnosis import MessageDiagnostics, anthropic_diagnostics
from router.prompt.catalog import ServedModel


class TextBlock(Struct, tag="text"):
    text: str


class ThinkingBlock(Struct, tag="thinking"):
    thinking: str
    signature: str


class ToolUse(Struct, tag="tool_use"):
    id: str
    name: str
    input: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]


Block = TextBlock | ThinkingBlock | ToolUse


class Message(Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    diagnostics: MessageDiagnostics | UnsetType | None = UNSET


_NO_ARGUMENTS = msgspec.Raw(b"{}")
_NO_TEXT = TextBlock("")
_NO_THINKING = ThinkingBlock("", "")
_DELTAS: Mapping[type[Said], bytes] = {
    Text: b'"text_delta","text":',
    Reasoning: b'"thinking_delta","thinking":',
    ToolCall: b'"input_json_delta","partial_json":',
}
_DELTA_END = b"}}\n\n"
_MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


class MessageWriter:
    """An answer has one choice, and each of its blocks ends before the next one begins."""

    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, context: ApiContext, request: ChatRequest, model: ServedModel, prompt: Prompt) -> None:
        self._context = context
        self._request = request
        self._prompt = prompt
        self._block_size = model.card.block_size
        self._shown = msgspec.convert(request.answers, ShownAnswer)
        self.answer_id = context.new_id("msg_")
        self._model = model.name
        self._block = -1
        self._kind: type[Said] | None = None
        self._head = b""
        self._arguments = ObjectPrefix()
        """Arguments of the call being written."""

    def open(self, prompt: Prompt, choice: int) -> bytes:
        usage = self._usage(prompt.usage_or_bare())
        return _event("message_start", {"message": self._message([], None, None, usage)})

    def part(self, prompt: Prompt, choice: int, part: Part, logprobs: Sequence[TokenLogprobs]) -> bytes:
        if type(part) is Text:
            begun = b"" if self._kind is Text else self._begin(Text, _NO_TEXT)
            return begun + self._delta(part.text)
        if type(part) is Reasoning:
            begun = b"" if self._kind is Reasoning else self._begin(Reasoning, _NO_THINKING)
            return begun if self._shown.omits_thinking else begun + self._delta(part.text)
        if type(part) is CallStart:
            self._arguments = ObjectPrefix()
            return self._begin(ToolCall, self._tool_use(part.name, _NO_ARGUMENTS))
        if type(part) is CallArguments:
            arguments = self._arguments.feed(part.text)  # its SDKs fail on what is no JSON
            return self._delta(arguments) if arguments else b""
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
        self, content: list[Block], reason: str | None, sequence: str | None, usage: MessageUsage
    ) -> Message:
        return Message(
            id=self.answer_id,
            model=self._model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=usage,
            diagnostics=self._diagnostics(),
        )

    def _diagnostics(self) -> MessageDiagnostics | UnsetType | None:
        if not self._shown.has_diagnostics:
            return UNSET
        return None if self._request.compared_id is None else anthropic_diagnostics(self._prompt.diagnosis)

    def _whole_block(self, said: Said) -> Block:
        match said:
            case Text(text):
                return TextBlock(text)
            case Reasoning(text):
                return ThinkingBlock("" if self._shown.omits_thinking else text, self.answer_id)
            case ToolCall(name, arguments):
                return self._tool_use(name, _object(arguments))

    def _tool_use(self, name: str, arguments: msgspec.Raw) -> ToolUse:
        return ToolUse(self._context.new_id("toolu_"), name, arguments)

    def _begin(self, kind: type[Said], block: Block) -> bytes:
        """Return the block that what follows belongs to."""
        ended = self._end_block()
        self._kind = kind
        self._block += 1
        self._head = _delta_head(self._block, _DELTAS[kind])
        return ended + _event("content_block_start", {"index": self._block, "content_block": block})

    def _end_block(self) -> bytes:
        if self._kind is None:
            return b""
        ended = b""
        if self._kind is Reasoning:  # clients send it back with its signature, which means nothing here
            head = _delta_head(self._block, b'"signature_delta","signature":')
            ended = head + encode_json(self.answer_id) + _DELTA_END
        self._kind = None
        return ended + _event("content_block_stop", {"index": self._block})

    def _delta(self, text: str) -> bytes:
        return self._head + encode_json(text) + _DELTA_END

    def _why(self, output: ChoiceOutput) -> tuple[str | None, str | None]:
        """The reason why the answer ends, and the stop sequence if it is one."""
        if self._request.only_prompt:
            return "max_tokens", None
        if output.stop_string is not None:  # which may have cut a call short: it must not be run
            return "stop_sequence", output.stop_string
        if output.finish_reason == TOOL_CALLS:
            return "tool_use", None
        if output.finish_reason != FinishReason.LENGTH.value:
            return "end_turn", None
        is_cut = self._prompt.generation.sampling.max_tokens < (self._request.max_tokens or 0)
        return "model_context_window_exceeded" if is_cut else "max_tokens", None

    def _final_usage(self, usage: AnswerUsage) -> MessageUsage:
        final = self._usage(usage.prompts[0])
        final.output_tokens = 0 if self._request.only_prompt else usage.num_output_tokens
        final.output_tokens_details = ThinkingTokens(usage.num_reasoning_tokens)
        return final

    def _usage(self, prompt: PromptUsage) -> MessageUsage:
        """All but the output's share, which is known in the end."""
        return usage_of(prompt, self._prompt.wished_leases, self._block_size, self._shown.num_marks)


def _delta_head(block: int, kind: bytes) -> bytes:
    """All that comes before the text of a delta."""
    return (
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":%b'
        % (block, kind)
    )


def _event(kind: str, content: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_json({"type": kind, **content}))


def _object(arguments: str) -> msgspec.Raw:
    """Return the arguments as the model wrote them; for a call that breaks off, as SDKs read its stream."""
    return msgspec.Raw((arguments if is_object(arguments) else completed_object(arguments)).encode())
