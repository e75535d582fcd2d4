"""Bodies of Gemini's cachedContents, and of requests that begin with one.

Owns their fields. What a cache is made of is kept as its client has sent it, and put before what a request
brings without being decoded.
"""

import math
import re
from datetime import datetime

import msgspec
from msgspec import Raw, Struct

from router.api.gemini.body import MODELS
from router.api.gemini.fields import CachedContentChange, NewCachedContent
from router.api.gemini.names import FieldsReader
from router.api.json_body import (
    check_salt,
    check_together,
    decode_body,
    encode_json,
    invalid,
    unsupported,
    with_fields,
)
from router.errors import InvalidRequest
from router.features.named_caches.body import (
    check_fits,
    check_name,
    check_size,
    check_ttl,
    joined_lists,
    mismatch,
)
from router.features.named_caches.bounds import DEFAULT_TTL_SECONDS
from router.features.named_caches.record import CacheContent, CacheKind, CacheRecord

CACHED_CONTENTS = "cachedContents/"
PARAMETER = "cachedContent"

_NAMES = (b'"cachedContent"', b'"cached_content"')
_ABSENT = (b"", b"null")
_EMPTY = (*_ABSENT, b"[]", b"{}")
_TTL = re.compile(r"([0-9]{1,9})(\.[0-9]{1,9})?s")


class _Beginning(Struct, rename="camel", omit_defaults=True):
    """Fields that requests may begin with."""

    contents: Raw = Raw(b"")
    system_instruction: Raw = Raw(b"")
    tools: Raw = Raw(b"")
    tool_config: Raw = Raw(b"")


class GeminiCacheUse(_Beginning, rename="camel"):
    """The fields of a request that may name a cache."""

    model: str = ""
    cached_content: str | None = None
    cache_salt: str | None = None


_beginning_decoder = msgspec.json.Decoder(_Beginning)
_use_reader = FieldsReader(GeminiCacheUse)
_new_reader = FieldsReader(NewCachedContent)
_change_reader = FieldsReader(CachedContentChange)


def gemini_cache_use(body: bytes) -> GeminiCacheUse | None:
    """None for nearly all. Raises InvalidRequest."""
    if not any(name in body for name in _NAMES):
        return None
    use = _use_reader.read(body)
    return None if use.cached_content is None else use


def new_cached_content(body: bytes, now: float, max_bytes: int) -> tuple[NewCachedContent, int, CacheContent]:
    """Return the fields, the seconds that it is to live, and what it stands for. Raises InvalidRequest."""
    new = _new_reader.read(body)
    ttl = _ttl(new.ttl, new.expire_time, now)
    check_name(new.display_name, "displayName")
    check_salt(new.cache_salt)
    if new.kms_key_name is not None:
        raise unsupported("kmsKeyName", "Caches are kept under the cluster's own key.")
    fields = _beginning(new.contents, new.system_instruction, new.tools, new.tool_config)
    if not fields:
        raise InvalidRequest(
            "A cache is made of 'contents', a 'systemInstruction' or 'tools'.",
            parameter="contents",
            code="missing_required_parameter",
        )
    content = CacheContent(encode_json(fields))
    check_size(content, max_bytes, "contents")
    return new, DEFAULT_TTL_SECONDS if ttl is None else ttl, content


def cached_content_change(body: bytes, now: float) -> int:
    """Return the seconds that it is to live from now on. Raises InvalidRequest."""
    change = _change_reader.read(body)
    if change.display_name is not None:
        raise unsupported("displayName", "Of a cache only 'ttl' or 'expireTime' can be changed.")
    ttl = _ttl(change.ttl, change.expire_time, now)
    if ttl is None:
        raise InvalidRequest(
            "Say when it is to expire: by 'ttl' or by 'expireTime'.",
            parameter="ttl",
            code="missing_required_parameter",
        )
    return ttl


def gemini_warming_body(record: CacheRecord, content: CacheContent) -> bytes:
    """Return the request that has a replica compute the beginning, and nothing besides."""
    fields: dict[str, object] = {
        "model": record.model,
        "generationConfig": {"temperature": 0.0},
        "promptCacheOptions": {"prewarm": True},
        "addGenerationPrompt": False,
    }
    if record.salt is not None:
        fields["cacheSalt"] = record.salt
    return b"%b,%b" % (encode_json(fields)[:-1], content.beginning[1:])


def check_gemini_use(use: GeminiCacheUse, record: CacheRecord) -> None:
    """Raises InvalidRequest for a request that this cache is not the beginning of."""
    model = use.model.removeprefix(MODELS)
    check_fits(record, CacheKind.GEMINI, model=model, salt=use.cache_salt, parameter=PARAMETER)
    for name, raw in (
        ("systemInstruction", use.system_instruction),
        ("tools", use.tools),
        ("toolConfig", use.tool_config),
    ):
        if bytes(raw).strip() not in _EMPTY:
            raise mismatch(
                f"'{name}' comes before what a cache begins with: create one that has it.",
                "cache_of_other_tools",
                name,
            )


def with_cached_content(body: bytes, use: GeminiCacheUse, content: CacheContent, max_bytes: int) -> bytes:
    """Return the same body with more fields at its end, which are those that count. Raises InvalidRequest."""
    check_together(len(body) + content.num_bytes, max_bytes, "contents")
    beginning = decode_body(_beginning_decoder, content.beginning)
    contents = joined_lists(_listed(bytes(beginning.contents)), _listed(bytes(use.contents)))
    fields = {name: None for name in ("cachedContent", "cached_content") if f'"{name}"'.encode() in body}
    whole = msgspec.structs.replace(beginning, contents=Raw(b"[]" if contents is None else contents))
    return with_fields(body, encode_json(fields)[1:-1] + b"," + encode_json(whole)[1:-1])


def _beginning(contents: Raw, system: Raw, tools: Raw, tool_config: Raw) -> dict[str, Raw]:
    fields = {"contents": contents, "systemInstruction": system, "tools": tools, "toolConfig": tool_config}
    return {name: raw for name, raw in fields.items() if bytes(raw).strip() not in _EMPTY}


def _listed(raw: bytes) -> bytes:
    """One content may stand where a list of them belongs."""
    raw = raw.strip()
    if raw in _ABSENT:
        return b"[]"
    return b"[%b]" % raw if raw[:1] == b"{" else raw


def _ttl(ttl: str | None, expire_time: str | None, now: float) -> int | None:
    if ttl is not None and expire_time is not None:
        raise InvalidRequest("'ttl' and 'expireTime' say the same: send one.", parameter="expireTime")
    if ttl is not None:
        found = _TTL.fullmatch(ttl)
        if found is None:
            raise invalid("ttl", f"'{ttl[:40]}' is no number of seconds such as '3600s'.")
        seconds, parameter = math.ceil(float(ttl[:-1])), "ttl"
    elif expire_time is not None:
        seconds, parameter = math.ceil(_moment(expire_time) - now), "expireTime"
    else:
        return None
    check_ttl(seconds, parameter)
    return seconds


def _moment(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            raise ValueError("no time zone")
        return moment.timestamp()
    except (ValueError, OverflowError) as error:
        raise invalid("expireTime", f"'{text[:40]}' is no moment such as '2030-01-31T12:00:00Z'.") from error
