"""Registration: the lease that shows a replica alive, renewed with each heartbeat.

Owns the replica's record in Redis. For the index, the record has the set's name and the newest change's
number.

A record is written only while it is absent or our own: WATCH, read, MULTI. Another epoch in it, after we
registered, means that a newer incarnation has taken our name: then `on_lost` is called. An epoch from before
our start is a dead predecessor; its set is removed.

With a seal, leases are signed, and only a replica that can sign and has registered after us takes our name: a
forged or copied record is overwritten.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError, WatchError

from replicas.errors import LeaseLost
from replicas.observation.metrics import ReplicaMetrics
from replicas.process.cancellation import raise_if_cancelled
from replicas.protocol.bounds import MAX_NUMBER
from replicas.protocol.keys import (
    MODELS_KEY,
    RECORD_FIELDS,
    ReplicaRecord,
    blocks_key,
    decode_record,
    encode_record,
    record_fields,
    registrations_key,
    replica_key,
    replicas_key,
)
from replicas.protocol.lease_seal import LeaseSeal
from replicas.protocol.status import Epoch, ReplicaId

logger = logging.getLogger(__name__)


MOST_REGISTRATIONS = MAX_NUMBER // 2


class Index(Protocol):
    """The part of the index writer that the heartbeat uses."""

    @property
    def set_key(self) -> str: ...

    def check(self, number: int, num_members: int) -> None: ...

    async def make_room(self) -> None: ...


class Registration:
    """`redis` should have no timeout of its own, as for the index writer."""

    def __init__(
        self,
        redis: "Redis",
        model: str,
        replica_id: ReplicaId,
        epoch: Epoch,
        *,
        record: Callable[[], ReplicaRecord],
        index: Index,
        lease_seconds: float,
        heartbeat_seconds: float,
        set_ttl_seconds: float,
        on_lost: Callable[[LeaseLost], None],
        metrics: ReplicaMetrics,
        seal: LeaseSeal | None = None,
    ) -> None:
        self._redis = redis
        self._seal = seal
        self._order = 0
        self._num_beats = 0
        self._model = model
        self._replica_id = replica_id
        self._epoch = epoch
        self._key = replica_key(model, replica_id)
        self._record = record
        self._index = index
        self._lease_ms = int(lease_seconds * 1000)
        self._timeout_seconds = lease_seconds / 2
        self._heartbeat_seconds = heartbeat_seconds
        self._set_ttl_ms = int(set_ttl_seconds * 1000)
        self._on_lost = on_lost
        self._metrics = metrics
        self._due = asyncio.Event()
        self._due.set()
        self._registered = asyncio.Event()
        self._is_redis_away = False

    def announce(self) -> None:
        """Write the record now: something in it has changed that cannot wait for the next heartbeat."""
        self._due.set()

    async def wait_registered(self) -> None:
        """Return once the record has been written for the first time."""
        await self._registered.wait()

    async def run(self) -> None:
        """Renew the lease until cancelled, or until it is lost."""
        while True:
            raise_if_cancelled()
            self._due.clear()
            try:
                async with asyncio.timeout(self._timeout_seconds):
                    if not await self._beat_or_prolong():
                        continue
            except LeaseLost as lost:
                self._metrics.lease_failures.inc()
                self._on_lost(lost)
                return
            except (RedisError, OSError) as error:
                if isinstance(error, ResponseError):
                    with contextlib.suppress(RedisError, OSError):
                        async with asyncio.timeout(self._timeout_seconds):
                            await self._clear_wrong_types()
                self._metrics.lease_failures.inc()
                if not self._is_redis_away:
                    logger.warning("cannot reach Redis; serving on without it error=%r", error)
                self._is_redis_away = True
            else:
                self._metrics.lease_renewals.inc()
                if self._is_redis_away:
                    logger.info("Redis is back")
                self._is_redis_away = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_seconds):
                    await self._due.wait()

    async def remove(self) -> None:
        """Take the record away, if it is still ours. Raises RedisError or OSError."""
        async with self._redis.pipeline(transaction=True) as pipeline:
            if await self._begin(pipeline) != self._epoch:
                return
            pipeline.delete(self._key)
            pipeline.srem(replicas_key(self._model), self._replica_id)
            with contextlib.suppress(WatchError):  # another incarnation's by now
                await pipeline.execute()

    async def _beat_or_prolong(self) -> bool:
        """Send a heartbeat, also to a full Redis: the index gives way, and at worst the existing lease is
        prolonged with an old load. Raises OutOfMemoryError if there is none."""
        try:
            return await self._beat()
        except OutOfMemoryError:
            await self._index.make_room()
        try:
            return await self._beat()
        except OutOfMemoryError:
            async with self._redis.pipeline(transaction=True) as pipeline:
                if await self._begin(pipeline) != self._epoch:
                    raise
                pipeline.pexpire(self._key, self._lease_ms)
                with contextlib.suppress(WatchError):
                    await pipeline.execute()
            self._metrics.lease_prolongations.inc()
            return True

    async def _beat(self) -> bool:
        """One heartbeat; False if the record was touched meanwhile and must be looked at again."""
        await self._take_number()
        async with self._redis.pipeline(transaction=True) as pipeline:
            holder = await self._begin(pipeline)
            predecessor = None
            if holder is not None and holder != self._epoch:
                if self._registered.is_set() and await self._is_newer(holder):
                    raise LeaseLost(
                        f"replica {self._replica_id} is served by another process: epoch {holder} has"
                        f" taken the place of {self._epoch}"
                    )
                predecessor = Epoch(holder)
            self._num_beats += 1
            record = replace(self._record(), order=self._order, beat=self._num_beats)
            fields = encode_record(record)
            if self._seal is not None:
                fields = self._seal.signed(self._key, fields)
            pipeline.scard(self._index.set_key)
            pipeline.delete(self._key)  # fields of another version would not be signed
            pipeline.hset(self._key, mapping=fields)  # type: ignore[arg-type]
            pipeline.pexpire(self._key, self._lease_ms)
            pipeline.sadd(replicas_key(self._model), self._replica_id)
            pipeline.pexpire(self._index.set_key, self._set_ttl_ms)
            if predecessor is not None:
                pipeline.unlink(blocks_key(self._model, self._replica_id, predecessor))
            try:
                num_members, *_ = await pipeline.execute()
            except WatchError:
                return False
        # Another hash slot than the model's keys, so outside the transaction.
        await self._redis.sadd(MODELS_KEY, self._model)
        await self._keep_count()
        self._registered.set()
        self._index.check(record.last_change, num_members)
        return True

    async def _take_number(self) -> None:
        """Once: after whom this incarnation has registered."""
        if not self._order:
            order = await self._redis.incr(registrations_key(self._model))
            if not 0 < order <= MOST_REGISTRATIONS:
                raise ResponseError(f"a count of registrations cannot be {order}")
            self._order = order

    async def _keep_count(self) -> None:
        """A Redis that came back empty goes on from where we are."""
        counted = await self._redis.get(registrations_key(self._model))
        if counted is None or not _is_count(counted) or int(counted) < self._order:
            await self._redis.set(registrations_key(self._model), self._order)

    async def _is_newer(self, holder: str) -> bool:
        """Whether the record is a later incarnation's; without a seal it is believed."""
        if self._seal is None:
            return True
        fields = record_fields(await self._redis.hmget(self._key, RECORD_FIELDS))
        try:
            self._seal.check(self._key, fields)
            record = decode_record(self._replica_id, fields)
        except ValueError as error:
            logger.error("another program wrote to this replica's lease; writing it again: %s", error)
            return False
        return record.epoch == holder and record.order > self._order

    async def _clear_wrong_types(self) -> None:
        """Delete our keys that have another type, or are no count."""
        kinds = {
            self._key: b"hash",
            replicas_key(self._model): b"set",
            MODELS_KEY: b"set",
            registrations_key(self._model): b"string",
        }
        for key, kind in kinds.items():
            found = await self._redis.type(key)
            is_right = found == kind and (kind != b"string" or _is_count(await self._redis.get(key)))
            if found != b"none" and not is_right:
                logger.error("the value under %s has the wrong type; it is deleted", key)
                await self._redis.unlink(key)

    async def _begin(self, pipeline: "Pipeline") -> str | None:
        """Read the epoch in the record, and begin a transaction that fails if it changes."""
        try:
            await pipeline.watch(self._key)
            holder = await pipeline.hget(self._key, "epoch")
        finally:
            # EXEC ends the watch, and so does the end of the connection if a timeout cuts us short. Left to
            # itself the client would then open another, say UNWATCH and wait for the answer without end.
            pipeline.watching = False
        pipeline.multi()  # type: ignore[no-untyped-call]
        return _text(holder)


def _text(value: object) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else None


def _is_count(value: object) -> bool:
    return value is None or (
        isinstance(value, bytes) and len(value) < 20 and value.isdigit() and int(value) < MOST_REGISTRATIONS
    )
