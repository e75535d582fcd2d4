"""POST /v1/chat/completions: the dialect of its answers.

That of the question is in `openai_chat_body.py`.
"""

from collections.abc import Sequence
from typing import Any

from replicas.protocol.frames import TokenLogprobs
from router.answers.parts import CallArguments, CallStart, Part, Reasoning, Text
from router.api.answer_usage import AnswerUsage
from router.api.api_request import Prompt
from router.api.chats import Chat, prepare_chats
from router.api.choice_output import ChoiceOutput
from router.api.json_body import encode_json
from router.api.openai_logprobs import logprobs_of
from router.api.openai_usage import usage_of
from router.api.sse import COMMENT, DONE, ChunkWriter


class _ChatWriter:
    keep_alive = COMMENT

    def __init__(self, chat: Chat) -> None:
        context, request, model = chat.context, chat.request, chat.model
        self._context = context
        self._tokenizer = model.tokenizer
        self._prompt = chat.prompt
        self._with_logprobs = request.num_logprobs is not None
        self._head = {
            "id": context.new_id("chatcmpl-"),
            "object": "chat.completion.chunk" if request.stream else "chat.completion",
            "created": int(context.wall_clock()),
            "model": model.name,
            "system_fingerprint": model.system_fingerprint,
        }
        if request.stream:
            options = request.stream_options
            self._writer = ChunkWriter(
                self._head,
                text_open=b'"delta":{"content":',
                text_close=b"}",
                with_usage=options is not None and bool(options.include_usage),
            )
            self._prefixes = [self._writer.prefix(choice) for choice in range(len(chat.prompt.outputs))]

    def open(self, prompt: Prompt, choice: int) -> bytes:
        return self._delta(choice, {"role": "assistant", "content": ""})

    def part(self, prompt: Prompt, choice: int, part: Part, logprobs: Sequence[TokenLogprobs]) -> bytes:
        if type(part) is Text:  # nearly all of them
            written = self._logprobs(logprobs) if self._with_logprobs else None
            return self._writer.text(self._prefixes[choice], part.text, written)
        match part:
            case Reasoning(text):
                delta: dict[str, Any] = {"reasoning_content": text}
            case CallStart(position, name):
                function = {"name": name, "arguments": ""}
                call_id = self._context.new_id("call_")
                delta = {
                    "tool_calls": [
                        {"index": position, "id": call_id, "type": "function", "function": function}
                    ]
                }
            case CallArguments(position, text):
                delta = {"tool_calls": [{"index": position, "function": {"arguments": text}}]}
            case _:
                return b""
        return self._delta(choice, delta, logprobs)

    def close(self, prompt: Prompt, choice: int) -> bytes:
        reason = prompt.outputs[choice].finish_reason
        return self._writer.choice({"index": choice, "delta": {}, "logprobs": None, "finish_reason": reason})

    def end(self, usage: AnswerUsage) -> bytes:
        return self._writer.usage(usage_of(usage)) + DONE

    def whole(self, usage: AnswerUsage) -> bytes:
        choices = [
            {
                "index": index,
                "message": self._message(output),
                "logprobs": self._logprobs(output.logprobs) if self._with_logprobs else None,
                "finish_reason": output.finish_reason,
            }
            for index, output in enumerate(self._prompt.outputs)
        ]
        return encode_json({**self._head, "choices": choices, "usage": usage_of(usage)})

    def _message(self, output: ChoiceOutput) -> dict[str, Any]:
        text = output.text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if output.reasoning:
            message["reasoning_content"] = "".join(output.reasoning)
        if output.calls:
            message["content"] = text or None
            message["tool_calls"] = [
                {
                    "id": self._context.new_id("call_"),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in output.calls
            ]
        return message

    def _delta(self, choice: int, delta: dict[str, Any], logprobs: Sequence[TokenLogprobs] = ()) -> bytes:
        written = self._logprobs(logprobs) if self._with_logprobs and logprobs else None
        return self._writer.choice(
            {"index": choice, "delta": delta, "logprobs": written, "finish_reason": None}
        )

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"content": logprobs_of(self._tokenizer, logprobs), "refusal": None}


prepare_chat = prepare_chats("chat", _ChatWriter)
