"""PullService: chunks of KV for other replicas, straight from this one's host memory.

Owns how many pulls are served at once, how many wait for that and how long, and that each has a deadline. The
engine is not asked and does not know; copies and checksums are made by threads, beside the event loop.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from prometheus_client import Counter

from replicas.kvstore.pulling.chunk_reader import ChunkReader
from replicas.protocol.pulls import MAX_PART_BYTES, MAX_PULL_SECONDS, TOO_MANY_PULLS, PullPart, PullRequest
from replicas.protocol.status import Epoch
from replicas.protocol.wire import decode_pull_request

MAX_PULLS = 8
MAX_BYTES = 256 << 20
"""Memory of parallel pulls, each of which holds a chunk. Beyond it pulls wait, but one is always served."""

MAX_WAITING = 32
WAIT_SECONDS = 1.0
WAIT_SHARE = 0.5
"""Number of waiting pulls, their time, and its share after which they are refused. Several replicas that take
over what one leaves pull from it at the same time, each by several threads."""

NUM_THREADS = 2

GRACE_SECONDS = 5.0
"""More than the longest deadline allows, for clocks and for the way."""


class PullService:
    """For pulls from this incarnation of a replica; a `reader` of None has nothing to pull."""

    def __init__(self, reader: ChunkReader | None, epoch: Epoch, chunks: Counter) -> None:
        """`chunks` counts those that were sent."""
        self._reader = reader
        self._epoch = epoch
        self._chunks = chunks
        self._num_pulls = 0
        """Waiting pulls included."""
        self._idle = asyncio.Event()
        self._idle.set()
        most = 0 if reader is None else MAX_BYTES // reader.image_bytes
        self._max_pulls = max(1, min(MAX_PULLS, most))
        self._places = asyncio.Semaphore(self._max_pulls)
        self._threads = ThreadPoolExecutor(NUM_THREADS, "kv-pull")

    async def serve(self, encoded: bytes, context: Any) -> None:
        reader = self._reader
        try:
            request = decode_pull_request(encoded)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return
        if reader is None or request.epoch != self._epoch or request.layout != reader.layout:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "there is no KV of this layout and incarnation here"
            )
            return
        # gRPC ends the call at its deadline, also one that nobody reads any more: nothing here could.
        seconds = context.time_remaining()
        if seconds is None or seconds > MAX_PULL_SECONDS + GRACE_SECONDS:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"a pull has a deadline within {MAX_PULL_SECONDS:g} seconds"
            )
            return
        if self._num_pulls >= self._max_pulls + MAX_WAITING:
            await _refuse_for_now(context)
            return
        self._num_pulls += 1
        self._idle.clear()
        try:
            await self._serve_in_turn(reader, request, context, min(WAIT_SECONDS, WAIT_SHARE * seconds))
        except grpc.aio.BaseError:
            return  # the peer has gone
        finally:
            self._num_pulls -= 1
            if not self._num_pulls:
                self._idle.set()

    @property
    def is_idle(self) -> bool:
        return not self._num_pulls

    async def wait_idle(self) -> None:
        """Return once no pull is served. Each has a deadline."""
        await self._idle.wait()

    def close(self) -> None:
        """No pull is served any more."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._reader is not None:
            self._reader.close()

    async def _serve_in_turn(
        self, reader: ChunkReader, request: PullRequest, context: Any, patience: float
    ) -> None:
        try:
            async with asyncio.timeout(patience):
                await self._places.acquire()
        except TimeoutError:
            await _refuse_for_now(context)
            return
        try:
            await self._serve(reader, request, context)
        finally:
            self._places.release()

    async def _serve(self, reader: ChunkReader, request: PullRequest, context: Any) -> None:
        loop = asyncio.get_running_loop()
        image = memoryview(bytearray(reader.image_bytes))
        for index, key in enumerate(request.keys):
            if not await loop.run_in_executor(self._threads, reader.copy, key, image):
                return
            for begin in range(0, len(image), MAX_PART_BYTES):
                await context.write(PullPart(index, bytes(image[begin : begin + MAX_PART_BYTES])))
            self._chunks.inc()


async def _refuse_for_now(context: Any) -> None:
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, TOO_MANY_PULLS)
