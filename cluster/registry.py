"""The registry as the cluster reads it: the lease of every replica, from Redis.

Owns what is skipped as invalid, and how that is reported. It asks only Redis, so it answers while replicas
are busy and controllers are down.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import redis

from replicas.process.secret_file import read_secret
from replicas.process.settings import SettingsError
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
from replicas.protocol.lease_seal import LeaseSeal
from replicas.protocol.status import ReplicaId

MOST_REFUSED = 3


@dataclass(frozen=True, slots=True)
class Registry:
    """Live records of all replicas by id; `complaint` says why there are none. `refused` lists the first few
    invalid ones."""

    records: Mapping[ReplicaId, ReplicaRecord]
    complaint: str | None = None
    refused: Sequence[str] = ()


def read_registry(redis_url: str, seal: LeaseSeal | None = None) -> Registry:
    """Read the registry. With a seal, only leases signed under the cluster secret count."""
    records: dict[ReplicaId, ReplicaRecord] = {}
    refused: list[str] = []
    try:
        with redis.Redis.from_url(
            redis_url, socket_timeout=2, socket_connect_timeout=2, protocol=2
        ) as client:
            for model, replica_id in live_names(client):
                try:
                    values = client.hmget(replica_key(model, replica_id), RECORD_FIELDS)
                    if any(values):
                        fields = record_fields(values)
                        if seal is not None:
                            seal.check(replica_key(model, replica_id), fields)
                        records[replica_id] = decode_record(replica_id, fields)
                except (redis.ResponseError, ValueError) as error:
                    refused.append(f"replica {replica_id}: {error}")
    except redis.RedisError as error:
        return Registry({}, str(error))
    return Registry(records, refused=tuple(refused[:MOST_REFUSED]))


def read_signed_registry(redis_url: str, secret_file: str | None) -> Registry:
    """Read the registry. With a secret file, only leases signed under the cluster secret count."""
    try:
        secret = read_secret(None, secret_file)
    except SettingsError as error:
        return Registry({}, f"leases cannot be checked: {error}")
    return read_registry(redis_url, None if secret is None else LeaseSeal(secret))


def live_names(client: "redis.Redis") -> Iterator[tuple[str, ReplicaId]]:
    """Yield model and id of replicas that may have a lease; invalid names and types are skipped."""
    for model in decode_names(_members(client, MODELS_KEY))[0]:
        for replica_id in decode_ids(_members(client, replicas_key(model)))[0]:
            yield model, replica_id


def _members(client: "redis.Redis", key: str) -> object:
    try:
        return client.smembers(key)
    except redis.ResponseError as error:
        return error
