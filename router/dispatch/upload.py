"""Upload: images on their way to the replica that was chosen for their prompt, which waits for them.

Owns the place that is reserved there meanwhile.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from replicas.protocol.frames import RefusalCode
from router.fleet.image_uploads import UploadFailed
from router.routing.table import RoutedRequest


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
