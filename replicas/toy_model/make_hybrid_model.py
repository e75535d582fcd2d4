"""Makes a tiny model whose layers keep different KV caches: random weights and the toy model's words.

It answers noise. It is there to try and to test how such models are cached and routed, on any machine; vLLM
serves it on a CPU. A file of weights has 1 to 4 MB::

    python -m replicas.toy_model.make_hybrid_model gpt_oss DIRECTORY

transformers has to be installed, as it is wherever vLLM is. The same versions of torch and transformers make
the same files.

Owns the shapes of these models.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from replicas.toy_model import toy_model_path
from replicas.toy_model.random_checkpoint import write_or_exit, write_random_weights

CONTEXT_LENGTH = 8192
WINDOW = 256
"""Tokens of a sliding window, and of a chunk that attention stays in."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_VOCAB_SIZE = 2048
_TURN_END_ID = 2

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_NO_SCALING = {"rope_type": "default", "rope_theta": 10000.0}
_FIVE_OF_SIX = ["sliding_attention"] * 5 + ["full_attention"]


@dataclass(frozen=True, slots=True)
class Family:
    """`config` is the name of its class in transformers, `shape` what it does not share with the others."""

    config: str
    shape: Mapping[str, Any]


FAMILIES: Mapping[str, Family] = {
    # A sliding window in five layers of six.
    "gemma3": Family(
        "Gemma3TextConfig",
        {**_HEADS, "num_hidden_layers": 6, "sliding_window": WINDOW, "layer_types": _FIVE_OF_SIX},
    ),
    # Full attention has wider heads, so its blocks hold fewer tokens than those of the windows.
    "gemma4": Family(
        "Gemma4TextConfig",
        {
            **_HEADS,
            "num_hidden_layers": 6,
            "global_head_dim": 64,
            "num_global_key_value_heads": 2,
            "vocab_size_per_layer_input": _VOCAB_SIZE,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "sliding_window": WINDOW,
            "layer_types": _FIVE_OF_SIX,
        },
    ),
    # Sliding and full layers in turn, with attention sinks.
    "gpt_oss": Family(
        "GptOssConfig",
        {
            **_HEADS,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 2.0,
                "original_max_position_embeddings": CONTEXT_LENGTH // 2,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
    # Short convolutions: one state in place of a cache.
    "lfm2": Family(
        "Lfm2Config",
        {
            "hidden_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 4,
            "conv_L_cache": 3,
            "conv_dim": 128,
            "conv_dim_out": 128,
            "block_dim": 128,
            "block_ff_dim": 128,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv"] * 3 + ["full_attention"],
        },
    ),
    # Attention within chunks in three layers of four.
    "llama4": Family(
        "Llama4TextConfig",
        {
            **_HEADS,
            "intermediate_size_mlp": 128,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
            "rope_parameters": _NO_SCALING,
        },
    ),
    # A sliding window in all layers.
    "mistral": Family("MistralConfig", {**_HEADS, "num_hidden_layers": 2, "sliding_window": WINDOW}),
    # A gated delta net in three layers of four, whose state takes a block of 1,056 tokens.
    "qwen3_next": Family(
        "Qwen3NextConfig",
        {
            **_HEADS,
            "num_hidden_layers": 4,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        },
    ),
}


def write_hybrid_model(family: str, directory: Path) -> None:
    """Write the checkpoint of a family. Raises ImportError without transformers or torch, and OSError."""
    transformers: Any = import_module("transformers")
    directory.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(toy_model_path() / name, directory / name)
    made = FAMILIES[family]
    config = getattr(transformers, made.config)(
        **{
            "hidden_size": 64,
            "intermediate_size": 128,
            "vocab_size": _VOCAB_SIZE,
            "max_position_embeddings": CONTEXT_LENGTH,
            "bos_token_id": None,
            "eos_token_id": _TURN_END_ID,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
            **made.shape,
        }
    )
    model = write_random_weights(lambda: transformers.AutoModelForCausalLM.from_config(config), directory)
    written = json.loads((directory / "config.json").read_text())
    written["architectures"] = [type(model).__name__]
    (directory / "config.json").write_text(json.dumps(written, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny model whose layers keep different KV caches.")
    parser.add_argument("family", choices=sorted(FAMILIES), help="whose layers it has")
    parser.add_argument("directory", type=Path, help="where its files go; made if it is not there")
    arguments = parser.parse_args()
    directory: Path = arguments.directory
    write_or_exit(lambda: write_hybrid_model(arguments.family, directory), directory)


if __name__ == "__main__":
    main()
