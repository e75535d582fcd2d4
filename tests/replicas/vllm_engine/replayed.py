"""Prompts in an engine, one after another, and a router that hears of its events and foretells each hit."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from replicas.engine import expand
from replicas.engine_process.build import build_engine
from replicas.proof import prove_hashes
from replicas.protocol.blocks import BlockHash, pack_token_ids
from replicas.protocol.frames import PromptUsage, SamplingParams, Submit
from tests.replicas.vllm_engine.conftest import vllm_config
from tests.replicas.vllm_engine.router_view import ROOT, Prompts, RouterView

LONGEST = 900
BLOCKS = {
    "gpt_oss": 90,
    "gemma3": 220,
    "gemma4": 150,
    "llama4": 150,
    "mistral": 80,
    "lfm2": 110,
    "qwen3_next": 20,
}
"""So few that blocks are evicted."""


def write_model(family: str, directory: Path) -> Path:
    from replicas.toy_model.make_hybrid_model import write_hybrid_model

    write_hybrid_model(family, directory)
    return directory


def build(**settings: Any) -> Any:
    defaults = {"context_length": 1024, "max_batched_tokens": 512}
    return build_engine(vllm_config(**{**defaults, **settings}))[0]


class Run:
    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.router = RouterView(engine.card)
        self.serial = 0

    def prompt(
        self, prompt: Sequence[int], num_output_tokens: int, root: BlockHash = ROOT, **fields: Any
    ) -> tuple[PromptUsage, list[int]]:
        """`fields` are those of the submit."""
        self.serial += 1
        sampling = SamplingParams(max_tokens=num_output_tokens, ignore_eos=True, temperature=0.0)
        submit = Submit(self.serial, pack_token_ids(prompt), sampling, root, **fields)
        (request,) = expand(submit, self.serial)
        self.engine.add(request)
        usage: PromptUsage | None = None
        output: list[int] = []
        num_computed = 0
        while self.engine.has_work():
            frame = self.engine.step()
            self.router.hear(frame.events)
            num_computed += frame.num_prefill_tokens
            for delta in frame.deltas:
                usage = usage or delta.usage
                output += delta.token_ids
        assert usage is not None and num_computed == len(prompt) - usage.num_cached_tokens
        return usage, output


def replay(
    engine: Any,
    num_prompts: int,
    longest: int = LONGEST,
    adapters: Mapping[str | None, BlockHash] = {None: ROOT},
) -> Counter[str]:
    """Return the figures of random prompts, after the proof of the hashes. Each is for one of `adapters`, by
    name, under its root."""
    prove_hashes(engine, random.Random(0))
    run, prompts = Run(engine), Prompts(7, engine.card.block_size, longest)
    figures: Counter[str] = Counter()
    names = cycle(adapters)
    for _ in range(num_prompts):
        prompt, name = prompts.next(), next(names)
        foretold = run.router.hit(prompt, adapters[name])
        usage, output = run.prompt(prompt, prompts.num_output_tokens(), adapters[name], adapter=name)
        figures["wrong"] += usage.num_cached_tokens != foretold
        figures["tokens"] += len(prompt)
        figures["hit tokens"] += foretold
        figures["unresumable"] += usage.num_unresumable_tokens > 0
        prompts.ran(prompt, output)
    figures["points"] = len(run.router.points)
    return figures


def assert_foretold(engine: Any, num_prompts: int, **more: Any) -> None:
    figures = replay(engine, num_prompts, **more)
    assert not figures["wrong"] and figures["hit tokens"] > 0.05 * figures["tokens"], figures
