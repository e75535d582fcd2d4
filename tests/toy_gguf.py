"""write_toy_gguf(): the toy model as the file that llama.cpp reads."""

import json
from pathlib import Path

import gguf
import numpy as np
import safetensors

from replicas.toy_model import checkpoint_directory

_OUTER = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
_IN_A_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_toy_gguf(file: Path) -> None:
    directory = checkpoint_directory(None)
    config = json.loads((directory / "config.json").read_text("utf-8"))
    writer = gguf.GGUFWriter(file, "llama")
    _add_sizes(writer, config)
    _add_tokenizer(writer, directory, config)
    heads = {
        "self_attn.q_proj": config["num_attention_heads"],
        "self_attn.k_proj": config["num_key_value_heads"],
    }
    for name, stored in safetensors.deserialize((directory / "model.safetensors").read_bytes()):
        bits = np.frombuffer(stored["data"], np.uint16).astype(np.uint32) << 16  # bfloat16 to float32
        weight = bits.view(np.float32).reshape(stored["shape"])
        place = _OUTER.get(name)
        if place is None:
            _, _, layer, rest = name.split(".", 3)
            part = rest.removesuffix(".weight")
            place = f"blk.{layer}.{_IN_A_LAYER[part]}.weight"
            if part in heads:
                weight = _interleaved(weight, heads[part])
        writer.add_tensor(place, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: gguf.GGUFWriter, config: dict[str, int]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, directory: Path, config: dict[str, int]) -> None:
    """Ids without a token get one that no text has."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text("utf-8"))
    unused, control, normal = gguf.TokenType.UNUSED, gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    tokens = [f"[{token_id}]" for token_id in range(config["vocab_size"])]
    types = [unused] * len(tokens)
    for token, token_id in tokenizer["model"]["vocab"].items():
        tokens[token_id], types[token_id] = token, normal
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], control
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template((directory / "chat_template.jinja").read_text("utf-8"))


def _interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Order a projection's rows as llama.cpp rotates them: neighbours make a pair, not halves."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)
