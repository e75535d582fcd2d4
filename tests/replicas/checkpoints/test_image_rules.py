"""Image rules of checkpoints: the same tokens as transformers' own processors, and what is refused."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from replicas.checkpoints.image_rules import read_image_rule
from replicas.protocol.image_rules import CellRule, ImageRule, TileRule, expand, read_rule, rule_fields
from replicas.protocol.images import ImageError, ImageFormat, ImageSize
from replicas.toy_model import toy_model_path
from replicas.toy_model.make_image_model import write_processor
from tests.examples import examples
from tests.replicas.checkpoints.image_models import edit, write_json, write_qwen, write_tokenizer

SIZES = [(300, 200), (200, 300), (2, 2), (2, 400), (400, 2), (225, 224), (300, 151), (113, 112), (1000, 999)]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("idefics3")
    write_processor(directory)
    return directory


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def image_size(width: int, height: int) -> ImageSize:
    return ImageSize(ImageFormat.PNG, width, height)


def rule_of(directory: Path) -> ImageRule:
    rule, reason = read_image_rule(directory)
    assert rule is not None, reason
    assert not reason
    return rule


def tile_rule_of(directory: Path) -> TileRule:
    rule = rule_of(directory)
    assert isinstance(rule, TileRule)
    return rule


def test_expansions_are_those_of_the_real_processor(original: Path) -> None:
    rule = rule_of(original)
    processor: Any = Idefics3Processor.from_pretrained(original)
    for width, height in SIZES:
        text = "What is this? <image>\n\nand <image>!"
        images = [Image.new("RGB", (width, height)), Image.new("RGB", (64, 64))]
        wanted = processor(text=text, images=[images])["input_ids"][0]
        ids = processor.tokenizer(text)["input_ids"]
        assert expand(ids, [image_size(width, height), image_size(64, 64)], rule)[0] == wanted


def test_tiles_are_those_that_the_real_processor_cuts(original: Path) -> None:
    rule = tile_rule_of(original)
    processor: Any = Idefics3Processor.from_pretrained(original).image_processor
    for width, height in SIZES:
        done = processor(images=[Image.new("RGB", (width, height))], return_row_col_info=True)
        assert rule.grid(image_size(width, height)) == (done["rows"][0][0], done["cols"][0][0])


@settings(max_examples=examples(300))
@example(1820, 365, (364, 5))
@example(425, 848, (424, 2))
@example(300, 151, (112, 2))
@example(300, 152, (112, 2))
@given(
    st.integers(2, 5700),
    st.integers(2, 5700),
    st.sampled_from([(364, 4), (384, 4), (512, 4), (512, 8), (112, 2), (336, 1), (2, 15)]),
)
def test_grids_are_those_that_transformers_counts(width: int, height: int, shape: tuple[int, int]) -> None:
    tile, per_side = shape
    processor: Any = Idefics3ImageProcessorPil(
        size={"longest_edge": tile * per_side}, max_image_size={"longest_edge": tile}
    )
    rule = TileRule(
        placeholder=9,
        longest_side=tile * per_side,
        tile_side=tile,
        tile_tokens=1,
        before_tile=(((1,),) * per_side,) * per_side,
        before_whole=(),
        before_only=(),
        end=(),
    )
    _, rows, columns = processor.get_number_of_image_patches(height, width)
    assert rule.grid(image_size(width, height)) == (rows, columns)


@settings(max_examples=examples(300))
@example(42, 42, (14, 3136, 1_003_520))
@example(70, 70, (14, 3136, 1_003_520))
@given(
    st.integers(2, 5700),
    st.integers(2, 5700),
    st.sampled_from([(14, 3136, 1_003_520), (14, 3136, 12_845_056), (16, 65_536, 16_777_216), (14, 9, 800)]),
)
def test_cells_are_those_that_transformers_counts(
    width: int, height: int, shape: tuple[int, int, int]
) -> None:
    patch, least, most = shape
    processor: Any = Qwen2VLImageProcessorPil(patch_size=patch, min_pixels=least, max_pixels=most)
    rule = CellRule(placeholder=9, cell=2 * patch, min_pixels=least, max_pixels=most)
    try:
        wanted = processor.get_number_of_image_patches(height, width) // 4
    except ValueError:
        with pytest.raises(ImageError, match="longer than 200 times"):
            rule.num_tokens(image_size(width, height))
    else:
        assert rule.num_tokens(image_size(width, height)) == wanted


def test_a_rule_of_a_checkpoint_fits_on_a_card(original: Path) -> None:
    rule = rule_of(original)
    assert read_rule(rule_fields(rule)) == rule


def test_what_the_tokenizer_merges_between_tiles_is_kept_as_it_merges(checkpoint: Path) -> None:
    words = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
    end_of_line = "Ċ"  # as byte-level tokenizers spell it
    tokenizer = write_tokenizer(checkpoint, words, merges=[(end_of_line, end_of_line)])
    edit(checkpoint / "config.json", image_token_id=tokenizer.token_to_id("<image>"))
    rule = tile_rule_of(checkpoint)
    assert rule.before_whole[0] == tokenizer.token_to_id(end_of_line * 2)
    assert rule.before_tile[1][0][0] == tokenizer.token_to_id(end_of_line)
    assert len(rule.before_tile[1][1]) == 1 + len("<row_2_col_2>")

    processor: Any = Idefics3Processor.from_pretrained(checkpoint)
    wanted = processor(text="<image>", images=[[Image.new("RGB", (300, 200))]])["input_ids"][0]
    assert rule.tokens_of(image_size(300, 200)) == tuple(wanted)


def test_what_a_special_token_swallows_is_missing(checkpoint: Path) -> None:
    words = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
    tokenizer = write_tokenizer(checkpoint, words, lstrip=True)
    edit(checkpoint / "config.json", image_token_id=tokenizer.token_to_id("<image>"))
    assert tile_rule_of(checkpoint).before_whole == tuple(
        tokenizer.token_to_id(word) for word in ("<fake_token_around_image>", "<global-img>")
    )


@pytest.mark.parametrize("generation", ["2", "2_5_", "3"])
def test_qwen_is_read_with_the_sizes_of_its_processor(tmp_path: Path, generation: str) -> None:
    write_qwen(tmp_path, generation, min_pixels=4000, max_pixels=2_000_000)
    rule = rule_of(tmp_path)
    cell = 32 if generation == "3" else 28
    assert rule == CellRule(placeholder=257, cell=cell, min_pixels=4000, max_pixels=2_000_000)


def test_sizes_of_qwen_have_two_spellings_and_a_default(tmp_path: Path) -> None:
    write_qwen(tmp_path)
    rule = rule_of(tmp_path)
    processor: Any = Qwen2VLImageProcessorPil()
    assert isinstance(rule, CellRule)
    assert (rule.min_pixels, rule.max_pixels) == (3136, 1_003_520)
    assert processor.size == {"shortest_edge": 3136, "longest_edge": 1_003_520}
    write_qwen(tmp_path, size={"shortest_edge": 5000, "longest_edge": 6000})
    assert rule_of(tmp_path) == CellRule(placeholder=257, cell=28, min_pixels=5000, max_pixels=6000)
    write_qwen(tmp_path, size={"shortest_edge": 5000, "longest_edge": 6000}, max_pixels=7000)
    assert rule_of(tmp_path) == CellRule(placeholder=257, cell=28, min_pixels=5000, max_pixels=7000)


def test_a_nested_image_processor_comes_before_a_file_of_its_own(tmp_path: Path) -> None:
    write_qwen(tmp_path, max_pixels=5000)
    nested = {"image_processor_type": "Qwen2VLImageProcessor", "max_pixels": 6000}
    write_json(tmp_path / "processor_config.json", {"processor_class": "Qwen2VLProcessor"})
    assert rule_of(tmp_path) == CellRule(placeholder=257, cell=28, min_pixels=3136, max_pixels=5000)
    write_json(tmp_path / "processor_config.json", {"image_processor": nested})
    assert rule_of(tmp_path) == CellRule(placeholder=257, cell=28, min_pixels=3136, max_pixels=6000)


def test_smolvlm_calls_its_tokens_as_its_tokenizer_says(checkpoint: Path) -> None:
    edit(checkpoint / "config.json", architectures=["SmolVLMForConditionalGeneration"])
    processor = checkpoint / "processor_config.json"
    images = {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": 224},
        "max_image_size": {"longest_edge": 112},
    }
    edit(processor, image_processor=images)
    before = tile_rule_of(checkpoint)
    edit(checkpoint / "tokenizer_config.json", global_image_token={"content": "<end_of_utterance>"})
    after = tile_rule_of(checkpoint)
    assert before.before_only != after.before_only
    edit(checkpoint / "config.json", architectures=["Idefics3ForConditionalGeneration"])
    edit(processor, image_processor={**images, "image_processor_type": "Idefics3ImageProcessor"})
    assert tile_rule_of(checkpoint) == before


@pytest.mark.parametrize(
    ("tile", "longest", "patch", "scale", "tokens"),
    [(364, 1456, 14, 2, 169), (384, 1536, 14, 3, 81), (512, 2048, 16, 4, 64)],
    ids=["Idefics3-8B", "SmolVLM-Instruct", "SmolVLM-256M"],
)
def test_numbers_of_models_that_there_are_fit(
    checkpoint: Path, tile: int, longest: int, patch: int, scale: int, tokens: int
) -> None:
    edit(checkpoint / "config.json", vision_config={"patch_size": patch}, scale_factor=scale)
    edit(checkpoint / "processor_config.json", image_seq_len=tokens)
    idefics3(size={"longest_edge": longest}, max_image_size={"longest_edge": tile})(checkpoint)
    rule = tile_rule_of(checkpoint)
    assert (rule.longest_side, rule.tile_side, rule.tile_tokens) == (longest, tile, tokens)
    processor: Any = Idefics3Processor.from_pretrained(checkpoint)
    for width, height in [(640, 480), (480, 640), (100, 500)]:
        wanted = processor(text="<image>", images=[[Image.new("RGB", (width, height))]])["input_ids"][0]
        assert rule.tokens_of(image_size(width, height)) == tuple(wanted)


def test_without_splitting_each_image_is_one_tile(checkpoint: Path) -> None:
    images = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": False,
        "size": {"longest_edge": 224},
        "max_image_size": {"longest_edge": 112},
    }
    edit(checkpoint / "processor_config.json", image_processor=images)
    rule = tile_rule_of(checkpoint)
    assert rule.grid(image_size(300, 200)) == (0, 0)
    processor: Any = Idefics3Processor.from_pretrained(checkpoint)
    wanted = processor(text="<image>", images=[[Image.new("RGB", (300, 200))]])["input_ids"][0]
    assert rule.tokens_of(image_size(300, 200)) == tuple(wanted)


def idefics3(**images: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        known = {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 224},
            "max_image_size": {"longest_edge": 112},
        }
        edit(directory / "processor_config.json", image_processor={**known, **images})

    return change


def without(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def broken(name: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes(b"{")


def with_pair_token(directory: Path) -> None:
    words = ["<fake_token_around_image>", "<image>", "<image><image>"]
    tokenizer = write_tokenizer(directory, words)
    edit(directory / "config.json", image_token_id=tokenizer.token_to_id("<image>"))


def with_fields(name: str, **fields: Any) -> Callable[[Path], None]:
    return lambda directory: edit(directory / name, **fields)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "another architecture": (with_fields("config.json", architectures=["Gemma3"]), "architecture, Gemma3"),
    "no architecture": (with_fields("config.json", architectures=None), "architecture, none"),
    "no config": (without("config.json"), "cannot read .*config.json"),
    "no processor": (without("processor_config.json"), "cannot read .*preprocessor_config.json"),
    "no tokenizer": (without("tokenizer.json"), "tokenizer.json cannot be read"),
    "another processor": (idefics3(image_processor_type="Idefics2ImageProcessor"), "Idefics2ImageProcessor"),
    "code of its own": (idefics3(auto_map={"AutoImageProcessor": "own.Own"}), "not Idefics3ImageProcessor"),
    "no resizing": (idefics3(do_resize=False), "does not resize"),
    "no edge": (idefics3(size={"height": 3, "width": 3}), "longest_edge is None"),
    "a size that is none": (idefics3(size=224), "size is 224"),
    "tiles that do not fit": (idefics3(size={"longest_edge": 280}), "not a multiple"),
    "other tiles": (idefics3(max_image_size={"longest_edge": 56}), "2 by 2 of them .* not the 16 tokens"),
    "other tokens": (with_fields("processor_config.json", image_seq_len=17), "not the 17 tokens"),
    "too many tiles": (idefics3(size={"longest_edge": 112 * 17}), "up to 17 by 17"),
    "another image token": (with_fields("config.json", image_token_id=5), "image_token_id 5"),
    "a token for two images": (with_pair_token, "does not make an image of . by . tiles of pieces"),
    "a broken tokenizer": (
        lambda directory: (directory / "tokenizer.json").write_bytes(b"{"),
        "takes no images",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_formulas_do_not_cover_takes_no_images(checkpoint: Path, case: str) -> None:
    change, words = REFUSED[case]
    change(checkpoint)
    rule, reason = read_image_rule(checkpoint)
    assert rule is None
    assert_sentence(reason, words)


def assert_sentence(reason: str, words: str) -> None:
    assert re.search(words, reason), reason
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("preprocessor_config.json", {"patch_size": 16}, "patch_size 14, its image processor 16"),
        ("preprocessor_config.json", {"merge_size": 1}, "spatial_merge_size 2, its image processor 1"),
        ("config.json", {"vision_config": {"patch_size": 16}}, "patch_size 16, its image processor 14"),
        ("preprocessor_config.json", {"size": {"max_pixels": 5000}}, "None"),
        ("preprocessor_config.json", {"max_pixels": 28 * 28 * 70_000}, "max_pixels"),
        ("config.json", {"image_token_id": 151_655}, "image_token_id 151655"),
    ],
)
def test_qwen_with_files_that_disagree_takes_no_images(
    tmp_path: Path, name: str, fields: dict[str, Any], words: str
) -> None:
    write_qwen(tmp_path)
    edit(tmp_path / name, **fields)
    rule, reason = read_image_rule(tmp_path)
    assert rule is None
    assert_sentence(reason, words)


def test_a_model_of_text_takes_no_images() -> None:
    rule, reason = read_image_rule(toy_model_path())
    assert rule is None
    assert "there is no image rule for its architecture, LlamaForCausalLM" in reason


def test_reading_a_rule_needs_neither_torch_nor_transformers(original: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from replicas.checkpoints.image_rules import read_image_rule\n"
        f"assert read_image_rule(Path({str(original)!r}))[0]\n"
        "assert not {'torch', 'transformers', 'PIL'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
