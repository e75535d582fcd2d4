"""Image rules: fixed vectors, bounds, spans that tile the prompt, and cards that lie."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.protocol.image_rules import (
    MAX_IMAGE_TOKENS,
    MAX_PIXELS,
    MAX_SIDE,
    CellRule,
    ImageRule,
    Span,
    TileRule,
    expand,
    read_rule,
    rule_fields,
)
from replicas.protocol.images import ImageError, ImageFormat, ImageSize

IMAGE = 9
QWEN2 = CellRule(placeholder=IMAGE, cell=28, min_pixels=56 * 56, max_pixels=28 * 28 * 1280)
QWEN3 = CellRule(placeholder=IMAGE, cell=32, min_pixels=65_536, max_pixels=16_777_216)
TINY = TileRule(
    placeholder=IMAGE,
    longest_side=224,
    tile_side=112,
    tile_tokens=3,
    before_tile=(((1, 11), (1, 12)), ((5, 1, 21), (1, 22))),
    before_whole=(6, 1, 2),
    before_only=(1, 2),
    end=(1,),
)
UNCUT = replace(TINY, before_tile=())
RULES: list[ImageRule] = [QWEN2, QWEN3, TINY, UNCUT]


def size(width: int, height: int) -> ImageSize:
    return ImageSize(ImageFormat.PNG, width, height)


sizes = st.builds(size, st.integers(2, 5000), st.integers(2, 5000))


def test_an_image_in_tiles_is_its_pieces_with_the_whole_at_the_end() -> None:
    tile = (IMAGE, IMAGE, IMAGE)
    assert TINY.tokens_of(size(300, 300)) == (
        *(1, 11, *tile, 1, 12, *tile),
        *(5, 1, 21, *tile, 1, 22, *tile),
        *(6, 1, 2, *tile, 1),
    )
    assert TINY.tokens_of(size(300, 100)) == (1, 11, *tile, 1, 12, *tile, 6, 1, 2, *tile, 1)
    assert UNCUT.tokens_of(size(300, 100)) == (1, 2, *tile, 1)


def test_each_placeholder_gives_way_to_the_image_of_its_position() -> None:
    prompt = [3, IMAGE, IMAGE, 4, 4]
    tokens, spans = expand(prompt, [size(2, 2), size(300, 200)], QWEN2)
    assert spans == [Span(1, 4), Span(5, 77)]
    assert tokens == [3, *[IMAGE] * 81, 4, 4]
    assert prompt == [3, IMAGE, IMAGE, 4, 4]
    assert expand([3, 4], [], QWEN2) == ([3, 4], [])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("num_places", "num_images"), [(0, 1), (1, 0), (2, 1), (1, 2)])
def test_places_and_images_have_to_be_equal_in_number(
    rule: ImageRule, num_places: int, num_images: int
) -> None:
    with pytest.raises(ImageError, match=f"room for {num_places} .* {num_images} came"):
        expand([3] + [IMAGE] * num_places, [size(8, 8)] * num_images, rule)


@pytest.mark.parametrize("rule", RULES)
@given(st.lists(sizes, max_size=4), st.lists(st.integers(0, 8), max_size=6))
def test_spans_hold_the_expansions_and_the_text_stays_around_them(
    rule: ImageRule, images: list[ImageSize], text: list[int]
) -> None:
    taken = [image for image in images if rule is TINY or rule is UNCUT or not is_too_narrow(image)]
    prompt = [token for _ in taken for token in (*text, IMAGE)] + text
    tokens, spans = expand(prompt, taken, rule)
    assert [tuple(tokens[at : at + length]) for at, length in spans] == [
        rule.tokens_of(image) for image in taken
    ]
    outside = set(range(len(tokens))) - {at for start, length in spans for at in range(start, start + length)}
    assert [tokens[at] for at in sorted(outside)] == text * (len(taken) + 1)


def is_too_narrow(image: ImageSize) -> bool:
    return max(image.width, image.height) / min(image.width, image.height) > 200


@pytest.mark.parametrize("rule", RULES)
@given(sizes)
def test_lengths_are_those_counted_and_bounded(rule: ImageRule, image: ImageSize) -> None:
    if isinstance(rule, CellRule) and is_too_narrow(image):
        with pytest.raises(ImageError, match="longer than 200 times"):
            rule.tokens_of(image)
        return
    tokens = rule.tokens_of(image)
    assert 0 < len(tokens) == rule.num_tokens(image) <= MAX_IMAGE_TOKENS
    if isinstance(rule, TileRule):
        rows, columns = rule.grid(image)
        assert rows <= 2 >= columns
        assert tokens.count(IMAGE) == 3 * (rows * columns + 1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("width", "height", "words"),
    [
        *[(1, 50, "1 by 50"), (50, 1, "50 by 1"), (MAX_PIXELS // 6_000 + 1, 6_000, "in all")],
        *[(MAX_SIDE + 1, 2, "65,535"), (2, MAX_SIDE + 1, "65,535"), (MAX_PIXELS // 2, 2, "longest side")],
    ],
)
def test_images_that_are_too_small_or_too_large_are_refused(
    rule: ImageRule, width: int, height: int, words: str
) -> None:
    with pytest.raises(ImageError, match=words):
        rule.num_tokens(size(width, height))
    with pytest.raises(ImageError, match=words):
        expand([IMAGE], [size(width, height)], rule)


def test_an_image_of_too_many_tokens_is_refused_before_they_are_made() -> None:
    row = (((1, 11),) * 16,) * 16
    large = replace(TINY, longest_side=1792, tile_tokens=60_000, before_tile=row)
    with pytest.raises(ImageError, match="15,"):
        large.tokens_of(size(300, 300))


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_comes_back_from_its_card(rule: ImageRule) -> None:
    assert read_rule(json.loads(json.dumps(rule_fields(rule)))) == rule


@pytest.mark.parametrize(
    "value", [None, {}, {"kind": "spheres", "radius": 3}, {"kind": 7}, {"kind": ["cells"]}]
)
def test_what_is_not_known_is_a_model_without_images(value: object) -> None:
    assert read_rule(value) is None


WRONG_CELLS: list[dict[str, Any]] = [
    {"placeholder": -1},
    {"placeholder": 2**32},
    {"placeholder": "9"},
    {"cell": 0},
    {"cell": 28.0},
    {"cell": True},
    {"min_pixels": 0},
    {"min_pixels": 28 * 28 * 1281},
    {"max_pixels": 700},
    {"max_pixels": 28 * 28 * (MAX_IMAGE_TOKENS + 1)},
    {"max_pixels": None},
    {"more": 1},
]
WRONG_TILES: list[dict[str, Any]] = [
    {"longest_side": 225},
    {"longest_side": 336},
    {"longest_side": 111 * 2, "tile_side": 111},
    {"longest_side": 8192, "tile_side": 4096},
    {"tile_side": 0},
    {"tile_tokens": MAX_IMAGE_TOKENS + 1},
    {"before_tile": [[[1], [1]]]},
    {"before_tile": [[[1], [1]], [[1]]]},
    {"before_tile": [[[1], [1]], [[1], 1]]},
    {"before_tile": [[[1], [1]], [[1], ["1"]]]},
    {"before_tile": [[[1], [1]], [[1], [[1]]]]},
    {"before_tile": "ab"},
    {"before_tile": [[[1]] * 17] * 17, "longest_side": 112 * 17},
    {"before_whole": [1] * 65},
    {"before_only": [IMAGE]},
    {"end": None},
    {"end": [-1]},
]


@pytest.mark.parametrize(
    ("rule", "change"),
    [(QWEN2, change) for change in WRONG_CELLS] + [(TINY, change) for change in WRONG_TILES],
)
def test_a_card_that_lies_is_found_out(rule: ImageRule, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        read_rule({**rule_fields(rule), **change})


def test_a_card_that_lacks_a_field_is_found_out() -> None:
    known = rule_fields(TINY)
    del known["end"]
    with pytest.raises(ValueError, match="fields of its kind"):
        read_rule(known)
    with pytest.raises(ValueError, match="no object"):
        read_rule([1])


def test_a_card_of_many_levels_is_not_followed_down() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError):
        read_rule({**rule_fields(TINY), "before_tile": deep})
