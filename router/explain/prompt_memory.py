"""PromptMemory: what a router has seen of prompts, by tenant, for explanations and for the live page.

Owns the memory, its bound in bytes, and whose prompts are compared. Knows hashes, counts and positions, never
tokens or text; no clock.

Of each tenant there is a prefix tree, with two bytes of each token (a keyed digest of it); a record for each
request, found by its ids; and for each piece of a conversation (see `outline.py`) the last prompt that had
it, for prompts that part in their first block or have another root. Prompts of other tenants are never looked
at, even where a group shares its KV; what a replica has computed for one of the group is known to all. The
oldest prompt is forgotten first: of the tenant that adds, if it has more than an equal part of all, otherwise
of the one that holds most.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice

import msgspec
import numpy as np

from replicas.protocol.blocks import BlockHash
from router.explain.nearest import (
    MAX_SIBLINGS,
    Digests,
    Nearest,
    PromptFacts,
    RememberedPrompt,
    best_branch,
    compared,
    longest_before,
    marks_of,
    most_alike,
    nearest,
    numbers_of,
    path_of,
)
from router.explain.prefix_tree import MARK_BYTES, Known, NamespaceName, PrefixNode, PrefixTree, Seen
from router.explain.repeats import LEAST_BLOCKS, LEAST_PART, SURE_PART, Run, repeats, seem_alike
from router.shared.bounded_cache import BoundedCache

BYTES_WHEN_OFF = 8 * 2**20
"""For the prefixes alone, where prompts are not remembered."""
RECORD_BYTES = 1100
"""Measured bytes of a record and its table entries, without its variable parts."""
UNIT_BYTES = 130
TENANT_BYTES = 2000
MAX_LOOKED_BACK = 4096
"""How many earlier prompts are looked through for the nearest one if that is asked for later."""
MAX_COUNTED = 4096
"""How many of the last used nodes may be the most used."""
MAX_BEGINNINGS = 4096
MAX_OF_GROUP = 8
"""How many tenants of a group are looked at for what is known of a prompt."""

_MARKS = np.dtype("<u2")


class _TenantPrompts:
    def __init__(self, name: str, numbers: Iterator[int]) -> None:
        self.name = name
        self.tree = PrefixTree(numbers)
        self.records: OrderedDict[int, RememberedPrompt] = OrderedDict()
        self.by_id: dict[str, int] = {}
        self.by_unit: dict[int, int] = {}
        self.record_bytes = 0

    @property
    def num_bytes(self) -> int:
        return TENANT_BYTES + self.tree.num_bytes + self.record_bytes + UNIT_BYTES * len(self.by_unit)

    def oldest(self) -> int | None:
        """Return the number of the oldest prompt of which anything is left."""
        for number in self.records:
            return number
        node = self.tree.oldest()
        return None if node is None else node.latest


class PromptMemory:
    """For one thread. `key` is made up by the process. With `max_bytes` of 0 no prompts are remembered, and
    only prefixes are counted."""

    def __init__(self, max_bytes: int, key: bytes) -> None:
        self.is_on = max_bytes > 0
        self.digests = Digests(key)
        self._max_bytes = max_bytes or BYTES_WHEN_OFF
        self._tenants: dict[str, _TenantPrompts] = {}
        self._by_root: dict[BlockHash, dict[str, _TenantPrompts]] = {}
        """Tenants with prompts under each root; the one that added the last is the last."""
        self._beginnings: BoundedCache[bytes, tuple[BlockHash, ...]] = BoundedCache(MAX_BEGINNINGS)
        """The last two namespaces in which each was seen."""
        self._numbers = count(1)
        self.last_number = 0
        self.num_bytes = 0
        self.num_forgotten = self.num_forgotten_nodes = 0

    @property
    def num_prompts(self) -> int:
        return sum(len(tenant.records) for tenant in self._tenants.values())

    @property
    def num_nodes(self) -> int:
        return sum(len(tenant.tree) for tenant in self._tenants.values())

    def recent(self, count: int) -> list[PrefixNode]:
        """Return the nodes that were used last, newest first: with a node come all above it."""
        each = [tenant.tree.newest_first() for tenant in self._tenants.values()]
        return list(islice(heapq.merge(*each, key=lambda node: -node.latest), count))

    def most_used(self, count: int) -> list[PrefixNode]:
        """Return nodes by requests, then by recency: with a node come all above it."""
        return sorted(self.recent(MAX_COUNTED), key=lambda node: -node.counts.num_requests)[:count]

    def known(self, facts: PromptFacts, num_cached_tokens: int, decided_at: float) -> Known:
        """Return the knowledge about a prompt at its decision, given the tokens read from cache."""
        found = Known(0)
        for tenant in islice(reversed(self._by_root.get(facts.root, {}).values()), MAX_OF_GROUP):
            known = tenant.tree.known(facts.root, facts.packed_hashes, num_cached_tokens, decided_at)
            found = max(found, known, key=lambda known: known.num_tokens)
        before = self._beginnings.peek(facts.beginning) if facts.beginning is not None else None
        if before is not None and any(other != facts.root for other in before):
            return msgspec.structs.replace(found, is_elsewhere=True)
        return found

    def find(self, tenant: str, prompt_id: str) -> RememberedPrompt | None:
        """Return a prompt by the request's id or the answer's."""
        mine = self._tenants.get(tenant)
        number = None if mine is None else mine.by_id.get(prompt_id)
        return None if mine is None or number is None else mine.records.get(number)

    def nearest(self, facts: PromptFacts, *, across_salts: bool = False) -> Nearest | None:
        """Return the earlier prompt that is most like this one. Only `across_salts` are those looked at that
        came with another salt: one who chooses a salt may not want to be found by others of the tenant."""
        mine = self._tenants.get(facts.tenant)
        if mine is None:
            return None
        steps = list(mine.tree.look(facts.root, facts.packed_hashes))
        above, end = steps[-1] if steps else (mine.tree.roots.get(facts.root), 0)
        children = {} if above is None or (steps and end < steps[-1][0].end) else above.children
        branches = ((node.latest, node.marks) for node in islice(reversed(children.values()), MAX_SIBLINGS))
        best = best_branch(facts.marks(end * facts.block_size, (end + 1) * facts.block_size), branches)
        numbers = [steps[-1][0].latest] if steps else []
        numbers += [best] if best is not None and best not in numbers else []
        longest = [mine.records[number] for number in numbers if number in mine.records]
        reach = {node.number: end for node, end in steps}
        alike = self._alike(mine, most_alike(facts.units, mine.by_unit), facts.salt_tag, across_salts)
        return nearest(mine.tree, facts, reach, longest, alike)

    def nearest_before(self, tenant: str, prompt: RememberedPrompt) -> tuple[PromptFacts, Nearest | None]:
        """Return what `nearest` would have found when that prompt came, of the MAX_LOOKED_BACK before it."""
        mine = self._tenants[tenant]
        facts = PromptFacts(
            self.digests,
            tenant,
            prompt.root,
            NamespaceName(prompt.model, prompt.adapter, tenant),
            prompt.block_size,
            b"".join(reversed([node.hashes for node in path_of(mine.tree, prompt)])),
            b"",
            prompt.salt_tag,
            prompt.outline,
            prompt.template_tag,
            _units=prompt.units,
            _marks=marks_of(mine.tree, prompt),
            _marked_from=0,
        )
        newest_first = (one for one in reversed(mine.records.values()) if one.number <= prompt.after)
        earlier = list(islice(newest_first, MAX_LOOKED_BACK))
        wanted = set(numbers_of(prompt.units))
        by_unit: dict[int, int] = {}
        for one in reversed(earlier):
            by_unit.update(dict.fromkeys(wanted.intersection(numbers_of(one.units)), one.number))
        numbers = most_alike(prompt.units, by_unit)
        alike = self._alike(mine, numbers, prompt.salt_tag, prompt.across_salts)
        reach = {node.number: node.end for node in path_of(mine.tree, prompt)}
        longest = longest_before(mine.tree, facts, reach, earlier)
        return facts, nearest(mine.tree, facts, reach, longest, alike)

    def compare(self, facts: PromptFacts, earlier: RememberedPrompt) -> Nearest:
        """Compare with one of the same tenant's."""
        tree = self._tenants[facts.tenant].tree
        reach = {node.number: end for node, end in tree.look(facts.root, facts.packed_hashes)}
        return compared(tree, facts, reach, earlier)

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
        ours = facts.marks(parted)
        theirs = marks_of(mine.tree, nearest.prompt, parted)
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

    def add(
        self,
        facts: PromptFacts,
        seen: Seen | None,
        ids: tuple[str, ...] = (),
        at: float = 0.0,
        after: int | None = None,
    ) -> RememberedPrompt | None:
        """Count a prompt that was served, and remember it under its `ids`. One that was not served is only
        found by these. `after` is what `last_number` was when it could be compared."""
        mine = self._tenants.get(facts.tenant)
        if mine is None:
            mine = self._tenants[facts.tenant] = _TenantPrompts(facts.tenant, self._numbers)
            self.num_bytes += TENANT_BYTES
        before = mine.num_bytes
        after = self.last_number if after is None else after
        number = self.last_number = self.last_number + 1
        tip = None if seen is None else self._count(mine, facts, seen, number)
        record = None
        if self.is_on:
            units, tail = b"", b""
            if seen is not None:
                units, tail = facts.units, facts.marks(facts.num_blocks * facts.block_size)
            record = mine.records[number] = RememberedPrompt(
                number, ids, at, facts.root, facts.namespace.model, facts.namespace.adapter, facts.block_size,
                facts.salt_tag, facts.num_tokens, units, facts.outline, facts.template_tag, tip, tail, after,
            )  # fmt: skip
            mine.record_bytes += _num_bytes(record)
            mine.by_unit.update(dict.fromkeys(numbers_of(units), number))
            mine.by_id.update(dict.fromkeys(ids, number))
        self.num_bytes += mine.num_bytes - before
        self._keep_bound(mine)
        return record

    def tell(self, prompt: RememberedPrompt, tenant: str, explanation: bytes) -> None:
        """Store an explanation."""
        mine = self._tenants.get(tenant)
        if mine is None or prompt.number not in mine.records:
            return
        added = len(explanation) - len(prompt.explanation)
        prompt.explanation = explanation
        mine.record_bytes += added
        self.num_bytes += added

    def _count(self, mine: _TenantPrompts, facts: PromptFacts, seen: Seen, number: int) -> int | None:
        def marks_from(start: int) -> bytes:
            block_size = facts.block_size
            return facts.marks(start * block_size, facts.num_blocks * block_size) if self.is_on else b""

        tip = mine.tree.add(
            facts.root, facts.namespace, facts.packed_hashes, facts.block_size, seen, number, marks_from
        )
        if facts.beginning is not None:
            others = [root for root in self._beginnings.peek(facts.beginning) or () if root != facts.root]
            self._beginnings.put(facts.beginning, (*others[-1:], facts.root))
        if tip is None:
            return None
        having = self._by_root.setdefault(facts.root, {})
        having[mine.name] = having.pop(mine.name, mine)
        return tip.number

    def _alike(
        self, mine: _TenantPrompts, numbers: Iterable[int], salt_tag: bytes, across_salts: bool
    ) -> list[RememberedPrompt]:
        found = [mine.records[number] for number in numbers if number in mine.records]
        return [one for one in found if across_salts or one.salt_tag == salt_tag]

    def _keep_bound(self, adds: _TenantPrompts) -> None:
        while self.num_bytes > self._max_bytes:
            share = self._max_bytes / len(self._tenants)
            victim = adds
            if adds.num_bytes <= share or adds.oldest() is None:
                victim = max(self._tenants.values(), key=lambda tenant: tenant.num_bytes)
            least = max(self._max_bytes // 256, 1)
            before = self.num_bytes
            while before - self.num_bytes < least and self.num_bytes > self._max_bytes:
                if (oldest := victim.oldest()) is None:
                    return
                self._forget(victim, oldest)

    def _forget(self, mine: _TenantPrompts, number: int) -> None:
        """Forget the prompt, and the ends of prefixes that no later one had."""
        before = mine.num_bytes
        record = mine.records.pop(number, None)
        if record is not None:
            mine.record_bytes -= _num_bytes(record)
            for prompt_id in record.ids:
                if mine.by_id.get(prompt_id) == number:
                    del mine.by_id[prompt_id]
            for unit in numbers_of(record.units):
                if mine.by_unit.get(unit) == number:
                    del mine.by_unit[unit]
            self.num_forgotten += 1
        while (node := mine.tree.oldest()) is not None and node.latest <= number:
            mine.tree.forget_oldest()
            self.num_forgotten_nodes += 1
            if (root := node.root.block_hash) not in mine.tree.roots:
                del self._by_root[root][mine.name]
                if not self._by_root[root]:
                    del self._by_root[root]
        self.num_bytes += mine.num_bytes - before
        if mine.oldest() is None:
            self.num_bytes -= self._tenants.pop(mine.name).num_bytes


def _num_bytes(record: RememberedPrompt) -> int:
    return RECORD_BYTES + 3 * len(record.units) + len(record.tail) + len(record.explanation)
