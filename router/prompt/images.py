"""Images of a prompt: as received, with their tokens, and with their names.

Plain data, which travels to the process that prepares large bodies and back, and the conversions between the
forms.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from replicas.protocol.bounds import Uint32
from replicas.protocol.image_rules import ImageRule, expand, rule_on_card
from replicas.protocol.images import ImageError, ImageFormat, ImageSize
from replicas.protocol.media import MAX_MEDIA_BYTES
from router.errors import InvalidRequest

NUM_KNOWN_RULES = 64

Content = Annotated[bytes, Meta(max_length=MAX_MEDIA_BYTES)]


class SentImage(Struct, frozen=True, array_like=True):
    """An image in a client's body, at `path`. `digest` is `media_digest` of the received content; the size is
    that of the displayed image."""

    content: Content
    digest: bytes
    format: ImageFormat
    width: Uint32
    height: Uint32
    path: str

    @property
    def size(self) -> ImageSize:
        return ImageSize(self.format, self.width, self.height)


class PromptImage(Struct, frozen=True, array_like=True):
    """Tokens `[start, start + length)` represent it."""

    content: Content
    digest: bytes
    start: Uint32
    length: Uint32
    path: str = ""


class Media(NamedTuple):
    """An image, its name under its prompt's root, and its path in the client's body."""

    content_hash: bytes
    content: bytes
    path: str = ""


class Shown(NamedTuple):
    """A prompt with the tokens of its images in it."""

    token_ids: list[int]
    images: Sequence[PromptImage] = ()

    def moved(self, num_tokens: int | None) -> int | None:
        """Return the position here of the end of `num_tokens` of the prompt with one token per image."""
        if num_tokens is None:
            return None
        for image in self.images:
            if image.start >= num_tokens:
                break
            num_tokens += image.length - 1
        return num_tokens

    def as_sent(self, position: int) -> int:
        """Return the token's position in the prompt with one token per image."""
        num_more = 0
        for image in self.images:
            if image.start > position:
                break
            num_more += min(position - image.start, image.length - 1)
        return position - num_more

    def image_path(self, position: int) -> str | None:
        """Return the path in the client's body of the image at the token `position`, if there is one."""
        for image in self.images:
            if image.start <= position < image.start + image.length:
                return image.path
        return None


@lru_cache(maxsize=NUM_KNOWN_RULES)
def rule_of(image_rule: str) -> ImageRule | None:
    """Parse the rule of a model's card. None if it reads text only, or in an unknown way."""
    try:
        return rule_on_card(image_rule)
    except ValueError:
        return None


def is_readable(image: SentImage, image_rule: str) -> bool:
    rule = rule_of(image_rule)
    try:
        return rule is not None and rule.num_tokens(image.size) > 0
    except ImageError:
        return False


def show(token_ids: list[int], images: Sequence[SentImage], image_rule: str, parameter: str) -> Shown:
    """Return the prompt as an engine computes it. Raises InvalidRequest."""
    if not images:
        return Shown(token_ids)
    rule = rule_of(image_rule)
    if rule is None:
        path = images[0].path
        raise InvalidRequest(
            f"This model reads text only; '{path}' is an image.", parameter=path, code="unsupported_value"
        )
    for image in images:
        try:
            rule.num_tokens(image.size)
        except ImageError as error:
            raise InvalidRequest(f"Invalid '{image.path}': {error}.", parameter=image.path) from error
    try:
        expanded, spans = expand(token_ids, [image.size for image in images], rule)
    except ImageError as error:
        raise InvalidRequest(
            f"The model's chat template does not show all images of the {parameter}: {error}.",
            parameter=parameter,
        ) from error
    return Shown(
        expanded,
        [
            PromptImage(image.content, image.digest, span.offset, span.length, image.path)
            for image, span in zip(images, spans, strict=True)
        ],
    )
