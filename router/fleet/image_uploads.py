"""ImageUploads: images sent to one replica over one connection, and those on their way.

Owns the router's belief. The replica evicts old images, and says so when a prompt refers to one: then it is
sent again.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc

from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import RefusalCode
from replicas.protocol.media import MEDIA_PART_BYTES, ImagePart
from replicas.protocol.wire import decode_media_taken, encode
from router.fleet.image_traffic import ImageTraffic
from router.fleet.replica_channel import ReplicaChannel
from router.prompt.images import Media
from router.shared.bounded_cache import BoundedCache

MAX_KNOWN = 4096
"""Images of one replica. One too many is sent once more."""

MAX_UPLOADS = 8
"""To one replica at once; the others wait for them. A replica reads one image after another."""

SECONDS = 30.0
"""For one image to be sent and read."""


class UploadFailed(Exception):
    """The replica has not taken the image; INVALID_REQUEST means bad content."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: RefusalCode.INVALID_REQUEST,
    grpc.StatusCode.RESOURCE_EXHAUSTED: RefusalCode.OVERLOADED,
    grpc.StatusCode.DEADLINE_EXCEEDED: RefusalCode.OVERLOADED,
}
"""All others are the replica's failure."""


@dataclass(slots=True)
class _Sending:
    task: asyncio.Task[None]
    num_waiting: int = 0
    has_begun: bool = False


class ImageUploads:
    """Two prompts that wait for one image wait for one upload."""

    def __init__(self, channel: ReplicaChannel, traffic: ImageTraffic) -> None:
        self._channel = channel
        self._traffic = traffic
        self._known: BoundedCache[bytes, bool] = BoundedCache(MAX_KNOWN)
        self._sending: dict[bytes, _Sending] = {}
        self._turns = asyncio.Semaphore(MAX_UPLOADS)
        self._forgotten: BoundedCache[bytes, bool] = BoundedCache(MAX_KNOWN)

    def has(self, media: Sequence[Media]) -> bool:
        """Whether all of them should be there: then they count as known."""
        for each in media:
            if not self._known.get(each.content_hash):
                return False
        self._traffic.num_known += len(media)
        return True

    def forget(self, media: Sequence[Media]) -> None:
        """The replica misses one of them."""
        for each in media:
            if self._known.pop(each.content_hash):
                self._forgotten.put(each.content_hash, True)

    async def send(self, root: BlockHash, media: Sequence[Media]) -> None:
        """Send the missing ones. Raises UploadFailed. When the caller is cancelled, begun uploads continue,
        and others are dropped if no caller waits for them."""
        for each in media:
            if each.content_hash in self._known:
                self._traffic.num_known += 1
            else:
                await self._wait_for(self._begun(root, each))

    async def _wait_for(self, sending: "_Sending") -> None:
        sending.num_waiting += 1
        try:
            await asyncio.shield(sending.task)
        finally:
            sending.num_waiting -= 1
            if not sending.num_waiting and not sending.has_begun:
                sending.task.cancel()

    def _begun(self, root: BlockHash, media: Media) -> "_Sending":
        sending = self._sending.get(media.content_hash)
        if sending is not None and not sending.task.cancelling():
            self._traffic.num_shared += 1
            return sending
        task = asyncio.create_task(self._send(root, media))
        sending = self._sending[media.content_hash] = _Sending(task)
        task.add_done_callback(lambda ended: self._ended(media.content_hash, ended))
        return sending

    def _ended(self, content_hash: bytes, task: asyncio.Task[None]) -> None:
        if self._sending[content_hash].task is task:
            del self._sending[content_hash]
        if not task.cancelled():
            task.exception()  # whoever still waits gets it; else nobody does

    async def _send(self, root: BlockHash, media: Media) -> None:
        async with self._turns:
            self._sending[media.content_hash].has_begun = True
            start = time.monotonic()
            try:
                await self._put(root, media)
            except UploadFailed as error:
                self._traffic.num_failed[error.code] += 1
                raise
        is_again = self._forgotten.pop(media.content_hash) is not None
        self._traffic.sent(len(media.content), time.monotonic() - start, is_again=is_again)
        self._known.put(media.content_hash, True)

    async def _put(self, root: BlockHash, media: Media) -> None:
        try:
            encoded: bytes = await self._channel.stub.put_media(
                _parts(root, media.content), metadata=self._channel.metadata("PutMedia"), timeout=SECONDS
            )
            taken = decode_media_taken(encoded)
        except grpc.RpcError as error:
            assert isinstance(error, grpc.aio.AioRpcError)
            code = _CODES.get(error.code(), RefusalCode.INTERNAL)
            raise UploadFailed(code, error.details() or "the image was not taken") from error
        except grpc.aio.UsageError as error:  # the channel was closed meanwhile
            raise UploadFailed(RefusalCode.INTERNAL, "the connection was closed") from error
        except ValueError as error:
            raise UploadFailed(RefusalCode.INTERNAL, f"its answer breaks the contract: {error}") from error
        if taken.content_hash != media.content_hash:
            raise UploadFailed(RefusalCode.INTERNAL, "the replica names the image by another hash")


async def _parts(root: BlockHash, content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), MEDIA_PART_BYTES):
        part = content[start : start + MEDIA_PART_BYTES]
        yield encode(ImagePart(part) if start else ImagePart(part, root, len(content)))
