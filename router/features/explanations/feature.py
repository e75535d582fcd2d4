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
from router.explain.explanation import header_of
from router.explain.miss_explainer import MissExplainer
from router.feature import Feature
from router.features.explanations.exchange import ExplanationExchange
from router.features.explanations.request_explanation import RequestExplanation
from router.features.explanations.routes import ExplanationRoutes
from router.features.explanations.store import ExplanationStore
from router.served import ServedRequest
from router.shared.instruments import Instrument


class Explanations(Feature):
    """`redis_url` and `secret` are what routers ask each other by; without them each tells its own."""

    def __init__(
        self, context: ApiContext, redis_url: str | None = None, secret: ClusterSecret | None = None
    ) -> None:
        self.explainer = MissExplainer(
            lambda model: context.catalog.get(model).card.block_size, context.index_of
        )
        key = context.rng.getrandbits(128).to_bytes(16, "little")
        self.explanations = ExplanationStore(context.config.explain_bytes, key)
        exchange = None
        if context.config.explain_bytes and redis_url is not None and secret is not None:
            exchange = ExplanationExchange(redis_url, secret, self.explanations.find)
        self.store = exchange
        self._routes = ExplanationRoutes(context, self.explanations, exchange)

    def instruments(self) -> Iterable[Instrument]:
        return self.explanations.instruments()

    def client_routes(self) -> Sequence[Route]:
        return self._routes.client_routes()

    def operator_routes(self) -> Sequence[Route]:
        return self._routes.operator_routes()

    async def close(self) -> None:
        self.explanations.close()

    def prepared(self, request: ApiRequest, body: bytes) -> None:
        if self.explanations.remembered.is_on:
            begun = request.state[self] = RequestExplanation(self.explanations, self.explainer, request)
            begun.begin(body)

    def started(self, request: ApiRequest, prompt: Prompt) -> None:
        begun: RequestExplanation | None = request.state.get(self)
        if begun is not None:
            begun.read(prompt)
        elif prompt.usage is not None:
            prompt.misses = self.explainer.misses(
                prompt.generation, prompt.decision, prompt.usage, decided_at=request.prepared_at
            )

    def headers(self, request: ApiRequest) -> Sequence[Header]:
        begun: RequestExplanation | None = request.state.get(self)
        found = [] if begun is None or request.error is not None else begun.prompts_so_far()
        return [(b"x-kvasir-cache", header_of(found))] if found else []

    def ended(self, request: ApiRequest, served: ServedRequest) -> None:
        begun: RequestExplanation | None = request.state.get(self)
        if begun is not None:
            begun.end(served.error)
        self.explainer.observe(served)
