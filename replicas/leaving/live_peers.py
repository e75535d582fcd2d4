"""LivePeers: the other ready replicas of a model, by their leases in Redis.

Owns nothing. Unreadable leases, and unsigned ones where they must be signed, are skipped.
"""

import logging

from redis.asyncio import Redis

from replicas.protocol.keys import (
    RECORD_FIELDS,
    decode_ids,
    decode_record,
    record_fields,
    replica_key,
    replicas_key,
)
from replicas.protocol.lease_seal import LeaseRefused, LeaseSeal
from replicas.protocol.pulls import PullHint
from replicas.protocol.status import ReplicaId, ReplicaState

logger = logging.getLogger(__name__)

MAX_PEERS = 1024
"""Bound on the leases read."""


class LivePeers:
    def __init__(self, redis: "Redis", model: str, own_id: ReplicaId, seal: LeaseSeal | None) -> None:
        self._redis = redis
        self._model = model
        self._own_id = own_id
        self._seal = seal

    async def read(self) -> list[PullHint]:
        """Raises RedisError or OSError."""
        ids, _ = decode_ids(await self._redis.smembers(replicas_key(self._model)))
        peers: list[PullHint] = []
        async with self._redis.pipeline(transaction=False) as pipeline:
            others = [replica_id for replica_id in ids if replica_id != self._own_id][:MAX_PEERS]
            for replica_id in others:
                pipeline.hmget(replica_key(self._model, replica_id), RECORD_FIELDS)
            found = await pipeline.execute(raise_on_error=False)
        for replica_id, values in zip(others, found, strict=True):
            try:
                fields = record_fields(values)
                if not fields:
                    continue  # its lease has ended
                if self._seal is not None:
                    self._seal.check(replica_key(self._model, replica_id), fields)
                record = decode_record(replica_id, fields)
                if record.state is ReplicaState.READY:
                    peers.append(PullHint(replica_id, record.epoch, record.address, 0))
            except (ValueError, LeaseRefused) as error:
                logger.warning("nothing is handed over to replica %s: %s", replica_id, error)
        return peers
