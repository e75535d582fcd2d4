"""Where replicas are found: the registry in Redis, or a fixed list of addresses.

Owns the reading of leases. Knows nothing of routing tables or streams: a view is what the source
believes now, and `membership.py` decides what follows from it.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.keys import MODELS_KEY, ReplicaRecord, decode_record, replica_key, replicas_key
from replicas.protocol.status import ReplicaId, ReplicaState
from router.replica_client import ReplicaClient, ReplicaLost

logger = logging.getLogger(__name__)

FleetView = Mapping[str, Mapping[ReplicaId, ReplicaRecord]]
"""The records of every live replica, by model name."""

TIMEOUT_SECONDS = 2.0
FORGET_SECONDS = 60.0
MAX_FORGOTTEN_PER_POLL = 64

# Atomic, so that a replica which registers again at this very moment keeps its place.
FORGET_SCRIPT = "if redis.call('EXISTS', KEYS[1]) == 0 then return redis.call('SREM', KEYS[2], ARGV[1]) end"


class ReplicaSource(Protocol):
    def views(self) -> AsyncIterator[FleetView]:
        """A view whenever the source has looked; none while it cannot look."""


class RegistrySource:
    """Replicas that hold a lease in Redis."""

    def __init__(
        self, redis_url: str, poll_seconds: float = 0.5, *, forget_seconds: float = FORGET_SECONDS
    ) -> None:
        self._redis_url = redis_url
        self._poll_seconds = poll_seconds
        self._forget_seconds = forget_seconds
        self._absent_since: dict[tuple[str, ReplicaId], float] = {}
        self._unreadable: set[ReplicaId] = set()
        self._is_redis_away = False

    async def views(self) -> AsyncIterator[FleetView]:
        # Nothing is retried below here: a look that fails is followed by the next one anyway.
        redis = Redis.from_url(
            self._redis_url,
            protocol=2,
            decode_responses=False,
            # The timeout stands around the whole look: with one of its own the client waits in
            # asyncio.wait_for, which before Python 3.12 may lose a cancellation.
            socket_timeout=None,
            socket_connect_timeout=None,
            retry=Retry(NoBackoff(), 0),
            driver_info=None,  # else each connection reads the package metadata from disk
        )
        try:
            while True:
                try:
                    async with asyncio.timeout(TIMEOUT_SECONDS):
                        view = await self._read(redis)
                        await self._forget(redis)
                except (RedisError, OSError) as error:
                    if not self._is_redis_away:
                        logger.warning(
                            "the registry is out of reach; the fleet stays as it is error=%r", error
                        )
                    self._is_redis_away = True
                else:
                    if self._is_redis_away:
                        logger.info("the registry is back")
                    self._is_redis_away = False
                    yield view
                await asyncio.sleep(self._poll_seconds)
        finally:
            await redis.aclose()

    async def _read(self, redis: "Redis") -> FleetView:
        models = sorted(_texts(await redis.smembers(MODELS_KEY)))
        async with redis.pipeline(transaction=False) as pipeline:
            for model in models:
                pipeline.smembers(replicas_key(model))
            members = await pipeline.execute(raise_on_error=False) if models else []
        names = [
            (model, ReplicaId(replica_id))
            for model, replica_ids in zip(models, members, strict=True)
            for replica_id in sorted(_texts(replica_ids))
        ]
        async with redis.pipeline(transaction=False) as pipeline:
            for model, replica_id in names:
                pipeline.hgetall(replica_key(model, replica_id))
            hashes = await pipeline.execute(raise_on_error=False) if names else []
        view: dict[str, dict[ReplicaId, ReplicaRecord]] = {model: {} for model in models}
        now = asyncio.get_running_loop().time()
        absent: dict[tuple[str, ReplicaId], float] = {}
        for (model, replica_id), fields in zip(names, hashes, strict=True):
            if isinstance(fields, ResponseError):
                logger.error("a replica is passed over: %s holds no hash", replica_key(model, replica_id))
            elif not fields:
                absent[model, replica_id] = self._absent_since.get((model, replica_id), now)
            elif (record := self._decode(replica_id, fields)) is not None:
                view[model][replica_id] = record
        self._absent_since = absent
        return view

    def _decode(self, replica_id: ReplicaId, fields: Mapping[bytes, bytes]) -> ReplicaRecord | None:
        try:
            record = decode_record(replica_id, fields)
        except ValueError as error:
            if replica_id not in self._unreadable:
                self._unreadable.add(replica_id)
                logger.error("a replica is passed over: %s", error)
            return None
        self._unreadable.discard(replica_id)
        return record

    async def _forget(self, redis: "Redis") -> None:
        """Take ids whose lease has long been gone out of the set, a few with each look."""
        now = asyncio.get_running_loop().time()
        due = [name for name, since in self._absent_since.items() if now - since >= self._forget_seconds]
        for model, replica_id in due[:MAX_FORGOTTEN_PER_POLL]:
            keys = (replica_key(model, replica_id), replicas_key(model))
            await redis.eval(FORGET_SCRIPT, 2, *keys, replica_id)
            del self._absent_since[model, replica_id]


class StaticSource:
    """Replicas at known addresses, without a registry: whoever answers is alive."""

    def __init__(self, addresses: Sequence[str], poll_seconds: float = 2.0) -> None:
        self._addresses = tuple(dict.fromkeys(addresses))
        self._poll_seconds = poll_seconds

    async def views(self) -> AsyncIterator[FleetView]:
        async with contextlib.AsyncExitStack() as stack:
            clients: list[ReplicaClient] = []
            for address in self._addresses:
                # Only ever describes; who it is comes with the answer.
                client = ReplicaClient(ReplicaId(address), address, lambda *_: None)
                stack.push_async_callback(client.close)
                clients.append(client)
            while True:
                yield await self._look(clients)
                await asyncio.sleep(self._poll_seconds)

    async def _look(self, clients: Sequence[ReplicaClient]) -> FleetView:
        async with asyncio.TaskGroup() as tasks:
            looks = [tasks.create_task(self._describe(client)) for client in clients]
        view: dict[str, dict[ReplicaId, ReplicaRecord]] = {}
        for look in looks:
            if (found := look.result()) is not None:
                model, record = found
                view.setdefault(model, {})[record.replica_id] = record
        return view

    async def _describe(self, client: ReplicaClient) -> tuple[str, ReplicaRecord] | None:
        try:
            card, _, replica_id, epoch = await client.describe(
                include_tokenizer=False, timeout_seconds=TIMEOUT_SECONDS
            )
        except ReplicaLost:
            return None
        record = ReplicaRecord(
            replica_id=replica_id,
            epoch=epoch,
            address=client.address,
            state=ReplicaState.READY,
            card_digest=card.digest(),
            last_change=0,
            load=LoadSnapshot(),
        )
        return card.name, record


def _texts(members: object) -> list[str]:
    """Set members that are text; a registry may hold anything, and what is no name is nobody."""
    texts: list[str] = []
    for member in members if isinstance(members, set | list) else ():
        with contextlib.suppress(UnicodeDecodeError):
            texts.append(member.decode())
    return texts
