"""A large body → what is left to do with it: token ids and the fields that say how to continue them.

Owns what becomes of a body of each kind where other requests need not wait for it. Everything here may take
seconds and hundreds of megabytes, or never end; its caller sees to that.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from replicas.protocol.blocks import pack_token_ids
from router.answers.grammar_check import CheckedGrammar
from router.api.anthropic.body import read_message
from router.api.anthropic.counts import count_message_tokens
from router.api.chat_prompt import RenderedChat, encode_chat, encoded_prompt, render_chat
from router.api.chat_request import ChatRequest
from router.api.conversation import encoded_history, encoded_tail
from router.api.gemini.body import read_gemini
from router.api.gemini.count import count_tokens
from router.api.grammar_checks import chat_grammar, check, text_grammar
from router.api.openai.chat_body import read_chat
from router.api.openai.completion_prompt import (
    COMPLETION,
    CompletionRequest,
    check_completion,
    check_prompt,
    check_tokens,
    echo_of,
    prompts_of,
)
from router.api.openai.structured_outputs import output_format_of, without_formats
from router.api.responses.body import read_response
from router.api.sampling import kept_tokens, most_tokens, too_many_tokens
from router.api.token_counts import detokenize, tokenize
from router.errors import InvalidRequest, RouterError, about_model
from router.prepared import (
    EncodedHistory,
    EncodedPrompt,
    Outcome,
    PreparedRequest,
    PrepareJob,
    RefusedRequest,
    WrittenAnswer,
)
from router.prompt.text_model import TextModel, TextModels


def prepare(job: PrepareJob, models: TextModels, body: bytes) -> Outcome:
    try:
        return KINDS[job.kind](job, models, body)
    except RouterError as error:
        return RefusedRequest.of(error)


def _chat(job: PrepareJob, models: TextModels, body: bytes) -> Outcome:
    request = READERS[job.kind](body, job.max_choices)
    model = models.get(request.model)
    with about_model(request.model):
        chat = render_chat(model, request)
        shown = encode_chat(model, request, chat)
        kept = kept_tokens(request, model, shown.token_ids)
        wished = chat_grammar(model, request, starts_in_reasoning=chat.starts_in_reasoning)
        encoded = encoded_prompt(
            model,
            request,
            chat,
            shown,
            kept,
            grammar=check(wished),
            history=_history(model, request, chat) if job.has_history else None,
        )
    return PreparedRequest(rest_of(request), [encoded])


def rest_of(request: ChatRequest) -> bytes:
    """Encode the parts of a conversation that its answer needs after its prompt was made. Raises
    InvalidRequest."""
    rest = msgspec.structs.replace(request, messages=[], images=[], template_arguments={}, output_format=None)
    try:
        return msgspec.msgpack.encode(rest)
    except OverflowError as error:
        raise InvalidRequest(
            "Invalid 'tools': whole numbers in them have up to 64 bits.", parameter="tools"
        ) from error


def _history(model: TextModel, request: ChatRequest, chat: RenderedChat) -> EncodedHistory | None:
    """Encode the history. The store is elsewhere; the last answer is most likely remembered."""
    history = encoded_history(request)
    if history is None or history.last_answer is None:
        return history
    tail = encoded_tail(model, chat, history.last_answer)
    return msgspec.structs.replace(history, tail=tail)


def _completion(job: PrepareJob, models: TextModels, body: bytes) -> Outcome:
    read, unknown = COMPLETION.read(body)
    request = COMPLETION.without_hints(read)
    model = models.get(request.model)
    with about_model(request.model):
        check_completion(request, job.max_choices)
        prompts = prompts_of(request.prompt, job.max_prompts)
        wished = text_grammar(output_format_of(request, request.response_format))
        grammar = check(wished)
        encoded = [_encoded(model, request, prompt, grammar) for prompt in prompts]
    fields = without_formats(msgspec.structs.replace(request, prompt="", suffix=None))
    return PreparedRequest(msgspec.msgpack.encode(fields), encoded, unknown)


def _encoded(
    model: TextModel, request: CompletionRequest, prompt: str | list[Any], grammar: CheckedGrammar
) -> EncodedPrompt:
    check_prompt(model, request, prompt)
    if isinstance(prompt, str):
        token_ids = model.tokenizer.encode_within(
            most_tokens(model), prompt, add_special_tokens=request.add_special_tokens is not False
        )
        if token_ids is None:
            raise too_many_tokens(model, "prompt")
    else:
        token_ids = prompt
    check_tokens(token_ids)
    kept = kept_tokens(request, model, token_ids)
    return EncodedPrompt(pack_token_ids(kept), echo_of(model, request, prompt), grammar=grammar)


def _tokenize(job: PrepareJob, models: TextModels, body: bytes) -> Outcome:
    return WrittenAnswer(tokenize(models, body, is_bounded=False))


def _detokenize(job: PrepareJob, models: TextModels, body: bytes) -> Outcome:
    return WrittenAnswer(detokenize(models, body, is_bounded=False))


def _gemini_count(job: PrepareJob, models: TextModels, body: bytes) -> Outcome:
    return WrittenAnswer(count_tokens(models, body, is_bounded=False))


def _message_count(job: PrepareJob, models: TextModels, body: bytes) -> Outcome:
    return WrittenAnswer(count_message_tokens(models, body, is_bounded=False))


READERS: Mapping[str, Callable[[bytes, int], ChatRequest]] = {
    "chat": read_chat,
    "gemini": read_gemini,
    "messages": read_message,
    "responses": read_response,
}
"""How each dialect's body becomes a conversation: from it, and from how many choices there may be at most."""

KINDS: Mapping[str, Callable[[PrepareJob, TextModels, bytes], Outcome]] = {
    **dict.fromkeys(READERS, _chat),
    "completion": _completion,
    "tokenize": _tokenize,
    "detokenize": _detokenize,
    "gemini_count": _gemini_count,
    "message_count": _message_count,
}
