"""Encoding: how far the images of one prompt are encoded, for engines that only count.

Owns the rule: an image is encoded whole, for the first of its tokens that is computed. Pure.
"""

from collections.abc import Sequence

from replicas.protocol.blocks import ImageTokens
from replicas.protocol.ways import num_image_tokens_left


class Encoding:
    """The images of one prompt to encode. Until it is computed, its first `num_ready_tokens` are expected to
    be cached."""

    __slots__ = ("_has_begun", "_ready", "media")

    def __init__(self, media: Sequence[ImageTokens], num_ready_tokens: int = 0) -> None:
        self.media = media
        self._ready = num_ready_tokens
        self._has_begun = False

    def expect(self, num_ready_tokens: int) -> None:
        """Change the number of ready tokens. Started encodings stay."""
        if not self._has_begun:
            self._ready = num_ready_tokens

    @property
    def num_tokens_left(self) -> int:
        return num_image_tokens_left(self.media, self._ready)

    def encode(self, start: int, end: int) -> int:
        """How many tokens of images are encoded for the tokens from `start` to `end`, which are computed."""
        if not self._has_begun:
            self._ready, self._has_begun = start, True
        num_encoded = 0
        for span in self.media:
            if span.start < end and span.start + span.length > self._ready:
                num_encoded += span.length
                end = max(end, span.start + span.length)
        self._ready = max(self._ready, end)
        return num_encoded
