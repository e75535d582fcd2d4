"""MetricsEndpoint: the controller's /metrics, at the address that the fleet file sets.

Owns the port. A port that is taken is a complaint, not an error: a fleet without a controller is worse than
one without metrics.
"""

import asyncio
import contextlib

from prometheus_client import CollectorRegistry

from replicas.observation.metrics import metrics_endpoint


class MetricsEndpoint:
    """`address` is where it serves; `complaint` says why it does not."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._place: tuple[str, int | None] | None = None
        self._served = contextlib.AsyncExitStack()
        self._moving = asyncio.Lock()
        self.address: str | None = None
        self.complaint: str | None = None

    async def serve(self, host: str, port: int | None) -> None:
        """Serve there and nowhere else. A repeated call retries a failure and otherwise does nothing."""
        async with self._moving:
            if self._place == (host, port) and self.complaint is None:
                return
            await self._close()
            self._place = (host, port)
            if port is None:
                return
            shown = f"[{host}]" if ":" in host else host
            try:
                endpoint = metrics_endpoint(self._registry, host, port)
                bound = await self._served.enter_async_context(endpoint)
            except (OSError, ValueError) as error:  # ValueError: a host that is no name at all
                reason = getattr(error, "strerror", None) or str(error)
                self.complaint = f"the controller serves no metrics on {shown}:{port}: {reason}"
            else:
                self.address = f"{shown}:{bound}"

    async def close(self) -> None:
        async with self._moving:
            await self._close()

    async def _close(self) -> None:
        self._place = self.address = self.complaint = None
        await self._served.aclose()
