"""What a store says of itself: every figure against what was really done, on a real disk."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from replicas.kvstore.arena import Arena
from replicas.kvstore.layout import HEADER_BYTES, ChunkError
from replicas.kvstore.on_disk.disk import Disk
from replicas.kvstore.store import ChunkShape, ChunkStore, DiskShare
from replicas.kvstore.tally import failure
from replicas.kvstore.telling import told
from replicas.kvstore.write_budget import WriteBudget
from replicas.protocol.frames import NO_USER, LoadSnapshot, StepFrame
from replicas.protocol.tier_figures import MoveFailure, TierFigures, TierFill, WriteStop
from replicas.protocol.wire import decode_load, encode
from tests.replicas.kvstore.chunk_images import LAYOUT, PAYLOAD_BYTES, SLOT_BYTES, payload
from tests.replicas.kvstore.chunk_names import BLOCKS_PER_CHUNK, key, name
from tests.replicas.kvstore.open_disk import PATIENCE_SECONDS, file_of, options

SHAPE = ChunkShape(32, BLOCKS_PER_CHUNK)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class OpenStore:
    """A store of a few slots over a disk in a folder, whose clock stands still."""

    def __init__(self, folder: Path, *, num_slots: int, budget: WriteBudget, **changes: Any) -> None:
        self.clock = Clock()
        self.disk = Disk(options(folder, **changes))
        share = DiskShare(self.disk, LAYOUT.digest(), 1000, budget)
        self.store = ChunkStore(Arena(num_slots, PAYLOAD_BYTES), SHAPE, clock=self.clock, share=share)
        self.store.begin()

    def keep(self, path: str) -> None:
        slot = self.store.offer(name(path), (NO_USER,) * SHAPE.blocks_per_chunk)
        assert slot is not None
        image = self.store.arena.slot(slot)
        image[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES] = payload(path)
        self.store.filled(key(path))

    def settle(self) -> TierFigures:
        """Until nothing moves."""
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            self.store.poll()
            if not self.store._reads and not self.store._writes:
                return self.store.figures()
            assert time.monotonic() < end, "something moves for ever"
            self.store.wait(0.02)

    def ask(self, path: str) -> TierFigures:
        """A request comes that begins with this chunk alone, and waits as long as it takes."""
        self.store.arrived(
            [name(path)],
            num_device_tokens=0,
            num_findable_tokens=SHAPE.tokens,
            wait_seconds=100.0,
            token_seconds=1.0,
        )
        return self.settle()


@contextmanager
def opened(
    folder: Path, *, num_slots: int = 4, budget: WriteBudget | None = None, **changes: Any
) -> Iterator[OpenStore]:
    each = OpenStore(folder, num_slots=num_slots, budget=budget or WriteBudget(), **changes)
    each.store.loaded(SHAPE.tokens, 0.001)
    each.disk._books._reading.probed(1e-9)
    try:
        yield each
    finally:
        each.store.close()


def test_a_chunk_on_its_way_through_every_tier_is_counted_at_each(tmp_path: Path) -> None:
    with opened(tmp_path) as tiers:
        assert tiers.store.figures().disk == TierFill(0, 0, 1000 * SLOT_BYTES)
        for path in "abcd":
            tiers.keep(path)
        figures = tiers.settle()
        num_files = len(list(tmp_path.rglob("*.kv")))
        assert figures.host == TierFill(4, 4 * SLOT_BYTES, 4 * SLOT_BYTES)
        assert figures.disk == TierFill(num_files, num_files * SLOT_BYTES, 1000 * SLOT_BYTES)
        assert (figures.writes.num, figures.writes.num_tokens) == (num_files, num_files * SHAPE.tokens)
        assert num_files > 0
        assert figures.writes.seconds > 0
        tiers.keep("e")
        figures = tiers.ask("a")
        assert (figures.reads.num, figures.reads.num_tokens) == (1, SHAPE.tokens)
        assert figures.reads.seconds > 0
        assert not figures.reads.num_failed and not figures.writes.num_failed
        tiers.store.loaded(3 * SHAPE.tokens, 0.25)
        loads = tiers.store.figures().loads
        assert (loads.num, loads.num_tokens) == (2, 4 * SHAPE.tokens)
        assert loads.seconds == pytest.approx(0.251)
        assert figures.write_stop is None and not figures.is_write_budget_short


def test_files_that_are_torn_or_gone_are_failed_reads_by_their_reason(tmp_path: Path) -> None:
    with opened(tmp_path) as tiers:
        for path in "abcdefgh":
            tiers.keep(path)
            tiers.settle()
        torn, gone = file_of(tmp_path, "a"), file_of(tmp_path, "b")
        content = bytearray(torn.read_bytes())
        content[HEADER_BYTES + 5] ^= 1
        torn.write_bytes(content)
        gone.unlink()
        tiers.ask("a")
        figures = tiers.ask("b")
        assert figures.reads.num == 0
        assert figures.reads.num_failed == {MoveFailure.DAMAGED: 1, MoveFailure.MISSING: 1}


def test_a_write_budget_that_is_spent_shows_with_what_waits_for_it(tmp_path: Path) -> None:
    with opened(tmp_path, num_slots=8, budget=WriteBudget(bytes_per_second=SLOT_BYTES / 10)) as tiers:
        for path in "abcdefghij":
            tiers.keep(path)
        figures = tiers.settle()
        assert figures.writes.num == 1
        assert figures.num_waiting_writes == tiers.store.directory.num_to_write > 0
        assert figures.write_budget_ratio == 0 and figures.is_write_budget_short
        tiers.clock.now += 4
        assert tiers.store.figures().write_budget_ratio == pytest.approx(0.4)


def test_a_disk_without_free_space_says_that_it_takes_no_writes(tmp_path: Path) -> None:
    with opened(tmp_path, reserve_bytes=1 << 60) as tiers:
        for path in "abcd":
            tiers.keep(path)
        figures = tiers.settle()
        assert figures.write_stop is WriteStop.FULL and figures.writes.num == 0


def test_writes_that_fail_are_counted_and_stop_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any, **named: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("replicas.kvstore.on_disk.chunk_files.ChunkFiles.write", fails)
    with opened(tmp_path) as tiers:
        for path in "abcd":
            tiers.keep(path)
        figures = tiers.settle()
        assert figures.writes.num_failed == {MoveFailure.IO_ERROR: 1}
        assert figures.write_stop is WriteStop.FAILS


def test_a_disk_that_is_off_says_so(tmp_path: Path) -> None:
    with opened(tmp_path) as tiers:
        assert tiers.disk.close(PATIENCE_SECONDS)
        assert tiers.store.figures().write_stop is WriteStop.OFF


def test_every_reason_of_a_disk_has_a_word_and_there_are_few_words() -> None:
    words = {"missing": "missing", "header": "damaged", "late": "late", "ENOSPC": "no_space"}
    words |= {"EDQUOT": "no_space", "EIO": "io_error", "EROFS": "io_error", "unknown": "io_error"}
    words |= dict.fromkeys(("off", "closed", "erased", "died"), "refused")
    words |= {error.__name__: "damaged" for error in ChunkError.__subclasses__()}
    assert {reason: failure(reason).value for reason in words} == words


def test_a_frame_has_figures_when_they_have_changed_and_a_load_always(tmp_path: Path) -> None:
    with opened(tmp_path) as tiers:
        assert tiers.store.has_news
        tiers.store.take_events()
        assert tiers.store.has_news, "nobody knows of the tiers yet"
        frame = told(StepFrame(load=LoadSnapshot(num_running=3)), tiers.store)
        assert frame.tiers == tiers.store.figures() and not tiers.store.has_news
        assert frame.load.num_running == 3
        assert (frame.load.num_host_bytes, frame.load.max_host_bytes) == (0, 4 * SLOT_BYTES)
        again = told(StepFrame(), tiers.store)
        assert again.tiers is None and again.load.max_disk_bytes == 1000 * SLOT_BYTES
        for path in "abcd":
            tiers.keep(path)
        tiers.settle()
        frame = told(StepFrame(), tiers.store)
        assert frame.tiers is not None
        assert frame.load.num_host_bytes == frame.tiers.host.num_bytes == 4 * SLOT_BYTES
        assert frame.tiers.disk is not None
        assert frame.load.num_disk_bytes == frame.tiers.disk.num_bytes == tiers.disk.bytes_used > 0
        assert told(StepFrame(), tiers.store).tiers is None


def test_a_disk_without_any_bound_worth_the_name_is_no_number_that_routers_refuse(tmp_path: Path) -> None:
    with opened(tmp_path, max_bytes=1 << 60) as tiers:
        assert decode_load(encode(told(StepFrame(), tiers.store).load)).max_disk_bytes == 1 << 53


def test_without_a_disk_nothing_is_said_of_one() -> None:
    store = ChunkStore(Arena(2, PAYLOAD_BYTES), SHAPE, clock=Clock())
    assert store.figures() == TierFigures(TierFill(0, 0, 2 * SLOT_BYTES))
    frame = told(StepFrame(), store)
    assert frame.load.max_disk_bytes == 0 and frame.load.max_host_bytes == 2 * SLOT_BYTES
    store.close()
