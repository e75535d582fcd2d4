"""Exchanges: requests and whole answers, written down with everything that differs by itself replaced.

Owns what is replaced. An id of 24 hex digits becomes the exchange in which it appeared first and its number
there; a time becomes its distance from now; the date is left out. All else stays as it came over the socket.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

MOST_WRITTEN = 2000
"""Characters of a request."""

_ID = re.compile(r"(?<![A-Za-z0-9])([a-z][a-z_-]*[_-])([0-9a-f]{32}|[0-9a-f]{24})([0-9a-f]{4})?\b")
_TIME = re.compile(r"(?<![\w.])(1[789]\d{8})(?:\d{3})?(?:\.\d+)?(?![\w.])")
_DATE_TIME = re.compile(r"\b20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)")
_PORT = re.compile(r"\b(127\.0\.0\.1|localhost):\d{4,5}\b")
_MEASURED = re.compile(r"(?m)^((?:x-ratelimit-reset|retry-after|openai-processing-ms)[a-z-]*): [^\r\n]+$")
_OVERLAP = re.compile(r"(?m)^(x-kvasir-overlap-tokens): [1-9]\d*$")
_LEFT = re.compile(
    r"(?m)^((?:x-ratelimit-remaining-tokens|anthropic-ratelimit-[a-z-]*tokens-remaining)): \d+$"
)
_SOON = re.compile(r"(has |again in |\"retryDelay\":\")[\d.]+(?= in use|s)")
_BUCKET = re.compile(r",?le=\"[^\"]*\"")
_BEFORE = re.compile(r"(\"seconds_before\"):[\d.]+")
_MOMENTARY = re.compile(
    "router_(?:frames|index|rate_news|itl|tpot|overlap|stored_response_uses|history_lookups)_|replica_(?:frames|index|lease_renewals)_"
)
_ALLOWED = re.compile(r"(?m)^(allow): (.+)$")
_CHOSEN = re.compile(r"(?m)^(x-kvasir-(?:replica|reason|overlap-tokens)): .+$")


_REPLACED: Sequence[tuple[re.Pattern[str], Any]] = (
    (_PORT, r"\1:<port>"),
    (_MEASURED, r"\1: <seconds>"),
    (_OVERLAP, r"\1: <some>"),
    (_LEFT, r"\1: <number>"),
    (_BEFORE, r"\1:<seconds>"),
    (_SOON, r"\1<number>"),
    (_ALLOWED, lambda found: f"{found[1]}: {', '.join(sorted(found[2].split(', ')))}"),
)


class Names:
    """What ids are called: by where they appeared first, among the exchanges of a group."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._label, self._number = "", 0

    def begin(self, label: str) -> None:
        self._label, self._number = label, 0

    def of(self, found: re.Match[str]) -> str:
        prefix, own, item = found.groups()
        if own not in self._names:
            self._number += 1
            self._names[own] = f"{self._label}:{self._number}"
        return f"{prefix}<{self._names[own]}>{item or ''}"


def plain(text: str, names: Names | None, rounded_seconds: int = 60) -> str:
    """The text with everything replaced that differs by itself. Without names all ids are called the same."""
    now = time.time()

    def distance(found: re.Match[str]) -> str:
        if int(found[1]) % 3600 == 0:
            return "<an hour>"
        seconds = round((float(found[1]) - now) / rounded_seconds) * rounded_seconds
        return f"<in {seconds} s>" if seconds > 0 else "<now>"

    text = _ID.sub(r"\1<id>\3" if names is None else names.of, text)
    text = _DATE_TIME.sub("<time>", _TIME.sub(distance, text))
    for pattern, written in _REPLACED:
        text = pattern.sub(written, text)
    return text


class Talk:
    """One group of exchanges with one router, and the file that they are written to."""

    def __init__(self, url: str, path: Path, headers: Mapping[str, str] | None = None) -> None:
        self._client = httpx.Client(base_url=url, timeout=60, headers={"user-agent": "oracle"})
        self._headers = dict(headers or {})
        self._path = path
        self._names = Names()
        self._written: dict[str, str] = {}

    def __enter__(self) -> "Talk":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        """An answer in which the next request's id is missing ends the group, and is a difference."""
        self._client.close()
        if error is not None:
            self._written["ended"] = repr(error)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._written, indent=0, ensure_ascii=False), "utf-8")
        return isinstance(error, LookupError | TypeError | ValueError)

    def ask(
        self,
        label: str,
        path: str,
        body: object = None,
        *,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
        written: Callable[[str, Any], str] | None = None,
    ) -> Any:
        """The answer's JSON, or that of the last event that has some. `body` may be bytes. `written` makes of
        the answer's text and JSON what is to be recorded of it, where that is not all."""
        assert label not in self._written, label
        self._names.begin(label)
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        method = method or ("GET" if body is None else "POST")
        own = {"content-type": "application/json"} if content else {}
        sent = {**own, **self._headers, **(headers or {})}
        answer = self._client.request(method, path, content=content, headers=sent)
        found = _last_json(answer.text)
        has_own_length = written is not None or answer.status_code == 429 or "explain" in path
        left_out = ("date", "content-length") if has_own_length else ("date",)
        head = "".join(f"{name}: {value}\n" for name, value in _heads(answer, left_out))
        text = answer.text.replace(',"', ',\n"') if written is None else written(answer.text, found)
        if _has_prompts(body):  # each of which goes its own way
            head = _CHOSEN.sub(r"\1: <one of them>", head)
            text = "\n\n".join(sorted(text.split("\n\n"), key=_index))
        asked = content[:MOST_WRITTEN].decode("utf-8", "replace")
        whole = f"{method} {path} {headers or ''}\n{asked}\n\n{answer.status_code}\n{head}\n{text}"
        self._written[label] = plain(whole, self._names)
        return found


def _has_prompts(body: object) -> bool:
    prompt = body.get("prompt") if isinstance(body, dict) else None
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


def _index(event: str) -> int:
    found = re.search(r'"index":(\d+)', event)
    return int(found[1]) if found else MOST_WRITTEN


def _heads(answer: httpx.Response, left_out: Sequence[str]) -> Iterator[tuple[str, str]]:
    for name, value in answer.headers.raw:
        if name.decode().lower() not in left_out:
            yield name.decode(), value.decode("latin-1")


def _last_json(text: str) -> Any:
    lines = [text, *reversed(re.findall(r"(?m)^data: (\{.*)$", text))]
    for line in lines:
        try:
            return json.loads(line)
        except ValueError:
            continue
    return None


def only_shape(text: str, found: Any) -> str:
    """Of metrics their series, of JSON its keys and types, of pages nothing: for what counts the moment."""
    if found is not None or not text.startswith("# HELP"):
        return json.dumps(shape(found), indent=1)
    kinds = re.findall(r"(?m)^# TYPE .*$", text)
    series = {_BUCKET.sub("", name) for name in re.findall(r"(?m)^([a-z_]+(?:\{.*\})?) ", text)}
    return "\n".join([*sorted(kinds), *sorted(series)])


def only_totals(text: str, _: Any) -> str:
    """Of metrics what was counted."""
    counted = re.findall(r"(?m)^([a-z_]+_(?:total|count)(?:\{.*\})? .*)$", text)
    return "\n".join(
        sorted(line for line in counted if not _MOMENTARY.match(line) and not line.endswith(" 0.0"))
    )


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__
