"""A conversation's prompt: its text by the model's chat template, and what is known of places in it.

Owns the way from a ChatRequest to tokens. Runs wherever there is a tokenizer and a template: beside the event
loop for small bodies, in a process of its own for large ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from replicas.protocol.blocks import pack_token_ids
from router.answers.formats import starts_in_reasoning
from router.answers.grammar_check import ANY_TEXT, CheckedGrammar
from router.api.chat_request import ChatRequest, KeepThrough
from router.api.images import content_of
from router.api.sampling import bounded_tokens, context_exceeded
from router.encoded import EncodedHistory, EncodedPrompt
from router.errors import InvalidRequest, about_model
from router.explain.outline import outline_of
from router.history.splicing import STANDS_FOR_ANSWER
from router.keeping import LeaseRequest
from router.prompt.images import SentImage, Shown, is_readable, show
from router.prompt.template import RESERVED_NAMES, TemplateError
from router.prompt.text_model import TextModel, TextModels
from router.prompt.unread import unread
from router.routing.bucket import BUCKET_TOKENS, SHORT_HEAD_TOKENS

LONG_HEAD_CHARACTERS = BUCKET_TOKENS * 8
"""A head of this many characters is taken to have more tokens than a bucket looks at."""

SHORT_HEAD_CHARACTERS = SHORT_HEAD_TOKENS * 8
"""Likewise of a head that the index does not have."""

MARK_CHARACTERS = 64
"""Characters at a prompt's end where an opened mark of reasoning may be."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The prompt's text, and the messages as they stand in it."""

    text: str
    messages: Sequence[Mapping[str, Any]]
    is_quoted: bool
    starts_in_reasoning: bool
    """Its end has opened the mark: the answer's first words are reasoning."""
    write: Callable[[Sequence[Mapping[str, Any]]], str]
    """The same with other messages."""


def as_read(model: TextModel, request: ChatRequest) -> ChatRequest:
    """Return the request without the images of tools that its model cannot read: it is told of them. A user's
    are refused later."""
    if not request.images:
        return request
    rule = model.card.image_rule if model.template.shows_found_images else ""
    sent = iter(request.images)
    images: list[SentImage] = []
    messages: list[dict[str, Any]] = []
    for message in request.messages:
        pieces: list[str | dict[str, Any]] = []
        for part in message["content"] if isinstance(message["content"], list) else ():
            image = None if part["type"] == "text" else next(sent)
            if image is None:
                pieces.append(part["text"])
            elif message["role"] == "tool" and not is_readable(image, rule):
                pieces.append(unread(part))
            else:
                images.append(image)
                pieces.append(part)
        messages.append({**message, "content": content_of(pieces)} if pieces else message)
    return msgspec.structs.replace(request, messages=messages, images=images)


def render_chat(model: TextModel, request: ChatRequest, *, is_bounded: bool = False) -> RenderedChat:
    """Raises InvalidRequest, and TooMuchWork if it is to be bounded and is not. Special tokens that stand in
    what the client sent remain text."""
    for name in request.template_arguments:
        if name in RESERVED_NAMES:
            raise InvalidRequest(
                f"Invalid 'chat_template_kwargs': '{name}' has its own field.",
                parameter="chat_template_kwargs",
            )
    _check_number(model, request)
    parameter = request.messages_field
    if not request.messages:
        raise InvalidRequest(f"Invalid '{parameter}': at least one message is needed.", parameter=parameter)
    messages = request.messages if model.template.knows_developers else _with_systems(request.messages)
    tools, arguments = request.tools, request.template_arguments
    sent = [messages, tools, arguments]
    try:
        is_quoted = model.quoter.is_needed(sent)
        if is_quoted:
            messages, tools, arguments = model.quoter.quote(sent)
        render = model.template.render_bounded if is_bounded else model.template.render
        write = partial(
            render,
            tools=tools or None,
            add_generation_prompt=request.add_generation_prompt,
            arguments=arguments,
        )
        try:
            text = write(messages)
        except TemplateError:
            changed = _with_system_first(messages)
            if changed == messages:
                raise
            text, messages = write(changed), changed
    except TemplateError as error:
        raise InvalidRequest(f"{error}", parameter=parameter) from error
    except RecursionError as error:
        raise InvalidRequest(f"The {parameter} are nested too deeply.", parameter=parameter) from error
    if request.continue_final_message:
        text = _through_last_message(text, messages, parameter, _behind_last(write, text, messages))
    opened = starts_in_reasoning(text[-MARK_CHARACTERS:], model.answer_format.reasoning)
    return RenderedChat(text, messages, is_quoted, opened, write)


def _with_systems(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates without developers: many leave out messages whose role they do not know."""
    if not any(message["role"] == "developer" for message in messages):
        return messages
    return [
        {**message, "role": "system"} if message["role"] == "developer" else message for message in messages
    ]


def _with_system_first(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates that take instructions at the beginning alone: later ones are the user's. They stay where
    they are, so that what comes before them is found in caches."""
    return [
        {**message, "role": "user"} if position and message["role"] in ("system", "developer") else message
        for position, message in enumerate(messages)
    ]


def encode_chat(model: TextModel, request: ChatRequest, chat: RenderedChat) -> Shown:
    """Raises InvalidRequest, and ContextLengthExceeded, before all is encoded, for what is far too long."""
    token_ids = bounded_tokens(model, chat.text, request.messages_field, is_quoted=chat.is_quoted)
    return shown_chat(model, request, token_ids)


def counted_chat(models: TextModels, request: ChatRequest, *, is_bounded: bool) -> Shown:
    """Encode a chat of which only the tokens are counted. Raises InvalidRequest or UnknownModel, and
    TooMuchWork if it is to be bounded and is not."""
    model = models.get(request.model)
    with about_model(request.model):
        if request.images:
            request = as_read(model, request)
        return encode_chat(model, request, render_chat(model, request, is_bounded=is_bounded))


def shown_chat(model: TextModel, request: ChatRequest, token_ids: list[int]) -> Shown:
    """With the images that it has. Raises InvalidRequest."""
    shown = show(token_ids, request.images, model.card.image_rule, request.messages_field)
    if request.images and request.truncate_prompt_tokens is not None:
        raise InvalidRequest(
            "'truncate_prompt_tokens' is not supported with images.", parameter="truncate_prompt_tokens"
        )
    return shown


def encoded_prompt(
    model: TextModel,
    request: ChatRequest,
    chat: RenderedChat,
    shown: Shown,
    kept: list[int],
    *,
    grammar: CheckedGrammar = ANY_TEXT,
    history: EncodedHistory | None = None,
) -> EncodedPrompt:
    """Return the tokens of it that are `kept`, with what is known of places in them, what the answer is held
    to, and by what the conversation is known again."""
    if len(kept) < len(shown.token_ids):  # the places in it are no longer where they were
        num_head_tokens = num_stable_tokens = None
        keeps = [LeaseRequest(keep.seconds) for keep in request.keeps]
    else:
        num_head_tokens, num_stable_tokens = map(shown.moved, _head_tokens(model, chat))
        keeps = [
            LeaseRequest(keep.seconds, shown.moved(_num_kept_tokens(model, chat, keep)))
            for keep in request.keeps
        ]
    wanted = request.output_format
    return EncodedPrompt(
        pack_token_ids(kept),
        num_stable_tokens=num_stable_tokens,
        num_head_tokens=num_head_tokens,
        starts_in_reasoning=chat.starts_in_reasoning,
        keeps=keeps,
        grammar=grammar,
        history=history,
        outline=outline_of(
            request.tools,
            request.messages,
            request.template_arguments,
            None if wanted is None else [wanted.schema, wanted.text, wanted.choices],
            () if history is None else history.digests[1:],
        ),
        images=list(shown.images),
    )


def _behind_last(
    write: Callable[[Sequence[Mapping[str, Any]]], str], text: str, messages: Sequence[Mapping[str, Any]]
) -> str:
    """Return what the template writes after the last message's text; empty if unknown."""
    try:
        marked = write([*messages[:-1], {**messages[-1], "content": STANDS_FOR_ANSWER}])
    except TemplateError:
        return ""
    behind = marked.rpartition(STANDS_FOR_ANSWER)[2]
    return behind if text.endswith(behind) else ""


def _through_last_message(
    text: str, messages: Sequence[Mapping[str, Any]], parameter: str, behind: str
) -> str:
    """The rendered text without what the template has put `behind` the last message's, which may have the
    same words. Raises InvalidRequest where the message does not stand in it as it was sent."""
    content = messages[-1]["content"]
    if not isinstance(content, str):
        raise InvalidRequest("A message with images cannot be continued.", parameter=parameter)
    stripped = content.strip()
    start = text.rfind(stripped, 0, len(text) - len(behind)) if stripped else -1
    if start < 0:
        raise InvalidRequest(
            "The last message cannot be continued: its text does not stand in the prompt that the chat"
            " template makes.",
            parameter=parameter,
        )
    as_sent = content.lstrip()
    return text[: start + len(as_sent if text.startswith(as_sent, start) else stripped)]


def _check_number(model: TextModel, request: ChatRequest) -> None:
    """Each message, tool and call takes a token at least: what cannot fit is not even rendered."""
    number = len(request.messages) + len(request.tools)
    for message in request.messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            number += len(calls)
    if number > model.card.context_length:
        raise context_exceeded(
            model.card.context_length,
            number,
            f"your {request.messages_field} and tools are {number} messages, tools and tool calls. Please"
            f" reduce the length of the {request.messages_field}.",
            request.messages_field,
        )


def _head_tokens(model: TextModel, chat: RenderedChat) -> tuple[int | None, int | None]:
    """Tokens before the first user message, and of what later turns will repeat (tools, system, first user
    message), each if they are few."""
    tokenizer, is_quoted, end = model.tokenizer, chat.is_quoted, 0
    for message in chat.messages:
        content, is_user = message["content"], message["role"] == "user"
        start = chat.text.find(content.strip(), end, LONG_HEAD_CHARACTERS) if isinstance(content, str) else -1
        if start >= 0:
            end = start + len(content)
        elif is_user:
            break
        if is_user:
            num_head = num_stable = None
            if start <= SHORT_HEAD_CHARACTERS:
                num_head = tokenizer.num_tokens_within(chat.text, start, is_quoted=is_quoted)
            if end <= LONG_HEAD_CHARACTERS:
                num_stable = tokenizer.num_tokens_through(chat.text, end, is_quoted=is_quoted)
            return num_head, num_stable
    return None, None


def _num_kept_tokens(model: TextModel, chat: RenderedChat, keep: KeepThrough) -> int | None:
    """None for all of them, and where the template has made something else of a message's text."""
    if keep.message is None:
        return None
    if keep.message < 0:
        end = _head_end(chat)
    else:
        found = _place_of(chat, keep.message)
        if found is None:
            return None
        start, end = found
        if keep.num_characters is None or start + keep.num_characters >= end:
            return model.tokenizer.num_tokens_through(chat.text, end, is_quoted=chat.is_quoted)
        end = start + keep.num_characters
    return (
        None if end is None else model.tokenizer.num_tokens_within(chat.text, end, is_quoted=chat.is_quoted)
    )


def _head_end(chat: RenderedChat) -> int | None:
    """Return roughly where the first non-system message begins, found from the end, since the text before it,
    such as tools, is arbitrary."""
    roles = [message["role"] for message in chat.messages]
    first = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
    end = len(chat.text)
    for message in reversed(chat.messages[first:]):
        if not isinstance(message["content"], str):
            return None
        end = chat.text.rfind(message["content"].strip(), 0, end)
        if end < 0:
            return None
    return end


def _place_of(chat: RenderedChat, position: int) -> tuple[int, int] | None:
    """Return the range of the message's text."""
    start = end = 0
    for message in chat.messages[: position + 1]:
        if not isinstance(message["content"], str):
            return None
        content = message["content"].strip()
        start = chat.text.find(content, end)
        if start < 0:
            return None
        end = start + len(content)
    return start, end
