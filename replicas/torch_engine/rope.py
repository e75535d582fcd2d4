"""Rotary position tables: the cosine and sine of every position, computed once.

Owns the five ways in which supported models turn a position into angles.
"""

import math

import torch

from replicas.checkpoints.model_config import RopeConfig


def rope_tables(
    rope: RopeConfig, head_dim: int, num_positions: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, each `[num_positions, head_dim / 2]`; computed in float32 for any `dtype`."""
    frequencies, scale = _frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    cosines, sines = angles.cos() * scale, angles.sin() * scale
    return cosines.to(device=device, dtype=dtype), sines.to(device=device, dtype=dtype)


def apply_rope(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate `[tokens, heads, head_dim]` by the angles `[tokens, 1, head_dim / 2]` of their positions."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


def _frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return each dimension pair's angle per position, and the factor of cosine and sine."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return plain / rope.number("factor"), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim), _yarn_scale(rope)
    # The dynamic kind changes its frequencies only beyond max_position_embeddings, which a replica never
    # goes beyond; it could not, for the keys in the cache are already rotated.
    assert rope.kind in ("default", "dynamic")
    return plain, 1.0


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched, short ones kept, those between blended."""
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    window = rope.number("original_max_position_embeddings")
    stretched = plain / rope.number("factor")
    turns_in_window = window * plain / (2 * math.pi)
    keep = ((turns_in_window - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * stretched + keep * plain


def _yarn(rope: RopeConfig, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Dimensions that turn often within the trained window are kept, those that hardly do are stretched."""
    window = rope.number("original_max_position_embeddings")

    def dimension_of(num_turns: float) -> float:
        return head_dim * math.log(window / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.number("beta_fast", 32)), dimension_of(rope.number("beta_slow", 1))
    if rope.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0.0, 1.0)
    return (1 - keep) * plain / rope.number("factor") + keep * plain


def _yarn_scale(rope: RopeConfig) -> float:
    if rope.parameters.get("attention_factor") is not None:
        return rope.number("attention_factor")
    factor = rope.number("factor")

    def sharpening(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.parameters.get("mscale") and rope.parameters.get("mscale_all_dim"):
        return sharpening(rope.number("mscale")) / sharpening(rope.number("mscale_all_dim"))
    return sharpening(1.0)
