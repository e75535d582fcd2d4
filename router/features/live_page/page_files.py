"""The page at `/`: its files as they ship, read once when the process starts.

Owns their routes and headers. Programs that ask for `/` get JSON.
"""

import hashlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.access import AdminAccess, AdminGuard, refusal_of

INDEX = "index.html"

Endpoint = Callable[[Request], Awaitable[Response]]

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


FILES = read_files(Path(__file__).resolve().parent / "page")


def page_routes(access: AdminAccess, plain: Endpoint) -> Iterator[Route]:
    """`plain` answers for `/` where no page was asked for."""

    async def index(request: Request) -> Response:
        if "text/html" not in request.headers.get("accept", ""):
            response = await plain(request)
            response.headers["vary"] = "accept"
            return response
        refusal = refusal_of(access, request.scope)
        if refusal is None:
            return file_answer(request, FILES[INDEX])
        return Response(refusal.body(), refusal.status, {"vary": "accept"}, "application/json")

    yield Route("/", index, methods=["GET"])
    guard = Middleware(AdminGuard, access=access)
    for name, file in FILES.items():
        if name != INDEX:
            yield Route(f"/page/{name}", endpoint_of(file), methods=["GET"], middleware=[guard])


def endpoint_of(file: PageFile) -> Endpoint:
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
