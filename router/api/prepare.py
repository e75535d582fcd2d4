"""Prepares a body: the steps from it to prompts, alike on the event loop and in the process beside it.

Owns the steps and their order. A `Site` has what differs: how a text is encoded, how a grammar is checked,
whether all must be bounded.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from replicas.protocol.frames import BodyForm
from router.answers.formats import AnswerFormat
from router.answers.grammar_check import ANY_TEXT, NO_GRAMMAR, CheckedGrammar, WishedGrammar
from router.answers.grammars import grammar_for
from router.answers.wishes import OutputFormat, ToolChoice, ToolMode
from router.api.chat_prompt import as_read, encoded_prompt, render_chat, shown_chat
from router.api.chat_request import ChatRequest
from router.api.completion_prompt import (
    COMPLETION,
    CompletionRequest,
    check_completion,
    check_token_prompt,
    echo_of,
    prompts_of,
)
from router.api.conversation import encoded_history, encoded_tail
from router.api.dialects import DIALECTS
from router.api.sampling import bounded_tokens, kept_tokens
from router.api.sent_body import sent_body
from router.api.structured_outputs import output_format_of
from router.encoded import EncodedPrompt, TailOf
from router.errors import InvalidRequest, about_model
from router.large_bodies.grammar_checks import check
from router.prompt.images import Shown
from router.prompt.text_model import TextModel, TextModels


@dataclass(slots=True)
class Site:
    """Prepares here, in one go, whatever it takes. A site that waits, or is bounded, overrides that."""

    models: TextModels
    max_choices: int
    max_prompts: int
    has_history: bool
    pass_fields: Collection[str] = ()
    """Fields that a server of bodies is sent though they are not read."""
    is_bounded: bool = False
    """Whether TooMuchWork is raised for what takes long."""

    def model(self, name: str, salt: str | None) -> TextModel:
        """Raises UnknownModel."""
        return self.models.get(name)

    async def encode(self, model: TextModel, text: str, parameter: str, **options: bool) -> list[int]:
        """Raises ContextLengthExceeded. `options` are the tokenizer's."""
        return bounded_tokens(model, text, parameter, **options)

    async def check(self, wished: WishedGrammar, salt: str | None) -> CheckedGrammar:
        """Raises InvalidRequest, RouterBusy or TooMuchWork."""
        return check(wished)

    async def give_way(self) -> None:
        """Called between prompts."""


class PreparedChat(NamedTuple):
    """`token_ids` are those that `prompt` has packed. `tail_of` finds the text after an answer in it. The
    answer's tokens are kept if it `is_remembered`. `sent` is for a server that takes bodies."""

    request: ChatRequest
    prompt: EncodedPrompt
    token_ids: list[int]
    tail_of: TailOf
    is_remembered: bool = False
    sent: bytes = b""


class PreparedText(NamedTuple):
    """A plain prompt. Its answer begins with `echo`."""

    token_ids: list[int]
    echo: str


class PreparedCompletion(NamedTuple):
    request: CompletionRequest
    prompts: list[PreparedText]
    grammar: CheckedGrammar
    unknown_fields: list[str]
    sent: bytes = b""


async def prepared_chat(site: Site, kind: str, body: bytes) -> PreparedChat:
    """`kind` is a key of DIALECTS. Raises a RouterError, and TooMuchWork on a bounded site."""
    request = DIALECTS[kind].read(body, site.max_choices)
    model = site.model(request.model, request.cache_salt)
    with about_model(request.model):
        check_form(model, kind)
        if request.images:
            request = as_read(model, request)
        chat = render_chat(model, request, is_bounded=site.is_bounded)
        token_ids = await site.encode(model, chat.text, request.messages_field, is_quoted=chat.is_quoted)
        wished = chat_grammar(model, request, starts_in_reasoning=chat.starts_in_reasoning)
        shown = shown_chat(model, request, token_ids) if request.images else Shown(token_ids)
        kept = kept_tokens(request, model, shown.token_ids)
        grammar = await site.check(wished, request.cache_salt) if wished.text else ANY_TEXT
        history = encoded_history(request) if site.has_history else None
        prompt = encoded_prompt(model, request, chat, shown, kept, grammar=grammar, history=history)
        sent = sent_body(kind, body, site.pass_fields) if model.card.takes_bodies else b""
    return PreparedChat(request, prompt, kept, partial(encoded_tail, model, chat), sent=sent)


async def prepared_completion(site: Site, body: bytes) -> PreparedCompletion:
    """Raises a RouterError, and TooMuchWork on a bounded site."""
    read, unknown = COMPLETION.read(body)
    request = COMPLETION.without_hints(read)
    model = site.model(request.model, request.cache_salt)
    with about_model(request.model):
        check_form(model, BodyForm.COMPLETION)
        check_completion(request, site.max_choices)
        sent = prompts_of(request.prompt, site.max_prompts)
        output_format = output_format_of(request, request.response_format)
        wished = text_grammar(None if model.card.takes_bodies else output_format)
        grammar = await site.check(wished, request.cache_salt) if wished.text else ANY_TEXT
        prompts: list[PreparedText] = []
        for prompt in sent:
            if prompts:
                await site.give_way()
            prompts.append(await _prepared_text(site, model, request, prompt))
        relayed = sent_body("completion", body, site.pass_fields) if model.card.takes_bodies else b""
    return PreparedCompletion(request, prompts, grammar, unknown, relayed)


async def _prepared_text(
    site: Site, model: TextModel, request: CompletionRequest, prompt: str | list[Any]
) -> PreparedText:
    if isinstance(prompt, str):
        with_special = request.add_special_tokens is not False
        token_ids = await site.encode(model, prompt, "prompt", add_special_tokens=with_special)
    else:
        check_token_prompt(model, request, prompt)
        token_ids = prompt
    if not token_ids:
        raise InvalidRequest("Invalid 'prompt': it has no tokens.", parameter="prompt")
    return PreparedText(kept_tokens(request, model, token_ids), echo_of(model, request, prompt))


def check_form(model: TextModel, kind: str) -> None:
    """Raises InvalidRequest where the model's server would be sent a body that it does not take."""
    forms = [form for form in model.card.takes_bodies if form != BodyForm.PASSED]
    if model.card.takes_bodies and not forms:
        raise InvalidRequest("The server of this model generates nothing: it only has routes of other kinds.")
    if forms and kind not in forms:
        raise InvalidRequest(
            f"The server of this model takes bodies of {' and '.join(forms)} only, and is sent them in"
            " their form."
        )


def chat_grammar(model: TextModel, request: ChatRequest, *, starts_in_reasoning: bool) -> WishedGrammar:
    """Raises InvalidRequest for what contradicts itself."""
    if model.card.takes_bodies:  # its server follows what the body says
        return NO_GRAMMAR
    is_free = request.output_format is None and request.tool_choice.mode is not ToolMode.REQUIRED
    if (is_free and not request.tools) or request.only_prompt:  # nearly all of them
        return NO_GRAMMAR
    marks = model.answer_format.marks(wants_calls=True)
    special_tokens = tuple(sorted(marks & model.tokenizer.added_tokens))  # no text matches these
    parameter = "tools" if request.output_format is None else request.output_format.parameter
    text = grammar_for(
        request.output_format,
        request.tools,
        request.tool_choice,
        model.answer_format,
        starts_in_reasoning=starts_in_reasoning,
        special_tokens=special_tokens,
        tool_parameter=request.tool_parameter,
    )
    return WishedGrammar(text, parameter, request.tool_parameter, special_tokens)


def text_grammar(wished: OutputFormat | None) -> WishedGrammar:
    """Return the grammar of an answer that is only text. Raises InvalidRequest."""
    if wished is None:
        return NO_GRAMMAR
    text = grammar_for(wished, [], ToolChoice(), AnswerFormat())
    return WishedGrammar(text, wished.parameter)
