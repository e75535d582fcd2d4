"""The directory's own time for prompts of many chunks: while it decides, the engine stands still.

No bytes move. Each prompt's chunks come to host memory one by one, are written to the disk as they get old
and at the end, are used, forgotten and fetched again; then two prompts come in turns.

    python -m loadtests.benches.directory [--chunks 128,1024] [--rounds 5]
"""

import argparse
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from loadtests.figures import percentiles, print_header
from replicas.kvstore.chunk import ChunkName
from replicas.kvstore.directory import Directory, Place
from replicas.protocol.blocks import HASH_BYTES, BlockHash

BLOCKS_PER_CHUNK = 8
STEP_CHUNKS = 16
"""Of 128 tokens: what a step of 2,048 tokens computes."""


class Bench:
    def __init__(self, num_chunks: int) -> None:
        self._num_chunks = num_chunks
        self._numbers = itertools.count(1)
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[what].append(time.perf_counter() - began)

    def _prompt(self) -> list[ChunkName]:
        names: list[ChunkName] = []
        parent = None
        for number in range(self._num_chunks):
            key = BlockHash(next(self._numbers).to_bytes(HASH_BYTES, "big"))
            names.append(ChunkName(key, parent, (number + 1) * BLOCKS_PER_CHUNK - 1))
            parent = key
        return names

    def round(self) -> None:
        slots = 2 * self._num_chunks
        directory = Directory(host_chunks=slots, disk_chunks=10 * slots)
        first, second, third = self._prompt(), self._prompt(), self._prompt()
        with self._timed("come"):
            _put(directory, first)
        with self._timed("come while the oldest are written"):
            for step in _steps(second):
                _put(directory, step)
                _write(directory)
        with self._timed("written at the end"):
            directory.write_all()
            _write(directory)
        with self._timed("used"):
            directory.use([name.key for name in first])
        _put(directory, third)
        _put(directory, self._prompt())
        with self._timed("fetched"):
            for name in first:
                if directory.place(name.key) is Place.DISK:
                    directory.fetch(name.key)
                    directory.filled(name.key)
        fourth, fifth = self._prompt(), self._prompt()
        with self._timed("two come in turns, each a step"):
            for steps in zip(_steps(fourth), _steps(fifth), strict=True):
                for step in steps:
                    _put(directory, step)


def _steps(names: Sequence[ChunkName]) -> list[Sequence[ChunkName]]:
    return [names[start : start + STEP_CHUNKS] for start in range(0, len(names), STEP_CHUNKS)]


def _put(directory: Directory, names: Sequence[ChunkName]) -> None:
    for name in names:
        if directory.offer(name) is not None:
            directory.filled(name.key)


def _write(directory: Directory) -> None:
    while writes := directory.take_writes(0.0, 4):
        for write in writes:
            directory.written(write.name.key)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunks", default="128,1024", help="of a prompt; several, with commas")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print_header("the directory of prompts of many chunks")
    for num_chunks in map(int, arguments.chunks.split(",")):
        bench = Bench(num_chunks)
        for _ in range(arguments.rounds):
            bench.round()
        print(f"\n{num_chunks} chunks of a prompt, milliseconds (median of {arguments.rounds})")
        for what, seconds in bench.seconds.items():
            print(f"  {what:<36} {1000 * percentiles(seconds).p50:9.2f}")


if __name__ == "__main__":
    main()
