"""GET /v1/cache/explain/{id}: why the prompt of a request was, or was not, read from cache.

Owns the routes. That one is for the tenant whose request it was, by a key that may explain; for all others
there is no such request, whether there is one or not. Operators name the tenant instead:
GET /explain/tenants/{tenant}/{id}, which is open to those that may see the page at `/`. A story has hashes,
counts, positions and paths, and no text. An id is known to the router that has served it, and the others ask
that one.
"""

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.access import AdminAccess, AdminGuard
from router.api.context import ApiContext
from router.api.json_body import encode_json
from router.caller import Right, caller_of
from router.errors import NotAllowed, StoryGone
from router.explain.story import Story, told

MAX_ID = 256


class StoryRoutes:
    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[Route]:
        return [Route("/v1/cache/explain/{id}", self.explain, methods=["GET"])]

    async def explain(self, request: Request) -> Response:
        context, caller = self._context, caller_of(request.scope)
        with context.hold_place(request.scope):
            if not caller.may(Right.EXPLAIN):
                raise NotAllowed("This key may not have requests explained: it lacks the right 'explain'.")
            return await _answer(context, caller.tenant.name, request.path_params["id"])


class OperatorStoryRoutes:
    """Explanations of any tenant, by name; an unknown name is answered like an unknown id."""

    def __init__(self, context: ApiContext, access: AdminAccess) -> None:
        self._context = context
        self._access = access

    def routes(self) -> list[Route]:
        guard = [Middleware(AdminGuard, access=self._access)]
        return [Route("/explain/tenants/{tenant}/{id}", self.explain, methods=["GET"], middleware=guard)]

    async def explain(self, request: Request) -> Response:
        asked = request.path_params
        with self._context.hold_place(request.scope):
            return await _answer(self._context, asked["tenant"], asked["id"])


async def _answer(context: ApiContext, tenant: str, asked: str) -> Response:
    """Raises StoryGone."""
    story = await _found(context, tenant, asked) if max(len(tenant), len(asked)) <= MAX_ID else None
    if story is None:
        raise StoryGone(f"Nothing is known of a request or answer '{asked[:60]}'.")
    return Response(
        encode_json(told(story)), headers={"cache-control": "no-store"}, media_type="application/json"
    )


async def _found(context: ApiContext, tenant: str, asked: str) -> Story | None:
    if context.story_exchange is None:
        return context.stories.find(tenant, asked)
    return await context.story_exchange.ask(tenant, asked)
