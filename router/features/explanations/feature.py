"""Explanations: finds why prompts were not read from cache, and keeps the explanations of a router.

Owns the hooks: an explanation begins when its request is prepared, and is stored when that has ended. The
causes of misses are found even where explanations are off, for the metrics and the live page.
"""

from collections.abc import Iterable, Sequence

from starlette.routing import Route

from replicas.protocol.cluster_secret import ClusterSecret
from router.api.api_request import ApiRequest, Prompt
from router.api.context import ApiContext
from router.edge.http import Header
from router.explain.miss_explainer import MissExplainer
from router.explain.prompt_memory import PromptMemory
from router.feature import Feature
from router.features.explanations.exchange import ExplanationExchange
from router.features.explanations.place_search import PlaceSearch
from router.features.explanations.request_explanation import RequestExplanation
from router.features.explanations.routes import ExplanationRoutes
from router.features.explanations.store import ExplanationStore
from router.served import ServedRequest
from router.shared.instruments import Instrument

BODIES_PART = 4
"""Bodies in which a place may be searched take at most this part of the memory, beside it."""


class Explanations(Feature):
    """`redis_url` and `secret` are what routers ask each other by; without them each tells its own."""

    def __init__(
        self, context: ApiContext, redis_url: str | None = None, secret: ClusterSecret | None = None
    ) -> None:
        key = context.rng.getrandbits(128).to_bytes(16, "little")
        self.memory = PromptMemory(context.config.explain_bytes, key)
        self.explanations = ExplanationStore(self.memory)
        self._explainer = MissExplainer(self.memory, context.index_of)
        self._places = PlaceSearch(context.config.explain_bytes // BODIES_PART)
        self._index_of = context.index_of
        exchange = None
        if self.memory.is_on and redis_url is not None and secret is not None:
            exchange = ExplanationExchange(redis_url, secret, self.explanations.find)
        self.store = exchange
        self._routes = ExplanationRoutes(context, self.explanations, exchange)

    def instruments(self) -> Iterable[Instrument]:
        yield from self.explanations.instruments()
        yield from self._places.instruments()

    def client_routes(self) -> Sequence[Route]:
        return self._routes.client_routes()

    def operator_routes(self) -> Sequence[Route]:
        return self._routes.operator_routes()

    async def close(self) -> None:
        self._places.close()

    def prepared(self, request: ApiRequest, body: bytes) -> None:
        if self.memory.is_on:
            self._of(request).begin(body)

    def started(self, request: ApiRequest, prompt: Prompt) -> None:
        self._of(request).read(prompt)

    def headers(self, request: ApiRequest) -> Sequence[Header]:
        begun: RequestExplanation | None = request.state.get(self)
        return () if begun is None or request.error is not None else begun.headers()

    def ended(self, request: ApiRequest, served: ServedRequest) -> None:
        begun: RequestExplanation | None = request.state.get(self)
        if begun is not None:
            begun.end(served)

    def _of(self, request: ApiRequest) -> RequestExplanation:
        found: RequestExplanation | None = request.state.get(self)
        if found is None:
            found = request.state[self] = RequestExplanation(
                self.explanations,
                self._explainer,
                self._places,
                request,
                self._index_of(request.model.card.name),
            )
        return found
