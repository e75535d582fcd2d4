"""RandomCheckpoint: a model of a given shape whose weights are drawn on the device, without any file.

Owns the shapes. What such a model says is noise; what it costs to compute is what a trained one costs.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from replicas.checkpoints.model_config import ModelConfig, RopeConfig
from replicas.checkpoints.weights import Checkpoint
from replicas.protocol.status import TokenizerBundle

_WEIGHT_SPREAD = 0.02


def _llama(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    has_tied_head: bool,
) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        norm_epsilon=1e-5,
        max_position_embeddings=131_072,
        rope=RopeConfig("default", 500_000.0, {}),
        has_tied_head=has_tied_head,
        has_qkv_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
        has_qk_norm=False,
        dtype_name="bfloat16",
    )


SHAPES: Mapping[str, ModelConfig] = {
    "tiny": _llama(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        has_tied_head=False,
    ),
    "1b": _llama(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        has_tied_head=True,
    ),
    "8b": _llama(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        has_tied_head=False,
    ),
}
"""`1b` and `8b` are those of Llama 3.2 and Llama 3.1."""


@dataclass(frozen=True, slots=True)
class RandomCheckpoint(Checkpoint):
    """The same weights whenever it is read on the same kind of device. It has no text side."""

    device: torch.device
    dtype: torch.dtype

    def tensor(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        made = torch.empty(tuple(shape), dtype=self.dtype, device=self.device)
        if name.endswith("norm.weight"):
            return made.fill_(1.0)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        return made.normal_(0.0, _WEIGHT_SPREAD, generator=generator)

    def bundle(self) -> TokenizerBundle:
        return TokenizerBundle({})

    def fingerprint(self) -> str:
        return f"random-{self.directory.name}"


def random_checkpoint(shape: str, device: torch.device, dtype: torch.dtype) -> RandomCheckpoint:
    return RandomCheckpoint(Path(shape), SHAPES[shape], (), {}, device, dtype)
