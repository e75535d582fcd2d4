"""Relayed answers: of servers that take a client's body and answer in its form.

Owns both ends: the body in the submit, and the server's bytes on their way to the client. What the answer
says is not read here; its tokens are only counted.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from replicas.protocol.frames import MAX_BODY_BYTES, BodyForm, TokenDelta, TokenLogprobs
from router.answers.parts import Part, Text
from router.api.answer_usage import AnswerUsage
from router.api.api_request import ApiRequest, Prompt
from router.api.chat_request import ChatRequest
from router.api.choice_output import ChoiceOutput
from router.api.completion_prompt import CompletionRequest
from router.api.context import ApiContext
from router.api.json_body import encode_json, with_fields
from router.api.sse import COMMENT
from router.errors import InvalidRequest
from router.prompt.catalog import ServedModel

_LENGTHS = {BodyForm.CHAT: "max_completion_tokens"}
"""Names of an answer's length that are not "max_tokens". A replica adds the older one."""

_MORE = Text("")
"""Says that a server has written more."""


def relay(
    context: ApiContext,
    asked: ApiRequest,
    model: ServedModel,
    form: BodyForm,
    request: ChatRequest | CompletionRequest,
    body: bytes,
) -> None:
    """Have a prepared request's only prompt answered to `body`, which is what was read of its own. Raises
    InvalidRequest."""
    if len(asked.prompts) > 1:
        raise InvalidRequest("The server of this model takes one prompt at a time.", parameter="prompt")
    if request.truncate_prompt_tokens is not None:
        words = "The server of this model is sent whole prompts."
        raise InvalidRequest(words, parameter="truncate_prompt_tokens")
    (prompt,) = asked.prompts
    submit, num_choices = prompt.generation.submit, prompt.generation.num_choices
    more: dict[str, int] = {}
    told_context = context.catalog.get(request.model).card.told_context_length
    if _has_bound(asked, told_context, form, request, submit.sampling.max_tokens):
        more[_LENGTHS.get(form, "max_tokens")] = submit.sampling.max_tokens
    if submit.priority:
        more["priority"] = submit.priority
    if more:
        body = with_fields(body, encode_json(more)[1:-1])
    if len(body) > MAX_BODY_BYTES:
        raise InvalidRequest(f"The server of this model is sent bodies of up to {MAX_BODY_BYTES} bytes.")
    submit = msgspec.structs.replace(submit, num_choices=1, body=body, body_form=form)
    prompt.generation = replace(prompt.generation, submit=submit, num_relayed_choices=num_choices)
    output = RelayedOutput(model)
    prompt.outputs = [output]
    asked.writer = RelayWriter(context.new_id("relay-"), output)


def _has_bound(
    asked: ApiRequest,
    told_context: int,
    form: BodyForm,
    request: ChatRequest | CompletionRequest,
    max_tokens: int,
) -> bool:
    """Whether an answer has a bound that its body does not say, or says otherwise. A chat of open length is
    bounded by its tenant's context, if the server's is larger."""
    if request.only_prompt:
        return form is not BodyForm.MESSAGES and request.max_tokens != 0
    if request.max_tokens is not None:
        return request.max_tokens > max_tokens
    most = asked.caller.max_context
    return form is BodyForm.COMPLETION or (most is not None and most < told_context)


class RelayedOutput(ChoiceOutput):
    """All choices of an answer, as its server writes them. What was added is waiting until it is taken."""

    __slots__ = ("_pieces", "answer_id")

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model.tokenizer.new_detokenizer(frozenset()), frozenset(), is_kept=False)
        self._pieces: list[bytes] = []
        self.answer_id = ""
        """The id that the server has given it; empty until it has ended."""

    def hold(self, delta: TokenDelta) -> None:
        self.add(delta)

    def add(self, delta: TokenDelta) -> Sequence[Part]:
        self.num_tokens += delta.num_tokens
        if delta.usage is not None:
            self.answer_id = delta.usage.answer_id
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value
        if not delta.body:
            return ()
        self._pieces.append(delta.body)
        return (_MORE,)

    def take(self) -> bytes:
        body = b"".join(self._pieces)
        self._pieces.clear()
        return body


class RelayWriter:
    """Writes what has come."""

    keep_alive = COMMENT

    def __init__(self, answer_id: str, output: RelayedOutput) -> None:
        self.answer_id = answer_id
        self._output = output

    def open(self, prompt: Prompt, choice: int) -> bytes:
        return b""

    def part(self, prompt: Prompt, choice: int, part: Part, logprobs: Sequence[TokenLogprobs]) -> bytes:
        return self._output.take()

    def close(self, prompt: Prompt, choice: int) -> bytes:
        self._take_id()
        return b""

    def end(self, usage: AnswerUsage) -> bytes:
        return b""

    def whole(self, usage: AnswerUsage) -> bytes:
        self._take_id()
        return self._output.take()

    def _take_id(self) -> None:
        self.answer_id = self._output.answer_id or self.answer_id
