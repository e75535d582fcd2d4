"""POST …/models/{model}:generateContent and :streamGenerateContent: the dialect of their answers.

That of the question is in `body.py`. Every event of a stream has a candidate with a part in it:
clients that keep a conversation drop what has none. The last one ends all candidates and has the usage.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.datastructures import QueryParams

from replicas.protocol.frames import FinishReason, TokenLogprobs
from router.answers.parts import CallArguments, CallEnd, CallStart, Part, Reasoning, Text
from router.api.answer_usage import AnswerUsage
from router.api.api_request import ApiRequest, Prompt
from router.api.asked import Asked
from router.api.chats import Chat, prepare_chats
from router.api.choice_output import ChoiceOutput, Said, ToolCall
from router.api.context import ApiContext
from router.api.gemini.modalities import details
from router.api.gemini.paths import STREAM, model_method, with_path_fields
from router.api.json_body import encode_json
from router.api.openai.logprobs import finite
from router.errors import InvalidRequest
from router.prompt.tokenizer import Tokenizer

KIND = "gemini"
MALFORMED_CALL = "MALFORMED_FUNCTION_CALL"

_arguments_decoder: "msgspec.json.Decoder[dict[str, Any]]" = msgspec.json.Decoder(dict[str, Any])
_EMPTY_PART = {"text": ""}


class _Candidate:
    """The unwritten part of a stream's candidate."""

    __slots__ = ("arguments", "call", "is_malformed", "logprobs")

    def __init__(self) -> None:
        self.call = ""
        self.arguments: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.is_malformed = False


class _GeminiWriter:
    keep_alive = b"\n\n"
    """Gemini's clients take a comment for an answer."""

    def __init__(self, chat: Chat) -> None:
        context, request, model = chat.context, chat.request, chat.model
        self._context = context
        self._tokenizer = model.tokenizer
        self._prompt = chat.prompt
        self._with_thoughts = bool((request.answers or {}).get("thoughts"))
        self._with_logprobs = request.num_logprobs is not None
        self.answer_id = context.new_id("gen-")
        self._tail = {"modelVersion": model.name, "responseId": self.answer_id}
        self._candidates = [_Candidate() for _ in chat.prompt.outputs]
        closing = b"," + encode_json(self._tail)[1:] + b"\n\n"
        self._text_closing = [
            b'}],"role":"model"},"index":%d}]%b' % (index, closing)
            for index in range(len(chat.prompt.outputs))
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
                return self._event(choice, {"text": text, "thought": True}) if self._with_thoughts else b""
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
        return self._frame({"candidates": candidates, "usageMetadata": usage_of(usage)})

    def whole(self, usage: AnswerUsage) -> bytes:
        candidates: list[dict[str, Any]] = []
        for index, output in enumerate(self._prompt.outputs):
            written = [self._whole_part(said) for said in output.said]
            parts = [part for part in written if part] or [_EMPTY_PART]
            candidates.append(self._ended(index, output, parts, output.logprobs, None in written))
        return encode_json({"candidates": candidates, "usageMetadata": usage_of(usage), **self._tail})

    def _whole_part(self, said: Said) -> dict[str, Any] | None:
        """Empty for what is not shown, and None for a call that is not well written."""
        match said:
            case Text(text):
                return {"text": text}
            case Reasoning(text):
                return {"text": text, "thought": True} if self._with_thoughts else {}
            case ToolCall(name, arguments):
                return self._call(name, arguments)

    def _call(self, name: str, arguments: str) -> dict[str, Any] | None:
        """None for one that the model has not finished, or not well."""
        try:
            values = _arguments_decoder.decode(arguments or "{}")
        except (ValueError, RecursionError):
            return None
        return {"functionCall": {"id": self._context.new_id("call_"), "name": name, "args": values}}

    def _ended(
        self,
        index: int,
        output: ChoiceOutput,
        parts: list[dict[str, Any]],
        logprobs: Sequence[TokenLogprobs],
        is_malformed: bool,
    ) -> dict[str, Any]:
        reason = "MAX_TOKENS" if output.finish_reason == FinishReason.LENGTH.value else "STOP"
        return {
            "content": {"parts": parts, "role": "model"},
            "finishReason": MALFORMED_CALL if is_malformed and reason == "STOP" else reason,
            "index": index,
            **self._logprobs(logprobs),
        }

    def _text(self, choice: int, text: str) -> bytes:
        if self._candidates[choice].logprobs or not text:
            return self._event(choice, {"text": text})
        return (
            b'data: {"candidates":[{"content":{"parts":[{"text":'
            + encode_json(text)
            + self._text_closing[choice]
        )

    def _event(self, choice: int, part: dict[str, Any]) -> bytes:
        held = self._candidates[choice]
        content = {"parts": [part], "role": "model"}
        candidate = {"content": content, "index": choice, **self._logprobs(held.logprobs)}
        held.logprobs = []
        return self._frame({"candidates": [candidate]})

    def _frame(self, fields: dict[str, Any]) -> bytes:
        return b"data: " + encode_json({**fields, **self._tail}) + b"\n\n"

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        if not self._with_logprobs or not logprobs:
            return {}
        chosen = [_token(self._tokenizer, each.token_id, each.logprob) for each in logprobs]
        top = [
            {"candidates": [_token(self._tokenizer, token_id, logprob) for token_id, logprob in each.top]}
            for each in logprobs
        ]
        average = sum(token["logProbability"] for token in chosen) / len(chosen)
        return {"avgLogprobs": average, "logprobsResult": {"topCandidates": top, "chosenCandidates": chosen}}


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    text, _ = tokenizer.token_text(token_id)
    return {"token": text, "tokenId": token_id, "logProbability": finite(logprob)}


def usage_of(usage: AnswerUsage) -> dict[str, Any]:
    """Return Gemini's usage: cached tokens are part of the prompt, thoughts are not part of the
    candidates."""
    num_prompt_tokens, num_cached_tokens = usage.num_prompt_tokens, usage.num_cached_tokens
    num_image_tokens, num_cached_image_tokens = usage.image_tokens()
    return {
        "promptTokenCount": num_prompt_tokens,
        "cachedContentTokenCount": num_cached_tokens,
        "candidatesTokenCount": usage.num_output_tokens - usage.num_reasoning_tokens,
        "thoughtsTokenCount": usage.num_reasoning_tokens,
        "totalTokenCount": num_prompt_tokens + usage.num_output_tokens,
        "promptTokensDetails": details(num_prompt_tokens, num_image_tokens),
        "cacheTokensDetails": details(num_cached_tokens, num_cached_image_tokens),
    }


prepare_gemini = prepare_chats(KIND, _GeminiWriter)
"""For bodies that say what their path does."""


def with_path(asked: Asked) -> Asked:
    """Its body says what its path does. Raises InvalidRequest."""
    found = model_method(asked.scope["path"])
    assert found is not None
    if found.method == STREAM and _framing(asked) != "sse":
        raise InvalidRequest(
            "Streams are of server-sent events: ask for '…:streamGenerateContent?alt=sse'.", parameter="alt"
        )
    return replace(asked, body=with_path_fields(asked.body, found))


def _framing(asked: Asked) -> str | None:
    query = QueryParams(asked.scope.get("query_string", b""))
    return query.get("alt") or query.get("$alt")


async def prepare_content(context: ApiContext, asked: Asked) -> ApiRequest:
    """Prepare a request whose path names model and method."""
    return await prepare_gemini(context, with_path(asked))
