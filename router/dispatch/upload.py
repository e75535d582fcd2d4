"""Upload: images on their way to the replica that was chosen for their prompt, which waits for them.

Owns the place that is reserved there meanwhile.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from replicas.protocol.blocks import BlockHash
from replicas.protocol.frames import RefusalCode
from router.fleet.image_uploads import ImageUploads, UploadFailed
from router.prompt.images import Media
from router.routing.table import RoutedRequest


async def send_to_all(places: Iterable[ImageUploads], root: BlockHash, media: Sequence[Media]) -> None:
    """Send a prompt's images to replicas, at the same time. Raises UploadFailed."""
    await asyncio.gather(*(place.send(root, media) for place in places))


@dataclass(frozen=True, slots=True)
class Upload:
    """`part` are the choices to submit afterwards."""

    part: Sequence[int]
    routed: RoutedRequest
    task: asyncio.Task[None]

    def error(self) -> UploadFailed | None:
        """Return the error of an upload that ended."""
        if self.task.cancelled():
            return UploadFailed(RefusalCode.INTERNAL, "the upload was ended")
        error = self.task.exception()
        if error is None or isinstance(error, UploadFailed):
            return error
        raise error

    def give_up(self) -> None:
        self.routed.close()
        self.task.cancel()
        if self.task.done() and not self.task.cancelled():
            self.task.exception()
