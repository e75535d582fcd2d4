"""FleetSource: a router's own view of its fleet, for the page at `/`.

Owns nothing: it asks membership, routing table and mirrors, all in memory, whenever it is asked.
"""

from collections.abc import Mapping, Sequence

from replicas.protocol.blocks import BlockHash
from replicas.protocol.status import ReplicaId, Role
from router.errors import UnknownModel
from router.features.live_page.live_view import LiveReplica
from router.fleet.index_mirror import IndexMirror
from router.fleet.membership import Member, Membership
from router.routing.table import RoutingTable

NOT_CONNECTED = "not connected"
"""It has a lease, but no stream: nothing is sent there."""


class FleetSource:
    """`name` tells this router process from others."""

    def __init__(
        self, name: str, membership: Membership, table: RoutingTable, mirrors: Mapping[str, IndexMirror]
    ) -> None:
        self.name = name
        self._membership = membership
        self._table = table
        self._mirrors = mirrors

    def replicas(self) -> Sequence[LiveReplica]:
        """By name."""
        members = sorted(self._membership.members(), key=lambda member: member.record.replica_id)
        return [self._view(member) for member in members]

    def _view(self, member: Member) -> LiveReplica:
        record, card = member.record, member.card
        latest = self._table.loads.latest(record.replica_id)
        load, num_on_the_way = (record.load, 0) if latest is None else latest
        return LiveReplica(
            replica_id=record.replica_id,
            model=member.model,
            engine=None if card is None else card.engine,
            block_size=None if card is None else card.block_size,
            epoch=record.epoch,
            address=record.address,
            state=record.state.value if member.is_routed else NOT_CONNECTED,
            load=load,
            num_on_the_way=num_on_the_way,
            role=None if card is None or card.role is Role.BOTH else card.role,
            complaint=member.complaint or self._table.doubt(record.replica_id),
        )

    def overlaps(self, model: str, block_hashes: Sequence[BlockHash]) -> Mapping[ReplicaId, int]:
        """Leading blocks by replica; of a sparse model those that full attention holds, if that is more than
        can be resumed."""
        try:
            found = self._table.index(model).overlaps(block_hashes)
        except UnknownModel:
            return {}
        if not found.reach:
            return found
        reached = {each: depth for depth, mask in found.reach for each in found.slots.of(mask)}
        return {each: max(found.depth(each), reached.get(each, 0)) for each in {*found, *reached}}

    def mirrors(self) -> Mapping[str, IndexMirror]:
        self._table.end_lingering()
        return self._mirrors
