"""Image rules of checkpoints: how a model's images become tokens.

Owns the parsing of the processors' files, with transformers' defaults for missing fields, and the refusal of
what the formulas in `protocol/image_rules.py` do not cover. A refusal is no error: the model is served for
text only.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers

from replicas.checkpoints.model_config import CheckpointError, read_json
from replicas.protocol.image_rules import MAX_GRID, CellRule, ImageRule, TileRule

logger = logging.getLogger(__name__)


class _NoImages(Exception):
    """Why the formulas do not fit a checkpoint: the end of a sentence."""


@dataclass(frozen=True, slots=True)
class _ImageFamily:
    """An architecture's image processor, with transformers' defaults for its config.json."""

    processor: str
    image_token_id: int
    patch_size: int


_CELLS: Mapping[str, _ImageFamily] = {
    "Qwen2VLForConditionalGeneration": _ImageFamily("Qwen2VLImageProcessor", 151655, 14),
    "Qwen2_5_VLForConditionalGeneration": _ImageFamily("Qwen2VLImageProcessor", 151655, 14),
    "Qwen3VLForConditionalGeneration": _ImageFamily("Qwen2VLImageProcessor", 151655, 16),
    "Qwen3VLMoeForConditionalGeneration": _ImageFamily("Qwen2VLImageProcessor", 151655, 16),
}
_TILES: Mapping[str, _ImageFamily] = {
    "Idefics3ForConditionalGeneration": _ImageFamily("Idefics3ImageProcessor", 128257, 32),
    "SmolVLMForConditionalGeneration": _ImageFamily("SmolVLMImageProcessor", 128257, 32),
}
_FIXED_TOKENS = ("Idefics3ForConditionalGeneration",)
"""Architectures whose processor has fixed names for its image tokens."""

_FORMS = ("", "Fast", "Pil")
"""One formula in three implementations, by the endings of their names."""

# The defaults of the processors' classes, which are not those of the models.
_PATCH_SIZE, _MERGE_SIZE = 14, 2
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280
_SCALE_FACTOR = 2
_LONGEST_SIDE, _TILE_SIDE, _TILE_TOKENS = 4 * 364, 364, 169


def read_image_rule(directory: Path) -> tuple[ImageRule | None, str]:
    """Return the checkpoint's rule; or None, and a sentence why it takes no images."""
    try:
        config = read_json(directory / "config.json")
        names = config.get("architectures")
        name = str(names[0]) if isinstance(names, list) and names else "none"
        if name in _CELLS:
            return _cell_rule(directory, config, _CELLS[name]), ""
        if name in _TILES:
            return _tile_rule(directory, config, name), ""
        raise _NoImages(f"there is no image rule for its architecture, {name}")
    except (CheckpointError, _NoImages, ValueError) as error:
        return None, f"the checkpoint {directory} takes no images: {error}"


def _cell_rule(directory: Path, config: Mapping[str, Any], family: _ImageFamily) -> CellRule:
    _, images = _processor_fields(directory, family)
    vision = _object(config, "vision_config")
    patch, merge = _number(images, "patch_size", _PATCH_SIZE), _number(images, "merge_size", _MERGE_SIZE)
    for name, of_processor, default in (
        ("patch_size", patch, family.patch_size),
        ("spatial_merge_size", merge, _MERGE_SIZE),
    ):
        of_model = _number(vision, name, default)
        if of_model != of_processor:
            raise _NoImages(f"config.json has {name} {of_model}, its image processor {of_processor}")
    size = _object(images, "size", {"shortest_edge": _MIN_PIXELS, "longest_edge": _MAX_PIXELS})
    tokenizer, names = _tokenizer(directory)
    return CellRule(
        placeholder=_placeholder(config, family, tokenizer, names.get("image_token", "<|image_pad|>")),
        cell=patch * merge,
        min_pixels=_number(images, "min_pixels", size.get("shortest_edge")),
        max_pixels=_number(images, "max_pixels", size.get("longest_edge")),
    )


def _tile_rule(directory: Path, config: Mapping[str, Any], architecture: str) -> TileRule:
    family = _TILES[architecture]
    processor, images = _processor_fields(directory, family)
    longest = _number(_object(images, "size", {"longest_edge": _LONGEST_SIDE}), "longest_edge")
    tile = _number(_object(images, "max_image_size", {"longest_edge": _TILE_SIDE}), "longest_edge")
    num_tokens = _number(processor, "image_seq_len", _TILE_TOKENS)
    patches = tile // _number(_object(config, "vision_config"), "patch_size", family.patch_size)
    scale = _number(config, "scale_factor", _SCALE_FACTOR)
    if patches % scale or num_tokens != (patches // scale) ** 2:
        raise _NoImages(
            f"the {patches} patches on a side of a tile, {scale} by {scale} of them to a token, are not the"
            f" {num_tokens} tokens that its processor writes for one"
        )
    per_side = longest // tile if images.get("do_image_splitting", True) else 0
    if per_side > MAX_GRID:
        raise _NoImages(f"it cuts an image into up to {per_side} by {per_side} tiles, not {MAX_GRID}")
    tokenizer, names = _tokenizer(directory)
    words = _Words.of({} if architecture in _FIXED_TOKENS else names)
    placeholder = _placeholder(config, family, tokenizer, words.image)
    before_only, end = _pieces(tokenizer, words.expansion(0, 0), placeholder, 1)
    before_tile: tuple[tuple[tuple[int, ...], ...], ...] = ()
    before_whole: tuple[int, ...] = before_only
    if per_side > 1:
        text = words.expansion(per_side, per_side)
        *tiles, before_whole, end = _pieces(tokenizer, text, placeholder, per_side * per_side + 1)
        starts = range(0, per_side * per_side, per_side)
        before_tile = tuple(tuple(tiles[start : start + per_side]) for start in starts)
    rule = TileRule(
        placeholder=placeholder,
        longest_side=longest,
        tile_side=tile,
        tile_tokens=num_tokens,
        before_tile=before_tile,
        before_whole=before_whole,
        before_only=before_only,
        end=end,
    )
    _check_pieces(rule, tokenizer, words)
    return rule


@dataclass(frozen=True, slots=True)
class _Words:
    """The text that a processor writes for an image of a number of tiles."""

    fake: str
    image: str
    whole: str

    @classmethod
    def of(cls, names: Mapping[str, str]) -> "_Words":
        return cls(
            fake=names.get("fake_image_token", "<fake_token_around_image>"),
            image=names.get("image_token", "<image>"),
            whole=names.get("global_image_token", "<global-img>"),
        )

    def expansion(self, rows: int, columns: int, tile_tokens: int = 1) -> str:
        tile = self.image * tile_tokens
        lines = [
            "".join(f"{self.fake}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        return "".join(lines) + ("\n" if rows else "") + f"{self.fake}{self.whole}{tile}{self.fake}"


def _pieces(
    tokenizer: tokenizers.Tokenizer, text: str, placeholder: int, num_images: int
) -> list[tuple[int, ...]]:
    """Split a text's tokens at the image tokens: before, between and after them."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    places = [at for at, token in enumerate(ids) if token == placeholder]
    if len(places) != num_images:
        raise _NoImages("its tokenizer does not keep image tokens apart from the text around them")
    cuts = [-1, *places, len(ids)]
    return [tuple(ids[before + 1 : after]) for before, after in pairwise(cuts)]


def _check_pieces(rule: TileRule, tokenizer: tokenizers.Tokenizer, words: _Words) -> None:
    """Check that every grid's pieces join to the tokenizer's own tokens."""
    side = len(rule.before_tile)
    grids = {(0, 0), *((side, count) for count in range(1, side + 1))}
    for rows, columns in grids | {(columns, rows) for rows, columns in grids}:
        tokens = rule.tokens_in(rows, columns)
        text = words.expansion(rows, columns, rule.tile_tokens)
        if tuple(tokenizer.encode(text, add_special_tokens=False).ids) != tokens:
            raise _NoImages(f"its tokenizer does not make an image of {rows} by {columns} tiles of pieces")


def _processor_fields(directory: Path, family: _ImageFamily) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the fields of the processor, and those of the image processor, which may be nested in it."""
    processor: Mapping[str, Any] = {}
    if (directory / "processor_config.json").is_file():
        processor = read_json(directory / "processor_config.json")
    if "image_processor" in processor:
        images = _object(processor, "image_processor")
    else:
        images = read_json(directory / "preprocessor_config.json")
    name = images.get("image_processor_type")
    if name not in [family.processor + form for form in _FORMS] or "auto_map" in images:
        raise _NoImages(f"its image processor is {name}, not {family.processor}")
    if not images.get("do_resize", True):
        raise _NoImages("its image processor does not resize")
    return processor, images


def _tokenizer(directory: Path) -> tuple[tokenizers.Tokenizer, Mapping[str, str]]:
    """Return the tokenizer and its names of tokens."""
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer((directory / "tokenizer.json").read_bytes())
    except OSError as error:
        raise _NoImages(f"its tokenizer.json cannot be read: {error.strerror}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    path = directory / "tokenizer_config.json"
    fields = read_json(path) if path.is_file() else {}
    extra = fields.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, dict) else {}), **fields}
    words = {name: word.get("content") if isinstance(word, dict) else word for name, word in named.items()}
    return tokenizer, {name: word for name, word in words.items() if isinstance(word, str) and word}


def _placeholder(
    config: Mapping[str, Any], family: _ImageFamily, tokenizer: tokenizers.Tokenizer, word: str
) -> int:
    of_model = config.get("image_token_id")
    if of_model is None:
        of_model = family.image_token_id
    of_tokenizer = tokenizer.encode(word, add_special_tokens=False).ids
    if of_tokenizer != [of_model]:
        raise _NoImages(f"config.json has image_token_id {of_model}, its tokenizer {of_tokenizer}")
    return int(of_model)


def _object(fields: Mapping[str, Any], name: str, default: Mapping[str, Any] | None = None) -> dict[str, Any]:
    value = fields.get(name)
    if value is None:
        value = {} if default is None else default
    if not isinstance(value, Mapping):
        raise _NoImages(f"{name} is {value!r}, and no object")
    return dict(value)


def _number(fields: Mapping[str, Any], name: str, default: object = None) -> int:
    value = fields.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _NoImages(f"{name} is {value!r}, and no positive whole number")
    return value


def served_image_rule(directory: Path) -> ImageRule | None:
    """Return the rule; None for a text model, and, with a log line, if token counts do not follow from
    sizes."""
    rule, reason = read_image_rule(directory)
    if rule is None and "vision_config" in read_json(directory / "config.json"):
        logger.warning("%s; it is served for text only", reason)
    return rule
