"""ChunkStore: a replica's KV below its device, as its engine sees it.

Owns the directory and the memory that it speaks of. Does not know requests, or how KV gets from the device
to a slot and back: that is the engine's. One thread calls it, the engine's, and no call blocks.

    device ──offer, filled──▶ host memory ──▶ device      the engine copies; `pin` while it reads
"""

from collections.abc import Callable, Sequence

from replicas.kvstore.arena import Arena
from replicas.kvstore.directory import ChunkName, Directory, Place
from replicas.kvstore.plan import Plan, num_ready_blocks, plan_arrival
from replicas.kvstore.rate import Rate
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import CacheEvent
from replicas.protocol.frames import UserTag
from replicas.protocol.ways import HOST_MOVE_SECONDS, MoveSpeeds

Writers = tuple[UserTag, ...]
"""Whose request computed each block of a chunk."""


class ChunkStore:
    """Chunks of `blocks_per_chunk` blocks of `block_size` tokens. `clock` never goes back."""

    def __init__(
        self,
        arena: Arena,
        *,
        block_size: int,
        blocks_per_chunk: int,
        clock: Callable[[], float],
    ) -> None:
        self.arena = arena
        self.directory = Directory(host_chunks=arena.num_slots, chunk_bytes=arena.slot_bytes)
        self.block_size = block_size
        self.blocks_per_chunk = blocks_per_chunk
        self.chunk_tokens = block_size * blocks_per_chunk
        self._clock = clock
        self._writers: list[Writers] = [()] * arena.num_slots
        self._host_rate = Rate()
        """Of loading: seconds per token from host memory to the device."""

    # From the device.

    def offer(self, name: ChunkName, writers: Writers) -> int | None:
        """The slot to copy a chunk into that the device has. Then `filled` or `given_up`.

        None if it has a slot already (`is_kept`), or if every slot is in use.
        """
        slot = self.directory.offer(name)
        if slot is not None:
            self._writers[slot] = writers
        return slot

    def is_kept(self, key: BlockHash) -> bool:
        """Whether host memory has the chunk, or is about to."""
        return self.directory.place(key) in (Place.HOST, Place.COMING)

    def filled(self, key: BlockHash) -> None:
        self.directory.filled(key)

    def given_up(self, key: BlockHash, *, may_still_be_written: bool = False) -> None:
        """The device's copy went before it was copied, or copying failed.

        A slot that a copy may still be made to is no chunk's until `give_back`.
        """
        self.directory.given_up(key, may_still_be_written=may_still_be_written)

    def give_back(self, slot: int) -> None:
        """Nothing copies to this slot any more."""
        self.directory.give_back(slot)

    # Towards the device.

    def arrived(
        self,
        names: Sequence[ChunkName],
        *,
        num_device_tokens: int,
        num_findable_tokens: int,
        wait_seconds: float,
        token_seconds: float,
    ) -> Plan:
        """A request with these chunks has come. They count as used."""
        return plan_arrival(
            self.directory,
            names,
            chunk_tokens=self.chunk_tokens,
            num_device_tokens=num_device_tokens,
            num_findable_tokens=num_findable_tokens,
            speeds=self.speeds(),
            wait_seconds=wait_seconds,
            token_seconds=token_seconds,
        )

    def num_ready_blocks(
        self, names: Sequence[ChunkName], num_device_blocks: int, num_findable_blocks: int
    ) -> tuple[int, bool]:
        """The leading blocks on the device or in host memory, and whether more of them are coming there."""
        return num_ready_blocks(
            self.directory,
            names,
            blocks_per_chunk=self.blocks_per_chunk,
            num_device_blocks=num_device_blocks,
            num_findable_blocks=num_findable_blocks,
        )

    def load_seconds(self, num_tokens: int) -> float:
        """What loading that many tokens from host memory should take, once their turn has come."""
        return HOST_MOVE_SECONDS + num_tokens * (self._host_rate.seconds_per_unit or 0.0)

    def pin(self, keys: Sequence[BlockHash]) -> list[int]:
        """The slots of chunks that are in host memory. They stay until `unpin`."""
        self.directory.pin(keys)
        slots: list[int] = []
        for key in keys:
            place = self.directory.slot(key)
            assert place is not None
            slots.append(place[0])
        return slots

    def unpin(self, keys: Sequence[BlockHash]) -> None:
        self.directory.unpin(keys)

    def writers(self, slot: int) -> Writers:
        return self._writers[slot]

    def loaded(self, num_tokens: int, seconds: float) -> None:
        """So long did a load take: the speed that routers are told follows."""
        self._host_rate.observe(num_tokens, seconds)

    # Beside requests.

    def speeds(self) -> MoveSpeeds:
        """None is what there is no way for, or nobody has measured."""
        return MoveSpeeds(host=self._host_rate.seconds_per_unit, disk=None, pull=None)

    def take_events(self) -> list[CacheEvent]:
        """What became ready or went since the last call, in order."""
        return self.directory.take_events()

    def clear(self) -> bool:
        """Forget every chunk. False, and nothing happens, while any of them moves."""
        return self.directory.clear()

    def close(self) -> None:
        """Give the memory back."""
        self.arena.close()
