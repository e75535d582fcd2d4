"""GET /openapi.json and /docs: what clients may ask of a router, for programs and for people.

Owns the two routes. The page's files are our own; nothing of it comes from anywhere else.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.features.live_page.page_files import FILES, INDEX, endpoint_of, read_files
from router.openapi.document import openapi_document

PAGE = "/docs"

ICON = "icon.svg"

_FILES = {ICON: FILES[ICON], **read_files(Path(__file__).resolve().parent / "docs_page")}


def docs_routes(passed: Callable[[], Iterable[str]] = tuple) -> list[Route]:
    """`passed` says which routes are passed on."""

    async def document(request: Request) -> Response:
        return Response(openapi_document(tuple(passed())), media_type="application/json")

    files = [
        Route(f"{PAGE}/{name}", endpoint_of(file), methods=["GET"])
        for name, file in _FILES.items()
        if name != INDEX
    ]
    return [
        Route("/openapi.json", document, methods=["GET"]),
        Route(PAGE, endpoint_of(_FILES[INDEX]), methods=["GET"]),
        *files,
    ]
