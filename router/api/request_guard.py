"""RequestGuard: refuses requests by their head alone, on every route, before their body is read.

Owns four rules. On a loopback address the router answers to loopback's names only, and where names are set to
those as well, on any other address too: a page whose name was pointed here (DNS rebinding) calls it by that
name. A header that says who asks, or whom, comes once: of two, what stands in front may have read the other
one. What browsers post for pages of other origins is refused;
under a public name not if it says that it is JSON, which a browser sends for them only where something in
front of the router has allowed it, or the router does (`cross_origin.py`). And a body is JSON, as it is or as
gzip, or a form where a route takes files: what is encoded otherwise or of another type is not guessed at. Who
may see what is decided in `access.py`.
"""

from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from replicas.protocol.passed_routes import FORM, FORM_ROUTES
from router.api.cross_origin import CrossOrigin, allowing, preflight_headers
from router.api.dialects import vendor_of
from router.edge.http import Header, client_request_id, send_whole
from router.edge.http_error import HttpError
from router.edge.inflating import GZIP
from router.errors import HeadFault
from router.shared.origins import (
    calls_address,
    calls_loopback,
    host_name,
    is_of_other_origin,
    means_loopback,
)

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_FORM_TYPE = FORM.encode()
_JSON_TYPES = (b"application/json", b"text/json")
_SINGLE = frozenset((b"host", b"authorization", b"x-api-key", b"x-goog-api-key", b"x-kvasir-cache-group"))
_JUDGED = _SINGLE | {b"origin", b"sec-fetch-site", b"content-type", b"content-encoding"}
_MOST_SHOWN = 100


class RequestGuard:
    """ASGI middleware of a whole listener. `host` is what that listens on, None for a Unix socket, which no
    browser opens; `allowed_hosts` are the names that clients call the router by, besides loopback's.
    `is_route` knows which paths there are, `count` hears of each refusal, and `new_id` makes an id out of its
    beginning."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        is_route: Callable[[Scope], bool],
        host: str | None,
        allowed_hosts: Sequence[str],
        cross_origin: CrossOrigin,
        count: Callable[[HeadFault], None],
        new_id: Callable[[str], str],
    ) -> None:
        self._app = app
        self._is_route = is_route
        self._is_on_loopback = host is not None and means_loopback(host.lower())
        self._allowed_names = frozenset(host_name(name.encode()) or name for name in allowed_hosts)
        self._has_names = self._is_on_loopback or (host is not None and bool(allowed_hosts))
        self._cross_origin = cross_origin
        self._count = count
        self._new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = self._cross_origin.origin_of(scope)
        fault = self._fault_of(scope, is_allowed=origin is not None)
        if fault is HeadFault.CONTENT_TYPE and not self._is_route(scope):
            fault = None  # nothing is there, whatever the body is
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
        shape = vendor_of(scope).errors
        request_id = client_request_id(scope) or self._new_id("req_")
        body = shape.body(error, request_id)
        headers += [(name, request_id.encode()) for name in shape.request_id_headers]
        await send_whole(send, shape.status(error), [*error.headers(), *headers], body)

    def _fault_of(self, scope: Scope, *, is_allowed: bool) -> HeadFault | None:
        """`is_allowed` says that it comes from a page whose origin may call the API."""
        head, repeated = _judged(scope)
        if repeated is not None:
            return HeadFault.REPEATED
        host = head.get(b"host")
        is_public = not self._is_on_loopback
        # Browsers always send a Host; what sends none is a probe of HTTP/1.0.
        if self._has_names and host is not None and not calls_loopback(host):
            if host_name(host) in self._allowed_names:
                is_public = True
            elif not _calls_own_address(host, scope):
                return HeadFault.HOST
        if scope["method"] in _SAFE_METHODS:
            return None
        content_type = head.get(b"content-type", b"").partition(b";")[0].strip().lower()
        is_form = content_type == _FORM_TYPE and scope["path"] in FORM_ROUTES
        is_foreign = is_of_other_origin(head.get(b"sec-fetch-site"), head.get(b"origin"), host)
        if is_foreign and not is_allowed and not (is_public and content_type and not is_form):
            return HeadFault.ORIGIN
        if content_type and not (_is_json(content_type) or is_form):
            return HeadFault.CONTENT_TYPE
        if head.get(b"content-encoding", b"").lower() not in (b"", b"identity", GZIP):
            return HeadFault.CONTENT_ENCODING
        return None


def _judged(scope: Scope) -> tuple[dict[bytes, bytes], bytes | None]:
    """Return the headers that matter here, and which of those that come once comes again. Another one that
    does is a list, which none of them may be."""
    head: dict[bytes, bytes] = {}
    repeated = None
    for name, value in scope["headers"]:
        if name in _JUDGED:
            if name not in head:
                head[name] = value
            elif name in _SINGLE:
                repeated = name
            else:
                head[name] = b"%b, %b" % (head[name], value)
    return head, repeated


def _calls_own_address(host: bytes, scope: Scope) -> bool:
    """Whether it names the address that it came to, as probes of a pod do. No name was pointed there."""
    server = scope.get("server")
    return server is not None and calls_address(host, server[0])


def _is_json(content_type: bytes) -> bool:
    if content_type in _JSON_TYPES:
        return True
    return content_type.startswith(b"application/") and content_type.endswith(b"+json")


def _refusal(fault: HeadFault, scope: Scope) -> tuple[HttpError, list[Header]]:
    """Return the error, and headers of its own."""
    head, repeated = _judged(scope)

    def shown(name: bytes) -> str:
        return head.get(name, b"").decode("latin-1")[:_MOST_SHOWN]

    match fault:
        case HeadFault.HOST:
            message = (
                f"This router does not answer to '{shown(b'host')}'. It answers to localhost, 127.0.0.1 and"
                " [::1]; other names that clients call it by, through a proxy or not, stand in allowed_hosts"
                " (--allowed-hosts, KVASIR_ROUTER_ALLOWED_HOSTS)."
            )
            return HttpError(403, message, "permission_error", None, "host_not_allowed"), []
        case HeadFault.REPEATED:
            name = (repeated or b"").decode()
            message = f"The header '{name}' comes twice. Send it once."
            return HttpError(400, message, "invalid_request_error", None, "repeated_header"), []
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
