"""Authenticator: whose a request is, told from its API key before anything of its body is read.

Owns which header has a key in which dialect, which paths take none, and which take one of an operator's. The
app behind finds the Caller in the scope. What a caller may ask for, and how much of it, is for others to say.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.context import FindsCallers
from router.api.dialects import Vendor, vendor_of
from router.caller import CALLER, Caller, Right
from router.edge.http import Header, client_request_id, header, send_whole
from router.edge.http_error import HttpError
from router.errors import KeyFault

OPERATORS_PATHS = ("/metrics", "/load", "/live/", "/explain/")
"""Prefixes of the operators' routes on the clients' port. They show all tenants."""

CACHE_GROUP = b"x-kvasir-cache-group"
"""A request may say with which of its tenant's groups it shares KV, or with none."""
NO_GROUP = "none"

_AUTHORIZATION = b"authorization"
_X_API_KEY = b"x-api-key"
_X_GOOG_API_KEY = b"x-goog-api-key"
_KEY_HEADERS = (_AUTHORIZATION, _X_API_KEY, _X_GOOG_API_KEY)
_BEARER = "bearer "


class Authenticator:
    """ASGI middleware of the clients' listener. `open_paths` tell nothing that is anybody's and take no key:
    whole paths, since what begins like one of them is another. `count` hears of each refusal, and `new_id`
    makes an id out of its beginning; `clock` tells seconds since 1970."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: FindsCallers,
        open_paths: frozenset[str],
        count: Callable[[KeyFault], None],
        new_id: Callable[[str], str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths
        self._count = count
        self._new_id = new_id
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] in self._open_paths:
            scope[CALLER] = None  # what asks for one all the same fails
            await self._app(scope, receive, send)
            return
        caller = self._caller_of(scope)
        if isinstance(caller, Caller):
            scope[CALLER] = caller
            await self._app(scope, receive, send)
        else:
            await self._refuse(caller, scope, send)

    def _caller_of(self, scope: Scope) -> "Caller | _KeyRefusal":
        vendor = vendor_of(scope)
        key = next((key for name in vendor.key_headers if (key := _key_in(scope, name)) is not None), None)
        if key is None:
            misplaced = next((name for name in _KEY_HEADERS if header(scope, name) is not None), None)
            return _no_key(vendor, misplaced)
        caller = self._keys.find(key, self._clock())
        if isinstance(caller, KeyFault):
            return _KeyRefusal(caller, _bad_key(caller))
        if scope["path"].startswith(OPERATORS_PATHS) and not caller.may(Right.ADMIN):
            return _KeyRefusal(KeyFault.NOT_ALLOWED, _missing_right(Right.ADMIN))
        group = header(scope, CACHE_GROUP)
        return caller if group is None else _with_group(caller, group.decode("latin-1"))

    async def _refuse(self, refusal: "_KeyRefusal", scope: Scope, send: Send) -> None:
        self._count(refusal.fault)
        shape, error = vendor_of(scope).errors, refusal.error
        request_id = client_request_id(scope) or self._new_id("req_")
        headers: list[Header] = [(name, request_id.encode()) for name in shape.request_id_headers]
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send_whole(
            send, shape.status(error), [*error.headers(), *headers], shape.body(error, request_id)
        )


class _KeyRefusal(NamedTuple):
    fault: KeyFault
    error: HttpError


def _key_in(scope: Scope, name: bytes) -> str | None:
    value = header(scope, name)
    if value is None:
        return None
    text = value.decode("latin-1").strip()
    if name != _AUTHORIZATION:
        return text
    return text[len(_BEARER) :].strip() if text[: len(_BEARER)].lower() == _BEARER else None


def _with_group(caller: Caller, group: str) -> "Caller | _KeyRefusal":
    if group == NO_GROUP:
        return msgspec.structs.replace(caller, group=None)
    if group in caller.tenant.groups:
        return msgspec.structs.replace(caller, group=group)
    message = f"This key's tenant is in no group '{group[:60]}': see '{CACHE_GROUP.decode()}'."
    return _KeyRefusal(
        KeyFault.NOT_ALLOWED, HttpError(403, message, "permission_error", None, "cache_group_not_allowed")
    )


def _no_key(vendor: Vendor, misplaced: bytes | None) -> _KeyRefusal:
    fault, words = KeyFault.MISSING, "There is no API key in this request."
    if misplaced is not None:
        fault = KeyFault.WRONG_HEADER
        words = f"The header '{misplaced.decode()}' has no API key for this route."
    message = f"{words} Send it as {vendor.key_words}."
    return _KeyRefusal(fault, HttpError(401, message, "invalid_request_error", None, "invalid_api_key"))


def _bad_key(fault: KeyFault) -> HttpError:
    words = "This API key has expired." if fault is KeyFault.EXPIRED else "Incorrect API key provided."
    return HttpError(401, words, "invalid_request_error", None, "invalid_api_key")


def _missing_right(right: Right) -> HttpError:
    message = f"This API key may not do that: it lacks the right '{right}'."
    return HttpError(403, message, "permission_error", None, "insufficient_permissions")
