"""A body that names a cache → the body that it stands for: the cache's beginning, then what the client sent.

Owns the fields `cache` of requests and those of a cache's creation. Bodies stay JSON: nothing of what they
say is decoded here, so that large ones are no more work than small ones.
"""

import msgspec
from msgspec import Raw, Struct, field

from router.api.json_body import (
    both_lists,
    check_salt,
    check_together,
    decode_body,
    encode_json,
    invalid,
    unsupported,
    with_fields,
)
from router.errors import InvalidRequest
from router.features.named_caches.bounds import DEFAULT_TTL_SECONDS, MAX_NAME_CHARACTERS, MAX_TTL_SECONDS
from router.features.named_caches.record import CacheContent, CacheKind, CacheRecord

_FIELD = b'"cache"'
_ABSENT = (b"", b"null")
_EMPTY = (*_ABSENT, b"[]")


class CacheUse(Struct):
    """The fields of a body that may name a cache."""

    model: str = ""
    cache: str | None = None
    cache_salt: str | None = None
    messages: Raw = Raw(b"")
    prompt: Raw = Raw(b"")
    tools: Raw = Raw(b"")
    functions: Raw = Raw(b"")


class NewCache(Struct):
    """The body that creates a cache; `ttl` is in seconds."""

    model: str
    ttl: int = DEFAULT_TTL_SECONDS
    name: str | None = None
    messages: Raw = field(default_factory=Raw)
    prompt: Raw = field(default_factory=Raw)
    tools: Raw = field(default_factory=Raw)
    cache_salt: str | None = None


class CacheChange(Struct):
    ttl: int | None = None
    name: str | None = None


_use_decoder = msgspec.json.Decoder(CacheUse)
_new_decoder = msgspec.json.Decoder(NewCache)
_change_decoder = msgspec.json.Decoder(CacheChange)


def named_in(body: bytes) -> CacheUse | None:
    """None for nearly all. Raises InvalidRequest."""
    if _FIELD not in body:
        return None
    use = decode_body(_use_decoder, body)
    return None if use.cache is None else use


def new_cache(body: bytes, max_bytes: int) -> tuple[NewCache, CacheKind, CacheContent]:
    """Raises InvalidRequest."""
    new = decode_body(_new_decoder, body)
    check_ttl(new.ttl)
    check_name(new.name)
    check_salt(new.cache_salt)
    messages, prompt, tools = (_stripped(raw) for raw in (new.messages, new.prompt, new.tools))
    if (messages in _ABSENT) == (prompt in _ABSENT):
        raise InvalidRequest(
            "A cache is made of either 'messages' or 'prompt'.",
            parameter="messages",
            code="missing_required_parameter" if messages in _ABSENT else None,
        )
    kind = CacheKind.CHAT if prompt in _ABSENT else CacheKind.COMPLETION
    if kind is CacheKind.COMPLETION:
        _check_one_prompt(prompt, "of a cache")
        if tools not in _EMPTY:
            raise unsupported("tools", "A prompt has no 'tools'; they go with 'messages'.")
    content = CacheContent(messages if kind is CacheKind.CHAT else prompt, b"" if tools in _EMPTY else tools)
    check_size(content, max_bytes, "messages" if kind is CacheKind.CHAT else "prompt")
    return new, kind, content


def cache_change(body: bytes) -> CacheChange:
    """Raises InvalidRequest."""
    change = decode_body(_change_decoder, body)
    if change.ttl is None and change.name is None:
        raise InvalidRequest(
            "Say what to change: 'ttl', 'name' or both.",
            parameter="ttl",
            code="missing_required_parameter",
        )
    if change.ttl is not None:
        check_ttl(change.ttl)
    check_name(change.name)
    return change


def check_ttl(ttl: int, parameter: str = "ttl") -> None:
    if not 1 <= ttl <= MAX_TTL_SECONDS:
        raise invalid(parameter, f"{ttl!s:.20} is not between 1 and {MAX_TTL_SECONDS} seconds.")


def check_name(name: str | None, parameter: str = "name") -> None:
    if name is not None and not (1 <= len(name) <= MAX_NAME_CHARACTERS and name.isprintable()):
        raise InvalidRequest(
            f"Invalid '{parameter}': 1 to {MAX_NAME_CHARACTERS} characters that can be printed.",
            parameter=parameter,
        )


def check_size(content: CacheContent, max_bytes: int, parameter: str) -> None:
    if content.num_bytes > max_bytes:
        raise InvalidRequest(
            f"A cache's beginning may have {max_bytes} bytes, and this one has {content.num_bytes}.",
            parameter=parameter,
            code="cache_too_large",
        )


def warming_body(record: CacheRecord, content: CacheContent) -> bytes:
    """Return the request that has a replica compute the beginning, and nothing besides."""
    fields: dict[str, object] = {
        "model": record.model,
        "prompt_cache_options": {"prewarm": True},
        "temperature": 0.0,
    }
    if record.salt is not None:
        fields["cache_salt"] = record.salt
    if record.kind is CacheKind.CHAT:
        fields |= {"messages": Raw(content.beginning), "add_generation_prompt": False}
        if content.tools:
            fields["tools"] = Raw(content.tools)
    else:
        fields["prompt"] = Raw(content.beginning)
    return encode_json(fields)


def check_use(use: CacheUse, kind: CacheKind, record: CacheRecord, content: CacheContent) -> None:
    """Raises InvalidRequest for a request that this cache is not the beginning of."""
    check_fits(record, kind, model=use.model, salt=use.cache_salt)
    has_tools = any(_stripped(raw) not in _EMPTY for raw in (use.tools, use.functions))
    if kind is CacheKind.CHAT and has_tools:
        what = "brings its own 'tools'" if content.tools else "was made without 'tools', which come first"
        raise mismatch(f"The cache {what}: create one with the tools that you need.", "cache_of_other_tools")


def check_fits(
    record: CacheRecord, kind: CacheKind, *, model: str, salt: str | None, parameter: str = "cache"
) -> None:
    """Raises InvalidRequest for a cache that is of something else."""
    if record.model != model:
        raise mismatch(
            f"The cache is for the model '{record.model[:200]}'.", "cache_of_other_model", parameter
        )
    if record.kind is not kind:
        what = f"The cache is the beginning of a {record.kind}."
        raise mismatch(what, "cache_of_other_kind", parameter)
    if record.salt != salt:
        what = "The cache was made with another 'cache_salt', or without one."
        raise mismatch(what, "cache_of_other_salt", parameter)


def spliced(body: bytes, use: CacheUse, kind: CacheKind, content: CacheContent, max_bytes: int) -> bytes:
    """Return the same body with more fields at its end, which are those that count. Raises InvalidRequest."""
    if kind is CacheKind.CHAT:
        sent = _stripped(use.messages)
        field, whole = b"messages", joined_lists(content.beginning, sent)
    else:
        sent = _stripped(use.prompt)
        field, whole = b"prompt", _joined_prompts(content.beginning, sent)
    if whole is None:
        return with_fields(body, b'"cache":null')
    check_together(len(body) + content.num_bytes, max_bytes, field.decode())
    tools = b',"tools":' + content.tools if content.tools else b""
    return with_fields(body, b'"cache":null,"%b":%b%b' % (field, whole, tools))


def joined_lists(first: bytes, then: bytes) -> bytes | None:
    """None for what is no list: reading it says what is wrong."""
    if then in _ABSENT:
        return first
    if then[:1] != b"[":
        return None
    return both_lists(first, then)


def _joined_prompts(first: bytes, then: bytes) -> bytes | None:
    if then in _ABSENT:
        return first
    _check_one_prompt(then, "with a cache")
    if first[:1] != then[:1]:
        what = "a text" if first[:1] == b'"' else "token ids"
        raise mismatch(f"The cache is {what}, and so is what goes with it.", "cache_of_other_kind")
    return first[:-1] + then[1:] if first[:1] == b'"' else joined_lists(first, then)


def _check_one_prompt(prompt: bytes, when: str) -> None:
    """A text, or a list of what will be found to be token ids."""
    if prompt[:1] != b'"' and not (prompt[:1] == b"[" and prompt[1:].lstrip()[:1] not in (b'"', b"[")):
        raise InvalidRequest(
            f"Invalid 'prompt': {when} it is one text, or one list of token ids.",
            parameter="prompt",
            code="invalid_type",
        )


def mismatch(message: str, code: str, parameter: str = "cache") -> InvalidRequest:
    return InvalidRequest(message, parameter=parameter, code=code)


def _stripped(raw: Raw) -> bytes:
    return bytes(raw).strip()
