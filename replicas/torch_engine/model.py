"""Decoder: the network of the Llama, Qwen2 and Qwen3 families.

Owns the weights and the arithmetic between token ids and logits. Attention, and with it the KV cache, is a
function argument.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding, linear, rms_norm, silu

from replicas.checkpoints.model_config import ModelConfig
from replicas.checkpoints.weights import Checkpoint
from replicas.torch_engine.rope import apply_rope

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, queries, keys, values), each `[tokens, heads, head_dim]`, to `[tokens, heads * head_dim]`."""


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return linear(inputs, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class _DecoderLayer:
    """One decoder layer. `qkv` and `gate_up` are matrices that read the same input, joined.

    `qk_norm` is `[heads + kv_heads, head_dim]`: one row for each head that it scales.
    """

    attention_norm: torch.Tensor
    qkv: _Linear
    qk_norm: torch.Tensor | None
    output: _Linear
    mlp_norm: torch.Tensor
    gate_up: _Linear
    down: _Linear


class Decoder:
    """A loaded model."""

    def __init__(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        config = checkpoint.config
        self.config = config
        self.dtype = dtype
        self.device = device
        reader = _WeightReader(checkpoint, dtype, device)
        vocabulary = (config.vocab_size, config.hidden_size)
        self._embeddings = reader.tensor("model.embed_tokens.weight", vocabulary)
        self._layers = [_read_layer(reader, config, index) for index in range(config.num_layers)]
        self._norm = reader.tensor("model.norm.weight", (config.hidden_size,))
        self._head = self._embeddings if config.has_tied_head else reader.tensor("lm_head.weight", vocabulary)

    def forward(
        self,
        token_ids: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        logit_rows: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """Float32 logits after those tokens that `logit_rows` names; one row per token goes in.

        `rotation` is the cosines and sines of the tokens' positions, each `[tokens, 1, head_dim / 2]`.
        """
        hidden = embedding(token_ids, self._embeddings)
        for index, layer in enumerate(self._layers):
            normed = _rms_norm(hidden, layer.attention_norm, self.config.norm_epsilon)
            queries, keys, values = self._project(layer, normed, rotation)
            hidden = hidden + layer.output(attend(index, queries, keys, values))
            normed = _rms_norm(hidden, layer.mlp_norm, self.config.norm_epsilon)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            hidden = hidden + layer.down(silu(gate) * up)
        normed = _rms_norm(hidden[logit_rows], self._norm, self.config.norm_epsilon)
        return linear(normed, self._head).float()

    def _project(
        self, layer: _DecoderLayer, inputs: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        heads = layer.qkv(inputs).view(-1, num_heads + 2 * num_kv_heads, self.config.head_dim)
        queries_keys, values = heads.tensor_split((num_heads + num_kv_heads,), dim=1)
        if layer.qk_norm is not None:
            queries_keys = _rms_norm(queries_keys, layer.qk_norm, self.config.norm_epsilon)
        queries, keys = apply_rope(queries_keys, *rotation).tensor_split((num_heads,), dim=1)
        return queries, keys, values


@dataclass(frozen=True, slots=True)
class _WeightReader:
    """Tensors of a checkpoint as the model wants them. They are copied: the file may change or go."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.checkpoint.tensor(name, shape).to(device=self.device, dtype=self.dtype, copy=True)

    def linear(self, prefix: str, outputs: dict[str, int], num_inputs: int, *, has_bias: bool) -> _Linear:
        """Return the matrices `outputs` (name to number of outputs) under `prefix`, stacked in that order."""
        weights = [
            self.tensor(f"{prefix}.{name}.weight", (size, num_inputs)) for name, size in outputs.items()
        ]
        bias = None
        if has_bias:
            bias = torch.cat(
                [self.tensor(f"{prefix}.{name}.bias", (size,)) for name, size in outputs.items()]
            )
        return _Linear(weights[0] if len(weights) == 1 else torch.cat(weights), bias)


def _read_layer(reader: _WeightReader, config: ModelConfig, index: int) -> _DecoderLayer:
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    hidden, inner = config.hidden_size, config.intermediate_size
    query_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qk_norm = None
    if config.has_qk_norm:
        query_norm, key_norm = (
            reader.tensor(f"{attention}.{name}.weight", (config.head_dim,)) for name in ("q_norm", "k_norm")
        )
        qk_norm = torch.cat(
            (query_norm.expand(config.num_heads, -1), key_norm.expand(config.num_kv_heads, -1))
        )
    return _DecoderLayer(
        attention_norm=reader.tensor(f"{prefix}.input_layernorm.weight", (hidden,)),
        qkv=reader.linear(
            attention,
            {"q_proj": query_width, "k_proj": kv_width, "v_proj": kv_width},
            hidden,
            has_bias=config.has_qkv_bias,
        ),
        qk_norm=qk_norm,
        output=reader.linear(attention, {"o_proj": hidden}, query_width, has_bias=config.has_output_bias),
        mlp_norm=reader.tensor(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=reader.linear(
            mlp, {"gate_proj": inner, "up_proj": inner}, hidden, has_bias=config.has_mlp_bias
        ),
        down=reader.linear(mlp, {"down_proj": hidden}, inner, has_bias=config.has_mlp_bias),
    )


def _rms_norm(inputs: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Normalised in float32, then scaled in the model's dtype: the order of roundings that models expect."""
    return weight * rms_norm(inputs, inputs.shape[-1:], eps=epsilon)
