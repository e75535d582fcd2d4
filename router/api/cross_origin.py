"""CrossOrigin: pages of which origins may have their visitors' browsers call the API (CORS).

Owns the answer to a browser that asks beforehand, and the headers by which it lets a page read an answer.
Only the API is meant; what operators see is never read by a page of another origin.
"""

import re
from collections.abc import Sequence

from starlette.types import Message, Scope, Send

from router.edge.http import Header, header
from router.shared.origins import EVERY_ORIGIN

_PATHS = ("/v1/", "/v1beta/", "/tokenize", "/detokenize")
_METHODS = b"GET, POST, PATCH, DELETE"
_MAX_AGE_SECONDS = b"600"
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_, -]{1,2048}")


class CrossOrigin:
    """`origins` as browsers write them (`https://chat.example.org`), or `*` for all."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(
            origin.lower().rstrip("/").encode("latin-1", "replace") for origin in origins
        )
        self._allows_all = EVERY_ORIGIN in origins

    def origin_of(self, scope: Scope) -> bytes | None:
        """The page's that asks, if it may."""
        if not self._origins or not scope["path"].startswith(_PATHS):
            return None
        origin = header(scope, b"origin")
        if origin is None or not (self._allows_all or origin.lower() in self._origins):
            return None
        return origin

    @staticmethod
    def is_preflight(scope: Scope) -> bool:
        return scope["method"] == "OPTIONS" and header(scope, b"access-control-request-method") is not None


def preflight_headers(scope: Scope) -> list[Header]:
    headers = [(b"access-control-allow-methods", _METHODS)]
    asked = header(scope, b"access-control-request-headers")
    if asked is not None and _HEADER_NAMES.fullmatch(asked):
        headers.append((b"access-control-allow-headers", asked))
    return [*headers, (b"access-control-max-age", _MAX_AGE_SECONDS)]


def allowing(send: Send, origin: bytes) -> Send:
    """Sends an answer that a page of this origin may read."""
    allowed = [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", b"*"),
        (b"vary", b"origin"),
    ]

    async def send_allowed(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *allowed]}
        await send(message)

    return send_allowed
