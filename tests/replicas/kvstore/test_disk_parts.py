"""The pure parts of the disk: the breaker and the measured speed."""

from pathlib import Path

import pytest

from replicas.kvstore.on_disk.breaker import MAX_PAUSE_SECONDS, Breaker
from replicas.kvstore.on_disk.disk_health import DiskHealth
from replicas.kvstore.on_disk.transfer_speed import SAMPLE_BYTES, SAMPLE_SECONDS, SHARE_OF_NEW, TransferSpeed
from tests.replicas.kvstore.open_disk import options


def test_a_breaker_pauses_twice_as_long_each_time_up_to_a_bound() -> None:
    breaker, now, pauses = Breaker(), 100.0, []
    assert breaker.allows(now) and not breaker.is_tripped
    for _ in range(12):
        pauses.append(breaker.failed(now))
        assert breaker.is_tripped and not breaker.allows(now + pauses[-1] - 0.01)
        now += pauses[-1]
        assert breaker.allows(now)
    assert pauses == [min(2.0**doubled, MAX_PAUSE_SECONDS) for doubled in range(12)]


def test_what_was_under_way_when_it_tripped_counts_once() -> None:
    breaker = Breaker()
    assert breaker.failed(10.0) == 1.0
    assert [breaker.failed(10.5), breaker.failed(10.75)] == [0.5, 0.25]
    assert breaker.failed(11.0) == 2.0


def test_a_success_forgets_the_failures() -> None:
    breaker = Breaker()
    breaker.failed(1.0)
    breaker.failed(2.0)
    breaker.succeeded()
    assert breaker.allows(2.0) and not breaker.is_tripped and breaker.failed(2.0) == 1.0


def test_what_is_written_takes_of_the_free_space_that_was_last_seen(caplog: pytest.LogCaptureFixture) -> None:
    health = DiskHealth(options(Path("/kv"), slot_bytes=10, reserve_bytes=100))
    assert health.allows(0.0)
    health.has_free(125)
    health.has_written(10)
    assert health.allows(0.0) and not caplog.records
    health.has_written(10)
    assert not health.allows(0.0)
    health.has_free(109)
    assert not health.allows(0.0) and len(caplog.records) == 1
    health.has_free(110)
    assert health.allows(0.0) and len(caplog.records) == 2


def test_a_file_that_cannot_be_removed_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    health = DiskHealth(options(Path("/kv")))
    for _ in range(3):
        health.has_failed_to_remove(OSError(30, "Read-only file system"))
    assert [record.getMessage() for record in caplog.records] == [
        "a file in /kv cannot be removed: Read-only file system"
    ]


def test_a_speed_is_unknown_until_something_moved() -> None:
    speed = TransferSpeed()
    speed.begun(1.0)
    speed.ended(9.0, 0)
    assert speed.seconds_per_byte is None


def test_time_counts_once_however_many_transfers_are_under_way() -> None:
    speed = TransferSpeed()
    for at in (1.0, 1.0, 1.05, 1.1):
        speed.begun(at)
    for at in (1.1, 1.15, 1.15, 1.2):
        assert speed.seconds_per_byte is None
        speed.ended(at, SAMPLE_BYTES // 4)
    assert speed.seconds_per_byte == pytest.approx(0.2 / SAMPLE_BYTES)
    idle_later = TransferSpeed()
    for begin in (1.0, 100.0):
        idle_later.begun(begin)
        idle_later.ended(begin + 1.0, SAMPLE_BYTES)
    assert idle_later.seconds_per_byte == pytest.approx(1.0 / SAMPLE_BYTES)


def test_a_speed_follows_what_is_new() -> None:
    speed = TransferSpeed()
    speed.probed(1.0)
    speed.probed(5.0)
    assert speed.seconds_per_byte == 1.0
    speed.begun(0.0)
    speed.ended(3.0 * SAMPLE_BYTES, SAMPLE_BYTES)
    assert speed.seconds_per_byte == pytest.approx(1.0 + SHARE_OF_NEW * 2.0)


def test_slow_small_transfers_and_failures_make_it_slower() -> None:
    speed = TransferSpeed()
    speed.begun(0.0)
    speed.ended(SAMPLE_SECONDS, 1)
    before = speed.seconds_per_byte
    assert before == SAMPLE_SECONDS
    speed.begun(10.0)
    speed.ended(20.0, 0)
    speed.begun(20.0)
    speed.ended(20.0, 1)
    assert speed.seconds_per_byte == pytest.approx(before + SHARE_OF_NEW * (10.0 - before))
