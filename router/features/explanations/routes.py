"""GET /v1/cache/explain/{id}: why the prompt of a request was, or was not, read from cache.

Owns the routes. Tenants are told of their own requests, by a key with the right `explain`; for all others
there is no such request. Operators name the tenant: GET /explain/tenants/{tenant}/{id}. An explanation has
hashes, counts, positions and paths, and no text.
"""

from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.access import AdminGuard, admin_access
from router.api.context import ApiContext
from router.api.json_body import encode_json
from router.caller import Right, caller_of
from router.errors import ExplanationGone, NotAllowed
from router.features.explanations.answer import answer_of
from router.features.explanations.exchange import ExplanationExchange
from router.features.explanations.store import ExplanationStore

MAX_ID = 256


class ExplanationRoutes:
    """An unknown tenant is answered like an unknown id. With an `exchange`, other routers are asked."""

    def __init__(
        self, context: ApiContext, store: ExplanationStore, exchange: ExplanationExchange | None
    ) -> None:
        self._context = context
        self._store = store
        self._exchange = exchange

    def client_routes(self) -> Sequence[Route]:
        return [Route("/v1/cache/explain/{id}", self.explain, methods=["GET"])]

    def operator_routes(self) -> Sequence[Route]:
        guard = [Middleware(AdminGuard, access=admin_access(self._context.config))]
        path = "/explain/tenants/{tenant}/{id}"
        return [Route(path, self.explain_any, methods=["GET"], middleware=guard)]

    async def explain(self, request: Request) -> Response:
        caller = caller_of(request.scope)
        with self._context.hold_place(request.scope):
            if not caller.may(Right.EXPLAIN):
                raise NotAllowed("This key may not have requests explained: it lacks the right 'explain'.")
            return await self._answer(caller.tenant.name, request.path_params["id"])

    async def explain_any(self, request: Request) -> Response:
        asked = request.path_params
        with self._context.hold_place(request.scope):
            return await self._answer(asked["tenant"], asked["id"])

    async def _answer(self, tenant: str, asked: str) -> Response:
        """Raises ExplanationGone."""
        found = None
        if max(len(tenant), len(asked)) <= MAX_ID:
            exchange = self._exchange
            found = await exchange.ask(tenant, asked) if exchange else self._store.find(tenant, asked)
        if found is None:
            raise ExplanationGone(f"Nothing is known of a request or answer '{asked[:60]}'.")
        content = encode_json(answer_of(found))
        return Response(content, headers={"cache-control": "no-store"}, media_type="application/json")
