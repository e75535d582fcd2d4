"""What `loadtests.bench_gpu` computes, and a whole run of it on the CPU."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from loadtests.bench_gpu import __main__ as bench_gpu
from loadtests.bench_gpu.__main__ import Bench, DecodeFigures, TtftFigures
from loadtests.bench_gpu.model_work import (
    DeviceLimits,
    Extent,
    Work,
    kv_bytes_per_token,
    num_parameters,
    step_work,
)
from loadtests.bench_gpu.random_model import SHAPES, RandomCheckpoint, random_checkpoint
from replicas.protocol.frames import PromptUsage
from replicas.torch_engine import attention
from replicas.torch_engine.model import Decoder

pytestmark = pytest.mark.usefixtures("compiling")

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]
SMALL = (
    *("--shape", "tiny", "--device", "cpu", "--prefixes", "96", "50", "--question", "5", "--rounds", "1"),
    *("--batches", "1", "3", "--context", "32", "--steps", "2"),
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    built = bench_gpu.build(bench_gpu.options().parse_args(SMALL), CPU, num_blocks=32)
    yield built
    built.engine.close()


def test_the_shapes_have_as_many_parameters_as_the_models_that_they_are_named_for() -> None:
    assert num_parameters(SHAPES["8b"]) == 8_030_261_248
    assert num_parameters(SHAPES["1b"]) == 1_235_814_400
    assert kv_bytes_per_token(SHAPES["8b"], 2) == 131_072


def test_the_parameters_that_are_counted_are_those_that_the_model_reads() -> None:
    sizes: list[int] = []

    class Counting(RandomCheckpoint):
        __slots__ = ()

        def tensor(self, name: str, shape: Sequence[int]) -> torch.Tensor:
            made = RandomCheckpoint.tensor(self, name, shape)
            sizes.append(made.numel())
            return made

    made = random_checkpoint("tiny", CPU, torch.bfloat16)
    counting = Counting(made.directory, TINY, (), {}, CPU, torch.bfloat16)
    Decoder(counting, dtype=torch.bfloat16, device=CPU)
    # Each layer 64 x 128 + 64 x 64 + 3 x 64 x 128 = 36,864, twice 512 x 64 around them, five norms of 64.
    assert sum(sizes) == num_parameters(TINY) == 2 * 36_864 + 2 * 32_768 + 5 * 64


def test_weights_are_the_same_each_time_and_differ_between_matrices() -> None:
    made = random_checkpoint("tiny", CPU, torch.float32)
    first, again = made.tensor("a.weight", (8, 8)), made.tensor("a.weight", (8, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, made.tensor("b.weight", (8, 8)))
    assert torch.equal(made.tensor("model.norm.weight", (4,)), torch.ones(4))


def test_a_prefill_behind_a_prefix() -> None:
    # 4 new tokens behind 16: 4 x 16 + 4 + 3 + 2 + 1 = 74 pairs of query and key, each 16 multiplications and
    # additions for its score and as many for its value, in 4 heads of 2 layers.
    matrices, attention, head = 2 * 4 * 73_728, 74 * (2 * 2 * 16) * 4 * 2, 2 * 32_768
    # Keys and values of a token: 2 x 2 layers x 2 heads x 16 numbers of 2 bytes.
    weights, cached = (73_728 + 32_768) * 2, 16 * 256
    assert step_work(TINY, [Extent(16, 4)], 2) == Work(matrices + attention + head, weights + cached)
    assert step_work(TINY, [Extent(16, 4)], 2) == Work(693_248, 217_088)


def test_a_step_of_decoding_reads_weights_once_and_the_keys_of_each_sequence() -> None:
    assert step_work(TINY, [Extent(10, 1), Extent(20, 1)], 2) == Work(442_368, 212_992 + 30 * 256)
    assert step_work(TINY, [Extent(10, 1), Extent(20, 1)], 4).num_bytes == 2 * (212_992 + 30 * 256)


def test_the_longer_of_arithmetic_and_memory_is_the_limit() -> None:
    limits = DeviceLimits(flops_per_second=1e6, bytes_per_second=2e6)
    assert limits.least_seconds(Work(500_000, 400_000)) == 0.5
    assert limits.bound(Work(500_000, 400_000)) == "FLOPs"
    assert limits.least_seconds(Work(100_000, 400_000)) == 0.2
    assert limits.bound(Work(100_000, 400_000)) == "bytes"
    assert bench_gpu.share_of_limit(limits, Work(500_000, 0), [2.0, 1.0, 9.0]) == "25.0 % (FLOPs)"


def test_a_saving_is_that_of_the_medians_and_is_held_against_what_is_said() -> None:
    figures = TtftFigures(4128, 4096, misses=[9.0, 2.0, 1.0], hits=[0.1, 0.3, 4.0])
    assert figures.saving == pytest.approx(0.85)
    assert bench_gpu.claim(TtftFigures(4128, 4096, [2.0], [0.25])).endswith("holds here: it is 87.5 %.")
    assert bench_gpu.claim(TtftFigures(4128, 4096, [2.0], [0.5])).endswith("not hold here: it is 75.0 %.")


def test_decoding_is_counted_over_all_steps() -> None:
    figures = DecodeFigures(4, [0.5, 1.5], [Work(100_000, 200_000), Work(300_000, 200_000)])
    assert figures.tokens_per_second == 4.0
    assert figures.share(DeviceLimits(1e6, 1e6)) == pytest.approx((0.2 + 0.3) / 2.0)


def test_a_hit_is_what_the_engine_has_read_from_its_cache(bench: Bench) -> None:
    figures = bench.ttft(50, 5, 2)
    assert (figures.num_prompt_tokens, figures.num_cached_tokens) == (55, 48)
    assert len(figures.misses) == len(figures.hits) == 2


def test_a_hit_that_is_none_is_no_figure(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Bench.first_token

    def ask_a_forgetful_engine(self: Bench, token_ids: Sequence[int]) -> tuple[float, PromptUsage]:
        self.forget()
        return ask(self, token_ids)

    monkeypatch.setattr(Bench, "first_token", ask_a_forgetful_engine)
    with pytest.raises(RuntimeError, match="0 tokens of a prompt were cached where 48 should be"):
        bench.ttft(50, 5, 1)


def test_each_step_is_counted_with_the_tokens_that_are_there_by_then(bench: Bench) -> None:
    figures = bench.decode(2, 32, 2)
    assert (figures.batch, len(figures.steps)) == (2, 2)
    # The first token, three steps unmeasured: the newest of 36 tokens is computed, behind 35.
    assert figures.works == [step_work(TINY, [Extent(before, 1)] * 2, 2) for before in (35, 36)]
    assert not bench.engine.has_work()


def test_the_cache_takes_what_the_weights_leave() -> None:
    weights, block = num_parameters(TINY) * 2, 16 * 256
    assert bench_gpu.fitting_blocks(weights + 100 * block, TINY, 2) == 85
    assert bench_gpu.fitting_blocks(weights - 1, TINY, 2) == 0
    assert bench_gpu.ttft_blocks(50, 5) == 4 + 2
    assert bench_gpu.decode_blocks(3, 32, 2) == 3 * 3  # 32 tokens and at most 9 of answer


def test_what_does_not_fit_is_skipped_and_the_rest_is_measured(bench: Bench) -> None:
    def runs_out() -> TtftFigures:
        bench.add(bench.prompt(40), max_tokens=9)
        bench.engine.step()
        raise torch.OutOfMemoryError

    sentence = bench_gpu.attempt(bench, "a batch of 64", 33, lambda: bench.ttft(50, 5, 1))
    assert sentence == "Skipped: a batch of 64 takes 33 KV blocks, and 32 fit beside the weights."
    sentence = bench_gpu.attempt(bench, "a batch of 3", 32, runs_out)
    assert sentence == "Skipped: a batch of 3 takes more scratch memory than the device has left."
    assert not bench.engine.has_work()
    assert isinstance(
        bench_gpu.attempt(bench, "a batch of 2", 32, lambda: bench.decode(2, 32, 2)), DecodeFigures
    )


def check_tables(output: str) -> None:
    rows = [line.split(" | ") for line in output.splitlines() if line.startswith("| ")]
    assert [row[0].strip("| ") for row in rows] == ["prompt tokens", "101", "55", "batch", "1", "3"]
    assert [row[1] for row in rows[1:3]] == ["96", "48"]


def test_a_whole_run_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_gpu.main(SMALL) == 0
    output = capsys.readouterr().out
    check_tables(output)
    assert "## Attention: gather, wanted: auto, built in " in output


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_both_ways_to_cached_keys_in_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_gpu.main((*SMALL, "--attention", "gather", "kernel")) == 0
    _, gather, kernel = capsys.readouterr().out.split("\n## ")
    check_tables(gather)
    check_tables(kernel)
    assert gather.startswith("Attention: gather, wanted: gather")
    assert kernel.startswith("Attention: kernel, wanted: kernel")


def test_a_way_that_cannot_be_had_is_told_and_the_other_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "complaint", lambda *_: "there is no compiler")
    assert bench_gpu.main((*SMALL, "--attention", "kernel", "gather")) == 2
    printed = capsys.readouterr()
    check_tables(printed.out)
    assert printed.err == "setting attention is kernel, which cannot be had here: there is no compiler\n"


def test_a_model_that_does_not_fit_is_told_in_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_gpu, "free_bytes", lambda _: 2_000_000)
    assert bench_gpu.main(["--shape", "8b", "--device", "cpu"]) == 2
    expected = "8b has 16,060.5 MB of weights in bfloat16, and 2.0 MB are free: take a smaller --shape\n"
    assert capsys.readouterr() == ("", expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_gpu.main([]) == 2
    expected = "torch finds no GPU here; --device cpu measures the processor instead\n"
    assert capsys.readouterr() == ("", expected)
