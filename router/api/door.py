"""Door: what is refused by a request's head alone, on every route, before anything of its body is read.

Owns three rules. On a loopback address the router answers to loopback's names only: a page whose name was
pointed here (DNS rebinding) calls it by that name. What browsers post for pages of other origins is refused;
under a public name not if it says that it is JSON, which a browser sends for them only where something in
front of the router has allowed it, or the router does (`cross_origin.py`). And a body is JSON, as it is or as
gzip: what is encoded otherwise or of another type is not guessed at. Who may see what is decided in
`access.py`.
"""

from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.cross_origin import CrossOrigin, allowing, preflight_headers
from router.api.error_shapes import error_shape
from router.api.http import Header, client_request_id, send_whole
from router.api.http_error import HttpError
from router.api.inflating import GZIP
from router.api.origins import calls_loopback, host_name, is_of_other_origin, means_loopback
from router.errors import HeadFault

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_JSON_TYPES = (b"application/json", b"text/json")
_JUDGED = frozenset((b"host", b"origin", b"sec-fetch-site", b"content-type", b"content-encoding"))
_MOST_SHOWN = 100


class Door:
    """ASGI middleware of a whole listener. `host` is what that listens on; `allowed_hosts` are names besides
    loopback's, for a proxy on this machine that passes its own on.
    `count` hears of each refusal, and `new_id` makes an id out of its beginning."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str | None,
        allowed_hosts: Sequence[str],
        cross_origin: CrossOrigin,
        count: Callable[[HeadFault], None],
        new_id: Callable[[str], str],
    ) -> None:
        self._app = app
        self._is_on_loopback = host is not None and means_loopback(host.lower())
        self._allowed_names = frozenset(name.lower() for name in allowed_hosts)
        self._cross_origin = cross_origin
        self._count = count
        self._new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = self._cross_origin.origin_of(scope)
        fault = self._fault_of(scope, is_allowed=origin is not None)
        if origin is not None:
            send = allowing(send, origin)
        if fault is None:
            if origin is not None and self._cross_origin.is_preflight(scope):
                await send_whole(send, 204, preflight_headers(scope), b"")
            else:
                await self._app(scope, receive, send)
            return
        self._count(fault)
        error, headers = _refusal(fault, scope)
        shape = error_shape(scope)
        request_id = client_request_id(scope) or self._new_id("req_")
        body = shape.body(error, request_id)
        headers += [(name, request_id.encode()) for name in shape.request_id_headers]
        await send_whole(send, shape.status(error), [*error.headers(), *headers], body)

    def _fault_of(self, scope: Scope, *, is_allowed: bool) -> HeadFault | None:
        """`is_allowed` says that it comes from a page whose origin may call the API."""
        head = _judged(scope)
        host = head.get(b"host")
        is_public = not self._is_on_loopback
        # Browsers always send a Host; what sends none is a probe of HTTP/1.0.
        if not is_public and host is not None and not calls_loopback(host):
            if host_name(host) not in self._allowed_names:
                return HeadFault.HOST
            is_public = True
        if scope["method"] in _SAFE_METHODS:
            return None
        content_type = head.get(b"content-type", b"").partition(b";")[0].strip().lower()
        is_foreign = is_of_other_origin(head.get(b"sec-fetch-site"), head.get(b"origin"), host)
        if is_foreign and not is_allowed and not (is_public and content_type):
            return HeadFault.ORIGIN
        if content_type and not _is_json(content_type):
            return HeadFault.CONTENT_TYPE
        if head.get(b"content-encoding", b"").lower() not in (b"", b"identity", GZIP):
            return HeadFault.CONTENT_ENCODING
        return None


def _judged(scope: Scope) -> dict[bytes, bytes]:
    """The headers that matter here. One that comes twice is a list, which none of them may be."""
    head: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in _JUDGED:
            head[name] = value if name not in head else b"%b, %b" % (head[name], value)
    return head


def _is_json(content_type: bytes) -> bool:
    if content_type in _JSON_TYPES:
        return True
    return content_type.startswith(b"application/") and content_type.endswith(b"+json")


def _refusal(fault: HeadFault, scope: Scope) -> tuple[HttpError, list[Header]]:
    """The error, and headers of its own."""
    head = _judged(scope)

    def shown(name: bytes) -> str:
        return head.get(name, b"").decode("latin-1")[:_MOST_SHOWN]

    match fault:
        case HeadFault.HOST:
            message = (
                "This router listens on loopback and answers to localhost, 127.0.0.1 and [::1], not to"
                f" '{shown(b'host')}'. Where a proxy on its machine passes on another name, name that in"
                " allowed_hosts (--allowed-hosts, KVASIR_ROUTER_ALLOWED_HOSTS)."
            )
            return HttpError(403, message, "permission_error", None, "host_not_allowed"), []
        case HeadFault.ORIGIN:
            message = (
                "This was sent by a browser for a page of another origin"
                f" ('{shown(b'origin')}'), and pages of other origins may not post here."
            )
            return HttpError(403, message, "permission_error", None, "origin_not_allowed"), []
        case HeadFault.CONTENT_TYPE:
            message = (
                f"Unsupported content type: '{shown(b'content-type')}'. A body is JSON: send it with"
                " 'content-type: application/json'."
            )
            return HttpError(415, message, "invalid_request_error", None, "unsupported_content_type"), []
        case HeadFault.CONTENT_ENCODING:
            message = (
                f"Unsupported content encoding: '{shown(b'content-encoding')}'. Send the body as it is, or as"
                " gzip."
            )
            error = HttpError(415, message, "invalid_request_error", None, "unsupported_content_encoding")
            return error, [(b"accept-encoding", b"gzip")]
