"""ImageReader: decodes the bytes of an image into vLLM's input.

Owns the decoding, its bounds, and the check for every image that vLLM makes as many tokens of it as the
model's rule. Runs beside the engine's thread. Imports vLLM.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from vllm.inputs.engine import mm_input
from vllm.multimodal.image import convert_image_mode
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs

from replicas.media.image_cache import CachedImage
from replicas.media.store import BROKEN_IMAGE
from replicas.protocol.blocks import ImageTokens
from replicas.protocol.image_rules import ImageRule
from replicas.protocol.images import ImageError, ImageFormat, ImageSize, read_size
from replicas.vllm_engine.media_spans import identifier_of

_NAMES = {
    ImageFormat.PNG: "PNG",
    ImageFormat.JPEG: "JPEG",
    ImageFormat.WEBP: "WEBP",
    ImageFormat.GIF: "GIF",
}
"""Pillow's names."""

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""By EXIF's orientation."""

_IMAGE = "image"
"""vLLM's name for this kind of media."""


@dataclass(frozen=True, slots=True)
class ReadImage:
    """`data` is vLLM's own. `is_embed` marks the tokens with an embedding; None is all."""

    data: Any
    is_embed: torch.Tensor | None


class ImageReader:
    """Reads images with vLLM's `processor` for the model, which has no other user."""

    def __init__(self, processor: Any, rule: ImageRule) -> None:
        self._processor = processor
        self._rule = rule

    def read(self, content: bytes) -> CachedImage[ReadImage]:
        """Raises ImageError."""
        size = read_size(content)
        expected = self._rule.tokens_of(size)  # before anything is decoded: it has bounds
        image = _decoded(content, size)
        processor = self._processor
        made = processor.apply(
            ProcessorInputs(
                [self._rule.placeholder],
                processor.info.parse_mm_data({_IMAGE: [image]}),
                {_IMAGE: [""]},
            ),
            TimingContext(),
        )
        (placeholder,) = made["mm_placeholders"][_IMAGE]
        token_ids = tuple(made["prompt_token_ids"])
        if token_ids != expected or (placeholder.offset, placeholder.length) != (0, len(token_ids)):
            raise RuntimeError(
                f"an image of {size.width} x {size.height} has other tokens than its rule says"
            )
        (data,) = made["mm_kwargs"][_IMAGE]
        return CachedImage(token_ids, len(content) + _num_bytes(data), ReadImage(data, placeholder.is_embed))


def prompt_with_images(
    token_ids: list[int], spans: Sequence[ImageTokens], items: Sequence[CachedImage[ReadImage]], salt: str
) -> Any:
    """Build a prompt in the form that vLLM takes unchecked."""
    return mm_input(
        token_ids,
        MultiModalKwargsItems({_IMAGE: [item.content.data for item in items]}),
        {_IMAGE: [identifier_of(span.content_hash) for span in spans]},
        {
            _IMAGE: [
                PlaceholderRange(span.start, span.length, item.content.is_embed)
                for span, item in zip(spans, items, strict=True)
            ]
        },
        cache_salt=salt,
    )


def _decoded(content: bytes, size: ImageSize) -> Image.Image:
    """Upright, in three colours. Raises ImageError. Pillow's own words stay here: they may name places in
    memory."""
    try:
        with Image.open(io.BytesIO(content), formats=[_NAMES[size.format]]) as opened:
            stored = size.width, size.height
            if opened.size != (stored if size.orientation < 5 else stored[::-1]):  # and nothing is decoded
                raise ImageError("the image has another size than its header says")
            opened.load()
            image = _in_three_colours(opened)
            turn = _TURNS.get(size.orientation)
            turned = image if turn is None else image.transpose(turn)
            bare = Image.new("RGB", turned.size)  # what it says of itself would have it turned again
            bare.paste(turned)
            return bare
    except ImageError:
        raise
    except Exception as error:
        raise ImageError(BROKEN_IMAGE) from error


def _in_three_colours(opened: Image.Image) -> Image.Image:
    """Greys of 16 bits are scaled to the 8 that are kept: Pillow makes all above 255 white."""
    if opened.mode.startswith("I"):
        opened = Image.fromarray((np.asarray(opened) >> 8).astype(np.uint8))
    image: Image.Image = convert_image_mode(opened, "RGB")
    return image


def _num_bytes(data: Any) -> int:
    """Count the bytes of all its tensors."""
    if isinstance(data, torch.Tensor):
        return data.nbytes
    if isinstance(data, dict) or hasattr(data, "values"):
        return sum(_num_bytes(inner) for inner in data.values())
    if isinstance(data, list | tuple):
        return sum(map(_num_bytes, data))
    return _num_bytes(data.data) if hasattr(data, "data") else 0
