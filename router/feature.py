"""Feature: a part of a router that is not on the way of every request.

Owns the contract: what such a part may add. By default it adds nothing.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from starlette.routing import Route

from router.shared.instruments import Instrument

if TYPE_CHECKING:
    from router.api.asked import Prepare


class Feature:
    """`run()` as a task of the router's, `close()` when no request is left."""

    def instruments(self) -> Iterable[Instrument]:
        return ()

    def client_routes(self) -> Iterable[Route]:
        return ()

    def prepares(self) -> "Mapping[str, Prepare]":
        """Ways to prepare requests, by the route's path, that replace the dialect's own."""
        return {}

    def operator_routes(self) -> Iterable[Route]:
        """Routes of the operators' listener, where there is one."""
        return ()

    async def run(self) -> None:
        """Work in the background until cancelled."""

    async def close(self) -> None:
        """Let go of connections and threads."""
