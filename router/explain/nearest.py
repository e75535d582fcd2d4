"""Nearest: which of a tenant's earlier prompts is most like one, and where the two part.

Owns that choice. Two prompts under one root are compared in their tenant's tree: block by block, and in the
block where they part by their tokens' marks. Under another root they are compared by the pieces of their
outlines.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from replicas.protocol.blocks import HASH_BYTES, BlockHash
from router.explain.outline import DIGEST_BYTES, NO_OUTLINE, PromptOutline
from router.explain.prefix_tree import MARK_BYTES, NamespaceName, PrefixNode, PrefixTree

MAX_SIBLINGS = 16
"""How many of the branches at the place where a prompt leaves the tree are compared token by token."""
MAX_CANDIDATES = 4
MAX_VOTES = 48
"""How many of a prompt's pieces are looked up."""
LEAST_SHARED = 2
MOST_BLOCKS = 4

_TOKENS, _MARKS = np.dtype("<u4"), np.dtype("<u2")
_DIGESTS = np.dtype(f"<u{DIGEST_BYTES}")
_HALF, _WHOLE, _UPPER = np.uint32(15), np.uint32(16), np.uint64(32)


class Digests:
    """Digests of tokens and of pieces, under the key of a process."""

    def __init__(self, key: bytes) -> None:
        self._unit_factor = np.uint64(int.from_bytes(key[:8], "little") | 1)
        numbers = [int.from_bytes(key[at : at + 4], "little") | 1 for at in (0, 4)]
        self._first, self._second = (np.uint32(number) for number in numbers)

    def marks(self, packed_tokens: bytes, start: int, end: int) -> bytes:
        """Two bytes a token."""
        mixed = np.frombuffer(packed_tokens, _TOKENS, end - start, start * _TOKENS.itemsize) * self._first
        mixed ^= mixed >> _HALF
        mixed *= self._second
        marks: bytes = (mixed >> _WHOLE).astype(_MARKS).tobytes()
        return marks

    def units(self, outline: PromptOutline) -> bytes:
        """Return the outline's digests, four bytes each."""
        mixed = np.frombuffer(outline.units(), _DIGESTS) * self._unit_factor
        units: bytes = (mixed >> _UPPER).astype(_TOKENS).tobytes()
        return units


@dataclass(slots=True)
class PromptFacts:
    """Facts about a prompt."""

    digests: Digests
    tenant: str
    root: BlockHash
    namespace: NamespaceName
    block_size: int
    packed_hashes: bytes
    packed_tokens: bytes
    salt_tag: bytes = b""
    outline: PromptOutline = NO_OUTLINE
    template_tag: bytes = b""
    media: tuple[tuple[int, int], ...] = ()
    """The first token of each image and the first behind it."""
    beginning: bytes | None = None
    """A digest of its first tokens in no namespace, if it has enough."""
    num_reusable_tokens: int | None = None
    peek_tokens: int = 0
    """Both as in `Past`."""
    _units: bytes | None = None
    _marks: bytes = b""
    """Its tokens', from `_marked_from` to its end, where they have been made."""
    _marked_from: int | None = None

    @property
    def num_tokens(self) -> int:
        """A remembered prompt has all its marks, and no tokens."""
        return len(self.packed_tokens) // _TOKENS.itemsize or len(self._marks) // MARK_BYTES

    @property
    def num_blocks(self) -> int:
        return len(self.packed_hashes) // HASH_BYTES

    @property
    def units(self) -> bytes:
        """Digests of its outline's pieces."""
        if self._units is None:
            self._units = self.digests.units(self.outline)
        return self._units

    def marks(self, start: int, end: int | None = None) -> bytes:
        """Return the marks of its tokens from `start` to `end`."""
        end = self.num_tokens if end is None else min(end, self.num_tokens)
        if start >= end:
            return b""
        begin = self._marked_from
        if begin is None or start < begin:
            if begin is not None and end < self.num_tokens:
                return self.digests.marks(self.packed_tokens, start, end)
            begin = self._marked_from = start
            self._marks = self.digests.marks(self.packed_tokens, start, self.num_tokens)
        return self._marks[(start - begin) * MARK_BYTES : (end - begin) * MARK_BYTES]


@dataclass(slots=True)
class RememberedPrompt:
    """`tip` is the node of its last full block, `tail` are the marks after that. `after` is the number of the
    last prompt that it could be compared with. `explanation` is encoded, and lacks the nearest earlier prompt
    until it `is_compared`."""

    number: int
    ids: tuple[str, ...]
    at: float
    root: BlockHash
    model: str
    adapter: str | None
    block_size: int
    salt_tag: bytes
    num_tokens: int
    units: bytes
    outline: PromptOutline
    template_tag: bytes
    tip: int | None
    tail: bytes
    after: int
    explanation: bytes = b""
    is_compared: bool = True
    across_salts: bool = False


class Nearest(NamedTuple):
    """An earlier prompt, and how many tokens lead both: None where their roots differ. `goes_on` says that
    it has other tokens behind those. `num_shared` counts the pieces that both have; `is_changed` that this
    prompt seems to be meant as the same conversation, and differs before its end."""

    prompt: RememberedPrompt
    num_common_tokens: int | None
    goes_on: bool
    num_shared: int = 0
    is_changed: bool = False

    @property
    def diverges_at(self) -> int | None:
        return self.num_common_tokens if self.goes_on else None


Reach = Mapping[int, int]
"""How many leading blocks a prompt has in common with nodes of its tree, by their numbers."""


def nearest(
    tree: PrefixTree,
    facts: PromptFacts,
    reach: Reach,
    longest: Iterable[RememberedPrompt],
    alike: Iterable[RememberedPrompt],
) -> Nearest | None:
    """Return the nearest of those with the longest common beginning, and those with most pieces in common."""
    found = [_judged(_common(tree, facts, reach, one), facts.units) for one in longest]
    best = max((one for one in found if one.num_common_tokens), key=_rank, default=None)
    for candidate in alike:
        if best is None or candidate is not best.prompt:
            one = compared(tree, facts, reach, candidate)
            if best is None or _is_nearer(one, best, facts.block_size):
                best = one
    return best


def compared(tree: PrefixTree, facts: PromptFacts, reach: Reach, prompt: RememberedPrompt) -> Nearest:
    if prompt.root != facts.root:
        return _judged(Nearest(prompt, None, goes_on=False), facts.units)
    return _judged(_common(tree, facts, reach, prompt), facts.units)


def most_alike(units: bytes, by_unit: Mapping[int, int]) -> Sequence[int]:
    """Return the numbers of the prompts with most pieces in common; `by_unit` has the last with each."""
    every = numbers_of(units)
    half = MAX_VOTES // 2
    looked_at = every if len(every) <= MAX_VOTES else [*every[:half], *every[-half:]]
    votes = Counter(by_unit[unit] for unit in looked_at if unit in by_unit)
    return [number for number, count in votes.most_common(MAX_CANDIDATES) if count >= LEAST_SHARED]


def longest_before(
    tree: PrefixTree, facts: PromptFacts, reach: Reach, earlier: Iterable[RememberedPrompt]
) -> list[RememberedPrompt]:
    """Return the candidates for the longest common beginning among these, the newest first: the last with
    most blocks, and the last of each branch behind them. A node of the tree knows only the last prompt that
    had it, so what each has in common with this one is found by its own nodes."""
    depths = dict(reach)
    deepest = 0
    found: list[RememberedPrompt] = []
    for one in earlier:
        if one.root != facts.root:
            continue
        passed = []
        num_blocks = 0
        for node in path_of(tree, one):
            if node.number in depths:
                num_blocks = depths[node.number]
                break
            passed.append(node.number)
        depths.update(dict.fromkeys(passed, num_blocks))
        if num_blocks > deepest:
            deepest, found = num_blocks, []
        if num_blocks == deepest:
            found.append(one)
    last_with: dict[bytes, RememberedPrompt] = {}
    for one in found:
        for node in path_of(tree, one):
            if node.start <= deepest < node.end:
                at = (deepest - node.start) * HASH_BYTES
                block = node.hashes[at : at + HASH_BYTES]
                last_with[block] = last_with.pop(block, one)  # the oldest branch comes last
    start, end = deepest * facts.block_size, (deepest + 1) * facts.block_size
    branches = {one.number: one for one in islice(last_with.values(), MAX_SIBLINGS)}
    marks = ((number, marks_of(tree, one, start, end)) for number, one in branches.items())
    best = best_branch(facts.marks(start, end), marks)
    return [*found[: deepest > 0], *([] if best is None else [branches[best]])]


def best_branch(ours: bytes, branches: Iterable[tuple[int, bytes]]) -> int | None:
    """Return which branch has most tokens in common with the marks of a block, the newest of such with as
    many. A branch is the number of its last prompt, and marks."""
    best, most = None, 1
    for number, marks in branches:
        least = MARK_BYTES * (most if best is None or number > best else most + 1)
        if least <= len(ours) and marks.startswith(ours[:least]):
            best, most = number, _num_common(ours, marks[: len(ours)])
    return best


def path_of(tree: PrefixTree, prompt: RememberedPrompt) -> Iterator[PrefixNode]:
    """Yield the nodes of its full blocks, the last first."""
    return iter(()) if prompt.tip is None else tree.node(prompt.tip).upwards()


def marks_of(tree: PrefixTree, prompt: RememberedPrompt, start: int = 0, end: int | None = None) -> bytes:
    """Return the marks of its tokens from `start` to `end`."""
    end = prompt.num_tokens if end is None else end
    runs = []
    for begin, marks in _runs(tree, prompt):
        if begin < end:
            runs.append(marks[max(0, start - begin) * MARK_BYTES : (end - begin) * MARK_BYTES])
        if begin <= start:
            break
    return b"".join(reversed(runs))


def _runs(tree: PrefixTree, prompt: RememberedPrompt) -> Iterator[tuple[int, bytes]]:
    """Yield its runs of marks with the first token of each, the last first."""
    yield prompt.num_tokens - len(prompt.tail) // MARK_BYTES, prompt.tail
    for node in path_of(tree, prompt):
        yield node.start * prompt.block_size, node.marks


def _common(tree: PrefixTree, facts: PromptFacts, reach: Reach, prompt: RememberedPrompt) -> Nearest:
    """Compare with one under the same root."""
    num_blocks = next((reach[node.number] for node in path_of(tree, prompt) if node.number in reach), 0)
    start = num_blocks * facts.block_size
    end = start + facts.block_size
    num_common = start + _num_common(facts.marks(start, end), marks_of(tree, prompt, start, end))
    return Nearest(prompt, num_common, num_common < min(prompt.num_tokens, facts.num_tokens))


def _judged(found: Nearest, units: bytes) -> Nearest:
    """With what both have in common, piece by piece."""
    ours, theirs = numbers_of(units), numbers_of(found.prompt.units)
    lead = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if lead is None:
        lead = min(len(ours), len(theirs))
    behind = set(ours[lead:]) & set(theirs[lead:])
    is_in_midst = lead and (lead == len(theirs) or lead < len(ours) - 1)
    is_changed = found.goes_on and bool(behind or (is_in_midst and found.num_common_tokens))
    return found._replace(num_shared=lead + len(behind), is_changed=is_changed)


def _is_nearer(found: Nearest, best: Nearest, block_size: int) -> bool:
    """Whether `found` is nearer. Under one root the longer beginning is nearer, unless the other shares
    clearly more pieces: each is worth a block, up to `MOST_BLOCKS`. Unrelated prompts share some tokens, by
    the template and by chance."""
    if found.num_common_tokens is None:
        return found.num_shared >= best.num_shared + LEAST_SHARED and (best.num_common_tokens or 0) < (
            block_size if best.num_shared else found.num_shared * block_size
        )
    if best.num_common_tokens is None:
        return found.num_common_tokens >= block_size or found.num_shared >= best.num_shared
    more_pieces = abs(found.num_shared - best.num_shared)
    worth = block_size * min(more_pieces, MOST_BLOCKS)
    if more_pieces >= LEAST_SHARED and abs(found.num_common_tokens - best.num_common_tokens) < worth:
        return found.num_shared > best.num_shared
    return _rank(found) > _rank(best)


def _rank(found: Nearest) -> tuple[int, bool, int, int]:
    return (found.num_common_tokens or 0, not found.goes_on, found.num_shared, found.prompt.number)


def numbers_of(units: bytes) -> Sequence[int]:
    return memoryview(units).cast("I")


def _num_common(ours: bytes, theirs: bytes) -> int:
    """Tokens with which both begin."""
    length = min(len(ours), len(theirs))
    if ours[:length] == theirs[:length]:
        return length // MARK_BYTES
    differs = int.from_bytes(ours[:length], "little") ^ int.from_bytes(theirs[:length], "little")
    return ((differs & -differs).bit_length() - 1) // (8 * MARK_BYTES)
