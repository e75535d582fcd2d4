"""A router's view of a replica, from its events alone, and prompts that share and leave beginnings."""

import random
from collections.abc import Iterable, Sequence

from replicas.protocol.blocks import HASH_BYTES, BlockHash, hash_blocks
from replicas.protocol.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    ResumePointsChanged,
)
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
