"""Time to first token by where KV lies: nowhere, on the device, in host memory, on disk, at a peer.

Runs one engine in this process on the toy model, without HTTP and router, and with `--peer` another in a
process of its own. Each round takes a prompt that is new (miss), again (device), after others have taken the
device (host), and after others have taken host memory as well (disk), and one that only the peer has
computed, in turns, so that whatever the machine does hits all alike.

    python -m loadtests.benches.tiers [--engine vllm] [--tokens 2048] [--rounds 9] [--peer]
"""

import argparse
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from loadtests.benches.harness import bench_options
from loadtests.benches.tier_peer import TierPeer, settle, tier_peer
from loadtests.figures import milliseconds, percentiles, print_header
from replicas.config import ReplicaConfig
from replicas.engine import Engine, expand
from replicas.engines import build_engine_here
from replicas.protocol.blocks import HASH_BYTES, BlockHash, pack_token_ids
from replicas.protocol.frames import PromptUsage, SamplingParams, Submit
from replicas.protocol.pulls import PullHint
from replicas.vllm_engine.environment import vllm_environment

ROOT = BlockHash(bytes(HASH_BYTES))
TOKEN_BYTES = {"torch": 2560, "vllm": 1280}
"""KV bytes per token of the toy model, in the engine's type on a CPU."""

HOST_PROMPTS = 3
NUM_OTHERS = 5
"""Prompts that fill host memory and more."""

WHERE = ("miss", "device", "host", "disk", "peer")

PULL_BYTES_PER_SECOND = 1e9
"""Assumed speed of the network until pulls have measured it."""


class Bench:
    def __init__(self, engine: Engine, num_tokens: int, peer: TierPeer | None = None) -> None:
        self._engine = engine
        self._peer = peer
        self._num_tokens = num_tokens
        self._rng = random.Random(num_tokens)
        self._serial = 0
        self._others = [self.prompt() for _ in range(NUM_OTHERS)]
        engine.begin(lambda: None)
        engine.step()

    def prompt(self) -> list[int]:
        return [self._rng.randrange(3, self._engine.card.vocab_size) for _ in range(self._num_tokens)]

    def ask(self, prompt: list[int], pull: PullHint | None = None) -> tuple[float, PromptUsage]:
        """Seconds to the first token, and what it was made of."""
        self._serial += 1
        (request,) = expand(replace(_submit(prompt), pull=pull), self._serial)
        began = time.perf_counter()
        self._engine.add(request)
        while not (deltas := self._engine.step().deltas):
            pass
        seconds = time.perf_counter() - began
        assert deltas[0].usage is not None
        settle(self._engine)
        return seconds, deltas[0].usage

    def round(self) -> Iterator[tuple[str, float]]:
        prompt = self.prompt()
        for where, others in (("miss", 0), ("device", 0), ("host", 1), ("disk", NUM_OTHERS)):
            for other in self._others[:others]:
                self.ask(other)
            yield from self._told(where, *self.ask(prompt))
        if self._peer is not None:
            prompt = self.prompt()
            yield from self._told("peer", *self.ask(prompt, self._peer.compute(_submit(prompt))))

    def _told(self, where: str, seconds: float, usage: PromptUsage) -> Iterator[tuple[str, float]]:
        if self._found(usage) == where:
            yield where, seconds
        else:
            print(f"  left out: found on {self._found(usage)} what was to be on {where}: {usage}")

    def _found(self, usage: PromptUsage) -> str:
        num_cached = usage.num_cached_tokens or 0
        if num_cached < self._num_tokens * 0.9:
            return "miss" if not num_cached else "part"
        if usage.num_pulled_tokens > num_cached / 2:
            return "peer"
        if usage.num_disk_tokens > num_cached / 2:
            return "disk"
        return "host" if usage.num_slower_tier_tokens > num_cached / 2 else "device"


def _submit(prompt: list[int]) -> Submit:
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    return Submit(0, pack_token_ids(prompt), sampling, ROOT)


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


def measure(arguments: argparse.Namespace, chosen: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds to first tokens, by where the KV lay."""
    times: dict[str, list[float]] = {where: [] for where in WHERE}
    with contextlib.ExitStack() as stack:
        peer = None
        if arguments.peer:
            chosen["pull_bytes_per_second"] = PULL_BYTES_PER_SECOND
            theirs = {**chosen, "disk_kv_bytes": None, "kv_folder": None}
            peer = stack.enter_context(tier_peer(ReplicaConfig(**theirs)))
        engine, _ = build_engine_here(ReplicaConfig(**chosen))
        stack.callback(engine.close)
        bench = Bench(engine, arguments.tokens, peer)
        print_header(f"TTFT of {arguments.tokens} tokens by tier, {arguments.engine}, toy model, CPU")
        for _ in range(arguments.rounds):
            for where, seconds in bench.round():
                times[where].append(seconds)
    return times


def main() -> None:
    options = bench_options(__doc__)
    options.add_argument("--engine", choices=tuple(TOKEN_BYTES), default="torch")
    options.add_argument("--tokens", type=int, default=2048, help="of a prompt, at most 8000")
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--peer", action="store_true", help="and what another engine has computed, pulled")
    options.add_argument("--folder", type=Path, help="where the disk's folder is made")
    arguments = options.parse_args()
    if arguments.engine == "vllm":
        os.environ.update(vllm_environment(None))
    with tempfile.TemporaryDirectory(prefix="kvasir-tiers-", dir=arguments.folder) as folder:
        times = measure(arguments, settings(arguments.engine, arguments.tokens, folder))
    for where in WHERE:
        if times[where]:
            share = percentiles(times[where]).p50 / percentiles(times["miss"]).p50
            print(f"  {where:<7} {milliseconds(times[where])}   {share:.3f} of a miss ({len(times[where])})")


if __name__ == "__main__":
    main()
