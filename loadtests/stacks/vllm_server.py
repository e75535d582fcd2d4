"""vLLM's own OpenAI server on the toy model, with settings equal to those of a replica of ours.

Owns its command line.
"""

import sys
from collections.abc import Mapping

from replicas.toy_model import toy_model_path

MODEL = "toy_model"
BLOCK_SIZE = 32
MAX_BATCHED_TOKENS, MAX_RUNNING = 2048, 256

REPLICA: Mapping[str, object] = {
    "engine": "vllm",
    "model_name": MODEL,
    "block_size": BLOCK_SIZE,
    "max_batched_tokens": MAX_BATCHED_TOKENS,
    "max_running": MAX_RUNNING,
    "num_threads": 1,
}


def vllm_server_command(port: int, cache_bytes: int) -> list[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(toy_model_path())]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--block-size", str(BLOCK_SIZE), "--kv-cache-memory-bytes", str(cache_bytes)]
    command += ["--max-num-batched-tokens", str(MAX_BATCHED_TOKENS), "--max-num-seqs", str(MAX_RUNNING)]
    command += ["--distributed-executor-backend", "uni", "--generation-config", "vllm"]
    return [*command, "--enable-prompt-tokens-details"]
