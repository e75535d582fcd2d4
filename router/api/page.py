"""The page at `/`: its files as they ship, read once when the process starts.

Owns their headers. What the page shows comes from `router/features/live_page/`; programs that ask for `/`
get JSON.
"""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.access import AdminAccess, AdminGuard, refusal_of

INDEX = "index.html"

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

SECURITY_HEADERS = {
    # Names of models and keys come from strangers: nothing but our own files runs, and text never becomes
    # markup, not even by mistake.
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; object-src 'none';"
    " frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    media_type: str
    etag: str


def read_files(folder: Path) -> Mapping[str, PageFile]:
    files = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in MEDIA_TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
            files[path.name] = PageFile(content, MEDIA_TYPES[path.suffix], etag)
    return files


FILES = read_files(Path(__file__).resolve().parent.parent / "features" / "live_page" / "page")


class PageRoutes:
    """`plain` answers for `/` where no page was asked for."""

    def __init__(self, access: AdminAccess, plain: Callable[[Request], Awaitable[Response]]) -> None:
        self._access = access
        self._plain = plain

    def routes(self) -> list[Route]:
        guard = Middleware(AdminGuard, access=self._access)
        return [
            Route("/", self.index, methods=["GET"]),
            *(
                Route(f"/page/{name}", _endpoint(file), methods=["GET"], middleware=[guard])
                for name, file in FILES.items()
                if name != INDEX
            ),
        ]

    async def index(self, request: Request) -> Response:
        if "text/html" not in request.headers.get("accept", ""):
            response = await self._plain(request)
            response.headers["vary"] = "accept"
            return response
        refusal = refusal_of(self._access, request.scope)
        if refusal is None:
            return file_answer(request, FILES[INDEX])
        return Response(refusal.body(), refusal.status, {"vary": "accept"}, "application/json")


def _endpoint(file: PageFile) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return file_answer(request, file)

    return endpoint


def file_answer(request: Request, file: PageFile) -> Response:
    """Browsers ask each time whether they have the current one: a router may have been replaced."""
    headers = {**SECURITY_HEADERS, "etag": file.etag, "cache-control": "no-cache", "vary": "accept"}
    known = request.headers.get("if-none-match", "")
    if file.etag in (etag.strip().removeprefix("W/") for etag in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)
