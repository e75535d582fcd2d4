"""GET /live/…: the fleet, the prefixes and the last decisions as JSON, for the page at `/`.

Owns the routes, and that they cost little: nothing is computed unless it is asked for, what was computed is
told to everybody who asks within the same moment, and long walks let others run in between. Shapes are
`router/features/live_page/live_view.py`'s.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from replicas.protocol.blocks import BlockHash
from replicas.protocol.status import ReplicaId
from router.api.access import AdminAccess, AdminGuard, admin_access
from router.api.api_request import ApiRequest
from router.api.context import ApiContext
from router.api.control import ControlRoutes
from router.api.json_body import encode_json
from router.edge.http_error import HttpError
from router.explain.prefix_tree import PrefixNode
from router.feature import Feature
from router.features.live_page import live_view
from router.features.live_page.live_view import LiveReplica
from router.features.live_page.page_files import page_routes
from router.features.live_page.recent import Recent
from router.served import ServedRequest

STATE_SECONDS = 0.5
PREFIXES_SECONDS = 1.5
"""For this long the same answer is given again instead of a new one."""


class Mirror(Protocol):
    """A router's copy of one model's block index."""

    @property
    def num_entries(self) -> int: ...
    @property
    def num_predictions(self) -> int: ...
    @property
    def lag_seconds(self) -> float: ...
    @property
    def is_connected(self) -> bool: ...


class LiveFleet(Protocol):
    """The fleet as the page sees it. `overlaps` has leading blocks of a chain by replica, for a model's
    name."""

    @property
    def name(self) -> str: ...
    def replicas(self) -> Sequence[LiveReplica]: ...
    def overlaps(self, model: str, block_hashes: Sequence[BlockHash], /) -> Mapping[ReplicaId, int]: ...
    def mirrors(self) -> Mapping[str, Mirror]: ...


class Prefixes(Protocol):
    """The prefixes of prompts that a router has seen."""

    @property
    def num_nodes(self) -> int: ...
    @property
    def num_forgotten_nodes(self) -> int: ...
    def most_used(self, count: int, /) -> list[PrefixNode]: ...
    def recent(self, count: int, /) -> list[PrefixNode]: ...


class _KeptAnswer:
    """An answer that is made at most once in a while, by one asker at a time."""

    def __init__(self, seconds: float, make: Callable[[], Awaitable[Any]]) -> None:
        self._seconds = seconds
        self._make = make
        self._lock = asyncio.Lock()
        self._content: bytes | None = None
        self._made_at = 0.0

    async def get(self) -> bytes:
        async with self._lock:
            if self._content is None or time.monotonic() - self._made_at >= self._seconds:
                self._content = encode_json(await self._make())
                self._made_at = time.monotonic()
            return self._content


class LivePage(Feature):
    """Records requests from now on, unless no client may see the page."""

    def __init__(self, context: ApiContext, fleet: LiveFleet, prefixes: Prefixes) -> None:
        self._context = context
        self._fleet = fleet
        self._access = admin_access(context.config)
        self._recent = Recent(lambda model: context.catalog.get(model).card.block_size)
        self.is_on = self._access is not AdminAccess.NOBODY
        self._started_at = context.wall_clock()
        self._prefixes_seen = prefixes
        self._state = _KeptAnswer(STATE_SECONDS, self._make_state)
        self._prefixes = {
            "used": _KeptAnswer(PREFIXES_SECONDS, lambda: self._make_prefixes(prefixes.most_used)),
            "recent": _KeptAnswer(PREFIXES_SECONDS, lambda: self._make_prefixes(prefixes.recent)),
        }

    def ended(self, request: ApiRequest, served: ServedRequest) -> None:
        self._recent.observe(served)

    def operator_routes(self) -> Sequence[Route]:
        guard = [Middleware(AdminGuard, access=self._access)]
        plain = ControlRoutes(self._context).index
        return [
            *page_routes(self._access, plain),
            Route("/live/state", self.state, methods=["GET"], middleware=guard),
            Route("/live/prefixes", self.prefixes, methods=["GET"], middleware=guard),
            Route("/live/decisions", self.decisions, methods=["GET"], middleware=guard),
            Route("/live/decisions/{number}", self.decision, methods=["GET"], middleware=guard),
        ]

    async def state(self, request: Request) -> Response:
        return _json(await self._state.get())

    async def prefixes(self, request: Request) -> Response:
        kept = self._prefixes.get(request.query_params.get("order", "used"))
        if kept is None:
            return _refuse(
                HttpError(400, "'order' must be used or recent.", "invalid_request_error", "order")
            )
        return _json(await kept.get())

    async def decisions(self, request: Request) -> Response:
        """Return decisions after the number `after`; only recent ones are kept."""
        after = _number(request.query_params.get("after", "0"))
        if after is None:
            return _refuse(HttpError(400, "'after' must be a number.", "invalid_request_error", "after"))
        rows = [live_view.decision_data(decision) for decision in self._recent.decisions(after)]
        return _json(encode_json({"num_decisions": self._recent.num_decisions, "decisions": rows}))

    async def decision(self, request: Request) -> Response:
        number = _number(request.path_params["number"])
        decision = None if number is None else self._recent.decision(number)
        if decision is None:
            return _refuse(HttpError(404, "This decision is no longer kept.", "invalid_request_error"))
        return _json(encode_json(live_view.explained_data(decision)))

    async def _make_state(self) -> dict[str, Any]:
        now = self._context.wall_clock()
        start, slots = self._recent.slots(now)
        replicas = self._fleet.replicas()
        return {
            "now": now,
            "router": {
                "name": self._fleet.name,
                "since": self._started_at,
                "policy": self._context.config.policy,
                "in_flight": self._context.in_flight.num,
                "knows_programs": "programs" not in self._context.config.off,
            },
            "index": [
                {
                    "model": model,
                    "entries": mirror.num_entries,
                    "predictions": mirror.num_predictions,
                    "lag_seconds": mirror.lag_seconds,
                    "is_connected": mirror.is_connected,
                }
                for model, mirror in self._fleet.mirrors().items()
            ],
            "num_replicas": len(replicas),
            "replicas": live_view.replicas_data(replicas, slots),
            "slots": live_view.slots_data(start, slots),
            "num_decisions": self._recent.num_decisions,
        }

    async def _make_prefixes(self, choose: Callable[[int], list[PrefixNode]]) -> dict[str, Any]:
        # Taken in one turn; later ones may find the tree changed, all but a node's end and its chain.
        nodes = choose(live_view.MAX_NODES)
        rows = [live_view.node_data(node) for node in nodes]
        frontier = live_view.frontier(nodes)
        depths = {}
        work = self._context.turns.long_work()
        for node in frontier:
            held = self._fleet.overlaps(node.root.namespace.model, node.chain())
            depths[node.number] = {replica_id: held[replica_id] * node.block_size for replica_id in held}
            await work.give_way()
        for row in sorted(rows, key=lambda row: -row["end"]):
            live_view.add_holders(row, depths)
            await work.give_way()
        return {
            "now": self._context.wall_clock(),
            "nodes": rows,
            "num_nodes": self._prefixes_seen.num_nodes,
            "num_forgotten": self._prefixes_seen.num_forgotten_nodes,
        }


def _number(text: str) -> int | None:
    """No decision has more digits, and Python reads some thousands at the most."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None


def _json(content: bytes) -> Response:
    return Response(content, headers={"cache-control": "no-store"}, media_type="application/json")


def _refuse(error: HttpError) -> Response:
    return Response(error.body(), error.status, media_type="application/json")
