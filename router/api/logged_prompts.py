"""Logged requests → the prompts that a router would make of them, without any router.

Owns the way from a logged body to tokens and back to the places in it: the same code that serves requests
reads the body, renders the chat template and encodes.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec

from replicas.protocol.blocks import Namespace, pack_token_ids, unpack_token_ids
from replicas.protocol.status import TokenizerBundle
from router.answers.formats import AnswerFormat, answer_format
from router.api.chat_prompt import as_read, render_chat, shown_chat
from router.api.completion_prompt import CompletionRequest, prompts_of
from router.api.dialects import DIALECTS
from router.errors import InvalidRequest, RouterError
from router.explain.linting.linter import LoggedPrompt
from router.explain.linting.log_lines import COMPLETION, LoggedRequest
from router.explain.places import Place, PlaceKind, place_in_prompt, place_of_token
from router.prompt.images import Shown
from router.prompt.quoting import Quoter
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer

MAX_CHOICES = 2**16
MAX_PROMPTS = 2**16
_NO_BOUND = 2**31

ELSEWHERE = ("previous_response_id", "cache", "cachedContent", "cached_content")
"""Fields that name what the prompt begins with, which no log of bodies has."""

_completion_decoder = msgspec.json.Decoder(CompletionRequest)


class NoPrompt(ValueError):
    """No prompt comes of a body. The message is a sentence without its line."""


class _LogWindow(NamedTuple):
    context_length: int
    vocab_size: int
    eos_token_ids: Sequence[int]
    image_rule: str = ""
    takes_bodies: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class LoggedModel:
    """A model's text files: a TextModel without a window."""

    card: _LogWindow
    tokenizer: Tokenizer
    template: ChatTemplate
    quoter: Quoter
    answer_format: AnswerFormat

    @classmethod
    def of(cls, bundle: TokenizerBundle, image_rule: str = "") -> "LoggedModel":
        """`image_rule` is as on a card: without one the model reads text only. Raises TokenizerError."""
        tokenizer = Tokenizer(bundle)
        template = ChatTemplate.from_bundle(bundle)
        return cls(
            _LogWindow(_NO_BOUND, tokenizer.vocab_size, (), image_rule),
            tokenizer,
            template,
            Quoter(tokenizer.special_tokens),
            answer_format(template.sources, tokenizer.added_tokens),
        )


def logged_prompts(
    model: LoggedModel, request: LoggedRequest, line: int, block_size: int
) -> Iterator[LoggedPrompt]:
    """Raises NoPrompt."""
    named = next((name for name in ELSEWHERE if request.body.get(name) is not None), None)
    if named is not None:
        raise NoPrompt(f"its prompt begins with what '{named}' names, which is not in the log")
    body = request.body if isinstance(request.body.get("model"), str) else {**request.body, "model": ""}
    try:
        if request.kind == COMPLETION:
            yield from _plain(model, request, body, line, block_size)
        else:
            yield _chat(model, request, body, line, block_size)
    except InvalidRequest as error:
        raise NoPrompt(f"a router would refuse it: {error}") from error
    except (RouterError, UnicodeError, RecursionError, OverflowError) as error:
        raise NoPrompt(f"a router would refuse it: {error!r:.200}") from error


def _chat(
    model: LoggedModel, logged: LoggedRequest, body: dict[str, Any], line: int, block_size: int
) -> LoggedPrompt:
    request = as_read(model, DIALECTS[logged.kind].read(json.dumps(body).encode(), MAX_CHOICES))
    chat = render_chat(model, request)
    token_ids = model.tokenizer.encode(chat.text, is_quoted=chat.is_quoted)
    shown = shown_chat(model, request, token_ids)
    text_place = partial(
        place_of_token, model.tokenizer, logged.body, chat.text, token_ids, is_quoted=chat.is_quoted
    )
    space = _space(request.model, block_size, logged.tenant, request.cache_salt)
    return LoggedPrompt(line, space, logged.body, _told_apart(shown), partial(_place, shown, text_place))


def _told_apart(shown: Shown) -> Sequence[int]:
    """Return the tokens, those of an image as numbers of its own: the same for the same image alone."""
    if not shown.images:
        return shown.token_ids
    packed = bytearray(pack_token_ids(shown.token_ids))
    for image in shown.images:
        size = 4 * image.length
        name = image.digest * (size // len(image.digest) + 1)
        packed[4 * image.start : 4 * image.start + size] = name[:size]
    return unpack_token_ids(bytes(packed))


def _place(shown: Shown, text_place: Callable[[int], Place], number: int) -> Place:
    """Find the place of a token in the prompt as shown; `text_place` knows places in the text before
    images."""
    path = shown.image_path(number)
    if path is not None:
        return Place(path, PlaceKind.VALUE, is_certain=True)
    return text_place(shown.as_sent(number))


def _plain(
    model: LoggedModel, logged: LoggedRequest, body: dict[str, Any], line: int, block_size: int
) -> Iterator[LoggedPrompt]:
    try:
        request = _completion_decoder.decode(json.dumps(body))
    except msgspec.ValidationError as error:
        raise NoPrompt(f"a router would refuse it: {error}") from error
    space = _space(request.model, block_size, logged.tenant, request.cache_salt)
    for number, prompt in enumerate(prompts_of(request.prompt, MAX_PROMPTS)):
        if isinstance(prompt, str):
            has_special = request.add_special_tokens is not False
            token_ids = model.tokenizer.encode(prompt, add_special_tokens=has_special)
        elif all(type(token_id) is int and 0 <= token_id < 2**32 for token_id in prompt):
            token_ids = prompt
        else:
            raise NoPrompt("its prompt is neither text nor token ids")
        place_of = partial(_plain_place, model.tokenizer, request.prompt, number, token_ids)
        yield LoggedPrompt(line, space, logged.body, token_ids, place_of)


def _plain_place(
    tokenizer: Tokenizer, prompt: Any, prompt_number: int, token_ids: Sequence[int], number: int
) -> Place:
    is_text = isinstance(prompt if isinstance(prompt, str) else prompt[prompt_number], str)
    start = len(tokenizer.decode(token_ids[:number])) if is_text else number
    return place_in_prompt(prompt, prompt_number, start)


def _space(model: str, block_size: int, tenant: str | None, salt: str | None) -> Namespace:
    """Make the namespace as a router does: another model, tenant or salt shares nothing."""
    fingerprint = hashlib.blake2b(model.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return Namespace(fingerprint, block_size, tenant=tenant, salt=salt or None)
