"""Whether formulas count the tokens of images as the models' own processors do, and how long each takes.

`python -m loadtests.benches.image_rules [--sizes N] [--images N] [--vllm]`. It needs transformers and Pillow,
and vLLM for `--vllm`. Counts are compared with transformers' own count of patches for random sizes, half of
them within a pixel of where a tile or a cell begins; token ids and grids with what the processors make of
real images of random sizes. Models are represented by the numbers of their processors; weights are none.
"""

import argparse
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from replicas.checkpoints.image_rules import read_image_rule
from replicas.protocol.image_rules import MAX_PIXELS, MIN_SIDE, CellRule, TileRule, expand
from replicas.protocol.images import ImageError, ImageFormat, ImageSize
from replicas.toy_model.make_image_model import write_processor

LONGEST_SIDE = 8000
MOST_DECODED_PIXELS = 1_000_000
TILES = {"Idefics3-8B": (364, 4), "SmolVLM-Instruct": (384, 4), "SmolVLM-256M": (512, 4), "tiny": (112, 2)}
CELLS = {
    "Qwen2-VL, 2.5-VL": (14, 3136, 12_845_056),
    "Qwen2-VL's class, no sizes": (14, 3136, 1_003_520),
    "Qwen3-VL": (16, 65_536, 16_777_216),
}


@dataclass(slots=True)
class Comparison:
    """One formula against one processor, size by size."""

    what: str
    num_equal: int = 0
    num_refused: int = 0
    different: list[str] = field(default_factory=list)
    formula_seconds: float = 0.0
    processor_seconds: float = 0.0

    def add(self, size: ImageSize, formula: Callable[[], Any], processor: Callable[[], Any]) -> None:
        ours, seconds = _timed(formula)
        self.formula_seconds += seconds
        theirs, seconds = _timed(processor)
        self.processor_seconds += seconds
        if ours != theirs:
            self.different.append(f"{size.width} by {size.height}")
        elif ours is None:
            self.num_refused += 1
        else:
            self.num_equal += 1

    def line(self) -> str:
        number = self.num_equal + self.num_refused + len(self.different)
        return (
            f"{self.what}: {number} sizes, {len(self.different)} different, {self.num_refused} refused by"
            f" both; {self.formula_seconds / number * 1e6:.1f} µs by formula,"
            f" {self.processor_seconds / number * 1e6:,.0f} µs by the processor"
            + (f"; different: {', '.join(self.different[:5])}" if self.different else "")
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, default=10_000, help="of each family")
    parser.add_argument("--images", type=int, default=300, help="real ones, of each family")
    parser.add_argument("--vllm", action="store_true", help="vLLM's own processor, too")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    comparisons = [
        *_counts(rng, arguments.sizes),
        *_grids(rng, arguments.images),
        *_ids(rng, arguments.images, with_vllm=arguments.vllm),
    ]
    raise SystemExit(1 if any(comparison.different for comparison in comparisons) else 0)


def _counts(rng: random.Random, number: int) -> Iterator[Comparison]:
    for name, (tile, per_side) in TILES.items():
        processor, rule = _tile_processor(tile, per_side), _tile_rule(tile, per_side)
        comparison = Comparison(f"{name}, count of tiles")
        for size in _sizes(rng, number, tile * per_side, tile):
            comparison.add(
                size,
                lambda rule=rule, size=size: rule.grid(size),  # type: ignore[misc]
                lambda processor=processor, size=size: processor.get_number_of_image_patches(  # type: ignore[misc]
                    size.height, size.width
                )[1:],
            )
        yield _told(comparison)
    for name, (patch, least, most) in CELLS.items():
        processor, cells = _cell_processor(patch, least, most), _cell_rule(patch, least, most)
        comparison = Comparison(f"{name}, count of tokens")
        for size in _sizes(rng, number, 0, cells.cell):
            comparison.add(
                size,
                lambda rule=cells, size=size: rule.num_tokens(size),  # type: ignore[misc]
                lambda processor=processor, size=size: (
                    processor.get_number_of_image_patches(  # type: ignore[misc]
                        size.height, size.width
                    )
                    // 4
                ),
            )
        yield _told(comparison)


def _grids(rng: random.Random, number: int) -> Iterator[Comparison]:
    for name, (tile, per_side) in TILES.items():
        processor, tiles = _tile_processor(tile, per_side), _tile_rule(tile, per_side)
        comparison = Comparison(f"{name}, tiles cut from real images")
        for size in _sizes(rng, number, tile * per_side, tile, MOST_DECODED_PIXELS):
            image = _image(size)
            comparison.add(
                size,
                lambda rule=tiles, size=size: rule.grid(size),  # type: ignore[misc]
                lambda processor=processor, image=image: _cut(processor, image),  # type: ignore[misc]
            )
        yield _told(comparison)
    for name, (patch, least, most) in CELLS.items():
        processor, rule = _cell_processor(patch, least, most), _cell_rule(patch, least, most)
        comparison = Comparison(f"{name}, grid of real images")
        for size in _sizes(rng, number, 0, rule.cell, MOST_DECODED_PIXELS):
            image = _image(size)
            comparison.add(
                size,
                lambda rule=rule, size=size: rule.num_tokens(size),  # type: ignore[misc]
                lambda processor=processor, image=image: (  # type: ignore[misc]
                    math.prod(processor(images=[image])["image_grid_thw"][0].tolist()) // 4
                ),
            )
        yield _told(comparison)


def _ids(rng: random.Random, number: int, *, with_vllm: bool) -> Iterator[Comparison]:
    transformers: Any = import_module("transformers")
    with tempfile.TemporaryDirectory() as folder:
        write_processor(Path(folder))
        rule, reason = read_image_rule(Path(folder))
        if rule is None:
            raise SystemExit(reason)
        processor = transformers.Idefics3Processor.from_pretrained(folder)
        text = "Look: <image>\n\nand <image>!"
        prompt = processor.tokenizer(text)["input_ids"]
        ways: dict[str, Callable[[Sequence[Any]], Any]] = {
            "token ids by transformers": lambda images: processor(text=text, images=[images])["input_ids"][0]
        }
        if with_vllm:
            ways["token ids and spans by vLLM"] = _vllm_way(folder, prompt)
        for name, way in ways.items():
            comparison = Comparison(f"tiny Idefics3, {name}, two real images each")
            has_spans = "spans" in name
            pairs = zip(*[_sizes(rng, 2 * number, 224, 112, MOST_DECODED_PIXELS)] * 2, strict=True)
            for pair in pairs:
                images = [_image(size) for size in pair]
                comparison.add(
                    pair[0],
                    lambda pair=pair, whole=has_spans: (  # type: ignore[misc]
                        expand(prompt, pair, rule) if whole else expand(prompt, pair, rule)[0]
                    ),
                    lambda way=way, images=images: way(images),  # type: ignore[misc]
                )
            yield _told(comparison)


def _vllm_way(folder: str, prompt: Sequence[int]) -> Callable[[Sequence[Any]], Any]:
    """What vLLM makes of the prompt: its processor for the model, without its caches."""
    config: Any = import_module("vllm.config")
    multimodal: Any = import_module("vllm.multimodal")
    processing: Any = import_module("vllm.multimodal.processing")
    model = config.ModelConfig(model=folder, limit_mm_per_prompt={"image": 2}, mm_processor_cache_gb=0)
    processor = multimodal.MULTIMODAL_REGISTRY.create_processor(model)

    def expanded(images: Sequence[Any]) -> Any:
        items = processor.info.parse_mm_data({"image": list(images)})
        inputs = processing.ProcessorInputs(prompt=list(prompt), mm_data_items=items)
        done = processor.apply(inputs, processing.TimingContext())
        spans = [(place.offset, place.length) for place in done["mm_placeholders"]["image"]]
        return list(done["prompt_token_ids"]), spans

    return expanded


def _sizes(
    rng: random.Random, number: int, scaled_side: int, step: int, most_pixels: int = MAX_PIXELS
) -> Iterator[ImageSize]:
    """Sides of all magnitudes. Every other size comes to lie next to a multiple of `step`.

    By itself or, if there is a `scaled_side`, once its longer side is scaled to that.
    """
    drawn = 0
    while drawn < number:
        width = round(math.exp(rng.uniform(math.log(MIN_SIDE), math.log(LONGEST_SIDE))))
        height = round(math.exp(rng.uniform(math.log(MIN_SIDE), math.log(LONGEST_SIDE))))
        if drawn % 2:
            if scaled_side:
                edge = step * rng.randint(1, max(1, scaled_side // step - 1)) + rng.randint(0, 2)
                height = round(width * edge / scaled_side)
            else:
                height = step * rng.randint(1, LONGEST_SIDE // step) + rng.choice((-1, 0, 1, step // 2))
            if rng.random() < 0.5:
                width, height = height, width
        if min(width, height) >= MIN_SIDE and width * height <= most_pixels:
            drawn += 1
            yield ImageSize(ImageFormat.PNG, width, height)


def _tile_processor(tile: int, per_side: int) -> Any:
    module: Any = import_module("transformers.models.idefics3.image_processing_pil_idefics3")
    return module.Idefics3ImageProcessorPil(
        size={"longest_edge": tile * per_side}, max_image_size={"longest_edge": tile}
    )


def _tile_rule(tile: int, per_side: int) -> TileRule:
    return TileRule(
        placeholder=0,
        longest_side=tile * per_side,
        tile_side=tile,
        tile_tokens=1,
        before_tile=(((1,),) * per_side,) * per_side,
        before_whole=(),
        before_only=(),
        end=(),
    )


def _cut(processor: Any, image: Any) -> tuple[int, int]:
    done = processor(images=[image], return_row_col_info=True)
    return done["rows"][0][0], done["cols"][0][0]


def _cell_processor(patch: int, least: int, most: int) -> Any:
    module: Any = import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    return module.Qwen2VLImageProcessorPil(patch_size=patch, min_pixels=least, max_pixels=most)


def _cell_rule(patch: int, least: int, most: int) -> CellRule:
    return CellRule(placeholder=0, cell=2 * patch, min_pixels=least, max_pixels=most)


def _image(size: ImageSize) -> Any:
    pillow: Any = import_module("PIL.Image")
    return pillow.new("RGB", (size.width, size.height))


def _timed(way: Callable[[], Any]) -> tuple[Any, float]:
    """What it gives, None for an image that it refuses, and the seconds that it took."""
    start = time.perf_counter()
    try:
        given = way()
    except (ImageError, ValueError):
        given = None
    return given, time.perf_counter() - start


def _told(comparison: Comparison) -> Comparison:
    print(comparison.line(), flush=True)
    return comparison


if __name__ == "__main__":
    main()
