"""held_images(): takes a prompt's images from a store and holds them until the prompt has ended.

Owns the check that every span belongs to its image: engines check none of it.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from replicas.engine import EngineRequest, RequestRefused
from replicas.media.image_cache import CachedImage
from replicas.protocol.frames import RefusalCode

Content = TypeVar("Content")


class Images(Protocol[Content]):
    """An ImageCache, or an ImageStore."""

    def hold(self, hashes: Iterable[bytes]) -> list[CachedImage[Content]] | None: ...

    def release(self, hashes: Iterable[bytes]) -> None: ...


def held_images(
    images: Images[Content] | None, request: EngineRequest, model: str
) -> Sequence[CachedImage[Content]]:
    """Hold the images until `release_images`. Raises RequestRefused and holds nothing. Without a store the
    model is for text."""
    media = request.submit.media
    if not media:
        return ()
    if images is None:
        raise RequestRefused(RefusalCode.INVALID_REQUEST, f"{model} reads text only")
    items = images.hold(span.content_hash for span in media)
    if items is None:
        raise RequestRefused(RefusalCode.MEDIA_MISSING, "an image that the prompt refers to is not here")
    end = 0
    for span, item in zip(media, items, strict=True):
        stands = tuple(request.token_ids[span.start : span.start + span.length])
        if span.start < end or stands != item.token_ids:
            release_images(images, request)
            raise RequestRefused(
                RefusalCode.INVALID_REQUEST, f"the tokens from {span.start} on are not those of an image"
            )
        end = span.start + span.length
    return items


def release_images(images: Images[Content] | None, request: EngineRequest) -> None:
    """Once for each time that they were held."""
    if images is not None and request.submit.media:
        images.release(span.content_hash for span in request.submit.media)
