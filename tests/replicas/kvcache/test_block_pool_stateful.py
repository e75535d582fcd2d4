"""The block pool and its manager against a naive twin, under any sequence of operations.

The twin keeps plain lists and whole prefixes instead of hashes, and searches instead of remembering.
"""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.frames import NO_USER, UserTag
from replicas.scheduling.kvcache_manager import KVCacheManager
from replicas.scheduling.request import Request
from tests.examples import examples
from tests.replicas.builders import OTHER_ROOT, ROOT, EventBalance, admit, decode, request

Prefix = tuple[object, ...]

TENANTS = [b"", b"red", b"blue", b"green"]

USERS = [UserTag(b"ann"), UserTag(b"bob"), NO_USER]


def is_cross_user(reader: UserTag, writer: UserTag) -> bool:
    return NO_USER not in (reader, writer) and reader != writer


@dataclass
class NaiveShares:
    """Whose block goes next, by the rules and nothing else. Without a second tenant there are none."""

    num_usable: int
    first: bytes | None = None
    seen: dict[bytes, int] = field(default_factory=dict)
    """When each tenant came last, those that came longest ago first."""
    gone: list[bytes] = field(default_factory=list)
    holder: dict[int, bytes] = field(default_factory=dict)
    handed_out: int = 0
    begun: bool = False

    def comes(self, tenant: bytes) -> None:
        if not self.begun:
            if self.first in (None, tenant):
                self.first = tenant
                return
            self.begun = True
            self.seen[self.first] = 0
        self.see(tenant)

    def released(self, block: int) -> None:
        if self.begun and self.seen[self.holder[block]] != self.handed_out:
            self.see(self.holder[block])

    def see(self, tenant: bytes) -> None:
        self.seen.pop(tenant, None)
        self.seen[tenant] = self.handed_out
        self.gone = [each for each in self.gone if each != tenant]

    def took(self, count: int) -> None:
        self.handed_out += count if self.begun else 0

    def about(self) -> list[bytes]:
        return [each for each, when in self.seen.items() if when >= self.handed_out - self.num_usable]

    def look(self, free_cached: list[int]) -> None:
        """Who is not about, and has something that can go."""
        owners = {self.holder[block] for block in free_cached}
        left = [each for each in self.seen if each not in self.about() and each in owners]
        self.gone = [each for each in self.gone if each in left]
        self.gone += [each for each in left if each not in self.gone]

    def victim(self, free_cached: list[int]) -> int:
        if not self.begun:
            return free_cached[0]
        self.look(free_cached)
        held = Counter(self.holder.values())
        owners = {self.holder[block] for block in free_cached}
        tenant = self.gone[0] if self.gone else min(owners, key=lambda each: (-held[each], each))
        if not self.gone and held[tenant] * len(self.about()) <= 1.25 * self.num_usable:
            return free_cached[0]
        return next(block for block in free_cached if self.holder[block] == tenant)


@dataclass
class NaiveCache:
    num_blocks: int
    block_size: int
    free: list[int] = field(default_factory=list)
    users: Counter[int] = field(default_factory=Counter)
    stored: list[tuple[int, Prefix]] = field(default_factory=list)
    """Blocks and what they hold, oldest first."""
    writers: dict[Prefix, UserTag] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = list(range(1, self.num_blocks))
        self.shares = NaiveShares(self.num_blocks - 1)

    @property
    def free_cached(self) -> list[int]:
        cached = {block for block, _ in self.stored}
        return [block for block in self.free if block in cached]

    def find(self, prefix: Prefix) -> int | None:
        return next((block for block, held in self.stored if held == prefix), None)

    def hits(self, tokens: Prefix) -> list[int]:
        hits = []
        for end in range(self.block_size, len(tokens) - 1, self.block_size):
            block = self.find(tokens[: end + 1])
            if block is None:
                break
            hits.append(block)
        return hits

    def extend(
        self, table: list[int], tokens: Prefix, hits: list[int], start: int, end: int, whose: Request
    ) -> bool:
        """Grow a block table to hold `end` tokens; `tokens[0]` is the namespace."""
        missing = -(-end // self.block_size) - len(table) - len(hits)
        if missing > len([block for block in self.free if block not in hits]):
            return False
        shares, tenant = self.shares, whose.submit.tenant
        if hits or missing > 0:
            shares.comes(tenant)
        for block in hits:
            if block in self.free:
                self.free.remove(block)
                shares.holder[block] = tenant
        table += hits
        for _ in range(missing):
            block = self.free[0]
            if block in self.free_cached:
                block = shares.victim(self.free_cached)
            self.free.remove(block)
            shares.holder.pop(block, None)
            self.stored = [(other, held) for other, held in self.stored if other != block]
            table.append(block)
        if missing > 0:
            shares.holder.update(dict.fromkeys(table[-missing:], tenant))
            shares.took(missing)
            shares.look(self.free_cached)
        for block in table[len(table) - missing - len(hits) :]:
            self.users[block] += 1
        for index in range(start // self.block_size, end // self.block_size):
            self.store(table[index], tokens[: (index + 1) * self.block_size + 1], whose.submit.user)
        return True

    def store(self, block: int, prefix: Prefix, user: UserTag) -> None:
        if self.find(prefix) is None:
            self.writers[prefix] = user
        self.stored.append((block, prefix))

    def cross_user_tokens(self, tokens: Prefix, num_cached: int, num_prompt: int, reader: UserTag) -> int:
        """Token by token; those of resumed output do not count."""
        num_tokens = 0
        for position in range(min(num_cached, num_prompt)):
            end = position // self.block_size * self.block_size + self.block_size
            num_tokens += is_cross_user(reader, self.writers[tokens[: end + 1]])
        return num_tokens

    def release(self, table: list[int]) -> None:
        for block in reversed(table):
            self.users[block] -= 1
            if self.users[block] == 0:
                if any(other == block for other, _ in self.stored):
                    self.free.append(block)
                    self.shares.released(block)
                else:
                    self.free.insert(0, block)
                    del self.shares.holder[block]
                if self.shares.begun:
                    self.shares.look(self.free_cached)


@dataclass
class Pair:
    """One request as the manager sees it, and its block table as the twin has it."""

    request: Request
    table: list[int]

    @property
    def tokens(self) -> Prefix:
        return (self.request.submit.root, *self.request.token_ids)


class BlockPoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.live: list[Pair] = []
        self.events = EventBalance()

    @initialize(num_blocks=st.integers(2, 14), block_size=st.integers(1, 3))
    def build(self, num_blocks: int, block_size: int) -> None:
        self.manager = KVCacheManager(num_blocks, block_size)
        self.twin = NaiveCache(num_blocks, block_size)

    @rule(
        root=st.sampled_from([ROOT, ROOT, ROOT, OTHER_ROOT]),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16),
        share=st.floats(0, 1),
        output_share=st.sampled_from([0, 0, 0.3, 0.7]),
        user=st.sampled_from(USERS),
        tenant=st.sampled_from(TENANTS),
    )
    def admit(
        self,
        root: BlockHash,
        tokens: list[int],
        share: float,
        output_share: float,
        user: UserTag,
        tenant: bytes,
    ) -> None:
        num_output = int(len(tokens) * output_share)
        fields = {"root": root, "user": user, "tenant": tenant, "num_output_tokens": num_output}
        pair = Pair(request(tokens, **fields), [])
        hits = self.twin.hits(pair.tokens)
        assert self.manager.find_cached(pair.request) == hits
        num_cached = len(hits) * self.manager.block_size
        assert self.manager.token_shares(pair.request, len(hits)).cross_user == self.twin.cross_user_tokens(
            pair.tokens, num_cached, len(tokens) - num_output, user
        )
        end = num_cached + max(1, int((len(tokens) - num_cached) * share))
        admitted = admit(self.manager, pair.request, end) is not None
        assert admitted == self.twin.extend(pair.table, pair.tokens, hits, num_cached, end, pair.request)
        if admitted:
            self.live.append(pair)
        else:
            assert pair.request.block_ids == []

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token_id=st.integers(0, 1))
    def grow(self, data: st.DataObject, token_id: int) -> None:
        """Compute the rest of the prompt, or append a token and compute that."""
        pair = data.draw(st.sampled_from(self.live))
        start = pair.request.num_computed_tokens
        if start < pair.request.num_tokens:
            end = data.draw(st.integers(start + 1, pair.request.num_tokens))
            grown = self.manager.allocate(pair.request, end - start)
            pair.request.num_computed_tokens = end if grown else start
            assert grown == self.twin.extend(pair.table, pair.tokens, [], start, end, pair.request)
        else:
            grown = decode(self.manager, pair.request, token_id)
            tokens = pair.tokens if grown else (*pair.tokens, token_id)
            assert grown == self.twin.extend(pair.table, tokens, [], start, start + 1, pair.request)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pair = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.manager.free(pair.request)
        self.twin.release(pair.table)

    @rule()
    def reset(self) -> None:
        assert self.manager.reset() == (not self.live)
        if not self.live:
            self.twin.stored.clear()
            self.twin.shares.holder.clear()
            self.twin.shares.gone.clear()

    @invariant()
    def agrees_with_the_twin(self) -> None:
        pool = self.manager.pool
        pool.check()
        assert pool.free_order() == self.twin.free
        assert all(pair.request.block_ids == pair.table for pair in self.live)
        owners = Counter(block for pair in self.live for block in pair.table)
        assert owners == +self.twin.users
        assert all(pool.ref_count(block) == owners[block] for block in range(pool.num_blocks))
        assert pool.num_free + len(owners) == pool.num_usable

    @invariant()
    def whoever_computed_what_is_held_first_is_its_writer(self) -> None:
        writers = self.manager.pool.writers
        held = {prefix for _, prefix in self.twin.stored}
        assert len(writers) == len(held)
        for prefix in held:
            for reader in USERS:
                expected = is_cross_user(reader, self.twin.writers[prefix])
                assert writers.shares([self.hash_of(prefix)], reader).cross_user == expected

    @invariant()
    def events_tell_what_is_held(self) -> None:
        self.events.apply(self.manager.take_events())
        assert self.events.held == Counter(self.hash_of(prefix) for _, prefix in self.twin.stored)

    def hash_of(self, prefix: Prefix) -> BlockHash:
        root, *tokens = prefix
        return hash_blocks(root, tokens, self.manager.block_size)[-1]  # type: ignore[arg-type]

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for pair in self.live:
            self.manager.free(pair.request)
        self.manager.pool.allocate(self.manager.pool.num_usable)
        self.events.apply(self.manager.take_events())
        assert self.manager.pool.num_cached == 0 and not self.events.held


BlockPoolMachine.TestCase.settings = settings(
    max_examples=examples(300), stateful_step_count=40, deadline=None
)
TestBlockPoolAgainstItsTwin = BlockPoolMachine.TestCase
