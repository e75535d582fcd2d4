"""NamedCacheFeature: named caches as a part of a router.

Owns which requests may name one, and which routes there are.
"""

from collections.abc import Mapping, Sequence

from starlette.routing import Route

from replicas.protocol.cluster_secret import ClusterSecret
from router.api.api_request import Prepare
from router.api.chats import prepare_chats
from router.api.context import ApiContext
from router.api.gemini.paths import GENERATE_CONTENT, VERSIONS
from router.api.openai.completions import prepare_completion
from router.feature import Feature
from router.features.named_caches.bounds import CacheBounds
from router.features.named_caches.gemini_routes import GeminiCacheRoutes, with_cached_contents
from router.features.named_caches.named_caches import NamedCaches
from router.features.named_caches.record import CacheKind
from router.features.named_caches.requests import with_caches
from router.features.named_caches.routes import CacheRoutes


class NamedCacheFeature(Feature):
    """`store` is None where there are none: without a secret prompts are not written to Redis."""

    store: NamedCaches | None

    def __init__(self, context: ApiContext, store: NamedCaches | None) -> None:
        self._context = context
        self.store = store

    @classmethod
    def open(cls, context: ApiContext, secret: ClusterSecret | None) -> "NamedCacheFeature":
        config = context.config
        if secret is None or not config.max_caches:
            return cls(context, None)
        bounds = CacheBounds(
            num_caches=config.max_caches,
            bytes_per_cache=config.max_cache_bytes,
            num_bytes=config.all_caches_bytes,
            memory_bytes=config.cache_memory_bytes,
        )
        return cls(context, NamedCaches(config.redis_url, secret, bounds))

    def preparers(self) -> Mapping[str, Prepare]:
        return {
            "/v1/chat/completions": with_caches(self.store, CacheKind.CHAT, prepare_chats("chat")),
            "/v1/completions": with_caches(self.store, CacheKind.COMPLETION, prepare_completion),
            GENERATE_CONTENT: with_cached_contents(self.store),
        }

    def client_routes(self) -> Sequence[Route]:
        own = CacheRoutes(self._context, self.store)
        gemini = GeminiCacheRoutes(self._context, self.store)
        return [
            *own.routes("/v1/caches"),
            *(route for version in VERSIONS for route in gemini.routes(f"{version}/cachedContents")),
        ]
