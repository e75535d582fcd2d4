"""Small random checkpoints as transformers saves them, and what transformers itself says of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 199
_NAMES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""Of transformers' classes. They take seconds to load, so only what uses them does."""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "bos_token_id": None,
    "eos_token_id": 5,
    "pad_token_id": 0,
}


def make_checkpoint(
    directory: Path, family: str, *, dtype: torch.dtype = torch.float32, shard: str = "1GB", **overrides: Any
) -> Path:
    """Weights are drawn wide, so that logits differ clearly and attention matters."""
    config_class: Any = getattr(transformers, f"{_NAMES[family]}Config")
    model_class: Any = getattr(transformers, f"{_NAMES[family]}ForCausalLM")
    shape = {**_SHAPE, **overrides}
    if shape["hidden_size"] % shape["num_attention_heads"]:
        shape["hidden_size"] = 16 * shape["num_attention_heads"]
    torch.manual_seed(7)
    model = model_class(config_class(**shape))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "bias" in name:
                parameter.normal_(std=0.5)
            else:
                parameter.normal_(std=0.15)
    model.to(dtype).save_pretrained(directory, max_shard_size=shard)
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    vocabulary = {f"t{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))


class Reference:
    """transformers' own model of a checkpoint, in float32."""

    def __init__(self, directory: Path) -> None:
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._model.generation_config.eos_token_id = None

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy, never ended by EOS."""
        output = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            generation_config=transformers.GenerationConfig(  # type: ignore[no-untyped-call]
                max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
            ),
        )
        return [int(token) for token in output[0, len(prompt) :]]

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Of every position, `[tokens, vocabulary]`."""
        with torch.no_grad():
            logits: torch.Tensor = self._model(torch.tensor([token_ids])).logits[0]
        return logits
