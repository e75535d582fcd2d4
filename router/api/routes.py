"""Routes that answer at once, for Starlette: one handler per method, and answers in JSON."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.json_body import encode_json

Handler = Callable[[Request], Awaitable[Response]]


def by_method(path: str, **handlers: Handler) -> Route:
    """Return a route with a handler for each method; HEAD is answered like GET."""

    async def handle(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, handle, methods=list(handlers))


def json_response(content: Any, status: int = 200) -> Response:
    return Response(encode_json(content), status, media_type="application/json")
