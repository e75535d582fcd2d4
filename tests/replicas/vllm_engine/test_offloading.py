"""KV of vLLM in our own host memory: chunks of four blocks, loaded back, counted, and never wrong."""

import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from replicas.kvstore.directory import ChunkPlace
from replicas.kvstore.layout import file_bytes
from replicas.kvstore.store import ChunkStore
from replicas.proof import prove_hashes
from replicas.protocol.blocks import BlockHash, hash_blocks
from replicas.protocol.events import AllBlocksCleared, BlockStored, Tier
from replicas.protocol.frames import PromptUsage, RequestKey, UserTag
from tests.replicas.builders import OTHER_ROOT, ROOT
from tests.replicas.engine_run import prompt_of
from tests.replicas.vllm_engine.conftest import OneEngine
from tests.replicas.vllm_engine.tiered_run import BLOCK, CHUNK, TieredRun, tiered_run

if TYPE_CHECKING:
    from replicas.vllm_engine.engine import VllmEngine

pytestmark = pytest.mark.vllm

NUM_BLOCKS = 32
NUM_SLOTS = 16
BLOCK_BYTES = 81_920
"""Keys and values of 32 tokens in five layers of two heads of 32, in float32."""

ANN, BOB = (UserTag(name.ljust(16)) for name in (b"ann", b"bob"))


Storm = list[tuple[list[int], BlockHash, int]]
"""Prompts, their roots, and how many tokens each is answered with."""


def storm_of(vocab_size: int) -> Storm:
    """Beginnings that many share, and turns of conversations: far more than the device holds."""
    rng = random.Random(5)

    def tokens(num_tokens: int) -> list[int]:
        return [rng.randrange(3, vocab_size) for _ in range(num_tokens)]

    shared = [tokens(500) for _ in range(4)]
    storm: Storm = []
    for n in range(70):
        prompt = [*rng.choice(shared)[: rng.randrange(1, 500)], *tokens(rng.randrange(1, 60))]
        if n % 3 == 2 and len(storm[-1][0]) < 500:
            prompt = [*storm[-1][0], *tokens(20)]
        storm.append((prompt, rng.choice((ROOT, ROOT, OTHER_ROOT)), rng.randrange(1, 70)))
    return storm


SETTINGS: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "dtype": "float32"}
"""In bfloat16 a token may change with what else is in its step."""


@pytest.fixture(scope="module")
def plain_answers(one_engine: OneEngine) -> list[list[int]]:
    """What the storm's prompts are answered by an engine without a tier."""
    engine = one_engine.of(**SETTINGS)
    assert not engine.core.has_more_tiers, "without the setting there is no connector"
    run = TieredRun(engine)
    keys = [
        run.add(prompt, root=root, max_tokens=num_tokens)
        for prompt, root, num_tokens in storm_of(engine.card.vocab_size)
    ]
    run.finish()
    assert all(tier is Tier.DEVICE for tier, _ in run.held)
    return [run.tokens(key) for key in keys]


@pytest.fixture(scope="module")
def engine(
    plain_answers: list[list[int]], one_engine: OneEngine, adapters: Mapping[str, str]
) -> "VllmEngine":
    room = NUM_SLOTS * file_bytes(4 * BLOCK_BYTES)
    engine: VllmEngine = one_engine.of(adapters=adapters, host_kv_bytes=room, **SETTINGS)
    return engine


@pytest.fixture
def store(engine: "VllmEngine") -> ChunkStore:
    assert engine._tier is not None
    return engine._tier.store


@pytest.fixture
def run(engine: "VllmEngine", store: ChunkStore) -> Iterator[TieredRun]:
    yield from tiered_run(engine)
    engine.step()
    assert store.directory.num_in_host == store.directory.num_quarantined == 0


def chunk_keys(prompt: list[int], root: BlockHash = ROOT) -> list[BlockHash]:
    return hash_blocks(root, prompt, BLOCK)[3::4]


def test_the_proof_passes_with_a_tier_and_leaves_nothing(run: TieredRun) -> None:
    assert run.engine.card.adapters
    prove_hashes(run.engine, random.Random(1))
    assert not run.engine.has_work()


def test_chunks_are_copied_when_they_are_complete_and_come_back(run: TieredRun) -> None:
    prompt = prompt_of(run.engine, 300)
    hashes = hash_blocks(ROOT, prompt, BLOCK)
    first = run.generate(prompt, max_tokens=5)
    stored = [event for event in run.events if isinstance(event, BlockStored) and event.tier is Tier.HOST]
    assert stored == [
        BlockStored((hashes[3],), 3, tier=Tier.HOST),
        BlockStored((hashes[7],), 7, tier=Tier.HOST),
    ]
    run.evict(Tier.DEVICE, hashes)
    again = run.generate(prompt, max_tokens=5)
    assert run.usage(again) == PromptUsage(300, 2 * CHUNK, BLOCK, num_slower_tier_tokens=2 * CHUNK)
    assert run.usage(run.generate(prompt, max_tokens=1)) == PromptUsage(300, 9 * BLOCK, 0)
    assert run.tokens(again) == run.tokens(first)


def test_a_load_may_begin_inside_a_chunk(run: TieredRun, monkeypatch: pytest.MonkeyPatch) -> None:
    from replicas.vllm_engine.row_copier import RowCopier

    loads: list[tuple[int, int]] = []
    copy_in = RowCopier.copy_in

    def spy(self: Any, slots: Any, places: Any, block_ids: Any) -> None:
        loads.append((int(places[0]), len(block_ids)))
        copy_in(self, slots, places, block_ids)

    monkeypatch.setattr(RowCopier, "copy_in", spy)
    prompt = prompt_of(run.engine, 650)
    hashes = hash_blocks(ROOT, prompt, BLOCK)
    first = run.tokens(run.generate(prompt, max_tokens=5))
    for num_other_tokens in (540, 600, 640, 670):
        run.generate(prompt_of(run.engine, num_other_tokens, 1), max_tokens=1)
        num_left = sum((Tier.DEVICE, block_hash) in run.held for block_hash in hashes)
        assert 0 < num_left < 16
        again = run.generate(prompt, max_tokens=5)
        assert run.usage(again).num_slower_tier_tokens == (20 - num_left) * BLOCK
        assert loads[-1] == (num_left % 4, 20 - num_left)
        assert run.tokens(again) == first
    assert len({place for place, _ in loads}) > 2


def test_whoever_wrote_a_block_wrote_it_wherever_it_has_been_since(run: TieredRun) -> None:
    prompt = prompt_of(run.engine, 2 * CHUNK + 10)
    hashes = hash_blocks(ROOT, prompt, BLOCK)

    def cross_and_own(user: UserTag) -> tuple[int, int]:
        run.evict(Tier.DEVICE, hashes)
        usage = run.usage(run.generate(prompt, max_tokens=1, user=user))
        assert usage.num_slower_tier_tokens == usage.num_cached_tokens
        return usage.num_cross_user_tokens, usage.num_own_tokens

    run.generate(prompt[: CHUNK + BLOCK], max_tokens=1, user=ANN)
    assert run.usage(run.generate(prompt, max_tokens=1, user=BOB)).num_cross_user_tokens == CHUNK + BLOCK
    for _ in range(2):
        assert cross_and_own(ANN) == (CHUNK - BLOCK, CHUNK + BLOCK)
        assert cross_and_own(BOB) == (CHUNK + BLOCK, CHUNK - BLOCK)
    run.evict(Tier.HOST, chunk_keys(prompt))
    run.evict(Tier.DEVICE, hashes)
    assert run.usage(run.generate(prompt, max_tokens=1, user=ANN)).num_cached_tokens == 0
    assert cross_and_own(BOB) == (2 * CHUNK, 0), "it was computed anew"


def test_a_reset_forgets_what_is_still_being_copied(run: TieredRun, store: ChunkStore) -> None:
    prompt = prompt_of(run.engine, 250)
    key = run.add(prompt, max_tokens=1)
    while not run.deltas[key]:
        run.step()
    assert [store.directory.place(each) for each in chunk_keys(prompt)] == [ChunkPlace.COMING]
    assert run.engine.reset_prefix_cache()
    assert run.step().events == [AllBlocksCleared(tier) for tier in Tier]
    assert store.directory.num_in_host == 0
    assert run.usage(run.generate(prompt, max_tokens=1)).num_cached_tokens == 0
    run.generate(prompt_of(run.engine, 40), max_tokens=3)
    assert store.directory.num_quarantined == 0, "the copies of before have ended"


def test_what_a_request_finds_in_host_memory_is_no_work_to_come(run: TieredRun) -> None:
    prompt = prompt_of(run.engine, 300)
    run.generate(prompt, max_tokens=1)
    run.evict(Tier.DEVICE, hash_blocks(ROOT, prompt, BLOCK))
    run.add(prompt_of(run.engine, 900, 1), max_tokens=20)
    run.step()
    before = run.engine._load().num_pending_tokens
    run.add(prompt, max_tokens=1)
    assert run.engine._load().num_pending_tokens - before == 300 - 2 * CHUNK


def delay_copies(monkeypatch: pytest.MonkeyPatch, num_steps: int = 3) -> Counter[str]:
    """Make copies some steps later than they are asked for, or when vLLM waits for them."""
    from replicas.vllm_engine.row_copier import RowCopier

    counts: Counter[str] = Counter()
    waiting: deque[list[Any]] = deque()
    submit = {"store": RowCopier.submit_store, "load": RowCopier.submit_load}
    finished = RowCopier.get_finished

    def make(copier: Any, job: list[Any]) -> None:
        waiting.remove(job)
        submit[job[1]](copier, *job[2:])

    def later(kind: str) -> Any:
        def ask(copier: Any, *job: Any) -> bool:
            waiting.append([num_steps, kind, *job])
            return True

        return ask

    def wait(copier: Any, job_ids: set[int]) -> None:
        for job in [each for each in waiting if each[2] in job_ids]:
            make(copier, job)

    def get_finished(copier: Any) -> Any:
        for job in list(waiting):
            job[0] -= 1
            if job[0] <= 0:
                counts["hit"] += 1
                make(copier, job)
        return finished(copier)

    monkeypatch.setattr(RowCopier, "submit_store", later("store"))
    monkeypatch.setattr(RowCopier, "submit_load", later("load"))
    monkeypatch.setattr(RowCopier, "wait", wait)
    monkeypatch.setattr(RowCopier, "get_finished", get_finished)
    return counts


def break_copies(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Every third copy to host memory leaves nonsense behind and fails."""
    from replicas.vllm_engine.row_copier import RowCopier

    counts: Counter[str] = Counter()
    copy_out = RowCopier.copy_out

    def fail_often(self: Any, block_ids: Any, slots: Any, places: Any) -> None:
        counts["asked"] += 1
        if counts["asked"] % 3:
            return copy_out(self, block_ids, slots, places)
        copy_out(self, block_ids[::-1], slots, places)
        counts["hit"] += 1
        raise OSError("no")

    monkeypatch.setattr(RowCopier, "copy_out", fail_often)
    return counts


@pytest.mark.parametrize("fault", ["copies fail", "copies are late"])
def test_tokens_are_those_of_an_engine_without_a_tier_whatever_happens(
    fault: str,
    run: TieredRun,
    engine: "VllmEngine",
    store: ChunkStore,
    plain_answers: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("CRITICAL")
    counts = break_copies(monkeypatch) if fault == "copies fail" else delay_copies(monkeypatch)
    rng = random.Random(fault)
    keys: list[RequestKey] = []
    aborted: set[RequestKey] = set()
    for prompt, root, num_tokens in storm_of(engine.card.vocab_size):
        keys.append(run.add(prompt, root=root, max_tokens=num_tokens))
        if rng.random() < 0.2:
            aborted.add(rng.choice(keys[-8:]))
            run.abort([*aborted][-1])
        for _ in range(rng.randrange(6)):
            run.step()
    run.finish()
    for key, expected in zip(keys, plain_answers, strict=True):
        if key not in aborted:
            assert run.tokens(key) == expected
    assert sum(frame.num_preemptions for frame in run.frames)
    assert run.num_removed[Tier.DEVICE] and run.num_removed[Tier.HOST]
    done = [key for key in keys if key not in aborted]
    assert sum(run.usage(key).num_slower_tier_tokens for key in done) > 5 * CHUNK
    assert counts["hit"]
    name = engine._cache.hashes.names
    truth = {(Tier.DEVICE, *name([key])): n for key, n in engine.core.cached_hashes().items()}
    in_host = {key for tier, key in run.held if tier is Tier.HOST}
    assert truth == {key: n for key, n in run.held.items() if key[0] is Tier.DEVICE}
    assert all(store.directory.place(key) is ChunkPlace.HOST for key in in_host)
    assert len(in_host) == store.directory.num_in_host


@pytest.mark.parametrize("has_share", [True, False])
def test_a_flood_of_another_tenant_leaves_what_is_within_a_share(run: TieredRun, has_share: bool) -> None:
    num_tokens = NUM_SLOTS // 4 * CHUNK + 8
    share = {"tenant": b"ada-0000", "store_share": 0.5 if has_share else 0.0}
    run.generate(prompt_of(run.engine, num_tokens, 1), max_tokens=1, **share)
    mine = {block for tier, block in run.held if tier is Tier.HOST}
    assert mine
    for seed in range(100, 108):
        run.generate(prompt_of(run.engine, num_tokens, seed), max_tokens=1, tenant=b"eve-0000")
    left = {block for tier, block in run.held if tier is Tier.HOST} & mine
    assert left == (mine if has_share else set())
