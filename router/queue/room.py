"""Room: whether a replica would begin a prompt soon, and how long it needs for one.

Owns the rule. Knows neither waiters nor tenants.

    prompts that it has take less than the target    a step or two: else they would only wait there instead
    a place in its batch is free, or nearly so
    requests that end soon leave enough KV blocks for it, or nothing runs there

Several routers see room at the same moment, and each other's prompts only later. So a router adds a guess of
what the others are sending: its own part that is on its way, times their requests over its own.

In a shared fleet, a tenant above its share leaves some blocks and places free. Otherwise a flood of long
answers would hold them all, and newcomers would wait until some end.
"""

from dataclasses import dataclass

from replicas.protocol.status import ReplicaId
from replicas.protocol.ways import num_image_tokens_left
from router.routing.decision import RoutingRequest
from router.routing.table import RoutingTable

DEFAULT_TOKEN_SECONDS = 1e-4

NUM_NEXT = 2
"""Requests beyond a full batch that a replica may have, so that a place that gets free is taken at once."""


@dataclass(frozen=True, slots=True)
class Room:
    table: RoutingTable
    target_seconds: float

    def token_seconds(self, replica_id: ReplicaId) -> float:
        """Seconds per prompt token there."""
        return self.table.load(replica_id).prefill_seconds_per_token or DEFAULT_TOKEN_SECONDS

    def wait_seconds(self, replica_id: ReplicaId, num_tokens: int) -> float:
        """Seconds for the prompts that it has, and until there is room for another one of `num_tokens`. It is
        counted whole: what is cached of it is seldom held by requests that run."""
        load = self.table.load(replica_id)
        seconds = load.num_pending_tokens * (load.prefill_seconds_per_token or DEFAULT_TOKEN_SECONDS)
        seconds += load.num_pending_image_tokens * (load.encode_seconds_per_token or 0.0)
        return seconds + load.room_seconds(num_tokens)

    def prompt_seconds(self, replica_id: ReplicaId, request: RoutingRequest, num_uncached: int) -> float:
        """Seconds for this prompt there, with `num_uncached` tokens computed."""
        load = self.table.load(replica_id)
        seconds = num_uncached * (load.prefill_seconds_per_token or DEFAULT_TOKEN_SECONDS)
        if not request.media:
            return seconds
        num_image_tokens = num_image_tokens_left(request.media, request.num_tokens - num_uncached)
        return seconds + num_image_tokens * (load.encode_seconds_per_token or 0.0)

    def has_full_batch(self, replica_id: ReplicaId, spared: float = 0.0) -> bool:
        """Whether a request would wait there for another to end, however short its prompt is. `spared` is the
        part of the places that is left free for others."""
        card = self.table.card(replica_id)
        if card is None or card.max_running <= 0:
            return False
        num_spared = round(spared * card.max_running) if spared else 0
        most = card.max_running - num_spared if num_spared else card.max_running + NUM_NEXT
        return self.table.load(replica_id).num_requests >= most

    def is_full(self, replica_id: ReplicaId) -> bool:
        """Whether there is no room for any prompt, however short."""
        if not self.table.load(replica_id).num_requests:
            return False
        seconds = self.wait_seconds(replica_id, 0) + self._unseen_seconds(replica_id)
        return seconds > self.target_seconds or self.has_full_batch(replica_id)

    def is_there(self, replica_id: ReplicaId, num_tokens: int, *, spared: float = 0.0) -> bool:
        """`spared` is the part of its KV blocks that is left free for others."""
        load = self.table.load(replica_id)
        if not load.num_requests:
            return True
        if self.is_full(replica_id):
            return False
        card = self.table.card(replica_id)
        if card is None or load.num_room_tokens is None:
            return True
        num_tokens += int(spared * card.num_blocks * card.block_size)
        if num_tokens <= load.num_room_tokens:
            return True
        return 0.0 < load.room_seconds(num_tokens) <= self.target_seconds

    def _unseen_seconds(self, replica_id: ReplicaId) -> float:
        """Guess the time of the prompts that other routers are sending there now."""
        loads, load = self.table.loads, self.table.load(replica_id)
        num_own, latest = loads.num_places_at(replica_id), loads.latest(replica_id)
        if latest is None or not 0 < num_own < load.num_requests:
            return 0.0
        num_sent_tokens = load.num_pending_tokens - latest[0].num_pending_tokens
        num_others = load.num_requests - num_own
        return num_others / num_own * num_sent_tokens * self.token_seconds(replica_id)
