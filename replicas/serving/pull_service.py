"""PullService: chunks of KV for other replicas, straight from this one's host memory.

Owns how many pulls are served at once, how many wait for that and how long, and that each has a deadline. The
engine is not asked and does not know; copies and checksums are made by threads, beside the event loop.

A pull of a split waits for each chunk that is being computed. It is served only while it has one to send.
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
from replicas.serving.chunk_watch import ChunkWatch
from replicas.serving.open_splits import OpenSplits

MAX_CALLS = 1024
"""Pulls at once, those that wait included: a call that waits has nothing but its deadline."""

MAX_BYTES = 256 << 20
"""Memory of the pulls that are served, each of which holds a chunk. Beyond it pulls wait, but one is always
served."""

WAIT_SECONDS = 1.0
WAIT_SHARE = 0.5
"""How long a pull waits for its turn, and as which share of its time, before it is refused. A split's does
until its deadline."""

NUM_THREADS = 2

GRACE_SECONDS = 5.0
"""More than the longest deadline allows, for clocks and for the way."""


class PullService:
    """For pulls from this incarnation of a replica; a `reader` of None has nothing to pull."""

    def __init__(
        self, reader: ChunkReader | None, epoch: Epoch, chunks: Counter, splits: OpenSplits | None = None
    ) -> None:
        """`chunks` counts those that were sent. Without `splits` none is known."""
        self._reader = reader
        self._epoch = epoch
        self._chunks = chunks
        self._num_pulls = 0
        """Waiting pulls included."""
        self._idle = asyncio.Event()
        self._idle.set()
        most = 0 if reader is None else MAX_BYTES // reader.image_bytes
        self._places = asyncio.Semaphore(max(1, most))
        self._threads = ThreadPoolExecutor(NUM_THREADS, "kv-pull")
        self._watch = None if reader is None else ChunkWatch(reader, splits or OpenSplits(), self._threads)

    async def serve(self, encoded: bytes, context: Any) -> None:
        reader, watch = self._reader, self._watch
        try:
            request = decode_pull_request(encoded)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return
        if reader is None or watch is None or request.epoch != self._epoch or request.layout != reader.layout:
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
        if self._num_pulls >= MAX_CALLS:
            await _refuse_for_now(context)
            return
        self._num_pulls += 1
        self._idle.clear()
        try:
            if request.split_id:
                await self._serve_split(reader, watch, request, context)
            else:
                patience = min(WAIT_SECONDS, WAIT_SHARE * seconds)
                await self._serve(reader, request, context, patience=patience)
        except grpc.aio.BaseError:
            return  # the peer has gone
        finally:
            self._num_pulls -= 1
            if not self._num_pulls:
                self._idle.set()

    @property
    def num_waiting(self) -> int:
        """Pulls that wait for a chunk."""
        return 0 if self._watch is None else self._watch.num_waiting

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

    async def _serve_split(
        self, reader: ChunkReader, watch: ChunkWatch, request: PullRequest, context: Any
    ) -> None:
        begin, may_come, has_waited = 0, True, False
        while True:
            begin = await self._serve(reader, request, context, begin=begin, has_waited=has_waited)
            if begin == len(request.keys) or not may_come:
                return
            may_come = await watch.wait(request.keys[begin], request.split_id)
            has_waited = True

    async def _serve(
        self,
        reader: ChunkReader,
        request: PullRequest,
        context: Any,
        *,
        begin: int = 0,
        has_waited: bool = False,
        patience: float | None = None,
    ) -> int:
        """Send the chunks from `begin` on up to the first that is missing, once it is this pull's turn.
        Returns the missing one's place."""
        try:
            async with asyncio.timeout(patience):
                await self._places.acquire()
        except TimeoutError:
            await _refuse_for_now(context)
            return begin
        try:
            loop = asyncio.get_running_loop()
            image = memoryview(bytearray(reader.image_bytes))
            for index in range(begin, len(request.keys)):
                if not await loop.run_in_executor(self._threads, reader.copy, request.keys[index], image):
                    return index
                for at in range(0, len(image), MAX_PART_BYTES):
                    content = bytes(image[at : at + MAX_PART_BYTES])
                    await context.write(PullPart(index, content, has_waited and not at))
                has_waited = False
                self._chunks.inc()
            return len(request.keys)
        finally:
            self._places.release()


async def _refuse_for_now(context: Any) -> None:
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, TOO_MANY_PULLS)
