"""POST /explain/v1/…: what would become of a request, without running it.

Owns the route, which is open to those that may see the page at `/`. The body is that of the route that it is
about, and goes through the same preparation.
"""

from collections.abc import Awaitable, Callable, Mapping

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.access import AdminAccess, AdminGuard
from router.api.api_request import ApiRequest, Prepare
from router.api.context import ApiContext
from router.api.json_body import encode_json
from router.explain.preview import preview_data


class PreviewRoutes:
    """`prepares` has what prepares a request, by its route."""

    def __init__(self, context: ApiContext, access: AdminAccess, prepares: Mapping[str, Prepare]) -> None:
        self._context = context
        self._access = access
        self._prepares = prepares

    def routes(self) -> list[Route]:
        guard = [Middleware(AdminGuard, access=self._access)]
        return [
            Route("/explain" + path, self._endpoint(prepare), methods=["POST"], middleware=guard)
            for path, prepare in self._prepares.items()
        ]

    def _endpoint(self, prepare: Prepare) -> Callable[[Request], Awaitable[Response]]:
        context = self._context

        async def explain(request: Request) -> Response:
            async with context.body(request.scope, request.receive) as body:
                asked = ApiRequest(request.scope, body)
                await prepare(context, asked)
            previews = [
                preview_data(
                    prompt.generation,
                    context.dispatcher.preview(prompt.generation),
                    card=asked.model.card,
                    index_stride=context.config.index_stride,
                )
                for prompt in asked.prompts
            ]
            return Response(encode_json({"prompts": previews}), media_type="application/json")

        return explain
