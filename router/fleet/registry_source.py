"""RegistrySource: polls which replicas hold a lease in Redis.

Owns the reading of leases. A view is the registry's present content; `membership.py` decides what follows.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from redis.asyncio import Redis
from redis.exceptions import ResponseError, WatchError

from replicas.process.cancellation import raise_if_cancelled
from replicas.process.complaints import Complaints
from replicas.process.plain_redis import plain_redis
from replicas.protocol.keys import (
    MODELS_KEY,
    RECORD_FIELDS,
    ReplicaRecord,
    decode_ids,
    decode_names,
    decode_record,
    record_fields,
    replica_key,
    replicas_key,
)
from replicas.protocol.lease_seal import MALFORMED, OLD, REASONS, LeaseRefused, LeaseSeal
from replicas.protocol.status import Epoch, ReplicaId
from router.shared.redis_health import REDIS_FAILURES, RedisHealth

logger = logging.getLogger(__name__)

ReplicaRecords = Mapping[str, Mapping[ReplicaId, ReplicaRecord]]
"""The records of every live replica, by model name."""

TIMEOUT_SECONDS = 2.0
FORGET_SECONDS = 60.0
MAX_FORGOTTEN_PER_POLL = 64

MAX_NAMES_PER_LOOK = 4096
"""Models per look, and replicas per model: a flood of names must not keep a look from ending."""

OLD_SECONDS = 10.0
"""For this long after a replica's newest heartbeat an older one is not believed."""

Name = TypeVar("Name", bound=str)


class _HeardLease(NamedTuple):
    """A replica's newest heartbeat, and when this router first read it."""

    epoch: Epoch
    place: tuple[int, int]
    at: float


class ReplicaSource(Protocol):
    def views(self) -> AsyncIterator[ReplicaRecords]:
        """A view whenever the source has looked; none while it cannot look."""

    @property
    def num_refused(self) -> Mapping[str, int]:
        """Replicas, or names of them, that the latest look passed over, by `lease_seal.REASONS`."""


class RegistrySource:
    """Replicas that hold a lease in Redis."""

    def __init__(
        self,
        redis_url: str,
        poll_seconds: float = 0.5,
        *,
        seal: LeaseSeal | None = None,
        forget_seconds: float = FORGET_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With a seal, only leases that were signed under the cluster secret are believed."""
        self._seal = seal
        self._clock = clock
        self._newest: dict[tuple[str, ReplicaId], _HeardLease] = {}
        self._redis_url = redis_url
        self._poll_seconds = poll_seconds
        self._forget_seconds = forget_seconds
        self._absent_since: dict[tuple[str, ReplicaId], float] = {}
        self._known: dict[tuple[str, str], frozenset[str]] = {}
        """Names that stood for a lease at the last look."""
        self._num_looks = 0
        self._num_refused = dict.fromkeys(REASONS, 0)
        self._complaints = Complaints(logger)
        self._health = RedisHealth(
            logger,
            "the registry is unreachable; the router keeps its replicas",
            "the registry is reachable again",
        )

    @property
    def num_refused(self) -> Mapping[str, int]:
        return self._num_refused

    async def views(self) -> AsyncIterator[ReplicaRecords]:
        # Nothing is retried below here: a look that fails is followed by the next one anyway.
        async with plain_redis(self._redis_url) as redis:
            while True:
                raise_if_cancelled()
                try:
                    async with self._health.deadline(TIMEOUT_SECONDS):
                        self._num_looks += 1
                        view = await self._read(redis)
                        await self._forget(redis)
                except REDIS_FAILURES:
                    pass
                else:
                    yield view
                await asyncio.sleep(self._poll_seconds)

    async def _read(self, redis: "Redis") -> ReplicaRecords:
        self._num_refused = dict.fromkeys(REASONS, 0)
        models = self._names("models", "", decode_names(await _answer(redis.smembers(MODELS_KEY))))
        async with redis.pipeline(transaction=False) as pipeline:
            for model in models:
                pipeline.smembers(replicas_key(model))
            members = await pipeline.execute(raise_on_error=False) if models else []
        names = [
            (model, replica_id)
            for model, replica_ids in zip(models, members, strict=True)
            for replica_id in self._names("replicas", model, decode_ids(replica_ids))
        ]
        async with redis.pipeline(transaction=False) as pipeline:
            for model, replica_id in names:
                pipeline.hmget(replica_key(model, replica_id), RECORD_FIELDS)
            leases = await pipeline.execute(raise_on_error=False) if names else []
        view: dict[str, dict[ReplicaId, ReplicaRecord]] = {model: {} for model in models}
        now = asyncio.get_running_loop().time()
        absent: dict[tuple[str, ReplicaId], float] = {}
        for (model, replica_id), values in zip(names, leases, strict=True):
            if isinstance(values, list) and not any(values):
                absent[model, replica_id] = self._absent_since.get((model, replica_id), now)
            elif (record := self._decode(model, replica_id, values)) is not None:
                view[model][replica_id] = record
        self._absent_since = absent
        for name in absent.keys() & self._newest.keys():
            if now - absent[name] >= self._forget_seconds:
                del self._newest[name]
        self._known = {("models", ""): frozenset(model for model in models if view[model])}
        self._known |= {("replicas", model): frozenset(records) for model, records in view.items()}
        return view

    def _names(self, kind: str, of: str, decoded: tuple[Sequence[Name], int]) -> list[Name]:
        """Return the names for one look: first those with a lease at the last one, then others in turn."""
        names, num_wrong = decoded
        if num_wrong:
            self._refuse((kind, of), f"{num_wrong} members of the registry's {kind} {of!r} are no names")
        if len(names) <= MAX_NAMES_PER_LOOK:
            return list(names)
        self._refuse((kind, of, "many"), f"the registry's {kind} {of!r} are {len(names)}: some wait")
        known = self._known.get((kind, of), frozenset())
        first = [name for name in names if name in known][:MAX_NAMES_PER_LOOK]
        others = [name for name in names if name not in known]
        start = self._num_looks * MAX_NAMES_PER_LOOK % len(others) if others else 0
        return (first + others[start:] + others[:start])[:MAX_NAMES_PER_LOOK]

    def _decode(self, model: str, replica_id: ReplicaId, values: object) -> ReplicaRecord | None:
        try:
            fields = record_fields(values)
            if self._seal is not None:
                self._seal.check(replica_key(model, replica_id), fields)
            record = decode_record(replica_id, fields)
            if self._seal is not None:
                self._check_age(model, record)
        except ValueError as error:
            reason = error.reason if isinstance(error, LeaseRefused) else MALFORMED
            message = f"replica {replica_id} of {model} is ignored: {error}"
            self._refuse((model, replica_id, reason), message, reason)
            return None
        for reason in REASONS:
            self._complaints.settle((model, replica_id, reason))
        return record

    def _check_age(self, model: str, record: ReplicaRecord) -> None:
        """Raises LeaseRefused if a newer incarnation, or a newer heartbeat of this one, was heard lately.

        Not for ever: a Redis that came back empty may count incarnations from the beginning.
        """
        now, name = self._clock(), (model, record.replica_id)
        heard = self._newest.get(name)
        place = (record.order, record.beat)
        if heard is not None and now - heard.at < OLD_SECONDS:
            if record.epoch == heard.epoch and place == heard.place:
                return
            if place < heard.place:
                raise LeaseRefused(OLD, "its lease is older than one that was read before")
        self._newest[name] = _HeardLease(record.epoch, place, now)

    def _refuse(self, subject: Hashable, message: str, reason: str = MALFORMED) -> None:
        self._num_refused[reason] += 1
        self._complaints.say(subject, message)

    async def _forget(self, redis: "Redis") -> None:
        """Take ids whose lease has long been gone out of the set, a few with each look."""
        now = asyncio.get_running_loop().time()
        due = [name for name, since in self._absent_since.items() if now - since >= self._forget_seconds]
        for model, replica_id in due[:MAX_FORGOTTEN_PER_POLL]:
            await forget(redis, model, replica_id)
            del self._absent_since[model, replica_id]


async def forget(redis: "Redis", model: str, replica_id: ReplicaId) -> None:
    """Take an id without a lease out of the set. A replica that registers at this very moment stays in.

    Not by a script: with a lease's name among its keys, Redis would ask for the right to write leases.
    """
    async with redis.pipeline() as pipeline:
        await pipeline.watch(replica_key(model, replica_id))
        if await pipeline.exists(replica_key(model, replica_id)):
            return
        pipeline.multi()  # type: ignore[no-untyped-call]
        pipeline.srem(replicas_key(model), replica_id)
        with contextlib.suppress(WatchError):
            await pipeline.execute()


async def _answer(question: Awaitable[object]) -> object:
    """A key of another type answers with an error, as values in a pipeline do."""
    try:
        return await question
    except ResponseError as error:
        return error
