"""Feature: a part of a router beside the pipeline of requests.

Owns the contract: what such a part may add, and when its hooks are called. By default it adds nothing.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from starlette.routing import Route

from router.shared.instruments import Instrument

if TYPE_CHECKING:
    from replicas.protocol.blocks import PublishedBeginning
    from router.api.api_request import ApiRequest, Prepare, Prompt
    from router.api.prepare import PreparedChat
    from router.edge.http import Header
    from router.prompt.catalog import ServedModel
    from router.served import ServedRequest


class Feature:
    """Instruments, routes, a background task, and hooks into each request that generates.

    Hooks run on the event loop, in the request's own task, and never raise unless they say so. A hook is
    called only if a feature overrides it. A feature keeps its notes on a request in `request.state`, under
    the feature itself.
    """

    is_on = True
    """Whether its hooks are called. Its instruments and routes are there all the same."""
    store: "Feature | None" = None
    """The part of it that works in the background, if that is on: added with it."""

    def instruments(self) -> Iterable[Instrument]:
        return ()

    def client_routes(self) -> Iterable[Route]:
        return ()

    def preparers(self) -> "Mapping[str, Prepare]":
        """Ways to prepare requests, by the route's path, that replace the dialect's own."""
        return {}

    def operator_routes(self) -> Iterable[Route]:
        """Routes of the operators' listener, where there is one."""
        return ()

    async def run(self) -> None:
        """Work in the background until cancelled."""

    async def close(self) -> None:
        """Close connections and threads, after the last request has ended."""

    def arrived(self, request: "ApiRequest") -> None:
        """Hook: its head is there, and nothing of its body is read. Raises a RouterError to refuse it."""

    def beginning(self, model: "ServedModel", packed_tokens: bytes) -> "PublishedBeginning | None":
        """Hook: the beginning of a prompt that it shares with every tenant, if any."""
        return None

    async def encoded(
        self, request: "ApiRequest", model: "ServedModel", chat: "PreparedChat"
    ) -> "PreparedChat":
        """Hook: a conversation's prompt is encoded. Returns the one that is used in its place."""
        return chat

    def prepared(self, request: "ApiRequest", body: bytes) -> None:
        """Hook: the request can run. `body` is as the client sent it."""

    def admitted(self, request: "ApiRequest") -> AbstractContextManager[None] | None:
        """Hook: held while replicas serve it. Raises a RouterError to refuse it."""
        return None

    def started(self, request: "ApiRequest", prompt: "Prompt") -> None:
        """Hook: a replica has reported the usage of one prompt, with its first token."""

    def headers(self, request: "ApiRequest") -> "Iterable[Header]":
        """Hook: headers of its answer or error, called when that begins. It may not have been prepared."""
        return ()

    def answered(self, request: "ApiRequest") -> None:
        """Hook: all of its answer is there, and its client has not received the end."""

    def ended(self, request: "ApiRequest", served: "ServedRequest") -> None:
        """Hook: the request has ended, whatever its end was. It may not have been prepared."""


class Hooks:
    """The hooks that the features of a router override, by stage, in the features' order."""

    def __init__(self) -> None:
        self.arrived: list[Callable[[ApiRequest], None]] = []
        self.beginning: list[Callable[[ServedModel, bytes], PublishedBeginning | None]] = []
        self.encoded: list[Callable[[ApiRequest, ServedModel, PreparedChat], Awaitable[PreparedChat]]] = []
        self.prepared: list[Callable[[ApiRequest, bytes], None]] = []
        self.admitted: list[Callable[[ApiRequest], AbstractContextManager[None] | None]] = []
        self.started: list[Callable[[ApiRequest, Prompt], None]] = []
        self.headers: list[Callable[[ApiRequest], Iterable[Header]]] = []
        self.answered: list[Callable[[ApiRequest], None]] = []
        self.ended: list[Callable[[ApiRequest, ServedRequest], None]] = []

    def add(self, feature: Feature) -> None:
        stages: dict[str, list[Any]] = vars(self)
        for stage, hooks in stages.items():
            if getattr(type(feature), stage) is not getattr(Feature, stage):
                hooks.append(getattr(feature, stage))
