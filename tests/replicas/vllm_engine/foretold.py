"""Prompts in an engine, one after another, and a router that hears of its events and foretells each hit."""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from replicas.engine import expand
from replicas.proof import prove_hashes
from replicas.protocol.blocks import HASH_BYTES, BlockHash, hash_blocks, pack_token_ids
from replicas.protocol.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    ResumePointsChanged,
)
from replicas.protocol.frames import PromptUsage, SamplingParams, Submit
from replicas.protocol.hits import num_hit_tokens, num_searched
from replicas.protocol.status import ModelCard

ROOT = BlockHash(bytes(range(HASH_BYTES)))


class RouterView:
    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self.points: set[BlockHash] = set()
        self.reached: list[BlockHash] = []
        self.num_steps_with_points = 0

    def hear(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            match event:
                case AllBlocksCleared():
                    self.points.clear()
                    self.reached.clear()
                case BlockStored(block_hashes):
                    self.reached += block_hashes
                case BlockRemoved(block_hashes):
                    for each in block_hashes:
                        self.reached.remove(each)
                case ResumePointsChanged(added, removed):
                    assert self.points.isdisjoint(added) and self.points.issuperset(removed)
                    self.points = (self.points | set(added)) - set(removed)
                    self.num_steps_with_points += 1

    def chain(self, token_ids: Sequence[int], root: BlockHash = ROOT) -> list[BlockHash]:
        return hash_blocks(root, token_ids, self.card.block_size)

    def hit(self, token_ids: Sequence[int], root: BlockHash = ROOT) -> int:
        """The tokens that a prompt would find in the cache."""
        num_findable = num_searched(self.card, len(token_ids))
        if not self.card.is_sparse:
            return num_hit_tokens(self.card, min(num_findable, self.num_reached(token_ids, root)))
        chain = self.chain(token_ids, root)
        found = next((end for end in range(num_findable, 0, -1) if chain[end - 1] in self.points), 0)
        return num_hit_tokens(self.card, found)

    def num_reached(self, token_ids: Sequence[int], root: BlockHash = ROOT) -> int:
        """Leading blocks of a prompt that are held; of a sparse model, by full attention."""
        reached = set(self.reached)
        chain = self.chain(token_ids, root)
        return next((at for at, each in enumerate(chain) if each not in reached), len(chain))


class Prompts:
    """Prompts of at most `longest` tokens: new ones, next turns, branches at and beside blocks, repeats."""

    def __init__(self, seed: int, block: int, longest: int) -> None:
        self._rng = random.Random(seed)
        self._block = block
        self._longest = longest
        self._past: list[list[int]] = []

    def next(self) -> list[int]:
        rng, roll = self._rng, self._rng.random()
        past = self._past[-24:]
        if not past or roll < 0.12:
            whole = self._block * rng.randint(1, max(1, self._longest // self._block))
            return self._new(rng.choice([rng.randint(1, self._longest), whole, rng.randint(1, 200)]))
        base = rng.choice(past)
        if roll < 0.62:
            base = base + self._new(rng.choice([1, rng.randint(1, 200), self._block]))
        elif roll < 0.9:
            at_block = self._block * rng.randint(1, len(base) // self._block + 1)
            base = base[: rng.choice([rng.randint(1, len(base)), at_block])] + self._new(rng.randint(0, 150))
        return base[: self._longest]

    def num_output_tokens(self) -> int:
        return self._rng.choice([1, 2, 5, 17, 33])

    def ran(self, prompt: list[int], output: Sequence[int]) -> None:
        self._past.append([*prompt, *output])

    def _new(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(10, 1000) for _ in range(num_tokens)]


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
