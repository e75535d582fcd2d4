"""Checkpoints as people have them, made of the toy model: quantised weights, and draft models.

The weights are rounded to the nearest step, and what a draft model has beside a layer of the toy's is random.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replicas.toy_model import toy_model_path

GROUP = 128
"""Weights of one scale, in 4 bits."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}

QUANTIZATION: Mapping[str, Mapping[str, Any]] = {
    "int8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**_INT8, "strategy": "channel", "dynamic": False},
                "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
            }
        },
    },
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}


def write_quantized(method: str, directory: Path) -> Path:
    """Write the toy model with the weights of all its layers in the format of `QUANTIZATION[method]`."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(toy_model_path(), directory, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    write = {"int8": _int8, "gptq": _gptq, "awq": _awq}[method]
    tensors: dict[str, Any] = {}
    for name, weight in load_file(directory / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in _LINEAR:
            tensors |= {f"{layer}.{part}": tensor for part, tensor in write(weight.float()).items()}
        else:
            tensors[name] = weight
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = QUANTIZATION[method]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _int8(weight: Any) -> dict[str, Any]:
    import torch

    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return {
        "weight": (weight / scale).round().to(torch.int8),
        "weight_scale": scale.to(torch.bfloat16),
    }


def _steps(weight: Any) -> tuple[Any, Any]:
    """Numbers of 4 bits around 8, by input and output, and a scale for each group and output."""
    columns = weight.t().contiguous()
    groups = columns.view(-1, GROUP, columns.shape[1])
    scale = groups.abs().amax(dim=1) / 7
    steps = (groups / scale[:, None]).round().clamp(-8, 7).view(columns.shape) + 8
    return steps.int(), scale


def _packed(steps: Any, order: tuple[int, ...] = tuple(range(8))) -> Any:
    """Eight numbers of a row in each int32; the one at `order[n]` in its n-th four bits."""
    import torch

    eights = steps.view(steps.shape[0], -1, 8).to(torch.int64)
    words = sum(eights[:, :, place] << 4 * at for at, place in enumerate(order))
    return (words - ((words >> 31) << 32)).to(torch.int32)


def _gptq(weight: Any) -> dict[str, Any]:
    import torch

    steps, scale = _steps(weight)
    return {
        "qweight": _packed(steps.t().contiguous()).t().contiguous(),
        "qzeros": _packed(torch.full(scale.shape, 7)),  # this format's zero is one less
        "scales": scale.to(torch.float16),
        "g_idx": torch.arange(steps.shape[0], dtype=torch.int32) // GROUP,
    }


def _awq(weight: Any) -> dict[str, Any]:
    import torch

    steps, scale = _steps(weight)
    return {
        "qweight": _packed(steps, _AWQ_ORDER),
        "qzeros": _packed(torch.full(scale.shape, 8), _AWQ_ORDER),
        "scales": scale.to(torch.float16),
    }


def write_drafter(method: str, directory: Path, target: Path | None = None) -> Path:
    """Write a draft model of one layer for "eagle" or "eagle3", of the toy's shape or of `target`'s width."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    config = json.loads((toy_model_path() / "config.json").read_text())
    if target is not None:
        config["hidden_size"] = json.loads((target / "config.json").read_text())["hidden_size"]
    width, inner = config["hidden_size"], config["intermediate_size"]
    num_q, num_kv = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    is_third = method == "eagle3"
    read = 2 * width if is_third else width
    shapes = {
        "fc": (width, width * (3 if is_third else 2)),
        "self_attn.q_proj": (num_q, read),
        "self_attn.k_proj": (num_kv, read),
        "self_attn.v_proj": (num_kv, read),
        "self_attn.o_proj": (width, num_q),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    generator = torch.Generator().manual_seed(3)
    layer = "midlayer" if is_third else "layers.0"
    tensors = {
        f"{name if name == 'fc' else f'{layer}.{name}'}.weight": torch.randn(shape, generator=generator) / 10
        for name, shape in shapes.items()
    }
    norms = ["post_attention_layernorm"] + ["input_layernorm", "hidden_norm"] * is_third
    tensors |= {f"{layer}.{norm}.weight": torch.ones(width) for norm in norms}
    if is_third:
        tensors["norm.weight"] = torch.ones(width)
        tensors["lm_head.weight"] = torch.randn(config["vocab_size"], width, generator=generator) / 10
    save_file(
        {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    config |= {
        "num_hidden_layers": 1,
        "architectures": ["LlamaForCausalLMEagle3" if is_third else "LlamaForCausalLM"],
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_mtp_model(directory: Path) -> Path:
    """Write a model of random weights whose checkpoint has a layer that drafts (Ernie 4.5)."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    directory.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(toy_model_path() / name, directory / name)
    width, heads, num_kv, inner = 128, 128, 64, 256
    config = transformers.Ernie4_5_MoeConfig(
        vocab_size=2048,
        hidden_size=width,
        intermediate_size=inner,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
        moe_layer_end_index=1,
        max_position_embeddings=8192,
        num_nextn_predict_layers=1,
        bos_token_id=None,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        model.save_pretrained(directory)
        tensors = load_file(directory / "model.safetensors")
        shapes = {
            "mtp_linear_proj.0": (width, 2 * width),
            "mtp_block.0.self_attn.q_proj": (heads, width),
            "mtp_block.0.self_attn.k_proj": (num_kv, width),
            "mtp_block.0.self_attn.v_proj": (num_kv, width),
            "mtp_block.0.self_attn.o_proj": (width, heads),
            "mtp_block.0.mlp.gate_proj": (inner, width),
            "mtp_block.0.mlp.up_proj": (inner, width),
            "mtp_block.0.mlp.down_proj": (width, inner),
        }
        for name, shape in shapes.items():
            tensors[f"model.{name}.weight"] = torch.randn(shape).to(torch.bfloat16) / 10
    for norm in (
        "emb_norm.0",
        "hidden_norm.0",
        "block.0.input_layernorm",
        "block.0.post_attention_layernorm",
    ):
        tensors[f"model.mtp_{norm}.weight"] = torch.ones(width, dtype=torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((directory / "config.json").read_text())
    written["architectures"] = ["Ernie4_5_MoeForCausalLM"]
    (directory / "config.json").write_text(json.dumps(written))
    return directory
