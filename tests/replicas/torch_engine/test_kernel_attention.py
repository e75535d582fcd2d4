"""Attention through the compiled kernel, against the gather, against a slow twin, and in an engine."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.process.settings import SettingsError
from replicas.torch_engine import attention as attention_module
from replicas.torch_engine.gathered_attention import GatheredAttention
from replicas.torch_engine.kernel_attention import KernelAttention
from replicas.torch_engine.kernel_proof import complaint
from replicas.torch_engine.rows import CachedAttend, CachedAttention, KVBlocks, Rows
from tests.examples import examples
from tests.replicas.torch_engine.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.replicas.torch_engine.driving import DEVICE, Driver, greedy

pytestmark = [
    pytest.mark.usefixtures("compiling"),
    pytest.mark.timeout(600),  # a C++ compiler that has no core to itself
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]
BLOCK_SIZE, NUM_BLOCKS = 16, 129


def blocks_of(
    dtype: torch.dtype, heads: tuple[int, int], head_dim: int, block_size: int = BLOCK_SIZE
) -> KVBlocks:
    """Two layers of random keys and values, so that a wrong layer is a wrong answer."""
    shape = (2, 2, NUM_BLOCKS, block_size * heads[1] * head_dim)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    return KVBlocks(drawn.to(DEVICE, dtype), block_size, *heads, head_dim)


@pytest.fixture(scope="module")
def blocks() -> KVBlocks:
    """In the shape of the checkpoint below, so that its kernels are compiled once."""
    return blocks_of(torch.float32, heads=(6, 2), head_dim=16)


@pytest.fixture(scope="module")
def kernel(blocks: KVBlocks) -> KernelAttention:
    return KernelAttention(blocks, GatheredAttention(blocks))


@st.composite
def batches(draw: st.DrawFn, block_size: int = BLOCK_SIZE) -> list[Rows]:
    """Sequences whose blocks lie anywhere, and whose leading blocks another sequence may have as well."""
    free = list(range(1, NUM_BLOCKS))
    random.Random(draw(st.integers(0, 99))).shuffle(free)
    longest = 5 * block_size
    extents = draw(
        st.lists(
            st.tuples(
                st.integers(0, longest),
                st.one_of(st.just(1), st.integers(2, 130)),
            ),
            min_size=1,
            max_size=7,
        )
    )
    ordered = sorted(extents, key=lambda extent: (extent[1] > 1, -extent[0]))
    rows: list[Rows] = []
    taken = row = 0
    for start, num_tokens in ordered:
        num_blocks = (start + num_tokens - 1) // block_size + 1
        shared: Sequence[int] = ()
        if rows and draw(st.booleans()):
            giver = draw(st.sampled_from(rows))
            shared = giver.block_ids[: min(start, giver.start) // block_size]
        num_spare = draw(st.integers(0, 1))
        num_own = num_blocks - len(shared) + num_spare
        rows.append(Rows(row, start, num_tokens, [*shared, *free[taken : taken + num_own]]))
        taken += num_own
        row += num_tokens
    return rows


def attended(attention: CachedAttention, rows: Sequence[Rows], queries: torch.Tensor) -> torch.Tensor:
    outputs = torch.full_like(queries, torch.nan)
    with torch.inference_mode():
        attention.plan(rows)(1, queries, outputs)
    return outputs.float()


def slowly_attended(blocks: KVBlocks, rows: Sequence[Rows], queries: torch.Tensor) -> torch.Tensor:
    """One query and one head at a time, in float64."""
    shape = (-1, blocks.num_kv_heads, blocks.head_dim)
    keys, values = (store[1].cpu().view(shape) for store in blocks.tensor)
    queries = queries.cpu()
    outputs = torch.zeros(queries.shape, dtype=torch.float64)
    for first, start, num_tokens, block_ids in rows:
        for offset in range(num_tokens):
            slots = [
                block_ids[position // blocks.block_size] * blocks.block_size + position % blocks.block_size
                for position in range(start + offset + 1)
            ]
            for head in range(blocks.num_heads):
                kv_head = head // blocks.queries_per_kv_head
                scores = keys[slots, kv_head].double() @ queries[first + offset, head].double()
                weights = torch.softmax(scores / blocks.head_dim**0.5, dim=0)
                outputs[first + offset, head] = weights @ values[slots, kv_head].double()
    return outputs.float().to(DEVICE)


def queries_for(blocks: KVBlocks, rows: Sequence[Rows], seed: int) -> torch.Tensor:
    shape = (rows[-1].first + rows[-1].num_tokens, blocks.num_heads, blocks.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, blocks.dtype)


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(rows=batches(), seed=st.integers(0, 9))
def test_the_kernel_says_what_the_gather_says(
    blocks: KVBlocks, kernel: KernelAttention, rows: list[Rows], seed: int
) -> None:
    queries = queries_for(blocks, rows, seed)
    torch.testing.assert_close(
        attended(kernel, rows, queries),
        attended(GatheredAttention(blocks), rows, queries),
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.slow
@settings(max_examples=examples(6))
@given(rows=batches(), seed=st.integers(0, 9))
def test_kernel_and_gather_say_what_attention_is(
    blocks: KVBlocks, kernel: KernelAttention, rows: list[Rows], seed: int
) -> None:
    queries = queries_for(blocks, rows, seed)
    expected = slowly_attended(blocks, rows, queries)
    for attention in (kernel, GatheredAttention(blocks)):
        torch.testing.assert_close(attended(attention, rows, queries), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "block_size"),
    [
        (torch.float32, (4, 4), 32, 16),
        (torch.bfloat16, (8, 2), 64, 16),
        (torch.float16, (4, 1), 128, 32),
        (torch.float32, (5, 1), 80, 8),
    ],
)
def test_shapes_and_dtypes(
    dtype: torch.dtype, heads: tuple[int, int], head_dim: int, block_size: int
) -> None:
    """Many batches in one test: what costs is the compiler."""
    blocks = blocks_of(dtype, heads, head_dim, block_size)
    gathered = GatheredAttention(blocks)
    kernel = KernelAttention(blocks, gathered)

    @settings(max_examples=examples(30))
    @given(rows=batches(block_size))
    def check(rows: list[Rows]) -> None:
        queries = queries_for(blocks, rows, 1)
        torch.testing.assert_close(
            attended(kernel, rows, queries),
            attended(gathered, rows, queries),
            atol=1e-5 if dtype == torch.float32 else 2e-2,
            rtol=1e-5 if dtype == torch.float32 else 2e-2,
        )

    check()


@pytest.mark.slow
def test_many_sequences_take_several_calls(blocks: KVBlocks, kernel: KernelAttention) -> None:
    """150 of one token, 64 to a call, and one of many."""
    table = list(range(1, NUM_BLOCKS))
    singles = [Rows(row, 1500 - 7 * row, 1, table) for row in range(150)]
    rows = [*singles, Rows(150, 200, 700, table)]
    queries = queries_for(blocks, rows, 2)
    torch.testing.assert_close(
        attended(kernel, rows, queries),
        attended(GatheredAttention(blocks), rows, queries),
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.slow
def test_the_kernel_copies_no_keys(blocks: KVBlocks, kernel: KernelAttention) -> None:
    """What a step allocates behind 2,000 tokens more than behind 60. On a CPU, the kernel keeps an output for
    each 128 keys: 1 % of these keys here. On CUDA it keeps as many as its grid has splits."""

    def allocated(attention: CachedAttention, start: int) -> int:
        rows = [Rows(0, start, 1, list(range(1, NUM_BLOCKS)))]
        queries = queries_for(blocks, rows, 1)
        outputs = torch.empty_like(queries)
        with torch.inference_mode(), torch.profiler.profile(profile_memory=True) as profile:
            attend = attention.plan(rows)
            attend(1, queries, outputs)
        return sum(
            max(0, event.nbytes())
            for event in profile.profiler.kineto_results.events()
            if event.name() == "[memory]"
        )

    attended(
        kernel, [Rows(0, 60, 1, list(range(1, NUM_BLOCKS)))], queries_for(blocks, [Rows(0, 60, 1, [])], 1)
    )
    gathered = GatheredAttention(blocks)
    copied = 2 * 2000 * 2 * 16 * 4
    assert allocated(gathered, 2000) - allocated(gathered, 60) > copied * 0.9
    assert allocated(kernel, 2000) - allocated(kernel, 60) < copied / 50


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama")


def driver_of(checkpoint: Path, attention: str) -> Driver:
    return Driver(
        checkpoint,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS - 1,
        context_length=400,
        max_batched_tokens=96,
        attention=attention,
    )


@pytest.mark.slow
def test_an_engine_says_the_same_with_either_and_compiles_nothing_while_it_serves(checkpoint: Path) -> None:
    """Prompts that share prefixes, more tokens than the cache holds, long prefills in chunks."""
    rng = random.Random(5)
    prefixes = [[rng.randrange(6, VOCAB_SIZE) for _ in range(length)] for length in (0, 40, 130)]
    prompts = [
        rng.choice(prefixes) + [rng.randrange(6, VOCAB_SIZE) for _ in range(rng.randint(1, 200))]
        for _ in range(24)
    ]
    answers = []
    for attention in ("kernel", "gather"):
        driver = driver_of(checkpoint, attention)
        assert driver.engine.attention == attention
        torch.compiler.set_stance("fail_on_recompile")
        try:
            for prompt in prompts:
                driver.add(prompt, greedy(12))
                driver.step()
            answers.append([outcome.token_ids for outcome in driver.finish().values()])
        finally:
            torch.compiler.set_stance("default")
        assert driver.largest_batch > 8
        assert any(outcome.usage and outcome.usage.num_cached_tokens for outcome in driver.outcomes.values())
        driver.engine.close()
    assert answers[0] == answers[1]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="it is about a CPU")
def test_on_a_cpu_keys_are_gathered_unless_the_kernel_is_asked_for(checkpoint: Path) -> None:
    assert driver_of(checkpoint, "auto").engine.attention == "gather"


@pytest.mark.skipif(DEVICE.type != "cpu", reason="takes the C++ compiler away")
def test_a_kernel_that_cannot_be_compiled_is_said_once_and_done_without(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU: auto tries the kernel there, and a compiler that is missing is an error of torch's."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, "no-such-compiler"))
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    with pytest.raises(SettingsError, match="attention is kernel, which cannot be had here: "):
        driver_of(checkpoint, "kernel")
    monkeypatch.setattr(attention_module, "KERNEL_DEVICES", ("cpu", "cuda"))
    driver = driver_of(checkpoint, "auto")
    assert driver.engine.attention == "gather"
    ours = [record for record in caplog.records if record.name == attention_module.__name__]
    assert [record.levelname for record in ours] == ["WARNING"]
    assert len(driver.generate([7, 8, 9], 4).token_ids) == 4


def test_a_kernel_that_computes_something_else_is_not_used(
    blocks: KVBlocks, kernel: KernelAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = blocks_of(torch.float32, heads=(6, 2), head_dim=16)
    gathered = GatheredAttention(fresh)

    class Shifted(GatheredAttention):
        def plan(self, rows: Sequence[Rows]) -> CachedAttend:
            return super().plan([row._replace(start=max(0, row.start - 1)) for row in rows])

    sentence = complaint(Shifted(fresh), gathered, fresh)
    assert sentence is not None and sentence.startswith("its outputs differ from those of the gather by ")
    assert complaint(gathered, gathered, fresh) is None
