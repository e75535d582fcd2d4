"""Prepares a body in the process beside the event loop, and sends the result back to it.

Owns the form in which prepared prompts travel. All here but reading the result may take seconds and hundreds
of megabytes, or never end; the worker bounds it.
"""

import functools
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from replicas.protocol.blocks import pack_token_ids
from router.answers.grammar_check import WishedGrammar
from router.api.chat_request import ChatRequest
from router.api.completion_prompt import CompletionRequest
from router.api.dialects import COUNTS, DIALECTS
from router.api.prepare import (
    PreparedChat,
    PreparedCompletion,
    PreparedText,
    Site,
    prepared_chat,
    prepared_completion,
)
from router.api.structured_outputs import without_formats
from router.encoded import EncodedPrompt
from router.errors import InvalidRequest, RouterError
from router.large_bodies.grammar_checks import check
from router.large_bodies.jobs import GRAMMAR, BodyJob, Outcome, PreparedRequest, RefusedRequest, WrittenAnswer
from router.prompt.text_model import TextModels

T = TypeVar("T")

_chat_decoder = msgspec.msgpack.Decoder(ChatRequest)
_completion_decoder = msgspec.msgpack.Decoder(CompletionRequest)


def prepare_in_worker(job: BodyJob, models: TextModels, body: bytes) -> Outcome:
    try:
        site = Site(models, job.max_choices, job.max_prompts, job.has_history, job.pass_fields)
        return KINDS[job.kind](site, body)
    except RouterError as error:
        return RefusedRequest.of(error)


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine whose site never waits."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("a site waits")


def _chat(kind: str, site: Site, body: bytes) -> Outcome:
    request, prompt, _, tail_of, _, relayed = _run(prepared_chat(site, kind, body))
    history = prompt.history
    if history is not None and history.last_answer is not None:  # most likely remembered
        history = msgspec.structs.replace(history, tail=tail_of(history.last_answer))
        prompt = msgspec.structs.replace(prompt, history=history)
    return PreparedRequest(rest_of(request), [prompt], sent=relayed)


def received_chat(sent: PreparedRequest) -> PreparedChat:
    (prompt,) = sent.prompts
    tail = None if prompt.history is None else prompt.history.tail
    tails = {} if tail is None else {tail.position: tail}
    request = _chat_decoder.decode(sent.fields)
    return PreparedChat(request, prompt, prompt.ids(), tails.get, sent=sent.sent)


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


def _completion(site: Site, body: bytes) -> Outcome:
    request, prompts, grammar, unknown, relayed = _run(prepared_completion(site, body))
    rest = without_formats(msgspec.structs.replace(request, prompt="", suffix=None))
    encoded = [EncodedPrompt(pack_token_ids(each.token_ids), each.echo, grammar=grammar) for each in prompts]
    return PreparedRequest(msgspec.msgpack.encode(rest), encoded, unknown, relayed)


def received_completion(sent: PreparedRequest) -> PreparedCompletion:
    prompts = [PreparedText(prompt.ids(), prompt.echo) for prompt in sent.prompts]
    request = _completion_decoder.decode(sent.fields)
    return PreparedCompletion(request, prompts, sent.prompts[0].grammar, sent.unknown_fields, sent.sent)


def _written(write: Callable[..., bytes], site: Site, body: bytes) -> Outcome:
    return WrittenAnswer(write(site.models, body, is_bounded=False))


def _grammar(site: Site, body: bytes) -> Outcome:
    return check(msgspec.msgpack.decode(body, type=WishedGrammar))


KINDS: Mapping[str, Callable[[Site, bytes], Outcome]] = {
    **{kind: functools.partial(_chat, kind) for kind in DIALECTS},
    "completion": _completion,
    GRAMMAR: _grammar,
    **{kind: functools.partial(_written, write) for kind, write in COUNTS.items()},
}
"""How a body of each kind is worked on."""
