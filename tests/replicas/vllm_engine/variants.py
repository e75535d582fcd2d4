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

_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
QUANTIZATION: Mapping[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "desc_act": False,
    "sym": True,
    "lm_head": False,
}


def write_quantized(directory: Path) -> Path:
    """Write the toy model with the weights of all its layers in 4 bits, in GPTQ's format."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(toy_model_path(), directory, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    tensors: dict[str, Any] = {}
    for name, weight in load_file(directory / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in _LINEAR:
            tensors |= {f"{layer}.{part}": tensor for part, tensor in _gptq(weight.float()).items()}
        else:
            tensors[name] = weight
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = QUANTIZATION
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _steps(weight: Any) -> tuple[Any, Any]:
    """Numbers of 4 bits around 8, by input and output, and a scale for each group and output."""
    columns = weight.t().contiguous()
    groups = columns.view(-1, GROUP, columns.shape[1])
    scale = groups.abs().amax(dim=1) / 7
    steps = (groups / scale[:, None]).round().clamp(-8, 7).view(columns.shape) + 8
    return steps.int(), scale


def _packed(steps: Any) -> Any:
    """Pack eight numbers of a row into each int32."""
    import torch

    eights = steps.view(steps.shape[0], -1, 8).to(torch.int64)
    words = sum(eights[:, :, place] << 4 * place for place in range(8))
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


def write_drafter(directory: Path, target: Path) -> Path:
    """Write a draft model of one layer for EAGLE 3, of `target`'s width."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    config = json.loads((toy_model_path() / "config.json").read_text())
    config["hidden_size"] = json.loads((target / "config.json").read_text())["hidden_size"]
    width, inner = config["hidden_size"], config["intermediate_size"]
    num_q, num_kv = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    shapes = {
        "fc": (width, width * 3),
        "midlayer.self_attn.q_proj": (num_q, 2 * width),
        "midlayer.self_attn.k_proj": (num_kv, 2 * width),
        "midlayer.self_attn.v_proj": (num_kv, 2 * width),
        "midlayer.self_attn.o_proj": (width, num_q),
        "midlayer.mlp.gate_proj": (inner, width),
        "midlayer.mlp.up_proj": (inner, width),
        "midlayer.mlp.down_proj": (width, inner),
    }
    generator = torch.Generator().manual_seed(3)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) / 10 for name, shape in shapes.items()
    }
    for norm in ("post_attention_layernorm", "input_layernorm", "hidden_norm"):
        tensors[f"midlayer.{norm}.weight"] = torch.ones(width)
    tensors["norm.weight"] = torch.ones(width)
    tensors["lm_head.weight"] = torch.randn(config["vocab_size"], width, generator=generator) / 10
    save_file(
        {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    config |= {
        "num_hidden_layers": 1,
        "architectures": ["LlamaForCausalLMEagle3"],
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
