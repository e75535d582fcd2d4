"""Checkpoints: what is read, what is refused and in which words, and what a fingerprint stands for."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from replicas.checkpoints.model_config import CheckpointError, read_model_config, stretched_context
from replicas.checkpoints.weights import fingerprint, load_checkpoint, tokenizer_bundle
from replicas.config import ReplicaConfig
from replicas.loadable import complaint
from replicas.torch_engine.model import Decoder
from tests.replicas.torch_engine.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def edit(directory: Path, file: str = "config.json", **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    path = directory / file
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def write_config(directory: Path, text: str) -> None:
    (directory / "config.json").write_text(text)


def load(directory: Path) -> None:
    Decoder(load_checkpoint(directory), dtype=torch.float32, device=torch.device("cpu"))


def drop_tensor(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors")


def quantize_tensor(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, directory / "model.safetensors")


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def index_of_nothing(directory: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def index_outside(directory: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../copy/model.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no directory": (shutil.rmtree, "there is no checkpoint directory"),
    "no config": (lambda path: (path / "config.json").unlink(), "there is no config.json"),
    "config is no JSON": (lambda path: write_config(path, "{"), "not valid JSON"),
    "config is no object": (lambda path: write_config(path, "[]"), "not hold a JSON object"),
    "architecture": (
        lambda path: edit(path, architectures=["MambaForCausalLM"]),
        "is MambaForCausalLM; supported are LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
    ),
    "no architecture": (lambda path: edit(path, architectures=None, model_type=None), "is none; supported"),
    "missing size": (lambda path: edit(path, hidden_size=None), "lacks hidden_size"),
    "senseless size": (lambda path: edit(path, num_hidden_layers=0), "num_hidden_layers 0"),
    "heads": (
        lambda path: edit(path, num_key_value_heads=4),
        "6 attention heads, which is not a multiple of its 4",
    ),
    "missing tensor": (drop_tensor, "lacks the tensor model.layers.1.mlp.up_proj.weight"),
    "other shape": (
        lambda path: edit(path, intermediate_size=100),
        r"gate_proj.weight has shape \(112, 96\) where config.json implies \(100, 96\)",
    ),
    "more layers than there are": (lambda path: edit(path, num_hidden_layers=9), "lacks the tensor"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "truncated weights": (truncate, "as safetensors"),
    "index of nothing": (index_of_nothing, "model-00001-of-00002.safetensors, which is not in"),
    "index that leads outside": (index_outside, "which is not in"),
    "rope type": (
        lambda path: edit(path, rope_parameters={"rope_type": "longrope"}),
        "rope type of this checkpoint is longrope; supported are default, linear, dynamic, llama3, yarn",
    ),
    "rope per layer": (
        lambda path: edit(path, rope_parameters={"full_attention": {"rope_type": "default"}}),
        "different rope parameters per layer",
    ),
    "partial rope": (lambda path: edit(path, partial_rotary_factor=0.5), r"a part \(0.5\) of each head"),
    "quantized": (
        lambda path: edit(path, quantization_config={"quant_method": "awq"}),
        r"is quantized \(awq\); the torch engine takes",
    ),
    "quantized tensor": (quantize_tensor, "up_proj.weight is quantized"),
    "sliding window": (
        lambda path: edit(path, use_sliding_window=True, sliding_window=128),
        "sliding window attention",
    ),
    "sliding layers": (lambda path: edit(path, layer_types=["sliding_attention"] * 3), "sliding window"),
    "activation": (lambda path: edit(path, hidden_act="gelu"), "activation is gelu"),
    "eos": (lambda path: edit(path, "generation_config.json", eos_token_id="</s>"), "not a token id"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_checkpoint_that_cannot_be_served_is_refused_in_one_clear_sentence(
    checkpoint: Path, case: str
) -> None:
    damage, words = BROKEN[case]
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=words) as caught:
        load(checkpoint)
    assert "\n" not in str(caught.value)
    assert complaint(ReplicaConfig(model=str(checkpoint))) == str(caught.value), "and before it is loaded"


def test_a_window_that_is_not_used_does_no_harm(checkpoint: Path) -> None:
    edit(checkpoint, use_sliding_window=False, sliding_window=128)
    load(checkpoint)


OLD_SCALING = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_old_and_new_spelling_of_rope_settings_mean_the_same(checkpoint: Path) -> None:
    new = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 5e5}
    edit(checkpoint, rope_parameters=new)
    expected = read_model_config(checkpoint)
    edit(checkpoint, rope_parameters=None, rope_scaling=OLD_SCALING, rope_theta=5e5)
    assert read_model_config(checkpoint) == expected
    assert expected.rope.kind == "yarn"
    assert expected.rope.theta == 5e5


def test_yarn_stretches_the_context_beyond_what_the_model_was_trained_with(checkpoint: Path) -> None:
    edit(checkpoint, rope_parameters=None, rope_scaling=OLD_SCALING, max_position_embeddings=64)
    assert read_model_config(checkpoint).longest_context == 256
    edit(checkpoint, rope_scaling={"type": "linear", "factor": 4.0})
    assert read_model_config(checkpoint).longest_context == 64
    for factor in (math.inf, 1e300, math.nan):
        with pytest.raises(CheckpointError, match="the yarn factor"):
            stretched_context(64, {**OLD_SCALING, "factor": factor})


def test_eos_tokens_come_from_the_generation_config_else_from_the_config(checkpoint: Path) -> None:
    edit(checkpoint, "generation_config.json", eos_token_id=[9, 5, 9])
    assert load_checkpoint(checkpoint).eos_token_ids == (9, 5)
    edit(checkpoint, "generation_config.json", eos_token_id=None)
    assert load_checkpoint(checkpoint).eos_token_ids == (5,)
    (checkpoint / "generation_config.json").unlink()
    edit(checkpoint, eos_token_id=None)
    assert load_checkpoint(checkpoint).eos_token_ids == ()


def test_the_bundle_holds_the_text_files_that_are_there(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    bundle = tokenizer_bundle(checkpoint)
    assert set(bundle.files) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert bundle.files["tokenizer.json"] == (checkpoint / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("use", [tokenizer_bundle, fingerprint])
def test_a_checkpoint_without_tokenizer_is_refused(checkpoint: Path, use: Callable[[Path], Any]) -> None:
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"there is no tokenizer\.json"):
        use(checkpoint)


def test_a_copy_elsewhere_has_the_same_fingerprint(original: Path, checkpoint: Path) -> None:
    edit(checkpoint, "generation_config.json", temperature=0.3)
    assert fingerprint(checkpoint) == fingerprint(original)


@pytest.mark.parametrize(
    "file", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
)
def test_one_changed_byte_changes_the_fingerprint(original: Path, checkpoint: Path, file: str) -> None:
    content = bytearray((checkpoint / file).read_bytes())
    content[-1] ^= 1
    if file == "config.json":
        edit(checkpoint, rope_theta=99.0)
    else:
        (checkpoint / file).write_bytes(content)
    assert fingerprint(checkpoint) != fingerprint(original)


def test_a_chat_template_beside_the_tokenizer_changes_the_fingerprint(
    original: Path, checkpoint: Path
) -> None:
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    assert fingerprint(checkpoint) != fingerprint(original)


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_how_images_are_processed_changes_the_fingerprint(
    original: Path, checkpoint: Path, name: str
) -> None:
    (checkpoint / name).write_text('{"image_seq_len": 16}')
    with_images = fingerprint(checkpoint)
    (checkpoint / name).write_text('{"image_seq_len": 64}')
    assert len({fingerprint(original), with_images, fingerprint(checkpoint)}) == 3


def test_every_shard_enters_the_fingerprint(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", shard="40KB")
    before = fingerprint(tmp_path)
    for shard in tmp_path.glob("*.safetensors"):
        content = shard.read_bytes()
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert fingerprint(tmp_path) != before
        shard.write_bytes(content)
    assert fingerprint(tmp_path) == before


def test_fingerprint_and_bundle_work_without_torch(original: Path) -> None:
    """The simulated engine describes a model without loading what computes it."""
    program = (
        "import sys; from pathlib import Path; from replicas.checkpoints import weights;"
        f"path = Path({str(original)!r}); weights.tokenizer_bundle(path);"
        "print(weights.fingerprint(path), 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == [fingerprint(original), "False"]
