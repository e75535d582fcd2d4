"""ApiKeys: the API keys of a router, from a file or from Redis.

Owns their source. `router/api/authenticator.py` asks for the caller of each request.
"""

import logging
from collections.abc import Iterator

from replicas.protocol.cluster_secret import ClusterSecret
from router.api.context import ApiContext
from router.caller import DEFAULT_TENANT
from router.config import RouterConfig
from router.feature import Feature
from router.features.api_keys.key_file import KeyFile
from router.features.api_keys.keys_in_force import KeysInForce
from router.features.api_keys.redis_keys import RedisKeys
from router.shared.instruments import Instrument

logger = logging.getLogger(__name__)


class ApiKeys(Feature):
    """Without keys, only its instruments are there, for alerts."""

    def __init__(self, context: ApiContext, secret: ClusterSecret | None) -> None:
        """Raises SettingsError."""
        config = context.config
        self._source: KeyFile | RedisKeys | None = None
        if config.has_keys:
            self._keys = context.keys = KeysInForce(context.clock)
            self._source = _source(config, self._keys, secret)
            return
        self._keys = KeysInForce(lambda: 0.0)
        logger.warning(
            "there are no API keys: everyone who reaches this router is the one tenant %r, and can tell what "
            "the others have asked; set keys_file, for which `kvasir keys create` makes keys",
            DEFAULT_TENANT,
        )

    def instruments(self) -> Iterator[Instrument]:
        return self._keys.instruments()

    async def run(self) -> None:
        if self._source is not None:
            await self._source.follow()


def _source(config: RouterConfig, keys: KeysInForce, secret: ClusterSecret | None) -> KeyFile | RedisKeys:
    """Raises SettingsError."""
    if config.keys_file is not None:
        return KeyFile(config.keys_file, keys)
    assert secret is not None, "the settings have been checked"
    return RedisKeys(config.redis_url, secret, keys)
