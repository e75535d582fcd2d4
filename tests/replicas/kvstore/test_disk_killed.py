"""A process that uses the disk is killed at any moment; the next one finds right bytes or none."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from replicas.kvstore.layout import HEADER_BYTES
from replicas.kvstore.on_disk.disk import Disk, Kind
from tests.replicas.kvstore.chunk_images import PAYLOAD_BYTES, SLOT_BYTES, fill, payload, slots
from tests.replicas.kvstore.chunk_names import key, name
from tests.replicas.kvstore.open_disk import opened, options

NUM_KILLS = 6
MOST_SECONDS = 0.4
PATHS = [str(number) for number in range(200)]
NUM_SLOTS = 16


def write_endlessly(folder: str, seed: str) -> int:
    """Use a disk at random until killed; return 3 after a read of wrong bytes."""
    drawn = random.Random(int(seed))
    disk = Disk(options(Path(folder)))
    free = slots(NUM_SLOTS)
    busy: dict[int, tuple[memoryview, str]] = {}
    os.write(1, b"begun\n")
    while True:
        while free:
            slot, path = free.pop(), drawn.choice(PATHS)
            action = drawn.randrange(8)
            if action < 3:
                job = disk.write(fill(slot, path), slot, sync=action == 0)
            elif action < 6:
                job = disk.read(key(path), slot)
            else:
                disk.remove([key(path)])
                disk.note_use(key(each) for each in drawn.sample(PATHS, 5))
                disk.note_lease(key(drawn.choice(PATHS)), drawn.choice([0.0, 1e9, 2e9]))
                job = None
            if job is None:
                free.append(slot)
                break
            busy[job] = slot, path
        disk.wait(0.01)
        for finished in disk.take_finished():
            if finished.kind is Kind.LOST:
                continue
            slot, path = busy.pop(finished.job)
            free.append(slot)
            read = slot[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES]
            if finished.kind is Kind.READ and finished.ok and read != payload(path):
                return 3


def killed_writer(folder: Path, seed: int, seconds: float) -> None:
    command = [sys.executable, "-m", "tests.replicas.kvstore.test_disk_killed", str(folder), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"begun\n"
        time.sleep(seconds)
        assert writer.poll() is None, "it was killed, and not ended by a wrong byte"
        writer.send_signal(signal.SIGKILL)


def test_a_process_killed_at_any_moment_leaves_right_bytes_or_none(tmp_path: Path) -> None:
    drawn = random.Random(11)
    num_read = 0
    for seed in range(NUM_KILLS):
        killed_writer(tmp_path, seed, drawn.random() * MOST_SECONDS)
        with opened(tmp_path) as at:
            restored = list(at.disk.restored)
            assert all(each in {name(path) for path in PATHS} for each in restored)
            assert len(set(restored)) == len(restored)
            at.compared()
            found = at.disk.take_found()
            lost = {each.key for each in at.finished if each.kind is Kind.LOST}
            known = {each.key for each in [*restored, *found]} - lost
            assert not set(found) & set(restored)
            assert not list(tmp_path.rglob(".tmp-*"))
            files = [each for each in tmp_path.rglob("*.kv") if re.fullmatch(r"[0-9a-f]{32}\.kv", each.name)]
            assert {each.stem for each in files} == {each.hex() for each in known}
            assert at.disk.bytes_used == len(known) * SLOT_BYTES
            for path in PATHS:
                is_there = at.has(path)
                assert is_there == (key(path) in known)
                num_read += is_there
    assert num_read > 100, "the processes have written"


if __name__ == "__main__":
    sys.exit(write_endlessly(*sys.argv[1:]))
