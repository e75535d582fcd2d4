"""Work: what a step of a model takes at least, in FLOPs and bytes, and how long that takes a device at best.

Owns the arithmetic of a decoder with grouped-query attention. How often an engine really reads its weights
in a step, or copies keys, is not counted. Biases and the arithmetic of norms, rotations and softmax are left
out: they are thousandths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from replicas.checkpoints.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Extent:
    """New tokens of one sequence, computed behind `num_before` tokens whose keys and values are there."""

    num_before: int
    num_new: int


@dataclass(frozen=True, slots=True)
class Work:
    """`num_bytes` are read from the device's memory: weights once, keys and values of earlier tokens."""

    flops: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Measured limits of a device."""

    flops_per_second: float
    bytes_per_second: float

    def least_seconds(self, work: Work) -> float:
        """Arithmetic and memory work side by side at best, so the longer of the two counts."""
        return max(self._seconds(work))

    def bound(self, work: Work) -> Literal["FLOPs", "bytes"]:
        """Return the larger of the two bounds."""
        arithmetic, memory = self._seconds(work)
        return "FLOPs" if arithmetic >= memory else "bytes"

    def _seconds(self, work: Work) -> tuple[float, float]:
        return work.flops / self.flops_per_second, work.num_bytes / self.bytes_per_second


def num_parameters(config: ModelConfig) -> int:
    embeddings = config.vocab_size * config.hidden_size * (1 if config.has_tied_head else 2)
    norms = (2 * config.num_layers + 1) * config.hidden_size
    return config.num_layers * _matrix_parameters(config) + embeddings + norms


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize


def step_work(config: ModelConfig, extents: Sequence[Extent], itemsize: int) -> Work:
    """A batch of which each sequence yields one row of logits, with numbers of `itemsize` bytes.

    A query multiplies with every key up to its own, and its scores with as many values. Embeddings are
    looked up, so of their matrix only the head's use counts as read.
    """
    num_new = sum(extent.num_new for extent in extents)
    num_pairs = sum(
        extent.num_new * extent.num_before + extent.num_new * (extent.num_new + 1) // 2 for extent in extents
    )
    matrices = config.num_layers * _matrix_parameters(config)
    head = config.vocab_size * config.hidden_size
    flops = (
        2 * matrices * num_new
        + 4 * config.num_layers * config.num_heads * config.head_dim * num_pairs
        + 2 * head * len(extents)
    )
    num_earlier = sum(extent.num_before for extent in extents)
    return Work(flops, (matrices + head) * itemsize + num_earlier * kv_bytes_per_token(config, itemsize))


def _matrix_parameters(config: ModelConfig) -> int:
    """Count the parameters of one layer that each token is multiplied with."""
    query_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (query_width + 2 * kv_width) + query_width * config.hidden_size
    return attention + 3 * config.hidden_size * config.intermediate_size
