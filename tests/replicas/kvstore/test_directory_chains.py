"""Long chains: a directory that remembers the newest chain beside one that walks the whole chain each time.

Both are given the same storm, and have the same order of everything after each step.
"""

from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import TypeVar

import hypothesis.strategies as st
from hypothesis import given, settings

from replicas.kvstore.chunk import Chunk, ChunkName, chain_before
from replicas.kvstore.directory import ChunkPlace, Directory
from replicas.kvstore.leasing.leases import Leases
from replicas.kvstore.use_order import NewestChain, UseOrder
from replicas.kvstore.write_queues import WriteQueues
from replicas.protocol.blocks import BlockHash
from replicas.protocol.prefix_leases import HOUR_SECONDS
from tests.examples import examples
from tests.replicas.kvstore.chunk_names import chain, key, name

T = TypeVar("T")


class WholeWalk(NewestChain):
    """Moves each chunk of the chain, every time."""

    def put(
        self, chunk: Chunk, before: Iterable[Chunk], take_for: Callable[[Chunk], UseOrder | None]
    ) -> None:
        for each in (chunk, *before):
            order = take_for(each)
            if order is not None:
                order.put_newest(each)


class WalkingQueues(WriteQueues):
    def first_unwritten(self, chunk: Chunk, chunks: Mapping[BlockHash, Chunk]) -> Chunk:
        for before in chain_before(chunk, chunks):
            if not before.may_be_written:
                break
            chunk = before
        return chunk


class Walker(Directory):
    def __init__(self, host: int, disk: int, leases: Leases) -> None:
        super().__init__(host_chunks=host, disk_chunks=disk, leases=leases)
        self._newest_in_host, self._newest_on_disk = WholeWalk(), WholeWalk()
        self._to_write = WalkingQueues()


def orders(directory: Directory) -> list[list[ChunkName]]:
    parts = (directory._hot, directory._cold, directory._owed, directory._disk, directory._disk_leased)
    return [[chunk.name for chunk in part] for part in parts]


LENGTH = 12
TRUNK = "a" * LENGTH
CHAINS = [TRUNK, *(TRUNK[:fork] + "b" * (LENGTH - fork) for fork in (0, 1, 4))]


class Storm:
    """Everything that can happen to a directory, to both of them."""

    def __init__(self, rng: Random, host: int, disk: int, lease_share: float, longest: int) -> None:
        def leases() -> Leases:
            return Leases(host_chunks=int(host * lease_share), disk_chunks=int(disk * lease_share))

        self.rng = rng
        self.longest = longest
        self.quick = Directory(host_chunks=host, disk_chunks=disk, leases=leases())
        self.slow = Walker(host, disk, leases())
        self.filling: list[BlockHash] = []
        self.writing: list[BlockHash] = []
        self.pinned: list[BlockHash] = []
        self.now = 0.0
        self.things: list[Callable[[], None]] = [
            self.offer_a_chain,
            self.offer_two_chains_in_turns,
            self.offer_a_chunk,
            self.fetch_a_chain,
            *[self.fill] * 3,
            self.give_up,
            *[self.use] * 2,
            self.pin,
            self.unpin,
            self.lease,
            self.wait,
            *[self.begin_writes] * 2,
            *[self.end_write] * 3,
            self.lose_a_file,
            *[self.find_a_file] * 2,
            self.write_all,
        ]

    def both(self, do: Callable[[Directory], T]) -> T:
        quick, slow = do(self.quick), do(self.slow)
        assert quick == slow
        assert orders(self.quick) == orders(self.slow)
        assert self.quick.take_events() == self.slow.take_events()
        assert self.quick.take_removals() == self.slow.take_removals()
        return quick

    def path(self) -> str:
        return self.rng.choice(CHAINS)[: self.rng.randint(1, self.longest)]

    def taken(self, chunks: list[BlockHash]) -> BlockHash | None:
        return chunks.pop(self.rng.randrange(len(chunks))) if chunks else None

    def offer(self, path: str) -> None:
        if self.both(lambda directory: directory.offer(name(path))) is not None:
            self.filling.append(key(path))

    def offer_a_chain(self) -> None:
        """As a prompt is computed, while chunks are written."""
        for path in beginnings(self.path()):
            self.offer(path)
            if self.rng.random() < 0.7:
                self.fill()
            if self.rng.random() < 0.1:
                self.begin_writes()

    def offer_two_chains_in_turns(self) -> None:
        for pair in zip(beginnings(self.path()), beginnings(self.path()), strict=False):
            for each in pair:
                self.offer(each)

    def offer_a_chunk(self) -> None:
        self.offer(self.path())

    def fetch_a_chain(self) -> None:
        for each in chain(self.path()):
            if self.quick.place(each) is ChunkPlace.DISK:
                self.fetch(each)

    def fetch(self, chunk: BlockHash) -> None:
        if self.both(lambda directory: directory.fetch(chunk)) is not None:
            self.filling.append(chunk)

    def fill(self) -> None:
        chunk = self.taken(self.filling)
        if chunk is not None:
            self.both(lambda directory: directory.filled(chunk))

    def give_up(self) -> None:
        chunk = self.taken(self.filling)
        if chunk is not None:
            self.both(lambda directory: directory.given_up(chunk))

    def use(self) -> None:
        keys = chain(self.path())
        self.both(lambda directory: directory.use(keys))

    def pin(self) -> None:
        chunk = key(self.path())
        if self.quick.place(chunk) is ChunkPlace.HOST:
            self.both(lambda directory: directory.pin([chunk]))
            self.pinned.append(chunk)

    def unpin(self) -> None:
        chunk = self.taken(self.pinned)
        if chunk is not None:
            self.both(lambda directory: directory.unpin([chunk]))

    def lease(self) -> None:
        keys, seconds = chain(self.path()), self.rng.choice([20, HOUR_SECONDS])
        self.both(lambda directory: directory.grant(keys, seconds))

    def wait(self) -> None:
        self.now += self.rng.choice([1, 15, 650, HOUR_SECONDS])
        self.both(lambda directory: directory.pass_time(self.now))

    def begin_writes(self) -> None:
        taking = self.rng.choice([Directory.take_early_writes, Directory.take_writes, Directory.take_writes])
        most = self.rng.randint(1, 3)
        writes = self.both(lambda directory: taking(directory, self.now, most))
        self.writing += [write.name.key for write in writes]

    def end_write(self) -> None:
        chunk = self.taken(self.writing)
        if chunk is not None:
            ending = Directory.not_written if self.rng.random() < 0.2 else Directory.written
            self.both(lambda directory: ending(directory, chunk))

    def lose_a_file(self) -> None:
        chunk = key(self.path())
        self.both(lambda directory: directory.lost_file(chunk))

    def find_a_file(self) -> None:
        found = name(self.path())
        if self.quick.max_disk_chunks:
            self.both(lambda directory: directory.adopt(found))

    def write_all(self) -> None:
        if self.rng.random() < 0.2:
            self.both(Directory.write_all)


@settings(max_examples=examples(2000))
@given(
    seed=st.integers(0, 1 << 32),
    num_things=st.integers(80, 200),
    host=st.sampled_from([2, 4, 8, 16, 40]),
    disk=st.sampled_from([3, 10, 30, 0]),
    lease_share=st.sampled_from([0.0, 0.5, 1.0]),
    longest=st.sampled_from([5, LENGTH]),
)
def test_what_is_remembered_changes_nothing(
    seed: int, num_things: int, host: int, disk: int, lease_share: float, longest: int
) -> None:
    storm = Storm(Random(seed), host, disk, lease_share, longest)
    for _ in range(num_things):
        storm.rng.choice(storm.things)()


def test_a_chain_that_comes_chunk_by_chunk_is_walked_once() -> None:
    """Not its length times its length: neither what comes nor what is written looks back at every chunk."""
    num_looked_at = 0

    class Counting(dict[BlockHash, Chunk]):
        def get(self, key: BlockHash, default: object = None) -> object:  # type: ignore[override]
            nonlocal num_looked_at
            num_looked_at += 1
            return super().get(key, default)

    directory = Directory(host_chunks=4 * LENGTH, disk_chunks=4 * LENGTH)
    directory._chunks = Counting()
    for path in beginnings(TRUNK):
        directory.offer(name(path))
        directory.filled(key(path))
    directory.write_all()
    for path in beginnings(TRUNK):
        [write] = directory.take_writes(0.0, 1)
        assert write.name == name(path)
        directory.written(key(path))
    assert num_looked_at < 10 * LENGTH


def beginnings(path: str) -> list[str]:
    return [path[:length] for length in range(1, len(path) + 1)]
