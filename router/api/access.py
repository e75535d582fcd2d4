"""Guards a router's operator pages: the page at `/`, its data, and explanations.

Owns the rule and the refusal. All of these reveal whether a prefix is cached, which concerns only the
operator.

By default a client must be on loopback *and* have asked for loopback by name: a foreign page open in a
browser on this machine can point its own name here (DNS rebinding), but then the Host header has that name. A
proxy's requests come from loopback too. Most proxies say so in a header, and nginx, which need not, has long
spoken HTTP/1.0 by default. A proxy that speaks HTTP/1.1, sets its own Host and adds none of these headers
looks like a local client, and so does one that forwards bytes: behind such a proxy these pages belong on a
listener of their own (`admin_port`). A page of another site may link here, and nothing else.
"""

import enum
from collections.abc import Iterable, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from router.config import RouterConfig
from router.edge.http import send_whole
from router.edge.http_error import HttpError
from router.shared.origins import calls_loopback, is_loopback, is_of_other_origin


class AdminAccess(enum.StrEnum):
    LOOPBACK = "loopback"
    EVERYONE = "everyone"
    NOBODY = "nobody"


def admin_access(config: RouterConfig) -> AdminAccess:
    """A Unix socket has file permissions for who is on this machine, and no browser opens one."""
    access = AdminAccess(config.admin_access)
    if access is AdminAccess.LOOPBACK and config.admin_socket is not None:
        return AdminAccess.EVERYONE
    return access


_FORWARDED = (b"forwarded", b"via", b"x-real-ip")


def refusal_of(access: AdminAccess, scope: Scope) -> HttpError | None:
    """None for a caller that is let in."""
    if access is AdminAccess.EVERYONE or (access is AdminAccess.LOOPBACK and _is_local(scope)):
        return None
    return _REFUSALS[access]


def _is_local(scope: Scope) -> bool:
    peer = scope.get("client")
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    hosts = [value for name, value in headers if name == b"host"]
    if peer is None or not is_loopback(peer[0]) or len(hosts) != 1:
        return False
    if scope.get("http_version") == "1.0":
        return False
    if any(name in _FORWARDED or name.startswith(b"x-forwarded-") for name, _ in headers):
        return False
    return not _is_foreign(dict(headers)) and calls_loopback(hosts[0])


def _is_foreign(headers: Mapping[bytes, bytes]) -> bool:
    """Browsers say so. To follow a link is no more than to type the address."""
    if headers.get(b"sec-fetch-dest") == b"document":
        return False
    return is_of_other_origin(headers.get(b"sec-fetch-site"), headers.get(b"origin"), headers.get(b"host"))


_HOW = "start the router with admin_access=everyone (--admin-access, KVASIR_ROUTER_ADMIN_ACCESS)"

_REFUSALS = {
    AdminAccess.LOOPBACK: HttpError(
        403,
        "This is open to clients on the router's own machine that address it as localhost or 127.0.0.1; to"
        f" open it to everyone who can reach the port, {_HOW}.",
        "permission_error",
        None,
        "admin_access",
    ),
    AdminAccess.NOBODY: HttpError(
        403,
        "This is switched off here; to open it, start the router with admin_access=loopback or"
        " admin_access=everyone (--admin-access, KVASIR_ROUTER_ADMIN_ACCESS).",
        "permission_error",
        None,
        "admin_access",
    ),
}


class AdminGuard:
    """ASGI middleware of a route: lets in who is admitted, and refuses the others."""

    def __init__(self, app: ASGIApp, access: AdminAccess) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = refusal_of(self._access, scope)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await send_whole(send, refusal.status, refusal.headers(), refusal.body())
