"""Memory of a log's earlier prompts: an endless cache, and the prompts themselves.

Owns the bounds: beyond them the oldest is evicted and counted. A prompt continues the one with which it has
most runs of tokens in common, anywhere: its beginning may be what has changed.
"""

import json
import zlib
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from replicas.protocol.blocks import (
    BlockHash,
    Namespace,
    hash_blocks,
    namespace_root,
    pack_token_ids,
)
from router.explain.repeats import Grams

MOST_BLOCKS = 2**20
MOST_PROMPT_BYTES = 256 * 2**20
"""For tokens and packed bodies."""

MOST_RUNS = 2**20
NUM_LATEST = 4
"""How many prompts with the same run of tokens are known."""

NEARLY = 0.9
"""A prompt with so much of what the most similar one has is as similar."""

SAMPLED = 8
"""Look up one n-gram in this many when searching for similar prompts."""

TOKEN_BYTES = 4

_SECRET = b"prompts of a log"


class EndlessCache:
    """Block hashes; far more than any replica has, but no more than MOST_BLOCKS."""

    def __init__(self) -> None:
        self._hashes: OrderedDict[BlockHash, None] = OrderedDict()
        self.num_forgotten = 0

    def take(self, space: Namespace, token_ids: Sequence[int]) -> int:
        """How many tokens of the prompt are cached; from now on all its full blocks are."""
        hashes = hash_blocks(namespace_root(_SECRET, space), token_ids, space.block_size)
        known = self._hashes
        num_cached = next((n for n, block_hash in enumerate(hashes) if block_hash not in known), len(hashes))
        for block_hash in hashes:
            known[block_hash] = None
            known.move_to_end(block_hash)
        while len(known) > MOST_BLOCKS:
            known.popitem(last=False)
            self.num_forgotten += 1
        return num_cached * space.block_size


@dataclass(frozen=True, slots=True)
class EarlierPrompt:
    """`number` counts the prompts of the log; `line` is where it stands there."""

    number: int
    line: int
    space: Namespace
    packed_tokens: bytes
    packed_body: bytes

    @property
    def body(self) -> Any:
        return json.loads(zlib.decompress(self.packed_body))

    @property
    def num_bytes(self) -> int:
        return len(self.packed_tokens) + len(self.packed_body)


class EarlierPrompts:
    """Prompts that a later one may continue."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[int, EarlierPrompt] = OrderedDict()
        self._runs: OrderedDict[tuple[str | None, int], tuple[int, ...]] = OrderedDict()
        self._num_bytes = 0
        self._num_seen = 0
        self.num_forgotten = 0

    def add(
        self, line: int, space: Namespace, token_ids: Sequence[int], body: Mapping[str, Any], grams: Grams
    ) -> None:
        number = self._num_seen
        self._num_seen += 1
        packed_body = zlib.compress(json.dumps(body).encode(), 1)
        prompt = EarlierPrompt(number, line, space, pack_token_ids(token_ids), packed_body)
        self._prompts[number] = prompt
        self._num_bytes += prompt.num_bytes
        while self._num_bytes > MOST_PROMPT_BYTES and len(self._prompts) > 1:
            self._num_bytes -= self._prompts.popitem(last=False)[1].num_bytes
            self.num_forgotten += 1
        for run in _sampled(grams):
            key = (space.tenant, run)
            self._runs[key] = (*self._runs.pop(key, ())[1 - NUM_LATEST :], number)
        while len(self._runs) > MOST_RUNS:
            self._runs.popitem(last=False)

    def nearest(self, space: Namespace, token_ids: Sequence[int], grams: Grams) -> EarlierPrompt | None:
        """Return the tenant's prompt that has most in common; of such that have nearly as much, one in the
        same namespace, that which begins alike for longest, and the latest."""
        votes: Counter[int] = Counter()
        for run in _sampled(grams):
            votes.update(self._runs.get((space.tenant, run), ()))
        near = [(number, count) for number, count in votes.items() if number in self._prompts]
        if not near:
            return None
        least = NEARLY * max(count for _, count in near)
        alike = [self._prompts[number] for number, count in near if count >= least]
        if len(alike) == 1:
            return alike[0]
        packed = pack_token_ids(token_ids)
        return max(
            alike,
            key=lambda prompt: (
                prompt.space == space,
                num_common(prompt.packed_tokens, packed) // space.block_size,
                prompt.number,
            ),
        )


def _sampled(grams: Grams) -> list[int]:
    """Return the sampled n-grams: the same ones in every prompt that has them."""
    chosen: list[int] = np.unique(grams[grams % np.uint64(SAMPLED) == 0]).tolist()
    return chosen


def num_common(packed: bytes, other: bytes) -> int:
    """How many tokens two prompts have in common at their beginnings."""
    length = min(len(packed), len(other)) // TOKEN_BYTES
    tokens = (np.frombuffer(one, dtype="<u4", count=length) for one in (packed, other))
    differs = np.not_equal(*tokens)
    return int(differs.argmax()) if differs.any() else length
