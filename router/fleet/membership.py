"""Membership: the replicas in the fleet now, with one open stream to each.

Owns the clients, and which replicas are in the routing table. It hears from a source (`registry_source.py`)
and from the streams themselves, which notice a death first.

    registry            stream               then
    lease, same epoch   up                   routed to
    lease, same epoch   broken               out of the table at once; connected again with back-off
    lease, same epoch   broken, had drained  out of the table; this incarnation does not come back
    lease, new epoch    -                    the old client is closed, a new one opened
    lease gone          silent or broken     closed and forgotten
    lease gone          frames keep coming   kept: the registry lost it, not the replica
    cannot be read      up / broken          as it is / as above
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from replicas.process.tls import RouterTls
from replicas.protocol.call_tokens import Audience, Caller, Role
from replicas.protocol.cluster_secret import ClusterSecret, Purpose
from replicas.protocol.keys import ReplicaRecord
from replicas.protocol.status import ModelCard, ReplicaId, ReplicaState, TokenizerBundle
from router.fleet.fleet_health import FleetHealth
from router.fleet.inflight import ReplicaLost
from router.fleet.registry_source import ReplicaRecords, ReplicaSource
from router.fleet.replica_client import ReplicaClient
from router.fleet.replica_words import Traffic
from router.routing.table import RoutingTable
from router.shared.instruments import Instrument, counter, gauge

logger = logging.getLogger(__name__)

MIN_BACKOFF_SECONDS = 0.05
MAX_BACKOFF_SECONDS = 2.0

PROOF_SECONDS = 2.0
"""A frame this recent proves life where the lease says nothing."""

COMING_BACK_SECONDS = 120.0
"""For this long after a model has lost its last replica, another is expected."""

OnModel = Callable[[ModelCard, TokenizerBundle], Awaitable[None] | None]
OnRecords = Callable[[str, Mapping[ReplicaId, ReplicaRecord]], None]
OnCards = Callable[[str, Sequence[tuple[ReplicaId, ModelCard]]], None]


class _RefusedReplica(Exception):
    """The replica cannot be routed to in its present state. The message says why."""


@dataclass(slots=True, eq=False)
class Member:
    """One incarnation of a replica. `client` is set while it is in the routing table."""

    model: str
    record: ReplicaRecord
    card: ModelCard | None = None
    card_digest: str = ""
    """The digest in its lease, before the card was asked for."""
    is_asked: bool = False
    """Its card has changed, and is being asked for."""
    client: ReplicaClient | None = None
    is_accepted: bool = False
    """It holds the model's identity: as long as one does, no other fingerprint takes the name."""
    is_refused: bool = False
    """It cannot be routed to in its present state."""
    complaint: str | None = None
    """The problem, and usually why it is not connected: one sentence or gRPC's words."""
    task: asyncio.Task[None] | None = None

    @property
    def is_routed(self) -> bool:
        return self.client is not None


def _cards(members: Sequence[Member]) -> list[tuple[ReplicaId, ModelCard]]:
    """In the order in which their replicas registered, which no clock decides and every router knows."""
    ready = [member for member in members if member.record.state is ReplicaState.READY]
    ready.sort(key=lambda member: (member.record.order, member.record.epoch))
    return [(member.record.replica_id, member.card) for member in ready if member.card is not None]


@dataclass(slots=True)
class _ModelMembers:
    """Properties on which replicas of one name must agree. None until the first was introduced."""

    identity: tuple[str, int] | None = None
    absent_since: float | None = None
    """Since when none of its replicas is routed to, once one was."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Membership:
    """Run `run()` as a task of the owner's.

    `on_model` is called before a model's first replica is routed to, and again when its fingerprint changes.
    `on_records` is called with each view and each change, with the replicas in the table, and then
    `on_cards` with the cards of those that take requests, the newest replica's last.
    """

    def __init__(
        self,
        source: ReplicaSource,
        table: RoutingTable,
        *,
        index_stride: int,
        on_model: OnModel,
        on_records: OnRecords | None = None,
        on_cards: OnCards | None = None,
        tls: RouterTls | None = None,
        secret: ClusterSecret | None = None,
        stall_seconds: float = 10.0,
        proof_seconds: float = PROOF_SECONDS,
    ) -> None:
        self._source = source
        self._table = table
        self._index_stride = index_stride
        self._on_model = on_model
        self._on_records = on_records
        self._on_cards = on_cards
        self._tls = tls
        self._call_key = None if secret is None else secret.key(Purpose.CALLS)
        self._stall_seconds = stall_seconds
        self._proof_seconds = proof_seconds
        self._members: dict[ReplicaId, Member] = {}
        self._models: dict[str, _ModelMembers] = {}
        self.registered: Collection[str] = ()
        """Names of the models that the registry has, also of those without a replica."""
        self.num_lost_streams = 0
        self.num_refused = 0
        self._traffic = Traffic()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            views = self._source.views()
            try:
                async for view in views:
                    self._apply(view, tasks)
            finally:
                if inspect.isasyncgen(views):
                    await views.aclose()

    def client(self, replica_id: ReplicaId) -> ReplicaClient | None:
        """Return the open client of a replica in the routing table."""
        member = self._members.get(replica_id)
        return None if member is None else member.client

    def outlook(self, model: str) -> FleetHealth:
        """Whether a model is likely to have a ready replica soon: the last one left a moment ago or is just
        leaving, or one has a lease and is being connected to."""
        known = self._models.get(model)
        since = None if known is None else known.absent_since
        is_coming = self._is_connecting(model) or self._is_leaving(model)
        if since is None:
            return FleetHealth(is_coming)
        away_seconds = asyncio.get_running_loop().time() - since
        return FleetHealth(is_coming or away_seconds < COMING_BACK_SECONDS, away_seconds)

    def _is_leaving(self, model: str) -> bool:
        states = [member.record.state for member in self._members.values() if member.model == model]
        return bool(states) and all(state is ReplicaState.DRAINING for state in states)

    def _is_connecting(self, model: str) -> bool:
        return any(
            member.model == model
            and member.record.state is ReplicaState.READY
            and not (member.is_routed or member.is_refused)
            for member in self._members.values()
        )

    def members(self) -> list[Member]:
        return list(self._members.values())

    @property
    def num_known(self) -> int:
        return len(self._members)

    @property
    def num_routed(self) -> int:
        return sum(member.is_routed for member in self._members.values())

    @property
    def num_refused_records(self) -> Mapping[str, int]:
        """Counted at the latest look."""
        return self._source.num_refused

    @property
    def num_malformed(self) -> int:
        return self._traffic.num_malformed

    def instruments(self) -> Iterator[Instrument]:
        traffic = self._traffic
        yield gauge("router_replicas_known", "Replicas that have a lease", lambda: self.num_known)
        yield gauge(
            "router_replicas",
            "Replicas that this router sends requests to",
            lambda: self.num_routed,
        )
        yield counter(
            "router_lost_streams_total",
            "Streams to replicas that were lost",
            lambda: self.num_lost_streams,
        )
        yield counter(
            "router_refused_replicas_total",
            "Replicas that this router refused to use",
            lambda: self.num_refused,
        )
        yield gauge(
            "router_refused_records",
            "Registry entries that the latest read ignored: malformed, unsigned, signed with "
            "another cluster secret (other_secret) or wrongly (forged), or replayed (old)",
            lambda: self.num_refused_records,
            "reason",
        )
        yield counter(
            "router_malformed_messages_total",
            "Messages from replicas that broke the contract and were ignored",
            lambda: traffic.num_malformed,
        )
        yield counter("router_frames_total", "Frames received from replicas", lambda: traffic.num_frames)
        yield counter(
            "router_submits_total",
            "Requests sent to replicas, attempts included",
            lambda: traffic.num_submits,
        )
        yield counter("router_aborts_total", "Aborts sent to replicas", lambda: traffic.num_aborts)
        yield from traffic.images.instruments()

    def _apply(self, view: ReplicaRecords, tasks: asyncio.TaskGroup) -> None:
        self.registered = view.keys()
        for member in self.members():
            self._review(member, view.get(member.model, {}).get(member.record.replica_id))
        for member in self._members.values():
            client, is_new = member.client, member.record.card_digest != member.card_digest
            if client is not None and is_new and not member.is_asked:
                member.is_asked = True
                tasks.create_task(self._ask_card(member, client), name=f"card of {client.replica_id}")
        for model, records in view.items():
            for replica_id, record in records.items():
                if replica_id not in self._members and record.state is ReplicaState.READY:
                    member = Member(model, record)
                    self._members[replica_id] = member
                    member.task = tasks.create_task(self._keep(member), name=f"replica {replica_id}")
        for name, known in self._models.items():
            if known.identity is not None:
                self._publish(name)

    def _review(self, member: Member, record: ReplicaRecord | None) -> None:
        if record is None:
            if self._proves_life(member):
                self._complain(member, "its lease is gone, but its stream is alive; it is kept")
            else:
                self._dismiss(member, "its lease is gone")
        elif (record.epoch, record.address) != (member.record.epoch, member.record.address):
            self._dismiss(member, f"it was restarted; its epoch is now {record.epoch}")
        elif record.state is ReplicaState.STOPPED:
            self._dismiss(member, "it has stopped")
        else:
            member.record = record
            if member.is_routed:
                member.complaint = None
            if record.state is ReplicaState.DRAINING and member.is_routed:
                self._table.set_draining(record.replica_id)
            elif member.is_routed:
                self._table.update_load_from_registry(record.replica_id, record.load)

    def _proves_life(self, member: Member) -> bool:
        quiet_seconds = None if member.client is None else member.client.quiet_seconds()
        return quiet_seconds is not None and quiet_seconds < self._proof_seconds

    def _dismiss(self, member: Member, reason: str) -> None:
        assert member.task is not None
        logger.info("replica %s leaves: %s", member.record.replica_id, reason)
        del self._members[member.record.replica_id]
        self._withdraw(member)
        member.task.cancel()

    def _withdraw(self, member: Member) -> None:
        """Out of the routing table, if it is in there."""
        if member.client is not None:
            member.client = None
            self._table.remove_replica(member.record.replica_id)
            self._publish(member.model)

    def _publish(self, model: str) -> None:
        routed = [member for member in self._members.values() if member.model == model and member.is_routed]
        known = self._models[model]
        if routed:
            known.absent_since = None
        elif known.absent_since is None:
            known.absent_since = asyncio.get_running_loop().time()
        if self._on_records is not None:
            self._on_records(model, {member.record.replica_id: member.record for member in routed})
        if self._on_cards is not None:
            self._on_cards(model, _cards(routed))

    async def _keep(self, member: Member) -> None:
        """Stay connected to one incarnation until it is dismissed."""
        num_failures = 0
        while True:
            client: ReplicaClient | None = None
            try:
                client = await self._client_of(member)
                await self._connect(member, client)
            except (_RefusedReplica, ReplicaLost) as error:
                member.is_refused = isinstance(error, _RefusedReplica)
                self._complain(member, str(error))
            except Exception as error:  # outermost frame of the task: one replica must not end the others
                reason = f"this router failed, its log says where: {error!r}"
                if member.complaint != reason:
                    logger.exception("replica %s cannot be connected", member.record.replica_id)
                member.complaint = reason
            finally:
                if client is not None:
                    await client.close()
            if client is not None and client.is_draining:
                return
            num_failures = 0 if client is not None and client.num_frames else num_failures + 1
            await asyncio.sleep(min(MAX_BACKOFF_SECONDS, MIN_BACKOFF_SECONDS * 2 ** min(num_failures, 10)))

    def _caller(self, record: ReplicaRecord) -> Caller | None:
        if self._call_key is None:
            return None
        return Caller(self._call_key, Role.ROUTER, Audience(record.replica_id, record.epoch))

    async def _client_of(self, member: Member) -> ReplicaClient:
        return ReplicaClient(
            member.record.replica_id,
            member.record.address,
            self._table.update_load,
            on_lost=lambda lost: self._lose(member, lost),
            on_draining=self._table.set_draining,
            stall_seconds=self._stall_seconds,
            traffic=self._traffic,
            tls=None if self._tls is None else await asyncio.to_thread(self._tls.current),
            caller=self._caller(member.record),
            epoch=member.record.epoch,
        )

    async def _connect(self, member: Member, client: ReplicaClient) -> None:
        """Describe, introduce, route to it; returns when the stream has ended."""
        record = member.record
        member.card_digest = record.card_digest
        card, _, replica_id, epoch = await client.describe(include_tokenizer=False)
        if (replica_id, epoch, card.name) != (record.replica_id, record.epoch, member.model):
            raise _RefusedReplica(
                f"at {record.address} is replica {replica_id} with epoch {epoch} and model {card.name},"
                f" not {record.replica_id} with {record.epoch} and {member.model}"
            )
        await self._introduce(member, client, card)
        try:
            self._table.add_replica(record.replica_id, card, self._index_stride)
        except ValueError as error:
            raise self._refuse(member, str(error)) from error
        if member.record.state is ReplicaState.DRAINING:
            self._table.set_draining(record.replica_id)
        member.card, member.client, member.complaint = card, client, None
        member.is_refused = False
        self._table.update_load_from_registry(record.replica_id, member.record.load)
        self._publish(member.model)
        logger.info("replica %s joins model=%s address=%s", record.replica_id, member.model, record.address)
        await client.serve()

    async def _ask_card(self, member: Member, client: ReplicaClient) -> None:
        """Take what may change in the card of a replica that is routed to."""
        digest = member.record.card_digest
        try:
            new = (await client.describe(include_tokenizer=False)).card
        except Exception as error:  # outermost frame of the task: the next look asks again
            logger.debug("the new card of replica %s is not known yet: %r", client.replica_id, error)
            return
        finally:
            member.is_asked = False
        if member.client is client:
            assert member.card is not None
            member.card_digest = digest
            member.card = replace(member.card, adapters=new.adapters, aliases=new.aliases)
            self._table.update_card(client.replica_id, member.card)
            self._publish(member.model)

    async def _introduce(self, member: Member, client: ReplicaClient, card: ModelCard) -> None:
        """Make the model known, once; refuse a replica that serves something else under its name."""
        model = self._models.setdefault(card.name, _ModelMembers())
        identity = (card.fingerprint, card.block_size)
        async with model.lock:  # of two replicas that join together one brings the tokenizer
            if model.identity != identity:
                if any(other.is_accepted and other.model == card.name for other in self._members.values()):
                    raise self._refuse(
                        member,
                        f"it serves {card.name} with fingerprint {card.fingerprint[:16]} and block size"
                        f" {card.block_size}, the replicas before it with others",
                    )
                bundle = (await client.describe(include_tokenizer=True)).bundle
                assert bundle is not None
                outcome = self._on_model(card, bundle)
                if outcome is not None:
                    await outcome
                model.identity = identity
            member.is_accepted = True

    def _refuse(self, member: Member, reason: str) -> _RefusedReplica:
        if member.complaint != reason:
            self.num_refused += 1
        return _RefusedReplica(reason)

    def _complain(self, member: Member, reason: str) -> None:
        """Log a complaint once per reason: later attempts say the same."""
        if member.complaint != reason:
            member.complaint = reason
            logger.warning(
                "replica %s: %s address=%s", member.record.replica_id, reason, member.record.address
            )

    def _lose(self, member: Member, lost: ReplicaClient) -> None:
        """Called by the client at the moment its stream breaks."""
        if member.client is not lost:
            return
        assert member.task is not None
        if lost.is_draining and not lost.num_inflight:
            logger.info("replica %s has drained", member.record.replica_id)
            member.complaint = "it has drained"
        elif not member.task.cancelling():  # else this router ends, and nothing is lost
            self.num_lost_streams += 1
            self._complain(member, f"its stream is lost: {lost.lost}")
        self._withdraw(member)
