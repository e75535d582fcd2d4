"""A replica's side of the block index as the schema describes it, for tests that need to misuse it."""

from collections.abc import Mapping

import redis

from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.keys import (
    BLOCKS_MARKER,
    Announcement,
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
        """Another incarnation, with an empty cache. What the last one has not said it never will."""
        self.epoch = Epoch(epoch)
        self.number = 0
        self.live: dict[int, tuple[BlockHash, ...]] = {}
        self._unsaid: list[IndexChange] = []
        self.client.sadd(self.key, BLOCKS_MARKER)

    def change(
        self,
        *,
        added: tuple[BlockHash, ...] = (),
        removed: tuple[BlockHash, ...] = (),
        cleared: bool = False,
        announced: Mapping[int, tuple[BlockHash, ...]] = {},
        ended: tuple[int, ...] = (),
        num_heard: int | None = 1,
        stream_length: int | None = None,
    ) -> None:
        """One change to set and stream, and to what is `live`.

        It is heard `num_heard` times; None leaves it out of the stream until `catch_up`.
        """
        self.number += 1
        if cleared:
            announced = self.live | announced
        self.live = {key: it for key, it in (self.live | announced).items() if key not in ended}
        change = IndexChange(
            self.replica_id,
            self.epoch,
            self.number,
            added,
            removed,
            cleared,
            tuple(Announcement(*it) for it in announced.items()),
            ended,
        )
        if num_heard is None:
            self._unsaid.append(change)
        with self.client.pipeline(transaction=True) as pipeline:
            if cleared:
                pipeline.delete(self.key)
                pipeline.sadd(self.key, BLOCKS_MARKER)
            if removed:
                pipeline.srem(self.key, *removed)
            if added:
                pipeline.sadd(self.key, *added)
            for _ in range(num_heard or 0):
                self._say(pipeline, change, stream_length)
            pipeline.execute()

    def catch_up(self) -> None:
        """Say what was left unsaid, late and behind what came after it."""
        for change in self._unsaid:
            self._say(self.client, change, None)
        self._unsaid.clear()

    def _say(self, client: "redis.Redis", change: IndexChange, stream_length: int | None) -> None:
        client.xadd(
            events_key(self.model),
            encode_change(change),  # type: ignore[arg-type]
            maxlen=stream_length,
            approximate=False,
        )

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
