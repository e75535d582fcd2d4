"""Work of a step in FLOPs and bytes, and the models of given shapes, with random weights and no file.

Owns the arithmetic of a decoder with grouped-query attention. Biases, norms, rotations and softmax are left
out: they are thousandths.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from replicas.checkpoints.model_config import ModelConfig, RopeConfig
from replicas.checkpoints.weights import Checkpoint
from replicas.protocol.status import TokenizerBundle


def _llama(vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        norm_epsilon=1e-5,
        max_position_embeddings=131_072,
        rope=RopeConfig("default", 500_000.0, {}),
        has_tied_head=hidden == 2048,
        has_qkv_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
        has_qk_norm=False,
        dtype_name="bfloat16",
    )


SHAPES = {
    "tiny": _llama(512, 64, 128, 2, 4, 2),
    "1b": _llama(128_256, 2048, 8192, 16, 32, 8),
    "8b": _llama(128_256, 4096, 14_336, 32, 32, 8),
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
        return made.normal_(0.0, 0.02, generator=generator)

    def bundle(self) -> TokenizerBundle:
        return TokenizerBundle({})

    def fingerprint(self) -> str:
        return f"random-{self.directory.name}"


def random_checkpoint(shape: str, device: torch.device, dtype: torch.dtype) -> RandomCheckpoint:
    return RandomCheckpoint(Path(shape), SHAPES[shape], (), {}, device, dtype)


class Extent(NamedTuple):
    """New tokens of one sequence, computed behind `num_before` tokens whose keys and values are there."""

    num_before: int
    num_new: int


class Work(NamedTuple):
    """`num_bytes` are read from the device's memory: weights once, keys and values of earlier tokens."""

    flops: int
    num_bytes: int


class DeviceLimits(NamedTuple):
    """Measured limits of a device. The longer of arithmetic and memory counts: they run at one time."""

    flops_per_second: float
    bytes_per_second: float

    def least_seconds(self, work: Work) -> float:
        return max(work.flops / self.flops_per_second, work.num_bytes / self.bytes_per_second)

    def share(self, work: Work, seconds: float) -> str:
        is_arithmetic = work.flops / self.flops_per_second >= work.num_bytes / self.bytes_per_second
        return f"{self.least_seconds(work) / seconds:.1%} ({'FLOPs' if is_arithmetic else 'bytes'})"


def num_parameters(config: ModelConfig) -> int:
    embeddings = config.vocab_size * config.hidden_size * (1 if config.has_tied_head else 2)
    norms = (2 * config.num_layers + 1) * config.hidden_size
    return config.num_layers * _matrix_parameters(config) + embeddings + norms


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize


def step_work(config: ModelConfig, extents: Sequence[Extent], itemsize: int) -> Work:
    """Sum a batch's work, one row of logits per sequence, with numbers of `itemsize` bytes."""
    num_new = sum(each.num_new for each in extents)
    num_pairs = sum(
        each.num_new * each.num_before + each.num_new * (each.num_new + 1) // 2 for each in extents
    )
    matrices, head = config.num_layers * _matrix_parameters(config), config.vocab_size * config.hidden_size
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * num_pairs
    num_cached_bytes = sum(each.num_before for each in extents) * kv_bytes_per_token(config, itemsize)
    return Work(
        2 * matrices * num_new + attention + 2 * head * len(extents),
        (matrices + head) * itemsize + num_cached_bytes,
    )


def _matrix_parameters(config: ModelConfig) -> int:
    """Count the parameters of one layer that each token is multiplied with."""
    query_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (query_width + 2 * kv_width) + query_width * config.hidden_size
    return attention + 3 * config.hidden_size * config.intermediate_size
