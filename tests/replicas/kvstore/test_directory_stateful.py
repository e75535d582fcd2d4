"""The directory under a storm, beside real bytes: what it says is there is there, and is the right chunk."""

from collections import Counter

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replicas.kvstore.directory import Directory, Place, Write
from replicas.kvstore.write_budget import BURST_SECONDS, WriteBudget
from replicas.protocol.blocks import BlockHash
from replicas.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, Tier
from tests.replicas.kvstore.chunk_names import chain, key, name

PATHS = [
    first + second + third
    for first in "ab"
    for second in ["", *"ab"]
    for third in ["", *"ab"]
    if second or not third
]
RATE = 2.0


class Tiers(RuleBasedStateMachine):
    """`arena` and `files` are the bytes: what a slot and a file really hold, the key of a chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.num_written = 0
        self.filling: dict[BlockHash, int] = {}
        self.writing: dict[BlockHash, Write] = {}
        self.pinned: Counter[BlockHash] = Counter()
        self.stuck: list[int] = []
        self.files: dict[BlockHash, BlockHash] = {}
        self.told: dict[Tier, set[BlockHash]] = {Tier.HOST: set(), Tier.DISK: set()}

    @initialize(
        host=st.integers(1, 6), disk=st.integers(0, 5), restored=st.lists(st.sampled_from(PATHS), unique=True)
    )
    def begin(self, host: int, disk: int, restored: list[str]) -> None:
        self.directory = Directory(
            host_chunks=host, disk_chunks=disk, chunk_bytes=1, write_budget=WriteBudget(bytes_per_second=RATE)
        )
        self.arena: list[BlockHash | None] = [None] * host
        if disk:
            self.files = {key(path): key(path) for path in restored}
            self.directory.restore(map(name, restored))
            self.remove_files()

    @rule(path=st.sampled_from(PATHS))
    def offer(self, path: str) -> None:
        slot = self.directory.offer(name(path))
        if slot is not None:
            self.begin_filling(key(path), slot)

    @rule(path=st.sampled_from(PATHS))
    def fetch(self, path: str) -> None:
        if self.directory.place(key(path)) is Place.DISK:
            slot = self.directory.fetch(key(path))
            if slot is not None:
                self.begin_filling(key(path), slot)

    def begin_filling(self, chunk: BlockHash, slot: int) -> None:
        assert slot not in self.filling.values() and slot not in self.stuck
        assert all(write.slot != slot for write in self.writing.values())
        assert not any(self.arena[slot] == pinned for pinned in self.pinned)
        self.arena[slot] = None
        self.filling[chunk] = slot

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), ends_well=st.booleans(), hangs=st.booleans())
    def end_filling(self, data: st.DataObject, ends_well: bool, hangs: bool) -> None:
        chunk = data.draw(st.sampled_from(sorted(self.filling)))
        slot = self.filling.pop(chunk)
        if ends_well:
            self.arena[slot] = chunk
            self.directory.filled(chunk)
            return
        self.directory.given_up(chunk, may_still_be_written=hangs)
        if hangs:
            self.stuck.append(slot)

    @precondition(lambda self: self.stuck)
    @rule(data=st.data())
    def a_stuck_thread_returns(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.stuck))
        self.arena[slot] = key("?")
        self.stuck.remove(slot)
        self.directory.give_back(slot)

    @rule(path=st.sampled_from(PATHS))
    def use(self, path: str) -> None:
        self.directory.use(chain(path))

    @rule(path=st.sampled_from(PATHS))
    def pin(self, path: str) -> None:
        if self.directory.place(key(path)) is Place.HOST:
            self.directory.pin([key(path)])
            self.pinned[key(path)] += 1

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        chunk = data.draw(st.sampled_from(sorted(self.pinned)))
        self.directory.unpin([chunk])
        self.pinned -= Counter([chunk])

    @rule(seconds=st.integers(0, 3))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(max_writes=st.integers(1, 3))
    def begin_writes(self, max_writes: int) -> None:
        self.remove_files()
        for write in self.directory.take_writes(self.now, max_writes):
            assert write.name.key not in self.writing
            self.writing[write.name.key] = write
            self.num_written += 1
        self.remove_files()

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), ends_well=st.booleans())
    def end_write(self, data: st.DataObject, ends_well: bool) -> None:
        chunk = data.draw(st.sampled_from(sorted(self.writing)))
        write = self.writing.pop(chunk)
        held = self.arena[write.slot]
        assert held == chunk, "the slot had another chunk while it was written"
        if ends_well:
            self.files[chunk] = held
            self.directory.written(chunk)
        else:
            self.directory.not_written(chunk)

    @rule(path=st.sampled_from(PATHS))
    def lose_a_file(self, path: str) -> None:
        self.directory.lost_file(key(path))

    @rule()
    def clear(self) -> None:
        cleared = self.directory.clear()
        assert cleared == (not self.filling and not self.writing and not self.pinned)
        if cleared:
            self.remove_files()
            assert not self.files

    def remove_files(self) -> None:
        for chunk in self.directory.take_removals():
            self.files.pop(chunk, None)

    @invariant()
    def what_is_there_is_there(self) -> None:
        for event in self.directory.take_events():
            match event:
                case BlockStored([chunk], tier=tier):
                    assert chunk not in self.told[tier]
                    self.told[tier].add(chunk)
                case BlockRemoved([chunk], tier):
                    self.told[tier].remove(chunk)
                case AllBlocksCleared(tier):
                    self.told[tier].clear()
        self.remove_files()
        in_host = {key(path) for path in PATHS if self.directory.place(key(path)) is Place.HOST}
        assert self.told[Tier.HOST] == in_host
        for chunk in in_host:
            at = self.directory.slot(chunk)
            assert at is not None and self.arena[at[0]] == chunk
            assert at[0] not in self.stuck
        assert self.told[Tier.DISK] == self.files.keys()
        assert all(self.files[chunk] == chunk for chunk in self.files)

    @invariant()
    def every_bound_holds(self) -> None:
        self.remove_files()
        directory = self.directory
        assert directory.num_in_host + directory.num_quarantined <= directory.num_host_slots
        assert directory.num_quarantined == len(self.stuck)
        assert directory.num_on_disk == len(self.files) + len(self.writing) <= directory.max_disk_chunks
        assert self.num_written <= RATE * (self.now + BURST_SECONDS) + 1
        for chunk in self.pinned:
            assert directory.place(chunk) is Place.HOST


TestTiers = Tiers.TestCase
