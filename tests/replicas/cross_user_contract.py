"""What every engine owes about users: of the cached tokens, it counts those that another one computed.

The part of the contract of engines that `engine_contract.EngineContract` takes in.
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest

from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, Tier
from replicas.protocol.frames import NO_USER, PromptUsage, RequestKey, UserTag
from tests.replicas.builders import OTHER_ROOT, ROOT
from tests.replicas.engine_run import EngineRun, prompt_of

ANN, BOB, CAROL = (UserTag(name.ljust(16)) for name in (b"ann", b"bob", b"carol"))


def hits(run: EngineRun, key: RequestKey) -> tuple[int, int]:
    """Cached tokens, and of these another user's."""
    usage = run.usage(key)
    return usage.num_cached_tokens, usage.num_cross_user_tokens


def read(run: EngineRun, token_ids: Sequence[int], user: UserTag, root: BlockHash = ROOT) -> tuple[int, int]:
    return hits(run, run.generate(token_ids, max_tokens=1, user=user, root=root))


class NaiveWriters:
    """Who wrote what is resident, by the events alone. Right as long as one user's requests run at a time."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[Tier, BlockHash]] = Counter()
        self.writers: dict[BlockHash, UserTag] = {}
        self.num_evicted = 0

    def apply(self, events: Iterable[CacheEvent], user: UserTag) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                for block_hash in event.block_hashes:
                    self.copies[event.tier, block_hash] += 1
                    self.writers.setdefault(block_hash, user)
                continue
            if isinstance(event, BlockRemoved):
                self.num_evicted += len(event.block_hashes)
                for block_hash in event.block_hashes:
                    self.copies[event.tier, block_hash] -= 1
            elif isinstance(event, AllBlocksCleared):
                self.copies = Counter({key: n for key, n in self.copies.items() if key[0] is not event.tier})
            resident = {block_hash for (_, block_hash), copies in self.copies.items() if copies > 0}
            self.writers = {key: writer for key, writer in self.writers.items() if key in resident}

    def num_cross_user(
        self, block_hashes: Sequence[BlockHash], block_size: int, usage: PromptUsage, user: UserTag
    ) -> int:
        """Token by token, of a request that has not been applied yet."""
        blocks = [position // block_size for position in range(usage.num_cached_tokens)]
        writers = [self.writers[block_hashes[block]] for block in blocks]
        return sum(1 for writer in writers if NO_USER not in (writer, user) and writer != user)


class CrossUserContract:
    num_random_requests = 100
    """How many random requests are held against the naive twin."""
    has_one_cache = True
    """Whether a block of a prompt is one of the pool's: all layers keep the same."""

    @pytest.mark.parametrize("extra", [-1, 0, 1])
    def test_what_another_user_computed_counts_and_what_one_computed_oneself_does_not(
        self, run: EngineRun, extra: int
    ) -> None:
        block = run.engine.card.block_size
        length = 3 * block + extra
        prompt = prompt_of(run.engine, length, extra)
        cached = (length - 1) // block * block
        assert read(run, prompt, ANN) == (0, 0)
        assert read(run, prompt, ANN) == (cached, 0)
        assert read(run, prompt, BOB) == (cached, cached)
        # Where the last block was computed a second time, that made a copy, and not a writer.
        longer = [*prompt, *prompt_of(run.engine, 1, 9)]
        full = length // block * block
        assert read(run, longer, ANN) == (full, 0)
        assert read(run, longer, BOB)[1] >= full

    def test_a_chain_that_two_users_wrote_counts_part_by_part(self, run: EngineRun) -> None:
        block = run.engine.card.block_size
        prefix = prompt_of(run.engine, 2 * block)
        whole = [*prefix, *prompt_of(run.engine, 3 * block + 1, 1)]
        assert read(run, prefix, ANN) == (0, 0)
        assert read(run, whole, BOB) == (2 * block, 2 * block)
        assert read(run, whole, CAROL) == (5 * block, 5 * block)
        assert read(run, whole, BOB) == (5 * block, 2 * block)
        assert read(run, whole, ANN) == (5 * block, 3 * block)

    def test_nobody_in_particular_neither_reads_nor_writes_as_another_user(self, run: EngineRun) -> None:
        block = run.engine.card.block_size
        prompt = prompt_of(run.engine, 2 * block + 1)
        longer = [*prompt, *prompt_of(run.engine, block, 1)]
        assert read(run, prompt, NO_USER) == (0, 0)
        assert read(run, prompt, ANN) == (2 * block, 0)
        assert read(run, longer, ANN) == (2 * block, 0)
        assert read(run, longer, NO_USER) == (3 * block, 0)
        assert read(run, longer, BOB) == (3 * block, block)

    def test_what_one_was_answered_is_another_users_too(self, run: EngineRun) -> None:
        block = run.engine.card.block_size
        prompt = prompt_of(run.engine, block)
        key = run.generate(prompt, max_tokens=block + 1, user=ANN)
        conversation = [*prompt, *run.tokens(key)]
        assert read(run, conversation, ANN) == (2 * block, 0)
        assert read(run, conversation, BOB) == (2 * block, 2 * block)

    def test_of_twins_that_come_together_only_one_has_written(self, run: EngineRun) -> None:
        """Whichever it was: each block is one's own for the one, and another user's for the other."""
        block = run.engine.card.block_size
        prompt = prompt_of(run.engine, 3 * block)
        keys = [run.add(prompt, max_tokens=2, user=user) for user in (ANN, BOB)]
        run.finish()
        twins = sorted(hits(run, key) for key in keys)
        assert twins == [(0, 0), (2 * block, 2 * block)]
        longer = [*prompt, *prompt_of(run.engine, 1, 1)]
        both = [read(run, longer, user)[1] for user in (ANN, BOB)]
        assert sorted(both) == [0, 3 * block]

    def test_choices_of_one_user_that_come_together_are_no_other_users(self, run: EngineRun) -> None:
        prompt = prompt_of(run.engine, 3 * run.engine.card.block_size)
        keys = [run.add(prompt, max_tokens=2, user=ANN, seed=seed) for seed in range(4)]
        run.finish()
        assert any(run.usage(key).num_cached_tokens for key in keys)
        assert not any(run.usage(key).num_cross_user_tokens for key in keys)

    def test_what_was_evicted_and_computed_anew_has_a_new_writer(self, run: EngineRun) -> None:
        card = run.engine.card
        prompt = prompt_of(run.engine, 2 * card.block_size + 1)
        assert read(run, prompt, ANN) == (0, 0)
        hashes = hash_blocks(ROOT, prompt, card.block_size)
        room = min(card.num_blocks * card.block_size, card.context_length)
        for seed in range(20):
            if not any(block_hash in run.balance.held for block_hash in hashes):
                break
            run.generate(prompt_of(run.engine, room // 2, seed), max_tokens=1, user=CAROL)
        assert read(run, prompt, BOB) == (0, 0)
        assert read(run, prompt, ANN) == (2 * card.block_size, 2 * card.block_size)
        assert read(run, prompt, BOB) == (2 * card.block_size, 0)

    def test_a_copy_that_is_evicted_takes_nothing_with_it_while_another_is_left(self, run: EngineRun) -> None:
        if not self.has_one_cache:
            pytest.skip("it fills the cache block by block")
        card = run.engine.card
        prompt = prompt_of(run.engine, 3 * card.block_size)
        assert read(run, prompt, ANN) == (0, 0)
        assert read(run, prompt, BOB) == (2 * card.block_size,) * 2
        last = hash_blocks(ROOT, prompt, card.block_size)[-1]
        num_never_used = card.num_blocks - run.frames[-1].load.num_cached_blocks - 2
        num_tokens = min(num_never_used * card.block_size, card.context_length - 1)
        run.generate(prompt_of(run.engine, num_tokens, 2), max_tokens=1)
        for seed in range(2 * card.num_blocks):
            if run.balance.held[last] <= 1:
                break
            run.generate(prompt_of(run.engine, card.block_size, seed), max_tokens=1)
        assert run.balance.held[last] == 1
        longer = [*prompt, *prompt_of(run.engine, 1, 1)]
        assert read(run, longer, BOB) == (3 * card.block_size,) * 2
        assert read(run, longer, ANN) == (3 * card.block_size, 0)

    def test_a_reset_forgets_who_wrote(self, run: EngineRun) -> None:
        block = run.engine.card.block_size
        prompt = prompt_of(run.engine, 2 * block + 1)
        assert read(run, prompt, ANN) == (0, 0)
        assert run.engine.reset_prefix_cache()
        assert read(run, prompt, BOB) == (0, 0)
        assert read(run, prompt, ANN) == (2 * block, 2 * block)
        assert read(run, prompt, BOB) == (2 * block, 0)

    def test_namespaces_have_writers_of_their_own(self, run: EngineRun) -> None:
        block = run.engine.card.block_size
        prompt = prompt_of(run.engine, 2 * block + 1)
        assert read(run, prompt, ANN) == (0, 0)
        assert read(run, prompt, BOB, OTHER_ROOT) == (0, 0)
        for reader, root in ((ANN, ROOT), (BOB, OTHER_ROOT)):
            assert read(run, prompt, reader, root) == (2 * block, 0)
        for reader, root in ((BOB, ROOT), (ANN, OTHER_ROOT)):
            assert read(run, prompt, reader, root) == (2 * block, 2 * block)

    def test_what_an_aborted_request_has_computed_stays_its_users(self, run: EngineRun) -> None:
        block = run.engine.card.block_size
        prompt = prompt_of(run.engine, 2 * block + 1)
        key = run.add(prompt, max_tokens=100, user=ANN)
        while not run.deltas[key]:
            run.step()
        run.abort(key)
        run.finish()
        assert read(run, prompt, BOB) == (2 * block, 2 * block)

    def test_of_a_resumed_request_only_the_prompts_part_counts(self, run: EngineRun) -> None:
        """The prompt ends within the second block; what follows is output, whoever computed it."""
        block = run.engine.card.block_size
        tokens = prompt_of(run.engine, 4 * block + 1)
        num_prompt_tokens = block + block // 2
        num_output_tokens = len(tokens) - num_prompt_tokens
        resumed = {"num_output_tokens": num_output_tokens, "max_tokens": num_output_tokens + 1}
        assert read(run, tokens[:block], ANN) == (0, 0)
        assert read(run, tokens, BOB) == (block, block)
        for reader, num_cross_user_tokens in ((ANN, block // 2), (BOB, block), (CAROL, num_prompt_tokens)):
            key = run.generate(tokens, user=reader, **resumed)
            assert hits(run, key) == (num_prompt_tokens, num_cross_user_tokens)

    @pytest.mark.timeout(120)
    def test_random_requests_of_few_users_count_what_the_naive_twin_counts(self, run: EngineRun) -> None:
        """Conversations that fork and go on in a cache too small for them all, one request at a time."""
        rng = random.Random(11)
        block = run.engine.card.block_size
        longest = min(run.engine.card.num_blocks // 3 * block, run.engine.card.context_length) - 3 * block
        stems = [prompt_of(run.engine, longest // 2, n) for n in range(3)]
        twin = NaiveWriters()
        counted: list[tuple[int, int]] = []
        for _ in range(self.num_random_requests):
            user = rng.choice((ANN, ANN, BOB, BOB, CAROL, NO_USER))
            root = ROOT if rng.random() < 0.8 else OTHER_ROOT
            stem = rng.choice(stems)
            tail = prompt_of(run.engine, rng.randrange(1, 2 * block), rng.randrange(10**6))
            num_shared = rng.choice((len(stem), rng.randrange(len(stem))))
            tokens = [*stem[:num_shared], *tail][:longest]
            num_output_tokens = rng.choice((0, 0, rng.randrange(len(tokens))))
            max_tokens = num_output_tokens + rng.choice((1, 1, 1, block + 1))
            run.frames.clear()
            key = run.generate(
                tokens, user=user, root=root, num_output_tokens=num_output_tokens, max_tokens=max_tokens
            )
            usage = run.usage(key)
            hashes = hash_blocks(root, tokens, block)
            assert usage.num_cross_user_tokens == twin.num_cross_user(hashes, block, usage, user)
            counted.append((usage.num_cached_tokens, usage.num_cross_user_tokens))
            if rng.random() < 0.3:
                stems[rng.randrange(len(stems))] = [*tokens, *run.tokens(key)]
            if rng.random() < 0.02:
                assert run.engine.reset_prefix_cache()
                run.finish()
            twin.apply(run.events, user)
        assert twin.num_evicted > 0
        assert any(0 < cross_user < cached for cached, cross_user in counted), "no chain of two users was hit"
