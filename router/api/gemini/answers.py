"""POST …/models/{model}:generateContent and :streamGenerateContent: the dialect of their answers.

That of the question is in `body.py`. Every event of a stream has a candidate with a part in it:
clients that keep a conversation drop what has none. The last one ends all candidates and has the usage.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.datastructures import QueryParams

from replicas.protocol.frames import FinishReason, TokenLogprobs
from router.answers.parts import CallArguments, CallEnd, CallStart, Part, Reasoning, Text
from router.api.answer_usage import AnswerUsage
from router.api.api_request import ApiRequest, Prompt
from router.api.chat_request import ChatRequest
from router.api.choice_output import ChoiceOutput, Said, ToolCall
from router.api.context import ApiContext
from router.api.gemini.modalities import ModalityTokens, details
from router.api.gemini.paths import STREAM, model_method, with_path_fields
from router.api.json_body import encode_json
from router.api.logprobs import finite
from router.errors import InvalidRequest
from router.prompt.catalog import ServedModel
from router.prompt.tokenizer import Tokenizer
from router.shared.answer_types import Count

KIND = "gemini"

_arguments_decoder: "msgspec.json.Decoder[dict[str, Any]]" = msgspec.json.Decoder(dict[str, Any])


class Called(Struct):
    id: str
    name: str
    args: dict[str, Any]


class AnsweredPart(Struct, rename="camel"):
    text: str | UnsetType = UNSET
    thought: bool | UnsetType = UNSET
    function_call: Called | UnsetType = UNSET


class AnsweredContent(Struct):
    parts: list[AnsweredPart]
    role: Literal["model"] = "model"


class LogprobCandidate(Struct, rename="camel"):
    token: str
    token_id: int
    log_probability: float


class TopCandidates(Struct):
    candidates: list[LogprobCandidate]


class LogprobsResult(Struct, rename="camel"):
    top_candidates: list[TopCandidates]
    chosen_candidates: list[LogprobCandidate]


FinishedBy = Literal["MALFORMED_FUNCTION_CALL", "MAX_TOKENS", "STOP"]
Logprobs = tuple[float, LogprobsResult] | tuple[UnsetType, UnsetType]


class Candidate(Struct, rename="camel"):
    content: AnsweredContent
    finish_reason: FinishedBy
    index: Count
    avg_logprobs: float | UnsetType = UNSET
    logprobs_result: LogprobsResult | UnsetType = UNSET


class _Growing(Struct, rename="camel"):
    """A candidate of which more comes."""

    content: AnsweredContent
    index: int
    avg_logprobs: float | UnsetType = UNSET
    logprobs_result: LogprobsResult | UnsetType = UNSET


class UsageMetadata(Struct, rename="camel"):
    prompt_token_count: Count
    cached_content_token_count: Count | UnsetType
    candidates_token_count: Count
    thoughts_token_count: Count
    total_token_count: Count
    prompt_tokens_details: list[ModalityTokens]
    cache_tokens_details: list[ModalityTokens] | UnsetType


class GeneratedContent(Struct, rename="camel"):
    candidates: list[Candidate]
    usage_metadata: UsageMetadata
    model_version: str
    response_id: str


_EMPTY_PART = AnsweredPart("")


class _Candidate:
    """The unwritten part of a stream's candidate."""

    __slots__ = ("arguments", "call", "is_malformed", "logprobs")

    def __init__(self) -> None:
        self.call = ""
        self.arguments: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.is_malformed = False


class GeminiWriter:
    keep_alive = b"\n\n"
    """Gemini's clients take a comment for an answer."""

    def __init__(self, context: ApiContext, request: ChatRequest, model: ServedModel, prompt: Prompt) -> None:
        self._context = context
        self._tokenizer = model.tokenizer
        self._prompt = prompt
        self._with_thoughts = bool((request.answers or {}).get("thoughts"))
        self._with_logprobs = request.num_logprobs is not None
        self.answer_id = context.new_id("gen-")
        self._model = model.name
        self._candidates = [_Candidate() for _ in prompt.outputs]
        tail = {"modelVersion": model.name, "responseId": self.answer_id}
        self._closing = b"]," + encode_json(tail)[1:] + b"\n\n"
        self._text_closing = [
            b'}],"role":"model"},"index":%d}%b' % (index, self._closing)
            for index in range(len(prompt.outputs))
        ]

    def open(self, prompt: Prompt, choice: int) -> bytes:
        return b""

    def part(self, prompt: Prompt, choice: int, part: Part, logprobs: Sequence[TokenLogprobs]) -> bytes:
        candidate = self._candidates[choice]
        if self._with_logprobs:
            candidate.logprobs += logprobs
        match part:
            case Text(text):
                return self._text(choice, text)
            case Reasoning(text):
                return self._event(choice, AnsweredPart(text, True)) if self._with_thoughts else b""
            case CallStart(_, name):
                candidate.call, candidate.arguments = name, []
            case CallArguments(_, text):
                candidate.arguments.append(text)
            case CallEnd():
                written = self._call(candidate.call, "".join(candidate.arguments))
                candidate.is_malformed |= written is None
                return b"" if written is None else self._event(choice, written)
        return b""

    def close(self, prompt: Prompt, choice: int) -> bytes:
        return b""

    def end(self, usage: AnswerUsage) -> bytes:
        candidates = [
            self._ended(index, output, [_EMPTY_PART], held.logprobs, held.is_malformed)
            for index, (output, held) in enumerate(zip(self._prompt.outputs, self._candidates, strict=True))
        ]
        return b"data: " + self._content(candidates, usage) + b"\n\n"

    def whole(self, usage: AnswerUsage) -> bytes:
        candidates: list[Candidate] = []
        for index, output in enumerate(self._prompt.outputs):
            written = [self._whole_part(said) for said in output.said]
            parts = [part for part in written if part] or [_EMPTY_PART]
            candidates.append(self._ended(index, output, parts, output.logprobs, None in written))
        return self._content(candidates, usage)

    def _content(self, candidates: list[Candidate], usage: AnswerUsage) -> bytes:
        return encode_json(GeneratedContent(candidates, usage_of(usage), self._model, self.answer_id))

    def _whole_part(self, said: Said) -> AnsweredPart | Literal[False] | None:
        """False for what is not shown, and None for a call that is not well written."""
        match said:
            case Text(text):
                return AnsweredPart(text)
            case Reasoning(text):
                return self._with_thoughts and AnsweredPart(text, True)
            case ToolCall(name, arguments):
                return self._call(name, arguments)

    def _call(self, name: str, arguments: str) -> AnsweredPart | None:
        """None for one that the model has not finished, or not well."""
        try:
            values = _arguments_decoder.decode(arguments or "{}")
        except (ValueError, RecursionError):
            return None
        return AnsweredPart(function_call=Called(self._context.new_id("call_"), name, values))

    def _ended(
        self,
        index: int,
        output: ChoiceOutput,
        parts: list[AnsweredPart],
        logprobs: Sequence[TokenLogprobs],
        is_malformed: bool,
    ) -> Candidate:
        reason: FinishedBy = "MALFORMED_FUNCTION_CALL" if is_malformed else "STOP"
        if output.finish_reason == FinishReason.LENGTH.value:
            reason = "MAX_TOKENS"
        return Candidate(AnsweredContent(parts), reason, index, *self._logprobs(logprobs))

    def _text(self, choice: int, text: str) -> bytes:
        if self._candidates[choice].logprobs or not text:
            return self._event(choice, AnsweredPart(text))
        return (
            b'data: {"candidates":[{"content":{"parts":[{"text":'
            + encode_json(text)
            + self._text_closing[choice]
        )

    def _event(self, choice: int, part: AnsweredPart) -> bytes:
        held = self._candidates[choice]
        logprobs, held.logprobs = held.logprobs, []
        candidate = _Growing(AnsweredContent([part]), choice, *self._logprobs(logprobs))
        return b'data: {"candidates":[' + encode_json(candidate) + self._closing

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> Logprobs:
        if not self._with_logprobs or not logprobs:
            return UNSET, UNSET
        chosen = [_token(self._tokenizer, each.token_id, each.logprob) for each in logprobs]
        top = [TopCandidates([_token(self._tokenizer, *token) for token in each.top]) for each in logprobs]
        average = sum(token.log_probability for token in chosen) / len(chosen)
        return average, LogprobsResult(top, chosen)


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> LogprobCandidate:
    return LogprobCandidate(tokenizer.token_text(token_id)[0], token_id, finite(logprob))


def usage_of(usage: AnswerUsage) -> UsageMetadata:
    """Return Gemini's usage: cached tokens are part of the prompt, thoughts are not part of the
    candidates."""
    num_prompt_tokens, num_cached_tokens = usage.num_prompt_tokens, usage.num_cached_tokens
    num_image_tokens, num_cached_image_tokens = usage.image_tokens()
    return UsageMetadata(
        num_prompt_tokens,
        UNSET if num_cached_tokens is None else num_cached_tokens,
        usage.num_output_tokens - usage.num_reasoning_tokens,
        usage.num_reasoning_tokens,
        num_prompt_tokens + usage.num_output_tokens,
        details(num_prompt_tokens, num_image_tokens),
        UNSET if num_cached_tokens is None else details(num_cached_tokens, num_cached_image_tokens),
    )


def read_path(asked: ApiRequest) -> None:
    """Have its body say what its path does. Raises InvalidRequest."""
    found = model_method(asked.scope["path"])
    assert found is not None
    if found.method == STREAM and _framing(asked) != "sse":
        raise InvalidRequest(
            "Streams are of server-sent events: ask for '…:streamGenerateContent?alt=sse'.", parameter="alt"
        )
    asked.body = with_path_fields(asked.body, found)


def _framing(asked: ApiRequest) -> str | None:
    query = QueryParams(asked.scope.get("query_string", b""))
    return query.get("alt") or query.get("$alt")
