"""Feature: a part of a router that is not on the way of every request.

Owns the contract: what such a part may add. By default it adds nothing.
"""

from collections.abc import Iterable

from starlette.routing import Route

from router.shared.instruments import Instrument


class Feature:
    """`run()` as a task of the router's, `close()` when no request is left."""

    def instruments(self) -> Iterable[Instrument]:
        return ()

    def client_routes(self) -> Iterable[Route]:
        return ()

    def operator_routes(self) -> Iterable[Route]:
        """Routes of the operators' listener, where there is one."""
        return ()

    async def run(self) -> None:
        """Work in the background until cancelled."""

    async def close(self) -> None:
        """Let go of connections and threads."""
