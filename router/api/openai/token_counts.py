"""POST /tokenize and /detokenize: their fields, and their answers in vLLM's shape.

Owns both. Runs beside the event loop for small bodies, and in a process of its own for others.
"""

from collections.abc import Sequence

import msgspec

from router.api.chat_prompt import as_read, encode_chat, render_chat
from router.api.json_body import decode_body, encode_json, missing
from router.api.openai.chat_body import read_tokenized_chat
from router.api.sampling import bounded_tokens, check_token_ids, most_tokens, too_many_tokens
from router.prompt.text_model import TextModel, TextModels
from router.shared.answer_types import Count


class TokenizedText(msgspec.Struct, kw_only=True):
    prompt: str
    model: str | None = None
    add_special_tokens: bool = True


class TokenizeOptions(msgspec.Struct, kw_only=True):
    messages: msgspec.Raw = msgspec.Raw(b"null")
    return_token_strs: bool | None = None


class DetokenizedTokens(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


class Tokens(msgspec.Struct):
    count: Count
    max_model_len: Count
    tokens: Sequence[Count]
    token_strs: Sequence[str] | None


class PlainText(msgspec.Struct):
    prompt: str


_text_decoder = msgspec.json.Decoder(TokenizedText)
_options_decoder = msgspec.json.Decoder(TokenizeOptions)
_detokenize_decoder = msgspec.json.Decoder(DetokenizedTokens)


def tokenize(models: TextModels, body: bytes, *, is_bounded: bool) -> bytes:
    """Raises InvalidRequest or UnknownModel, and TooMuchWork if it is to be bounded and is not."""
    options = decode_body(_options_decoder, body)
    if bytes(options.messages) == b"null":
        plain = decode_body(_text_decoder, body)
        model = _named(models, plain.model)
        token_ids = bounded_tokens(model, plain.prompt, "prompt", add_special_tokens=plain.add_special_tokens)
    else:
        sent = read_tokenized_chat(body)
        model = _named(models, sent.model or None)
        request = as_read(model, sent)
        chat = render_chat(model, request, is_bounded=is_bounded)
        token_ids = encode_chat(model, request, chat).token_ids
    strings = model.tokenizer.token_strings(token_ids) if options.return_token_strs else None
    return encode_json(Tokens(len(token_ids), model.card.context_length, token_ids, strings))


def detokenize(models: TextModels, body: bytes, *, is_bounded: bool) -> bytes:
    """Raises InvalidRequest or UnknownModel."""
    asked = decode_body(_detokenize_decoder, body)
    model = _named(models, asked.model)
    if len(asked.tokens) > most_tokens(model):
        raise too_many_tokens(model, "tokens")
    token_ids = check_token_ids(asked.tokens, model, "tokens")
    return encode_json(PlainText(model.tokenizer.decode(token_ids)))


def _named(models: TextModels, name: str | None) -> TextModel:
    """Return the model that was asked for; without a name, the only one."""
    if name is not None:
        return models.get(name)
    names = models.names()
    if len(names) == 1:
        return models.get(names[0])
    raise missing("model")
