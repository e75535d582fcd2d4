"""ImageService: receives images from routers, in parts, for the engine.

Owns the bounds on parallel uploads and their bytes, the deadline of each call, and the waiters for the
engine's answers.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple, Protocol

import grpc

from replicas.observation.media_metrics import ImageMetrics, ImageOutcome
from replicas.protocol.blocks import HASH_BYTES, BlockHash
from replicas.protocol.media import (
    MAX_MEDIA_BYTES,
    MAX_MEDIA_SECONDS,
    ImageQuery,
    ImageQueryAnswer,
    ImageTaken,
)
from replicas.protocol.wire import decode_media_part

MAX_CALLS = 32

MAX_BYTES = 128 << 20
"""For all images being received, by the sizes in their first parts."""

GRACE_SECONDS = 5.0
"""More than the longest deadline allows, for clocks and for the way."""

FULL = "this replica has no room for more images now"


class ImageInbox(Protocol):
    """The part of the engine loop that is used here."""

    def take_media(self, question: ImageQuery) -> None: ...


class _AskedImage(NamedTuple):
    answer: asyncio.Future[ImageQueryAnswer]
    num_bytes: int


class ImageService:
    """`takes_images` comes from the model's card."""

    def __init__(self, inbox: ImageInbox, metrics: ImageMetrics, *, takes_images: bool) -> None:
        self._inbox = inbox
        self._metrics = metrics
        self._takes_images = takes_images
        self._numbers = itertools.count(1)
        self._asked: dict[int, _AskedImage] = {}
        self._num_calls = 0
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes being received, also without a waiter: the engine has them."""
        return self._num_bytes

    @property
    def num_calls(self) -> int:
        return self._num_calls

    def take(self, answers: Sequence[ImageQueryAnswer]) -> None:
        """Record the engine's answers."""
        for answer in answers:
            asked = self._asked.pop(answer.number, None)
            if asked is not None:
                self._give_back(asked.num_bytes)
                if not asked.answer.done():
                    asked.answer.set_result(answer)

    async def serve(self, parts: AsyncIterator[bytes], context: Any) -> ImageTaken:
        if not self._takes_images:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this replica's model reads text only")
        seconds = context.time_remaining()
        if seconds is None or seconds > MAX_MEDIA_SECONDS + GRACE_SECONDS:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"to send an image has a deadline within {MAX_MEDIA_SECONDS:g} seconds",
            )
        if self._num_calls >= MAX_CALLS:
            await self._refuse(context, ImageOutcome.FULL)
        self._num_calls += 1
        root, content = await self._read(parts, context)
        answer = await self._ask(root, content)
        if answer.is_full:
            await self._refuse(context, ImageOutcome.FULL)
        if answer.problem:
            self._metrics.count(ImageOutcome.UNREADABLE)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, answer.problem)
        self._metrics.taken(len(content), answer.seconds)
        return ImageTaken(answer.content_hash)

    async def _read(self, parts: AsyncIterator[bytes], context: Any) -> tuple[BlockHash, bytes]:
        """Read all parts; the bytes count from the first part on, and not at all if it does not come."""
        root, num_bytes, content = BlockHash(b""), 0, bytearray()
        try:
            async for encoded in parts:
                try:
                    part = decode_media_part(encoded)
                except ValueError as error:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
                if not root:
                    if len(part.root) != HASH_BYTES or not 0 < part.num_bytes <= MAX_MEDIA_BYTES:
                        await context.abort(
                            grpc.StatusCode.INVALID_ARGUMENT, "the first part says no root and no size"
                        )
                    if self._num_bytes + part.num_bytes > MAX_BYTES:
                        await self._refuse(context, ImageOutcome.FULL)
                    root, num_bytes = BlockHash(part.root), part.num_bytes
                    self._num_bytes += num_bytes
                if len(content) + len(part.content) > num_bytes:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "more has come than was announced")
                content += part.content
            if not root or len(content) != num_bytes:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "less has come than was announced")
        except BaseException:
            self._give_back(num_bytes)
            raise
        return root, bytes(content)

    async def _ask(self, root: BlockHash, content: bytes) -> ImageQueryAnswer:
        """Ask the engine until the call's deadline, which gRPC enforces. Content given to the engine counts
        until it has answered."""
        asked = _AskedImage(asyncio.get_running_loop().create_future(), len(content))
        number = next(self._numbers)
        self._asked[number] = asked
        self._inbox.take_media(ImageQuery(number, root, content))
        return await asked.answer

    def _give_back(self, num_bytes: int) -> None:
        self._num_calls -= 1
        self._num_bytes -= num_bytes

    async def _refuse(self, context: Any, outcome: ImageOutcome) -> None:
        self._metrics.count(outcome)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, FULL)
