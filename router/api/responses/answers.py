"""POST /v1/responses: the dialect of its answers.

Owns the response object and the events of a stream, each with its number. That of the question is in
`body.py`, the items of an answer in `items.py`.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Final, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from replicas.protocol.frames import FinishReason, TokenLogprobs
from router.answers.parts import CallArguments, CallEnd, CallStart, Part, Text
from router.api.answer_usage import AnswerUsage
from router.api.api_request import Prompt
from router.api.chat_request import ChatRequest
from router.api.choice_output import ChoiceOutput, ToolCall
from router.api.context import ApiContext
from router.api.json_body import encode_json
from router.api.logprobs import logprobs_of
from router.api.openai.usage import OutputDetails, PromptDetails, prompt_details
from router.api.responses.body import Echo
from router.api.responses.items import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    AnswerItems,
    Event,
    ItemKind,
    OutputItem,
    Status,
)
from router.api.sse import COMMENT
from router.edge.http_error import HttpError
from router.explain.diagnosis import CacheDiagnostics, openai_diagnostics
from router.prompt.catalog import ServedModel
from router.shared.answer_types import Count

FAILED: Final = "failed"
TOLD_APART = ("context_length_exceeded", "rate_limit_exceeded")
"""Codes of errors that clients act on; of the others they only tell whose fault it was."""


class ResponseError(Struct):
    code: str
    message: str


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseUsage(Struct):
    input_tokens: Count
    input_tokens_details: PromptDetails
    output_tokens: Count
    output_tokens_details: OutputDetails
    total_tokens: Count


class Response(Struct, kw_only=True):
    """A response without the fields that repeat the question."""

    id: str
    object: Literal["response"] = "response"
    created_at: Count
    model: str
    status: Status | Literal["failed"]
    completed_at: Count | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    previous_response_id: str | None
    store: bool
    temperature: float | None
    top_p: float | None
    usage: ResponseUsage | None
    prompt_cache_diagnostics: CacheDiagnostics | UnsetType = UNSET


class ResponseWriter:
    keep_alive = COMMENT

    def __init__(self, context: ApiContext, request: ChatRequest, model: ServedModel, prompt: Prompt) -> None:
        answers = request.answers
        self._echo = answers if isinstance(answers, Echo) else msgspec.convert(answers, Echo)
        self._context = context
        self._prompt = prompt
        self._request = request
        self._created = int(context.wall_clock())
        self.answer_id = context.new_id("resp_")
        tokenizer = model.tokenizer
        wants_logprobs = request.num_logprobs is not None
        self._items = AnswerItems(
            self.answer_id,
            new_call_id=lambda: context.new_id("call_"),
            spaces=self._echo.spaces,
            packs_reasoning=self._echo.packs_reasoning,
            write_logprobs=(lambda logprobs: logprobs_of(tokenizer, logprobs)) if wants_logprobs else None,
        )
        self._model = model.name
        self.wants_storing = self._echo.is_stored
        self.keep: Callable[[bytes], None] | None = None
        """Told of the response, if it is to be stored."""
        self.previous_response_id: str | None = None
        self._num_events = 0
        self._delta_head = b""

    def open(self, prompt: Prompt, choice: int) -> bytes:
        response = msgspec.Raw(self._response(IN_PROGRESS))
        return b"".join(
            self._event((name, {"response": response}))
            for name in ("response.created", "response.in_progress")
        )

    def part(self, prompt: Prompt, choice: int, part: Part, logprobs: Sequence[TokenLogprobs]) -> bytes:
        item = self._items.current
        if type(part) is Text and part.text and not logprobs and self._delta_head:
            assert item is not None
            item.pieces.append(part.text)
            return self._text_delta(part.text)
        events = self._written(self._items.take(part, logprobs))
        if self._items.current is not item:
            self._delta_head = self._new_delta_head()
        return events

    def close(self, prompt: Prompt, choice: int) -> bytes:
        return self._written(self._ended(prompt.outputs[choice]))

    def end(self, usage: AnswerUsage) -> bytes:
        status = self._status()
        response = self._last_response(status, usage)
        return self._event((f"response.{status}", {"response": msgspec.Raw(response)}))

    def whole(self, usage: AnswerUsage) -> bytes:
        (output,) = self._prompt.outputs
        logprobs: Sequence[TokenLogprobs] = output.logprobs
        for part in _parts(output):
            self._items.take(part, logprobs)
            if type(part) is Text:  # they stand with the first text
                logprobs = ()
        self._ended(output)
        return self._last_response(self._status(), usage)

    def failed(self, error: HttpError) -> bytes:
        """Write the end of a failed stream."""
        message = error.message
        if error.retry_after_seconds is not None and "try again in" not in message:
            message += f" Please try again in {math.ceil(error.retry_after_seconds)}s."
        fault = "server_error" if error.status >= 500 else "invalid_prompt"
        code = error.code if error.code in TOLD_APART else fault
        words = {"code": error.code, "message": message, "param": error.param}
        response = self._response(FAILED, error=ResponseError(code, message))
        return self._event(("error", words)) + self._event(
            ("response.failed", {"response": msgspec.Raw(response)})
        )

    def _ended(self, output: ChoiceOutput) -> list[Event]:
        if self._request.only_prompt:
            return []
        cut = output.finish_reason == FinishReason.LENGTH.value
        return self._items.end(INCOMPLETE if cut else COMPLETED)

    def _status(self) -> Status:
        (output,) = self._prompt.outputs
        cut = output.finish_reason == FinishReason.LENGTH.value and not self._request.only_prompt
        return INCOMPLETE if cut else COMPLETED

    def _last_response(self, status: Status, usage: AnswerUsage) -> bytes:
        response = self._response(status, usage)
        if self.keep is not None:
            self.keep(response)
        return response

    def _response(
        self,
        status: Status | Literal["failed"],
        usage: AnswerUsage | None = None,
        error: ResponseError | None = None,
    ) -> bytes:
        compares = self._echo.wants_diagnostics and usage is not None
        response = Response(
            id=self.answer_id,
            created_at=self._created,
            model=self._model,
            status=status,
            completed_at=int(self._context.wall_clock()) if status == COMPLETED else None,
            error=error,
            incomplete_details=IncompleteDetails() if status == INCOMPLETE else None,
            output=self._items.done,
            previous_response_id=self.previous_response_id,
            store=self.keep is not None,
            temperature=self._sampled("temperature"),
            top_p=self._sampled("top_p"),
            usage=None if usage is None else _usage(usage),
            prompt_cache_diagnostics=openai_diagnostics(self._prompt.diagnosis) if compares else UNSET,
        )
        return encode_json(response)[:-1] + b"," + self._echo.fields + b"}"

    def _sampled(self, name: str) -> float | None:
        """Return a parameter as the client set it, or as it is; None for a server's own default."""
        asked: float | None = getattr(self._request, name)
        sampling = self._prompt.generation.submit.sampling
        if asked is not None or name in sampling.unsaid:
            return asked
        return float(getattr(sampling, name))

    def _written(self, events: Sequence[Event]) -> bytes:
        return b"".join([self._event(event) for event in events])

    def _event(self, event: Event) -> bytes:
        name, fields = event
        number, self._num_events = self._num_events, self._num_events + 1
        data = encode_json({"type": name, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)

    def _new_delta_head(self) -> bytes:
        """All that comes before the number and the text of a delta of the message that is under way."""
        item = self._items.current
        if item is None or item.kind is not ItemKind.MESSAGE:
            return b""
        name = "response.output_text.delta"
        fields = encode_json({"type": name, **item.place, "logprobs": []})
        return b"event: %b\ndata: %b" % (name.encode(), fields[:-1])

    def _text_delta(self, text: str) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return b'%b,"sequence_number":%d,"delta":%b}\n\n' % (self._delta_head, number, encode_json(text))


def _usage(usage: AnswerUsage) -> ResponseUsage:
    num_prompt_tokens, num_output_tokens = usage.num_prompt_tokens, usage.num_output_tokens
    return ResponseUsage(
        num_prompt_tokens,
        prompt_details(usage),
        num_output_tokens,
        OutputDetails(usage.num_reasoning_tokens),
        num_prompt_tokens + num_output_tokens,
    )


def _parts(output: ChoiceOutput) -> list[Part]:
    """Return the parts, each whole."""
    parts: list[Part] = []
    positions = itertools.count()
    for said in output.said:
        if isinstance(said, ToolCall):
            position = next(positions)
            parts += [
                CallStart(position, said.name),
                CallArguments(position, said.arguments),
                CallEnd(position),
            ]
        else:
            parts.append(said)
    return parts
