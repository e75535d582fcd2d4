"""RememberedPrompts: what is known of a tenant's earlier prompts, so that the next one finds the nearest.

Owns the memory, its bound in bytes, and whose prompts are compared. Knows hashes, counts and positions, never
tokens or text; no clock.

Of each tenant there is a radix tree of block hashes, in which two bytes of each token (a keyed digest of it)
tell at which token two prompts part, and what both have behind that; a record for each request, found by its
ids; and for each piece of a conversation (see `outline.py`) the last prompt that had it, for prompts that
part in their first block or have another root. Prompts of other tenants are never looked at, even where a
group shares its KV. What was remembered the longest ago is forgotten first: of the tenant that adds, if it
has more than an equal part of all, otherwise of the one that holds most.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from replicas.protocol.blocks import HASH_BYTES, BlockHash
from router.explain.chain_tree import ChainNode, ChainTree, NamespaceName, Root
from router.explain.outline import DIGEST_BYTES, NO_OUTLINE, PromptOutline
from router.explain.repeats import LEAST_BLOCKS, LEAST_PART, SURE_PART, Run, repeats, seem_alike

MARK_BYTES = 2
RECORD_BYTES = 1100
"""Measured bytes of a record and its table entries, without its variable parts."""
NODE_BYTES = 700
UNIT_BYTES = 130
TENANT_BYTES = 2000
MAX_SIBLINGS = 16
"""How many of the branches at the place where a prompt leaves the tree are compared token by token."""
MAX_LOOKED_BACK = 4096
"""How many earlier prompts are looked through for the nearest one if that is asked for later."""
MAX_CANDIDATES = 4
MAX_VOTES = 48
"""How many of a prompt's pieces are looked up."""
LEAST_SHARED = 2
MOST_BLOCKS = 4
SHORT_BYTES = 512
"""Length up to which marks are compared as one integer, which is faster than numpy."""

_TOKENS, _MARKS = np.dtype("<u4"), np.dtype("<u2")
_DIGESTS = np.dtype(f"<u{DIGEST_BYTES}")
_HALF, _WHOLE, _UPPER = np.uint32(15), np.uint32(16), np.uint64(32)


class Passed:
    """Kept per run of blocks: the last prompt that had it, and its tokens' marks."""

    __slots__ = ("latest", "marks")

    def __init__(self, latest: int, marks: bytes) -> None:
        self.latest = latest
        self.marks = marks

    def cut(self, num_blocks: int, num_all: int) -> "Passed":
        split = len(self.marks) // num_all * num_blocks
        upper = Passed(self.latest, self.marks[:split])
        self.marks = self.marks[split:]
        return upper


@dataclass(slots=True)
class PromptFacts:
    """Facts about a prompt before it is served. `RememberedPrompts` caches its results here, since the same
    prompt is looked up and then stored."""

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
    units: bytes | None = None
    """Its outline's pieces."""
    marks: bytes = b""
    """Its tokens', from `marked_from` to its end."""
    marked_from: int | None = None

    @property
    def num_tokens(self) -> int:
        """A remembered prompt has all its marks, and no tokens."""
        return len(self.packed_tokens) // 4 or len(self.marks) // MARK_BYTES


@dataclass(slots=True)
class RememberedPrompt:
    """`tip` is the node of its last full block, `tail` are the marks after that. `explanation` is its encoded
    explanation, which lacks the nearest earlier prompt until it `is_compared`."""

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
    tip: int | None
    tail: bytes
    explanation: bytes = b""
    num_bytes: int = 0
    template_tag: bytes = b""
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


class _Tenant:
    def __init__(self) -> None:
        self.tree: ChainTree[Passed] = ChainTree()
        self.records: OrderedDict[int, RememberedPrompt] = OrderedDict()
        self.by_id: dict[str, int] = {}
        self.by_unit: dict[int, int] = {}
        self.num_bytes = TENANT_BYTES


class RememberedPrompts:
    """For one thread. `key` is made up by the process; `max_bytes` of 0 remembers nothing."""

    def __init__(self, max_bytes: int, key: bytes) -> None:
        self._max_bytes = max_bytes
        self._unit_factor = np.uint64(int.from_bytes(key[:8], "little") | 1)
        numbers = [int.from_bytes(key[at : at + 4], "little") | 1 for at in (0, 4)]
        self._factors = tuple(np.uint32(number) for number in numbers)
        self._tenants: dict[str, _Tenant] = {}
        self._last_number = 0
        self.num_bytes = 0
        self.num_forgotten = 0

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    @property
    def num_prompts(self) -> int:
        return sum(len(tenant.records) for tenant in self._tenants.values())

    def find(self, tenant: str, prompt_id: str) -> RememberedPrompt | None:
        """By the request's id or the answer's."""
        mine = self._tenants.get(tenant)
        number = None if mine is None else mine.by_id.get(prompt_id)
        return None if mine is None or number is None else mine.records.get(number)

    def nearest(self, facts: PromptFacts, *, across_salts: bool = False) -> Nearest | None:
        """The earlier prompt that is most like this one. Only `across_salts` are those looked at that came
        with another salt: one who chooses a salt may not want to be found by others of the tenant."""
        mine = self._tenants.get(facts.tenant)
        if mine is None:
            return None
        alike = self._alike(mine, self._units(facts), mine.by_unit)
        return self._best(mine, facts, self._longest(mine, facts), alike, across_salts=across_salts)

    def nearest_before(self, tenant: str, prompt: RememberedPrompt) -> "tuple[PromptFacts, Nearest | None]":
        """Return what `nearest` would have found when that prompt came, of the MAX_LOOKED_BACK before it."""
        mine = self._tenants[tenant]
        namespace = NamespaceName(prompt.model, prompt.adapter, tenant)
        facts = PromptFacts(
            tenant, prompt.root, namespace, prompt.block_size, self._hashes_of(mine, prompt), b"",
            prompt.salt_tag, prompt.outline, prompt.template_tag, units=prompt.units,
            marks=self._marks_of(mine, prompt), marked_from=0,
        )  # fmt: skip
        newest_first = (one for one in reversed(mine.records.values()) if one.number < prompt.number)
        earlier = list(islice(newest_first, MAX_LOOKED_BACK))
        wanted = set(_numbers(prompt.units))
        by_unit = {
            unit: one.number for one in reversed(earlier) for unit in wanted.intersection(_numbers(one.units))
        }
        alike = self._alike(mine, prompt.units, by_unit)
        longest = self._longest_of(mine, facts, prompt, earlier)
        return facts, self._best(mine, facts, longest, alike, across_salts=prompt.across_salts)

    def _best(
        self,
        mine: _Tenant,
        facts: PromptFacts,
        longest: Nearest | None,
        alike: Sequence[RememberedPrompt],
        *,
        across_salts: bool,
    ) -> Nearest | None:
        units = self._units(facts)
        best = None if longest is None else _judged(longest, units)
        for candidate in alike:
            if candidate.salt_tag != facts.salt_tag and not across_salts:
                continue
            if best is not None and candidate is best.prompt:
                continue
            found = self._compared(mine, facts, units, candidate)
            if best is None or _is_nearer(found, best, facts.block_size):
                best = found
        return best

    def compare(self, facts: PromptFacts, earlier: RememberedPrompt) -> Nearest:
        """With one of the same tenant's."""
        return self._compared(self._tenants[facts.tenant], facts, self._units(facts), earlier)

    def repeats(self, facts: PromptFacts, nearest: Nearest, start: int) -> Sequence[Run]:
        """Return the runs of tokens from `start` on that the nearest prompt also has, after the point where
        they part (the first token, if their roots differ). For a prompt without common pieces, such as plain
        text, most of it must be common."""
        mine = self._tenants.get(facts.tenant)
        if mine is None:
            return ()
        parted, block_size = nearest.num_common_tokens or 0, facts.block_size
        if min(facts.num_tokens, nearest.prompt.num_tokens) - parted < LEAST_BLOCKS * block_size:
            return ()
        ours = self._marks(facts, parted, facts.num_tokens)
        theirs = self._marks_of(mine, nearest.prompt, parted)
        is_sure = nearest.is_changed or nearest.num_common_tokens is None
        if not is_sure and not seem_alike(ours, theirs, MARK_BYTES):
            return ()
        return repeats(
            np.frombuffer(ours, _MARKS),
            np.frombuffer(theirs, _MARKS),
            parted=parted,
            start=start,
            block_size=block_size,
            least_part=LEAST_PART if is_sure else SURE_PART,
        )

    def remember(self, facts: PromptFacts, ids: tuple[str, ...], at: float) -> RememberedPrompt | None:
        if not self._max_bytes:
            return None
        mine = self._tenants.get(facts.tenant)
        if mine is None:
            mine = self._tenants[facts.tenant] = _Tenant()
            self.num_bytes += TENANT_BYTES
        number = self._last_number = self._last_number + 1
        before = mine.tree.num_nodes, mine.tree.num_blocks, len(mine.by_unit)
        tip = self._grow(mine, facts, number)
        tail = self._marks(facts, len(facts.packed_hashes) // HASH_BYTES * facts.block_size, facts.num_tokens)
        units, namespace = self._units(facts), facts.namespace
        record = RememberedPrompt(
            number, ids, at, facts.root, namespace.model, namespace.adapter, facts.block_size, facts.salt_tag,
            facts.num_tokens, units, facts.outline, tip, tail, template_tag=facts.template_tag,
        )  # fmt: skip
        for unit in _numbers(units):
            mine.by_unit[unit] = number
        for prompt_id in ids:
            mine.by_id[prompt_id] = number
        mine.records[number] = record
        record.num_bytes = RECORD_BYTES + 3 * len(units) + len(tail)
        added = record.num_bytes + (mine.tree.num_nodes - before[0]) * NODE_BYTES
        added += (mine.tree.num_blocks - before[1]) * (HASH_BYTES + MARK_BYTES * facts.block_size)
        added += (len(mine.by_unit) - before[2]) * UNIT_BYTES
        mine.num_bytes += added
        self.num_bytes += added
        self._keep_bound(mine)
        return record

    def tell(self, prompt: RememberedPrompt, tenant: str, explanation: bytes) -> None:
        """Store an explanation."""
        mine = self._tenants.get(tenant)
        if mine is None or prompt.number not in mine.records:
            return
        added = len(explanation) - len(prompt.explanation)
        prompt.explanation = explanation
        prompt.num_bytes += added
        mine.num_bytes += added
        self.num_bytes += added

    def _grow(self, mine: _Tenant, facts: PromptFacts, number: int) -> int | None:
        num_blocks = len(facts.packed_hashes) // HASH_BYTES

        def passed(start: int) -> Passed:
            marks = self._marks(facts, start * facts.block_size, num_blocks * facts.block_size)
            return Passed(number, marks)

        path = mine.tree.use(facts.root, facts.namespace, facts.packed_hashes, facts.block_size, passed)
        for node in path:
            node.uses.latest = number
        return path[-1].number if path else None

    def _longest(self, mine: _Tenant, facts: PromptFacts) -> Nearest | None:
        """Return the prompt under the same root with the longest common beginning."""
        steps = list(mine.tree.look(facts.root, facts.packed_hashes))
        if not steps:
            firsts = islice(mine.tree.first_nodes(facts.root), MAX_SIBLINGS)
            branches = [(node.uses.latest, node.uses.marks) for node in firsts]
            return self._furthest(mine, facts, 0, None, branches)
        last, num_blocks = steps[-1]
        newest = mine.records.get(last.uses.latest)
        if num_blocks < last.end:
            at = (num_blocks - last.start) * facts.block_size * MARK_BYTES
            branches = [(last.uses.latest, last.uses.marks[at:])]
        else:
            children = islice(reversed(last.children.values()), MAX_SIBLINGS)
            branches = [(node.uses.latest, node.uses.marks) for node in children]
        return self._furthest(mine, facts, num_blocks, newest, branches)

    def _longest_of(
        self,
        mine: _Tenant,
        facts: PromptFacts,
        prompt: RememberedPrompt,
        earlier: Sequence[RememberedPrompt],
    ) -> Nearest | None:
        """The same among these, the newest first. A node of the tree knows the last prompt that had it, so
        what each has in common with `prompt` is found by its own nodes."""
        depths = {node.number: node.end for node in _path(mine.tree, prompt)}
        deepest = 0
        found: list[RememberedPrompt] = []
        for one in earlier:
            if one.root != facts.root or one.tip is None:
                continue
            passed = []
            num_blocks = 0
            for node in _path(mine.tree, one):
                if node.number in depths:
                    num_blocks = depths[node.number]
                    break
                passed.append(node.number)
            depths.update(dict.fromkeys(passed, num_blocks))
            if num_blocks > deepest:
                deepest, found = num_blocks, []
            if num_blocks == deepest:
                found.append(one)
        branches: dict[bytes, tuple[int, bytes]] = {}
        for one in found:
            for node in _path(mine.tree, one):
                if not node.start <= deepest < node.end:
                    continue
                at = deepest - node.start
                block = node.hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES]
                newest = branches.pop(
                    block, (one.number, node.uses.marks[at * facts.block_size * MARK_BYTES :])
                )
                branches[block] = newest  # the oldest branch comes last
        siblings = list(islice(branches.values(), MAX_SIBLINGS))
        return self._furthest(mine, facts, deepest, found[0] if found and deepest else None, siblings)

    def _furthest(
        self,
        mine: _Tenant,
        facts: PromptFacts,
        num_blocks: int,
        newest: RememberedPrompt | None,
        branches: Iterable[tuple[int, bytes]],
    ) -> Nearest | None:
        """Return the prompt with most tokens in common, of those that have these blocks. `newest` is the last
        of them; each branch is the last prompt that has another block behind them, and its marks from there.
        """
        block_size = facts.block_size
        start = num_blocks * block_size
        ours = self._marks(facts, start, min(facts.num_tokens, start + block_size))
        best: Nearest | None = None
        most = 0
        has_ended = newest is not None and newest.num_tokens // block_size == num_blocks
        if newest is not None and has_ended:
            most = _num_common(ours, newest.tail)
            goes_on = most * MARK_BYTES < len(newest.tail) and start + most < facts.num_tokens
            best = Nearest(newest, start + most, goes_on)
        for number, marks in branches if ours else ():
            is_newer = best is None or number > best.prompt.number
            least = max(1, most if is_newer else most + 1)  # tokens, or it is no nearer than what was found
            prompt = mine.records.get(number) if marks.startswith(ours[: least * MARK_BYTES]) else None
            if prompt is not None:
                most = _num_common(ours, marks[: block_size * MARK_BYTES])
                found = Nearest(prompt, start + most, start + most < facts.num_tokens)
                if best is None or _rank(found) > _rank(best):
                    best = found
        if best is None and newest is not None:  # no other has more of this prompt than those blocks
            best = Nearest(newest, start, not has_ended and start < facts.num_tokens)
        return best if best is not None and best.num_common_tokens else None

    def _alike(self, mine: _Tenant, units: bytes, by_unit: Mapping[int, int]) -> Sequence[RememberedPrompt]:
        """Return the prompts with most pieces in common."""
        votes: Counter[int] = Counter()
        every = _numbers(units)
        looked_at = (
            every if len(every) <= MAX_VOTES else [*every[: MAX_VOTES // 2], *every[-MAX_VOTES // 2 :]]
        )
        for unit in looked_at:
            number = by_unit.get(unit)
            if number is not None:
                votes[number] += 1
        common = [number for number, count in votes.most_common(MAX_CANDIDATES) if count >= LEAST_SHARED]
        return [mine.records[number] for number in common if number in mine.records]

    def _compared(
        self, mine: _Tenant, facts: PromptFacts, units: bytes, earlier: RememberedPrompt
    ) -> Nearest:
        if earlier.root != facts.root:
            return _judged(Nearest(earlier, None, goes_on=False), units)
        theirs = self._marks_of(mine, earlier)
        ours = self._marks(facts, 0, facts.num_tokens)
        common = _num_common(ours, theirs)
        goes_on = common * MARK_BYTES < len(theirs) and common < facts.num_tokens
        return _judged(Nearest(earlier, common, goes_on), units)

    def _hashes_of(self, mine: _Tenant, prompt: RememberedPrompt) -> bytes:
        return b"".join(reversed([node.hashes for node in _path(mine.tree, prompt)]))

    def _marks_of(self, mine: _Tenant, earlier: RememberedPrompt, start: int = 0) -> bytes:
        """From the token `start` on."""
        num_left = (earlier.num_tokens - start) * MARK_BYTES
        runs = [earlier.tail]
        num_found = len(earlier.tail)
        if earlier.tip is not None and mine.tree.node(earlier.tip) is None:
            return b""
        for node in _path(mine.tree, earlier):
            if num_found >= num_left:
                break
            runs.append(node.uses.marks)
            num_found += len(node.uses.marks)
        return b"".join(reversed(runs))[max(0, num_found - num_left) :]

    def _marks(self, facts: PromptFacts, start: int, end: int) -> bytes:
        """Two bytes a token."""
        if start >= end:
            return b""
        if facts.marked_from is None or start < facts.marked_from:
            facts.marks, facts.marked_from = self._new_marks(facts, start), start
        begin = facts.marked_from
        return facts.marks[(start - begin) * MARK_BYTES : (end - begin) * MARK_BYTES]

    def _new_marks(self, facts: PromptFacts, start: int) -> bytes:
        first, second = self._factors
        mixed = np.frombuffer(facts.packed_tokens, _TOKENS, offset=start * _TOKENS.itemsize) * first
        mixed ^= mixed >> _HALF
        mixed *= second
        marks: bytes = (mixed >> _WHOLE).astype(_MARKS).tobytes()
        return marks

    def _units(self, facts: PromptFacts) -> bytes:
        """The outline's digests, four bytes each, under the process' key."""
        if facts.units is not None:
            return facts.units
        mixed = np.frombuffer(facts.outline.units(), _DIGESTS) * self._unit_factor
        facts.units = (mixed >> _UPPER).astype(_TOKENS).tobytes()
        return facts.units

    def _keep_bound(self, adds: _Tenant) -> None:
        while self.num_bytes > self._max_bytes:
            share = self._max_bytes / len(self._tenants)
            victim = adds
            if adds.num_bytes <= share or not adds.records:
                victim = max(self._tenants.values(), key=lambda tenant: tenant.num_bytes)
            if not victim.records:
                return
            least = max(self._max_bytes // 256, 1)
            before = self.num_bytes
            while victim.records and self.num_bytes > self._max_bytes and before - self.num_bytes < least:
                self._forget(victim)

    def _forget(self, mine: _Tenant) -> None:
        number, record = mine.records.popitem(last=False)
        freed = record.num_bytes
        for prompt_id in record.ids:
            if mine.by_id.get(prompt_id) == number:
                del mine.by_id[prompt_id]
        for unit in _numbers(record.units):
            if mine.by_unit.get(unit) == number:
                del mine.by_unit[unit]
                freed += UNIT_BYTES
        while (node := mine.tree.oldest()) is not None and node.uses.latest <= number:
            freed += NODE_BYTES + len(node.hashes) + len(node.uses.marks)
            mine.tree.forget_oldest()
        mine.num_bytes -= freed
        self.num_bytes -= freed
        self.num_forgotten += 1
        if not mine.records:
            self._drop_empty()

    def _drop_empty(self) -> None:
        for name in [name for name, tenant in self._tenants.items() if not tenant.records]:
            self.num_bytes -= self._tenants.pop(name).num_bytes


def _path(tree: ChainTree[Passed], prompt: RememberedPrompt) -> Iterator[ChainNode[Passed]]:
    """Yield the nodes of its full blocks, the last first."""
    node: ChainNode[Passed] | Root | None = None if prompt.tip is None else tree.node(prompt.tip)
    while isinstance(node, ChainNode):
        yield node
        node = node.parent


def _judged(found: Nearest, units: bytes) -> Nearest:
    """With what both have in common, piece by piece."""
    ours, theirs = _numbers(units), _numbers(found.prompt.units)
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


def _numbers(units: bytes) -> Sequence[int]:
    return memoryview(units).cast("I")


def _num_common(ours: bytes, theirs: bytes) -> int:
    """Tokens with which both begin."""
    length = min(len(ours), len(theirs))
    if ours[:length] == theirs[:length]:
        return length // MARK_BYTES
    if length <= SHORT_BYTES:
        differs = int.from_bytes(ours[:length], "little") ^ int.from_bytes(theirs[:length], "little")
        return ((differs & -differs).bit_length() - 1) // (8 * MARK_BYTES)
    a = np.frombuffer(ours, np.uint16, length // MARK_BYTES)
    b = np.frombuffer(theirs, np.uint16, length // MARK_BYTES)
    return int(np.argmax(a != b))
