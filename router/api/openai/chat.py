"""POST /v1/chat/completions: writes its answers.

`chat_body.py` reads its bodies.
"""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from replicas.protocol.frames import TokenLogprobs
from router.answers.parts import CallArguments, CallStart, Part, Reasoning, Text
from router.api.answer_usage import AnswerUsage
from router.api.api_request import Prompt
from router.api.chat_request import ChatRequest
from router.api.choice_output import TOOL_CALLS, ChoiceOutput, ToolCall
from router.api.context import ApiContext
from router.api.json_body import encode_json
from router.api.logprobs import TokenLogprob, logprobs_of
from router.api.openai.choice import AnswerHead, Stop, TokenIds, stop_fields, usage_so_far
from router.api.openai.usage import OpenAiUsage, TokensSoFar, usage_of
from router.api.sse import COMMENT, DONE, ChunkWriter
from router.explain.diagnosis import CacheDiagnostics, openai_diagnostics
from router.prompt.catalog import ServedModel
from router.shared.answer_types import Count

FUNCTION_CALL = "function_call"
"""Why an answer has ended that calls a function, as those say it who still ask for `functions`."""


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class Function(Struct):
    name: str
    arguments: str


class ChatCall(Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    function_call: Function | UnsetType = UNSET
    tool_calls: list[ChatCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: Stop
    matched_stop: Stop
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(AnswerHead, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: OpenAiUsage
    prompt_cache_diagnostics: CacheDiagnostics | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class ChatWriter:
    keep_alive = COMMENT

    def __init__(self, context: ApiContext, request: ChatRequest, model: ServedModel, prompt: Prompt) -> None:
        self._context = context
        self._request = request
        self._tokenizer = model.tokenizer
        self._prompt = prompt
        self._with_logprobs = request.num_logprobs is not None
        self._with_reasoning = bool(request.answers["reasoning"])
        self._with_functions = bool(request.answers["functions"])
        self.answer_id = context.new_id("chatcmpl-")
        self._head: dict[str, Any] = {
            "id": self.answer_id,
            "object": "chat.completion.chunk" if request.stream else "chat.completion",
            "created": int(context.wall_clock()),
            "model": model.name,
            "system_fingerprint": model.system_fingerprint,
        }
        if request.stream:
            options = request.stream_options
            self._with_usage = options is not None and bool(options.include_usage)
            self._writer = ChunkWriter(
                self._head, text_open=b'"delta":{"content":', text_close=b"}", with_usage=self._with_usage
            )
            self._counts = self._with_usage and options is not None and bool(options.continuous_usage_stats)
            num_choices = len(prompt.outputs)
            self._prefixes = [self._writer.prefix(choice) for choice in range(num_choices)]
            self._token_ids = TokenIds(num_choices) if request.return_token_ids else None
            self._is_plain = not (self._with_logprobs or self._counts or request.return_token_ids)

    def open(self, prompt: Prompt, choice: int) -> bytes:
        closing = None
        more = None
        if self._token_ids is not None and choice == 0:
            more = {"prompt_token_ids": prompt.generation.token_ids}
        if self._counts or more is not None:
            closing = self._writer.closing(more, self._usage_so_far(prompt.outputs[choice].num_said_tokens))
        return self._delta(choice, {"role": "assistant", "content": ""}, closing=closing)

    def part(self, prompt: Prompt, choice: int, part: Part, logprobs: Sequence[TokenLogprobs]) -> bytes:
        if type(part) is Text:  # nearly all of them
            if self._is_plain:
                return self._writer.plain(self._prefixes[choice], part.text)
            return self._writer.text(
                self._prefixes[choice],
                part.text,
                self._logprobs(logprobs) if self._with_logprobs else None,
                token_ids=UNSET if self._token_ids is None else self._new_ids(choice),
                closing=self._closing() if self._counts else None,
            )
        match part:
            case Reasoning(text):
                delta: dict[str, Any] = {"reasoning_content": text} if self._with_reasoning else {}
            case CallStart(position, name):
                delta = self._call_started(position, name)
            case CallArguments(position, text):
                delta = self._call_said(position, text)
            case _:
                delta = {}
        return self._delta(choice, delta, logprobs) if delta or logprobs else b""

    def close(self, prompt: Prompt, choice: int) -> bytes:
        output = prompt.outputs[choice]
        ended: dict[str, Any] = {
            "index": choice,
            "delta": {},
            "logprobs": None,
            "finish_reason": self._finish_reason(output),
            **stop_fields(self._request, output),
        }
        if self._token_ids is not None:
            ended["token_ids"] = self._new_ids(choice)
        more = None
        if not self._with_usage and all(each.has_finished() for each in prompt.outputs):
            more = self._diagnostics()
        return self._writer.choice(ended, closing=self._closing(more) if self._counts or more else None)

    def end(self, usage: AnswerUsage) -> bytes:
        return self._writer.usage(usage_of(usage), self._diagnostics()) + DONE

    def whole(self, usage: AnswerUsage) -> bytes:
        with_ids = self._request.return_token_ids
        answer = ChatCompletion(
            **self._head,
            choices=[self._choice(index, output) for index, output in enumerate(self._prompt.outputs)],
            usage=usage_of(usage),
            **self._diagnostics(),
            prompt_token_ids=self._prompt.generation.token_ids if with_ids else UNSET,
        )
        return encode_json(answer)

    def _diagnostics(self) -> dict[str, Any]:
        if self._request.compared_id is None:
            return {}
        return {"prompt_cache_diagnostics": openai_diagnostics(self._prompt.diagnosis)}

    def _choice(self, index: int, output: ChoiceOutput) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=self._message(output),
            logprobs=self._logprobs(output.logprobs) if self._with_logprobs else None,
            finish_reason=self._finish_reason(output),
            token_ids=output.token_ids if self._request.return_token_ids else UNSET,
            **stop_fields(self._request, output),
        )

    def _message(self, output: ChoiceOutput) -> ChatMessage:
        text, reasoning, calls = output.text, output.reasoning, output.calls
        message = ChatMessage(content=text or None if calls else text)
        if reasoning and self._with_reasoning:
            message.reasoning_content = reasoning
        if calls and self._with_functions:
            message.function_call = Function(*calls[0])
        elif calls:
            message.tool_calls = [self._call(call) for call in calls]
        return message

    def _call(self, call: ToolCall) -> ChatCall:
        return ChatCall(id=self._context.new_id("call_"), function=Function(*call))

    def _finish_reason(self, output: ChoiceOutput) -> str | None:
        if self._with_functions and output.finish_reason == TOOL_CALLS:
            return FUNCTION_CALL
        return output.finish_reason

    def _call_started(self, position: int, name: str) -> dict[str, Any]:
        function = {"name": name, "arguments": ""}
        if self._with_functions:
            return {"function_call": function}
        call_id = self._context.new_id("call_")
        return {"tool_calls": [{"index": position, "id": call_id, "type": "function", "function": function}]}

    def _call_said(self, position: int, text: str) -> dict[str, Any]:
        if self._with_functions:
            return {"function_call": {"arguments": text}}
        return {"tool_calls": [{"index": position, "function": {"arguments": text}}]}

    def _delta(
        self,
        choice: int,
        delta: dict[str, Any],
        logprobs: Sequence[TokenLogprobs] = (),
        *,
        closing: bytes | None = None,
    ) -> bytes:
        written = self._logprobs(logprobs) if self._with_logprobs and logprobs else None
        chunk = {"index": choice, "delta": delta, "logprobs": written, "finish_reason": None}
        if self._token_ids is not None:
            chunk["token_ids"] = self._new_ids(choice)
        if closing is None and self._counts:
            closing = self._closing()
        return self._writer.choice(chunk, closing=closing)

    def _new_ids(self, choice: int) -> Sequence[int]:
        assert self._token_ids is not None
        return self._token_ids.new(choice, self._prompt.outputs[choice])

    def _usage_so_far(self, num_unsaid_tokens: int = 0) -> TokensSoFar | None:
        if not self._counts:
            return None
        return usage_so_far([self._prompt], num_unsaid_tokens=num_unsaid_tokens)

    def _closing(self, more: dict[str, Any] | None = None) -> bytes:
        return self._writer.closing(more, self._usage_so_far())

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
        as_ids = bool(self._request.return_tokens_as_token_ids)
        return ChatLogprobs(logprobs_of(self._tokenizer, logprobs, as_ids=as_ids))
