"""Time to first token by where a prompt's KV lies: nowhere, on the device, in host memory, on disk.

Runs one engine in this process on the toy model, without HTTP and router. Each round takes a prompt that is
new (miss), again (device), after others have taken the device (host), and after others have taken host memory
as well (disk), in turns, so that whatever the machine does hits all alike.

    python -m loadtests.benches.tiers [--engine vllm] [--tokens 2048] [--rounds 9]
"""

import argparse
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loadtests.figures import milliseconds, percentiles, print_header
from replicas.config import ReplicaConfig
from replicas.engine import Engine, expand
from replicas.engines import build_engine_here
from replicas.protocol.blocks import HASH_BYTES, BlockHash, pack_token_ids
from replicas.protocol.frames import PromptUsage, SamplingParams, Submit
from replicas.vllm_engine.environment import vllm_environment

ROOT = BlockHash(bytes(HASH_BYTES))
TOKEN_BYTES = {"torch": 2560, "vllm": 1280}
"""Of the toy model's KV, in the type in which the engine keeps it on a CPU."""

HOST_PROMPTS = 3
NUM_OTHERS = 5
"""What host memory holds, and how many others there are: more."""

WHERE = ("miss", "device", "host", "disk")


class Bench:
    def __init__(self, engine: Engine, num_tokens: int) -> None:
        self._engine = engine
        self._num_tokens = num_tokens
        self._rng = random.Random(num_tokens)
        self._serial = 0
        self._others = [self.prompt() for _ in range(NUM_OTHERS)]
        engine.begin()
        engine.step()

    def prompt(self) -> list[int]:
        return [self._rng.randrange(3, self._engine.card.vocab_size) for _ in range(self._num_tokens)]

    def ask(self, prompt: list[int]) -> tuple[float, PromptUsage]:
        """Seconds to the first token, and what it was made of."""
        self._serial += 1
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        (request,) = expand(Submit(0, pack_token_ids(prompt), sampling, ROOT), self._serial)
        began = time.perf_counter()
        self._engine.add(request)
        while not (deltas := self._engine.step().deltas):
            pass
        seconds = time.perf_counter() - began
        assert deltas[0].usage is not None
        self._settle()
        return seconds, deltas[0].usage

    def _settle(self) -> None:
        """Until nothing is copied or written any more."""
        while self._engine.step().look_again_seconds is not None or self._engine.has_work():
            time.sleep(0.001)

    def round(self) -> Iterator[tuple[str, float]]:
        prompt = self.prompt()
        for where, others in (("miss", 0), ("device", 0), ("host", 1), ("disk", NUM_OTHERS)):
            for other in self._others[:others]:
                self.ask(other)
            seconds, usage = self.ask(prompt)
            if self._found(usage) != where:
                print(f"  left out: found on {self._found(usage)} what was to be on {where}: {usage}")
                continue
            yield where, seconds

    def _found(self, usage: PromptUsage) -> str:
        if usage.num_cached_tokens < self._num_tokens * 0.9:
            return "miss" if not usage.num_cached_tokens else "part"
        if usage.num_disk_tokens > usage.num_cached_tokens / 2:
            return "disk"
        return "host" if usage.num_slower_tier_tokens > usage.num_cached_tokens / 2 else "device"


def settings(engine: str, num_tokens: int, folder: str) -> dict[str, Any]:
    block_size = 32 if engine == "vllm" else 16
    prompt_bytes = num_tokens * TOKEN_BYTES[engine]
    return {
        "engine": engine,
        "device": "cpu" if engine == "torch" else "auto",
        "block_size": block_size,
        "num_blocks": num_tokens * 5 // 4 // block_size,
        "context_length": min(8192, num_tokens + 64),
        "host_kv_bytes": int(HOST_PROMPTS * prompt_bytes * 1.1),
        "disk_kv_bytes": 100 * prompt_bytes,
        "kv_folder": f"{folder}/kv",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=tuple(TOKEN_BYTES), default="torch")
    parser.add_argument("--tokens", type=int, default=2048, help="of a prompt, at most 8000")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where the disk's folder is made")
    arguments = parser.parse_args()
    if arguments.engine == "vllm":
        os.environ.update(vllm_environment(None))
    times: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="kvasir-tiers-", dir=arguments.folder) as folder:
        config = ReplicaConfig(**settings(arguments.engine, arguments.tokens, folder))
        engine, _ = build_engine_here(config)
        bench = Bench(engine, arguments.tokens)
        print_header(f"TTFT of {arguments.tokens} tokens by tier, {arguments.engine}, toy model, CPU")
        for _ in range(arguments.rounds):
            for where, seconds in bench.round():
                times[where].append(seconds)
        engine.close()
    for where in WHERE:
        if times[where]:
            share = percentiles(times[where]).p50 / percentiles(times["miss"]).p50
            print(f"  {where:<7} {milliseconds(times[where])}   {share:.3f} of a miss ({len(times[where])})")


if __name__ == "__main__":
    main()
