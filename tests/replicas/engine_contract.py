"""What every engine owes: a suite that is written once and run over each of them.

A test module for one engine subclasses `EngineContract` and gives it a fixture `engine` whose cache
holds at least 64 blocks, in which nothing runs, and which is empty.
"""

import random
from typing import Any

import pytest

from replicas.engine import RequestRefused
from replicas.proof import prove_hashes
from replicas.protocol.blocks import ImageTokens, PublishedBeginning, hash_blocks
from replicas.protocol.events import BlockStored
from replicas.protocol.frames import (
    FinishReason,
    PromptUsage,
    RefusalCode,
    RequestKey,
)
from tests.replicas.builders import ANOTHER_ROOT, OTHER_ROOT, ROOT
from tests.replicas.cross_user_contract import CrossUserContract
from tests.replicas.engine_run import EngineRun, prompt_of, run

__all__ = ["EngineContract", "EngineRun", "prompt_of", "run"]


class EngineContract(CrossUserContract):
    resumes_samples = True
    """Whether a resumed request that samples yields the tokens that it would have had."""
    has_a_model = True
    """Whether what it answers depends on the prompt."""

    def test_passes_the_start_up_proof(self, run: EngineRun) -> None:
        prove_hashes(run.engine, random.Random(1))
        assert not run.engine.has_work()

    def test_every_choice_streams_its_tokens_in_order_and_ends_once(self, run: EngineRun) -> None:
        keys = [run.add(prompt_of(run.engine, 20 + n, n), max_tokens=3 + n % 5) for n in range(12)]
        run.finish()
        for n, key in enumerate(keys):
            deltas = run.deltas[key]
            assert len(run.tokens(key)) == 3 + n % 5
            assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
            assert deltas[-1].finish_reason is FinishReason.LENGTH
            assert [delta.usage is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)

    def test_tokens_come_one_step_at_a_time(self, run: EngineRun) -> None:
        key = run.add(prompt_of(run.engine, 10), max_tokens=5)
        seen = []
        while run.engine.has_work():
            run.step()
            seen.append(len(run.tokens(key)))
        assert seen[seen.index(1) :][:5] == [1, 2, 3, 4, 5]

    def test_an_aborted_request_says_nothing_more_and_gives_its_blocks_back(self, run: EngineRun) -> None:
        before = run.engine.step().load.num_used_blocks
        key = run.add(prompt_of(run.engine, 100), max_tokens=500)
        other = run.add(prompt_of(run.engine, 40, 1), max_tokens=8)
        for _ in range(3):
            run.step()
        said = len(run.deltas[key])
        assert said
        run.abort(key)
        run.step()
        load = run.step().load
        assert load.num_running == 1
        run.finish()
        assert len(run.deltas[key]) == said
        assert run.finish_reason(other) is FinishReason.LENGTH
        assert run.engine.step().load.num_used_blocks == before

    def test_aborting_before_the_first_step_and_unknown_keys_does_no_harm(self, run: EngineRun) -> None:
        key = run.add(prompt_of(run.engine, 100))
        run.abort(key)
        run.abort(key)
        run.abort(RequestKey(0, 99))
        run.finish()
        assert run.deltas[key] == []

    def test_the_last_request_aborted_leaves_an_engine_without_work(self, run: EngineRun) -> None:
        key = run.add(prompt_of(run.engine, 100), max_tokens=100)
        run.step()
        run.abort(key)
        run.step()
        run.step()
        assert not run.engine.has_work()
        assert run.engine.step().load.num_running == 0

    def test_a_stop_token_ends_the_answer_and_is_part_of_it(self, run: EngineRun) -> None:
        prompt = prompt_of(run.engine, 20)
        tokens = run.tokens(run.generate(prompt, max_tokens=8))
        stop = tokens[3]
        stopped = run.generate(prompt, max_tokens=8, stop_token_ids=(stop,))
        assert run.tokens(stopped) == tokens[: tokens.index(stop) + 1]
        assert run.finish_reason(stopped) is FinishReason.STOP

    def test_a_stop_token_does_not_end_the_answer_before_min_tokens(self, run: EngineRun) -> None:
        prompt = prompt_of(run.engine, 20)
        first = run.tokens(run.generate(prompt, max_tokens=1))[0]
        key = run.generate(prompt, max_tokens=8, stop_token_ids=(first,), min_tokens=4)
        assert len(run.tokens(key)) >= 4

    def test_equal_seeds_sample_equally_and_other_seeds_differ(self, run: EngineRun) -> None:
        prompt = prompt_of(run.engine, 20)
        keys = [run.add(prompt, max_tokens=12, temperature=1.5, seed=seed) for seed in (7, 2**64 - 1, 7)]
        run.finish()
        assert run.tokens(keys[0]) == run.tokens(keys[2]) != run.tokens(keys[1])

    def test_a_seed_samples_the_same_whatever_else_runs(self, run: EngineRun) -> None:
        prompt = prompt_of(run.engine, 20)
        alone = run.tokens(run.generate(prompt, max_tokens=8, temperature=1.0, seed=3))
        others = [
            run.add(prompt_of(run.engine, 30, n), max_tokens=9, temperature=1.0, seed=n) for n in range(5)
        ]
        key = run.add(prompt, max_tokens=8, temperature=1.0, seed=3)
        run.finish()
        assert run.tokens(key) == alone
        assert all(len(run.tokens(other)) == 9 for other in others)

    def test_a_greedy_generation_resumed_goes_on_as_if_nothing_had_happened(self, run: EngineRun) -> None:
        prompt = prompt_of(run.engine, 20)
        whole = run.tokens(run.generate(prompt, max_tokens=10))
        key = run.generate([*prompt, *whole[:6]], max_tokens=10, num_output_tokens=6)
        assert whole[:6] + run.tokens(key) == whole
        assert run.usage(key).num_prompt_tokens == 20

    def test_a_sampled_generation_resumed_keeps_its_length_and_its_seed(self, run: EngineRun) -> None:
        prompt = prompt_of(run.engine, 20)
        whole = run.tokens(run.generate(prompt, max_tokens=10, temperature=1.0, seed=11))
        keys = [
            run.generate([*prompt, *whole[:6]], max_tokens=10, temperature=1.0, seed=11, num_output_tokens=6)
            for _ in range(2)
        ]
        assert run.tokens(keys[0]) == run.tokens(keys[1])
        assert len(run.tokens(keys[0])) == 4
        if self.resumes_samples:
            assert whole[:6] + run.tokens(keys[0]) == whole

    def test_logprobs_name_the_sampled_token_and_the_likeliest(self, run: EngineRun) -> None:
        key = run.generate(prompt_of(run.engine, 20), max_tokens=3, num_logprobs=1)
        entries = [entry for delta in run.deltas[key] for entry in delta.logprobs or ()]
        assert [entry.token_id for entry in entries] == run.tokens(key)
        for entry in entries:  # greedy: the sampled one is the likeliest
            assert entry.top == ((entry.token_id, entry.logprob),)
            assert entry.logprob <= 0
        chosen_only = run.generate(prompt_of(run.engine, 20), max_tokens=1, num_logprobs=0)
        (logprobs,) = [delta.logprobs for delta in run.deltas[chosen_only]]
        assert logprobs is not None
        assert logprobs[0].token_id == entries[0].token_id
        # Asked again, most of the prompt is cached. A smaller batch rounds otherwise, in bfloat16 by 0.03.
        assert logprobs[0].logprob == pytest.approx(entries[0].logprob, abs=0.05)
        assert logprobs[0].top == ()

    @pytest.mark.parametrize("extra", [-1, 0, 1])
    def test_usage_of_a_miss_and_of_a_hit_around_a_block_boundary(self, run: EngineRun, extra: int) -> None:
        block = run.engine.card.block_size
        length = 3 * block + extra
        prompt = prompt_of(run.engine, length, extra)
        full = length // block * block
        cached = (length - 1) // block * block  # the last token is computed again
        missed = run.generate(prompt, max_tokens=1)
        assert run.usage(missed) == PromptUsage(length, 0, full)
        hit = run.generate(prompt, max_tokens=1)
        assert run.usage(hit) == PromptUsage(length, cached, full - cached)

    def test_each_request_is_said_to_have_started_once_before_it_answers(self, run: EngineRun) -> None:
        keys = [run.add(prompt_of(run.engine, 30 * n, n), max_tokens=3) for n in range(1, 5)]
        started: list[RequestKey] = []
        while run.engine.has_work():
            frame = run.step()
            started += frame.started
            assert {delta.key for delta in frame.deltas} <= set(started)
        assert sorted(started) == keys

    def test_a_longer_prompt_hits_the_blocks_that_it_shares(self, run: EngineRun) -> None:
        block = run.engine.card.block_size
        prompt = prompt_of(run.engine, 4 * block)
        run.generate(prompt, max_tokens=1)
        longer = run.generate([*prompt, *prompt_of(run.engine, block, 9)], max_tokens=1)
        assert run.usage(longer) == PromptUsage(5 * block, 4 * block, block)
        forked = run.generate([*prompt[: 2 * block + 5], *prompt_of(run.engine, 2 * block, 8)], max_tokens=1)
        assert run.usage(forked).num_cached_tokens == 2 * block

    def test_decoded_blocks_are_cached(self, run: EngineRun) -> None:
        block = run.engine.card.block_size
        prompt = prompt_of(run.engine, block)
        key = run.generate(prompt, max_tokens=block + 1)
        again = run.generate([*prompt, *run.tokens(key)], max_tokens=1)
        assert run.usage(again).num_cached_tokens == 2 * block

    def test_namespaces_never_share(self, run: EngineRun) -> None:
        prompt = prompt_of(run.engine, 3 * run.engine.card.block_size + 1)
        run.generate(prompt, max_tokens=1)
        other = run.generate(prompt, max_tokens=1, root=OTHER_ROOT)
        assert run.usage(other).num_cached_tokens == 0
        assert run.usage(run.generate(prompt, max_tokens=1)).num_cached_tokens > 0

    def test_published_blocks_are_shared_and_nothing_behind_them(self, run: EngineRun) -> None:
        block = run.engine.card.block_size
        prompt = prompt_of(run.engine, 4 * block + 1)
        everyones = PublishedBeginning(ANOTHER_ROOT, 2)
        run.generate(prompt, max_tokens=1, published=everyones)
        other = run.generate(prompt, max_tokens=1, root=OTHER_ROOT, published=everyones)
        assert run.usage(other).num_cached_tokens == 2 * block
        for root in (ROOT, OTHER_ROOT):
            again = run.generate(prompt, max_tokens=1, root=root, published=everyones)
            assert run.usage(again).num_cached_tokens == 4 * block
        assert run.usage(run.generate(prompt, max_tokens=1)).num_cached_tokens == 0
        shorter = run.generate(prompt, max_tokens=1, published=PublishedBeginning(ANOTHER_ROOT, 1))
        assert run.usage(shorter).num_cached_tokens == block

    def test_stored_blocks_bear_the_hashes_that_routers_compute(self, run: EngineRun) -> None:
        """Of the prompt and of what was decoded, with their positions, and the prompt's end marked."""
        block = run.engine.card.block_size
        prompt = prompt_of(run.engine, 2 * block + 3)
        key = run.generate(prompt, max_tokens=2 * block)
        stored = [event for event in run.events if isinstance(event, BlockStored)]
        named = {
            event.first_block_index + offset: block_hash
            for event in stored
            for offset, block_hash in enumerate(event.block_hashes)
        }
        whole = [*prompt, *run.tokens(key)][:-1]  # the last token has no KV
        assert named == dict(enumerate(hash_blocks(ROOT, whole, block)))
        ends = {
            event.first_block_index + len(event.block_hashes) - 1 for event in stored if event.ends_prompt
        }
        assert ends == {1}

    def test_the_prompt_ends_where_it_ended_before_it_was_resumed(self, run: EngineRun) -> None:
        block = run.engine.card.block_size
        tokens = prompt_of(run.engine, 4 * block + 1)
        run.generate(tokens, max_tokens=3 * block, num_output_tokens=2 * block)
        ends = [
            event.first_block_index + len(event.block_hashes) - 1
            for event in run.events
            if isinstance(event, BlockStored) and event.ends_prompt
        ]
        assert ends == [1]

    def test_a_reset_forgets_everything_and_says_so(self, run: EngineRun) -> None:
        prompt = prompt_of(run.engine, 100)
        run.generate(prompt, max_tokens=1)
        assert run.balance.held
        assert run.engine.reset_prefix_cache()
        assert run.engine.has_work()
        run.finish()
        assert not run.balance.held
        assert run.usage(run.generate(prompt, max_tokens=1)).num_cached_tokens == 0

    def test_a_reset_is_refused_while_a_request_holds_blocks(self, run: EngineRun) -> None:
        key = run.add(prompt_of(run.engine, 100), max_tokens=50)
        run.step()
        assert not run.engine.reset_prefix_cache()
        run.finish()
        assert run.finish_reason(key) is FinishReason.LENGTH

    @pytest.mark.timeout(120)
    def test_events_balance_after_a_storm(self, run: EngineRun) -> None:
        """Evictions, aborts and resets: what the events leave is what the engine counts."""
        rng = random.Random(5)
        shared = [prompt_of(run.engine, 200, n) for n in range(3)]
        live: list[RequestKey] = []
        frame = run.step()
        for _ in range(150):
            prefix = rng.choice(shared)[: rng.randrange(200)]
            live.append(
                run.add(
                    [*prefix, *prompt_of(run.engine, rng.randrange(1, 60), rng.randrange(10**6))],
                    root=rng.choice((ROOT, OTHER_ROOT)),
                    max_tokens=rng.randrange(1, 40),
                )
            )
            if rng.random() < 0.2:
                run.abort(live.pop(rng.randrange(len(live))))
            for _ in range(rng.randrange(4)):
                frame = run.step()
            if rng.random() < 0.05:
                run.finish()
                assert run.engine.reset_prefix_cache()
        run.finish()
        frame = run.step()
        if self.has_one_cache:
            assert sum(run.balance.held.values()) == frame.load.num_cached_blocks
        assert run.balance.removed, "the storm was too small for this cache"
        assert frame.load.num_used_blocks == frame.load.num_running == frame.load.num_waiting == 0

    def test_load_is_counted_while_requests_run_and_zero_after_the_drain(self, run: EngineRun) -> None:
        keys = [run.add(prompt_of(run.engine, 40, n), max_tokens=6) for n in range(3)]
        load = run.step().load
        assert load.num_running + load.num_waiting == 3
        assert load.num_context_tokens + load.num_pending_tokens >= 3 * 40
        assert load.num_total_blocks == run.engine.card.num_blocks
        run.finish()
        load = run.step().load
        assert (load.num_running, load.num_waiting, load.num_pending_tokens, load.num_context_tokens) == (
            0,
        ) * 4
        assert all(len(run.tokens(key)) == 6 for key in keys)

    def test_room_is_what_is_free_beyond_what_prompts_need(self, run: EngineRun) -> None:
        card = run.engine.card
        capacity, idle = card.num_blocks * card.block_size, run.step().load.num_room_tokens
        length = capacity * 2 // 3
        assert idle is not None and abs(idle - capacity) <= card.block_size
        for n in range(2):
            run.add(prompt_of(run.engine, length, n), max_tokens=2)
        rooms: list[int] = []
        while run.engine.has_work():
            rooms.append(run.step().load.num_room_tokens or 0)
        assert min(rooms) <= idle - 2 * length + 2 * card.block_size, "one runs, and one waits"
        if self.has_one_cache:
            assert min(rooms) >= idle - 2 * length - 2 * card.block_size
        assert rooms[-1] == idle

    def test_computed_tokens_are_counted_by_kind(self, run: EngineRun) -> None:
        run.generate(prompt_of(run.engine, 50), max_tokens=5)
        assert sum(frame.num_prefill_tokens for frame in run.frames) == 50
        assert sum(frame.num_decode_tokens for frame in run.frames) == 4

    def test_lower_priority_numbers_go_first(self, run: EngineRun) -> None:
        room = run.engine.card.num_blocks * run.engine.card.block_size
        length = room * 2 // 3
        keys = [
            run.add(prompt_of(run.engine, length, n), max_tokens=2, priority=priority)
            for n, priority in enumerate((5, 5, 1))
        ]
        order: list[RequestKey] = []
        while run.engine.has_work():
            order.extend(delta.key for delta in run.step().deltas if delta.finish_reason is not None)
        assert order.index(keys[2]) < order.index(keys[1])

    def test_what_can_never_run_is_refused(self, run: EngineRun) -> None:
        card = run.engine.card
        refused: list[tuple[RefusalCode, list[int], dict[str, Any]]] = [
            (RefusalCode.CONTEXT_LENGTH_EXCEEDED, prompt_of(run.engine, card.context_length), {}),
            (RefusalCode.INVALID_REQUEST, [], {}),
            (RefusalCode.INVALID_REQUEST, [5, card.vocab_size], {}),
            (RefusalCode.INVALID_REQUEST, [5, -1], {}),
            (RefusalCode.INVALID_REQUEST, [5], {"temperature": float("nan")}),
            (RefusalCode.INVALID_REQUEST, [5], {"logit_bias": ((card.vocab_size, 1.0),)}),
        ]
        for code, token_ids, fields in refused:
            with pytest.raises(RequestRefused) as caught:
                run.add(token_ids, **fields)
            assert caught.value.code is code
        assert not run.engine.has_work()

    def test_a_logit_bias_decides(self, run: EngineRun) -> None:
        key = run.generate(prompt_of(run.engine, 10), max_tokens=3, logit_bias=((77, 1000.0),))
        assert not self.has_a_model or run.tokens(key) == [77] * 3

    def test_media_are_refused_by_an_engine_that_reads_text_only(self, run: EngineRun) -> None:
        if not self.has_a_model:
            pytest.skip("the simulated engine reads anything")
        with pytest.raises(RequestRefused):
            run.add(prompt_of(run.engine, 20), media=(ImageTokens(b"image", 0, 4),))
