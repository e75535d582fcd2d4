"""Image rules: the tokens of an image in a prompt, from its size alone.

Owns the formulas, one class per kind of model, their form on a replica's card, and the expansion of a prompt.
Router and replica expand by this code, so that the router hashes exactly the engine's tokens.

The formulas repeat the float expressions of the models' own image processors, in their order: another
spelling would round differently somewhere. A size is that of the displayed image, as in `images.read_size`.

In an expansion, tokens equal to the rule's `placeholder` become embeddings of the image, and all others are
accompanying text. The engine counts both as the image's.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, NamedTuple

from replicas.protocol.images import ImageError, ImageSize

MIN_SIDE = 2
MAX_PIXELS = 7680 * 4320
MAX_SIDE = 65_535
"""Longest side of any image, as in JPEG: scaling a strip of millions of pixels takes seconds."""
MAX_IMAGE_TOKENS = 1 << 16
"""Per image. The largest default of these models is 16,384."""

MAX_RULE_CHARACTERS = 1 << 18
"""Length of a rule as text: twice that of a grid of 16 by 16 tiles with many tokens between them."""

MAX_GRID = 16
MAX_PIECE_TOKENS = 64
_MAX_TOKEN_ID = 2**32 - 1
_MAX_ASPECT_RATIO = 200
_MAX_LONGEST_SIDE = 4096


class Span(NamedTuple):
    """The expansion of an image in a prompt, in tokens."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class CellRule:
    """Rule of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: an image is scaled to whole cells, each of which is one
    token.

    `cell` is the side of a cell in pixels: a patch's, times the number of merged patches. Raises ValueError
    for impossible numbers.
    """

    KIND: ClassVar[str] = "cells"

    placeholder: int
    cell: int
    min_pixels: int
    max_pixels: int

    def __post_init__(self) -> None:
        _check_number("placeholder", self.placeholder, 0, _MAX_TOKEN_ID)
        _check_number("cell", self.cell, 1, 1024)
        _check_number("max_pixels", self.max_pixels, self.cell**2, MAX_IMAGE_TOKENS * self.cell**2)
        _check_number("min_pixels", self.min_pixels, 1, self.max_pixels)

    def num_tokens(self, size: ImageSize) -> int:
        """Raises ImageError."""
        columns, rows = self._grid(size)
        return _bounded(columns * rows)

    def tokens_of(self, size: ImageSize) -> tuple[int, ...]:
        """Return the tokens that replace one placeholder. Raises ImageError."""
        return (self.placeholder,) * self.num_tokens(size)

    def _grid(self, size: ImageSize) -> tuple[int, int]:
        _check_size(size)
        height, width, cell = size.height, size.width, self.cell
        if max(height, width) / min(height, width) > _MAX_ASPECT_RATIO:
            raise ImageError(
                f"an image is {width} by {height} pixels; this model takes none that is longer than"
                f" {_MAX_ASPECT_RATIO} times its other side"
            )
        high = round(height / cell) * cell
        wide = round(width / cell) * cell
        if high * wide > self.max_pixels:
            beta = math.sqrt((height * width) / self.max_pixels)
            high = max(cell, math.floor(height / beta / cell) * cell)
            wide = max(cell, math.floor(width / beta / cell) * cell)
        elif high * wide < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (height * width))
            high = math.ceil(height * beta / cell) * cell
            wide = math.ceil(width * beta / cell) * cell
        return wide // cell, high // cell


@dataclass(frozen=True, slots=True)
class TileRule:
    """Rule of Idefics3 and SmolVLM: an image is cut into tiles with text between them, and follows once more
    as a whole.

    An image is scaled until its longer side is `longest_side` pixels, and cut into tiles of `tile_side`. Each
    tile is `tile_tokens` placeholders, after the text `before_tile` by row and column; the whole image comes
    after `before_whole`, then `end`. An uncut image is `before_only`, its placeholders, `end`. If
    `before_tile` is empty, none is cut.

    The pieces come from the model's tokenizer on the whole text: a piece may hold the end of a row and the
    beginning of the next tile, which some tokenizers merge. Raises ValueError for impossible numbers.
    """

    KIND: ClassVar[str] = "tiles"

    placeholder: int
    longest_side: int
    tile_side: int
    tile_tokens: int
    before_tile: tuple[tuple[tuple[int, ...], ...], ...]
    before_whole: tuple[int, ...]
    before_only: tuple[int, ...]
    end: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_number("placeholder", self.placeholder, 0, _MAX_TOKEN_ID)
        _check_number("tile_side", self.tile_side, 2, _MAX_LONGEST_SIDE)
        _check_number("longest_side", self.longest_side, self.tile_side, _MAX_LONGEST_SIDE)
        _check_number("tile_tokens", self.tile_tokens, 1, MAX_IMAGE_TOKENS)
        for name in ("before_whole", "before_only", "end"):
            self._check_piece(name, getattr(self, name))
        per_side, rest = divmod(self.longest_side, self.tile_side)
        # Else the processor itself counts and cuts by different roundings.
        if rest or self.longest_side % 2 or self.tile_side % 2:
            raise ValueError("longest_side is not a multiple of tile_side, or they are odd")
        if not isinstance(self.before_tile, tuple) or len(self.before_tile) not in (0, per_side):
            raise ValueError(f"before_tile does not have {per_side} rows")
        if len(self.before_tile) > MAX_GRID:
            raise ValueError(f"before_tile has more than {MAX_GRID} rows")
        for row in self.before_tile:
            if not isinstance(row, tuple) or len(row) != per_side:
                raise ValueError(f"before_tile does not have {per_side} columns")
            for piece in row:
                self._check_piece("before_tile", piece)

    def num_tokens(self, size: ImageSize) -> int:
        """Raises ImageError."""
        return self._num_tokens(*self.grid(size))

    def tokens_of(self, size: ImageSize) -> tuple[int, ...]:
        """Return the tokens that replace one placeholder. Raises ImageError."""
        return self.tokens_in(*self.grid(size))

    def tokens_in(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the tokens of an image in that many tiles. Raises ImageError."""
        self._num_tokens(rows, columns)
        tile = (self.placeholder,) * self.tile_tokens
        if not rows:
            return (*self.before_only, *tile, *self.end)
        tokens: list[int] = []
        for row in self.before_tile[:rows]:
            for piece in row[:columns]:
                tokens += piece
                tokens += tile
        return (*tokens, *self.before_whole, *tile, *self.end)

    def grid(self, size: ImageSize) -> tuple[int, int]:
        """Rows and columns of tiles; (0, 0) for an image that is not cut. Raises ImageError.

        The processor makes odd sides longer by a pixel, which begins no other tile where tiles are even.
        """
        _check_size(size)
        if not self.before_tile:
            return 0, 0
        width, height = size.width, size.height
        aspect_ratio = width / height
        if width >= height:
            width = self.longest_side
            height = int(width / aspect_ratio)
        else:
            height = self.longest_side
            width = int(height * aspect_ratio)
        rows = math.ceil(max(height, 1) / self.tile_side)
        columns = math.ceil(max(width, 1) / self.tile_side)
        return (rows, columns) if rows > 1 or columns > 1 else (0, 0)

    def _num_tokens(self, rows: int, columns: int) -> int:
        if not rows:
            return _bounded(len(self.before_only) + self.tile_tokens + len(self.end))
        between = sum(len(piece) for row in self.before_tile[:rows] for piece in row[:columns])
        between += len(self.before_whole) + len(self.end)
        return _bounded(between + (rows * columns + 1) * self.tile_tokens)

    def _check_piece(self, name: str, piece: object) -> None:
        if not isinstance(piece, tuple) or len(piece) > MAX_PIECE_TOKENS:
            raise ValueError(f"{name} has a piece that is no list of up to {MAX_PIECE_TOKENS} tokens")
        for token in piece:
            _check_number(name, token, 0, _MAX_TOKEN_ID)
            if token == self.placeholder:
                raise ValueError(f"{name} has the placeholder in a piece of text")


ImageRule = CellRule | TileRule

_KINDS: Mapping[str, type[CellRule] | type[TileRule]] = {kind.KIND: kind for kind in (CellRule, TileRule)}


def expand(
    token_ids: Sequence[int], sizes: Sequence[ImageSize], rule: ImageRule
) -> tuple[list[int], list[Span]]:
    """Expand the prompt as the engine computes it: each placeholder is replaced by the image of the same
    position.

    Raises ImageError for more or fewer placeholders than images, or for a size that the model does not take.
    """
    places = [at for at, token in enumerate(token_ids) if token == rule.placeholder]
    if len(places) != len(sizes):
        raise ImageError(
            f"the prompt has room for {_counted(len(places))}, and {len(sizes)} came with it: it has to have"
            " one place for each"
        )
    expanded: list[int] = []
    spans: list[Span] = []
    done = 0
    for at, size in zip(places, sizes, strict=True):
        tokens = rule.tokens_of(size)
        expanded += token_ids[done:at]
        spans.append(Span(len(expanded), len(tokens)))
        expanded += tokens
        done = at + 1
    expanded += token_ids[done:]
    return expanded, spans


def rule_fields(rule: ImageRule) -> dict[str, Any]:
    """Convert the rule to a card's plain JSON values."""
    return {"kind": rule.KIND, **asdict(rule)}


def written_rule(rule: ImageRule | None) -> str:
    """Encode a rule for a model's card; empty for None."""
    return "" if rule is None else json.dumps(rule_fields(rule))


def rule_on_card(text: str) -> ImageRule | None:
    """Parse a text of `written_rule`. None for an unknown kind. Raises ValueError."""
    return read_rule(json.loads(text)) if text else None


def read_rule(value: object) -> ImageRule | None:
    """Read a card's rule for images. None if it has none, or one of an unknown kind.

    A model without a rule is served for text only. Raises ValueError for a known kind with wrong fields.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError("the image rule is no object")
    name = value.get("kind")
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        return None
    given = {name: _frozen(item, 3) for name, item in value.items() if name != "kind"}
    names = {field.name for field in fields(kind)}
    if given.keys() != names:
        raise ValueError(f"the image rule does not have the fields of its kind, {', '.join(sorted(names))}")
    return kind(**given)


def _frozen(value: Any, depth: int) -> Any:
    """Convert lists to tuples. Too long or too deep ones stay lists, which no rule accepts."""
    if depth and isinstance(value, list | tuple) and len(value) <= max(MAX_GRID, MAX_PIECE_TOKENS):
        return tuple(_frozen(item, depth - 1) for item in value)
    return value


def _check_number(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} is no whole number from {least} to {most}")


def _check_size(size: ImageSize) -> None:
    if min(size.width, size.height) < MIN_SIDE:
        raise ImageError(
            f"an image is {size.width} by {size.height} pixels; the least is {MIN_SIDE} by {MIN_SIDE}"
        )
    if max(size.width, size.height) > MAX_SIDE:
        raise ImageError(
            f"an image is {size.width} by {size.height} pixels; the longest side has at most {MAX_SIDE:,}"
        )
    if size.width * size.height > MAX_PIXELS:
        raise ImageError(
            f"an image is {size.width} by {size.height} pixels; the most is {MAX_PIXELS:,} in all"
        )


def _bounded(num_tokens: int) -> int:
    if num_tokens > MAX_IMAGE_TOKENS:
        raise ImageError(f"an image stands for {num_tokens:,} tokens; the most is {MAX_IMAGE_TOKENS:,}")
    return num_tokens


def _counted(number: int) -> str:
    return f"{number} image" if number == 1 else f"{number} images"
