"""Small LoRA adapters for tiny models, as PEFT writes them, and strong enough to change every answer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RANK = 4
_SHAPES = {
    "self_attn.q_proj": (128, 128),
    "self_attn.v_proj": (128, 64),
    "self_attn.o_proj": (128, 128),
    "mlp.down_proj": (512, 128),
}
GEMMA3 = {
    "self_attn.q_proj": (64, 128),
    "self_attn.v_proj": (64, 64),
    "self_attn.o_proj": (128, 64),
    "mlp.down_proj": (128, 64),
}
"""The layers of `make_hybrid_model`'s, of which there are 6."""


def write_adapter(
    directory: Path,
    *,
    seed: int = 1,
    rank: int = RANK,
    width: int = 128,
    shapes: Mapping[str, tuple[int, int]] = _SHAPES,
    num_layers: int = 5,
    **config: Any,
) -> Path:
    """A seeded adapter, by default for the toy model; a `width` other than 128 fits none of these. `config`
    overrides adapter_config.json."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(num_layers):
        for module, (num_in, num_out) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            num_in = num_in * width // 128
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, num_in, generator=generator) / 2
            tensors[f"{name}.lora_B.weight"] = torch.randn(num_out, rank, generator=generator) / 2
    save_file(
        {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()},
        directory / "adapter_model.safetensors",
    )
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [module.rpartition(".")[2] for module in shapes],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings | config))
    return directory
