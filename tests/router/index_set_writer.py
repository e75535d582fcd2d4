"""A replica's side of the block index as the schema describes it, for tests that need to misuse it."""

import redis

from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.keys import (
    BLOCKS_MARKER,
    IndexChange,
    ReplicaRecord,
    blocks_key,
    encode_change,
    events_key,
)
from replicas.protocol.status import Epoch, ReplicaId, ReplicaState


class IndexSetWriter:
    def __init__(self, url: str, model: str, replica_id: str, epoch: str = "e1") -> None:
        self.client = redis.Redis.from_url(url, protocol=2)
        self.model = model
        self.replica_id = ReplicaId(replica_id)
        self.number = 0
        self.restart(epoch)

    @property
    def key(self) -> str:
        return blocks_key(self.model, self.replica_id, self.epoch)

    def close(self) -> None:
        self.client.close()

    def restart(self, epoch: str) -> None:
        """Another incarnation, with an empty cache."""
        self.epoch = Epoch(epoch)
        self.number = 0
        self.client.sadd(self.key, BLOCKS_MARKER)

    def change(
        self,
        *,
        added: tuple[BlockHash, ...] = (),
        removed: tuple[BlockHash, ...] = (),
        cleared: bool = False,
        is_heard: bool = True,
        stream_length: int | None = None,
    ) -> None:
        """One change to set and stream; `is_heard` False leaves it out of the stream."""
        self.number += 1
        change = IndexChange(self.replica_id, self.epoch, self.number, added, removed, cleared)
        with self.client.pipeline(transaction=True) as pipeline:
            if cleared:
                pipeline.delete(self.key)
                pipeline.sadd(self.key, BLOCKS_MARKER)
            if removed:
                pipeline.srem(self.key, *removed)
            if added:
                pipeline.sadd(self.key, *added)
            if is_heard:
                fields = encode_change(change)
                pipeline.xadd(
                    events_key(self.model),
                    fields,  # type: ignore[arg-type]
                    maxlen=stream_length,
                    approximate=False,
                )
            pipeline.execute()

    def write_again(self, hashes: set[BlockHash]) -> None:
        """What a replica does about a lost set: the whole of it, and a change that says so."""
        self.client.delete(self.key)
        self.client.sadd(self.key, BLOCKS_MARKER)
        self.change(added=tuple(hashes), cleared=True)

    def members(self) -> set[bytes]:
        return set(self.client.smembers(self.key)) - {BLOCKS_MARKER}  # type: ignore[arg-type]

    def record(self) -> ReplicaRecord:
        return ReplicaRecord(
            self.replica_id,
            self.epoch,
            "127.0.0.1:1",
            ReplicaState.READY,
            "card",
            self.number,
            LoadSnapshot(),
        )
