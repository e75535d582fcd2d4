"""A process that uses a disk without end: `python -m tests.replicas.kvstore.endless_writer FOLDER SEED`.

It writes, reads, removes and uses chunks at random, many at a time, until it is killed. A read of bytes that
are not the chunk's ends it with status 3.
"""

import os
import random
import sys
from pathlib import Path

from replicas.kvstore.layout import HEADER_BYTES
from replicas.kvstore.on_disk.disk import Disk, Kind
from tests.replicas.kvstore.chunk_images import PAYLOAD_BYTES, fill, payload, slots
from tests.replicas.kvstore.chunk_names import key
from tests.replicas.kvstore.open_disk import options

PATHS = [str(number) for number in range(200)]
NUM_SLOTS = 16


def main(folder: str, seed: str) -> int:
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


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
