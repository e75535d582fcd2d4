"""Time to first token with and without a cached prefix, through the HTTP API, on our own engine.

Makes a random Llama of about 20 M parameters on the spot (its answers are noise; its times are real),
serves it with the toy model's tokenizer, and alternates: a prompt that was not sent before (cold), then
one that shares all but its last words with it (warm).

    python -m loadtests.benches.ttft
"""

import argparse
import asyncio
import json
import random
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from loadtests.benches.router import WORDS
from loadtests.figures import milliseconds, percentiles, print_header
from loadtests.load.streaming import Connection
from loadtests.stacks.local_stack import LocalStack, local_stack
from replicas.toy_model import toy_model_path

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def make_model(folder: Path) -> int:
    """Write a random checkpoint with the toy model's tokenizer. Returns its number of parameters."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        if (toy_model_path() / name).exists():
            shutil.copy(toy_model_path() / name, folder / name)
    toy = json.loads((toy_model_path() / "config.json").read_text(encoding="utf-8"))
    config = SHAPE | {key: toy[key] for key in ("vocab_size", "bos_token_id", "eos_token_id") if key in toy}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.manual_seed(0)
    hidden, kv = 384, 2 * 64
    tensors = {"model.embed_tokens.weight": torch.randn(toy["vocab_size"], hidden) * 0.02}
    for layer in range(12):
        at = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", 1024, hidden),
            ("mlp.up_proj", 1024, hidden),
            ("mlp.down_proj", hidden, 1024),
        ):
            tensors[f"{at}{name}.weight"] = torch.randn(rows, columns) * 0.02
        tensors[f"{at}input_layernorm.weight"] = torch.ones(hidden)
        tensors[f"{at}post_attention_layernorm.weight"] = torch.ones(hidden)
    tensors["model.norm.weight"] = torch.ones(hidden)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in tensors.values())


def prompt(rng: random.Random, num_tokens: int, tokens_per_word: float) -> str:
    return " ".join(rng.choices(WORDS, k=int(num_tokens / tokens_per_word)))


async def measure(stack: LocalStack, num_tokens: int, rounds: int) -> None:
    port = stack.port
    connection = Connection("127.0.0.1", port)
    rng = random.Random(num_tokens)

    async def ask(system: str, question: str) -> tuple[float, int, int]:
        body = {
            "model": "bench",
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
            "max_tokens": 4,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = await connection.post("/v1/chat/completions", json.dumps(body).encode())
        assert answer.status == 200, answer
        return answer.ttft, int(str(answer.usage["prompt_tokens"])), answer.num_cached_tokens

    sample = prompt(rng, 400, 1.0)
    _, counted, _ = await ask(sample, "?")
    tokens_per_word = counted / 400
    cold, warm, cached, length = [], [], 0, 0
    for round_number in range(rounds):
        system = prompt(rng, num_tokens, tokens_per_word)
        first, length, missed = await ask(system, f"question {round_number}")
        second, _, cached = await ask(system, f"another {round_number}")
        assert missed < 64, "the cold prompt was not cold"
        cold.append(first)
        warm.append(second)
    ratio = percentiles(cold).p50 / percentiles(warm).p50
    print(f"- {length} prompt tokens, {cached} of them cached when warm, {rounds} rounds, alternating")
    print(f"    cold {milliseconds(cold)}")
    print(f"    warm {milliseconds(warm)}   {ratio:.1f} times sooner (medians)")
    await connection.close()


async def run(stack: LocalStack, rounds: int) -> None:
    for num_tokens in (512, 2048, 8192):
        await measure(stack, num_tokens, rounds if num_tokens < 8192 else max(3, rounds // 3))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvasir-model-") as folder:
        num_parameters = make_model(Path(folder))
        print_header(
            f"TTFT with and without a cached prefix, {num_parameters / 1e6:.1f} M parameters, fp32, CPU"
        )
        settings = {"engine": "torch", "model": folder, "model_name": "bench", "kv_cache_bytes": 1 << 30}
        with local_stack(replica_settings=settings) as stack:
            asyncio.run(run(stack, arguments.rounds))
    print("  for orientation, vLLM 0.32 on the CPU (4-layer model of hidden size 256, bf16, one thread,")
    print("  in-process): 512 tokens 14.5 / 3.6 ms, 2048 97.5 / 6.8 ms, 8192 1018 / 13.6 ms (miss / hit)")


if __name__ == "__main__":
    main()
