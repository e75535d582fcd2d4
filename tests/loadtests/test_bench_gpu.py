"""What `loadtests.bench_gpu` computes, and a whole run of it on the CPU."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from loadtests.bench_gpu import __main__ as bench_gpu
from loadtests.bench_gpu.__main__ import Bench
from loadtests.bench_gpu.work import (
    SHAPES,
    DeviceLimits,
    Extent,
    RandomCheckpoint,
    Work,
    kv_bytes_per_token,
    num_parameters,
    random_checkpoint,
    step_work,
)
from replicas.torch_engine.model import Decoder

pytestmark = pytest.mark.usefixtures("compiling")

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]
LIMITS = DeviceLimits(flops_per_second=1e6, bytes_per_second=2e6)
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
    built = Bench(bench_gpu.options().parse_args(SMALL), 32, "auto")
    yield built
    built.engine.close()


def test_the_parameters_that_are_counted_are_those_that_the_model_reads() -> None:
    sizes: list[int] = []

    class Counting(RandomCheckpoint):
        __slots__ = ()

        def tensor(self, name: str, shape: Sequence[int]) -> torch.Tensor:
            made = RandomCheckpoint.tensor(self, name, shape)
            sizes.append(made.numel())
            return made

    made = random_checkpoint("tiny", CPU, torch.bfloat16)
    Decoder(Counting(made.directory, TINY, (), {}, CPU, torch.bfloat16), dtype=torch.bfloat16, device=CPU)
    # Each layer 64 x 128 + 64 x 64 + 3 x 64 x 128 = 36,864, twice 512 x 64 around them, five norms of 64.
    assert sum(sizes) == num_parameters(TINY) == 2 * 36_864 + 2 * 32_768 + 5 * 64
    assert num_parameters(SHAPES["8b"]) == 8_030_261_248
    assert num_parameters(SHAPES["1b"]) == 1_235_814_400
    assert kv_bytes_per_token(SHAPES["8b"], 2) == 131_072


def test_weights_are_the_same_each_time_and_differ_between_matrices() -> None:
    made = random_checkpoint("tiny", CPU, torch.float32)
    first, again = made.tensor("a.weight", (8, 8)), made.tensor("a.weight", (8, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, made.tensor("b.weight", (8, 8)))
    assert torch.equal(made.tensor("model.norm.weight", (4,)), torch.ones(4))


def test_the_work_of_a_prefill_behind_a_prefix_and_of_a_step_of_decoding() -> None:
    # 4 new tokens behind 16: 4 x 16 + 4 + 3 + 2 + 1 = 74 pairs of query and key, each 16 multiplications and
    # additions for its score and as many for its value, in 4 heads of 2 layers.
    matrices, scores, head = 2 * 4 * 73_728, 74 * (2 * 2 * 16) * 4 * 2, 2 * 32_768
    # Keys and values of a token: 2 x 2 layers x 2 heads x 16 numbers of 2 bytes.
    weights, cached = (73_728 + 32_768) * 2, 16 * 256
    assert step_work(TINY, [Extent(16, 4)], 2) == Work(matrices + scores + head, weights + cached)
    assert step_work(TINY, [Extent(10, 1), Extent(20, 1)], 2) == Work(442_368, 212_992 + 30 * 256)
    assert step_work(TINY, [Extent(10, 1), Extent(20, 1)], 4).num_bytes == 2 * (212_992 + 30 * 256)


def test_the_longer_of_arithmetic_and_memory_is_the_limit() -> None:
    assert LIMITS.least_seconds(Work(500_000, 400_000)) == 0.5
    assert LIMITS.share(Work(500_000, 400_000), 2.0) == "25.0% (FLOPs)"
    assert LIMITS.share(Work(100_000, 400_000), 2.0) == "10.0% (bytes)"


def test_a_hit_that_is_none_is_no_figure(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.ttft(50, 5, 2, LIMITS).startswith("| 55 | 48 | ")
    ask = Bench.first_token

    def ask_a_forgetful_engine(self: Bench, token_ids: Sequence[int], num_expected: int | None) -> float:
        self.forget()
        return ask(self, token_ids, num_expected)

    monkeypatch.setattr(Bench, "first_token", ask_a_forgetful_engine)
    with pytest.raises(RuntimeError, match="0 tokens of a prompt were cached where 48 should be"):
        bench.ttft(50, 5, 1, LIMITS)
    bench.forget()


def test_each_step_is_counted_with_the_tokens_that_are_there_by_then(bench: Bench) -> None:
    # The first token, three steps unmeasured: the newest of 36, then 37 tokens is computed.
    expected = step_work(TINY, [Extent(36, 1)] * 2, 2).num_bytes / 1e6
    row = bench.decode(2, 32, 2, LIMITS).split(" | ")
    assert (row[0], row[3]) == ("| 2", f"{expected:,.2f}")
    assert not bench.engine.has_work()


def test_what_does_not_fit_is_skipped_and_the_rest_is_measured(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    def runs_out() -> str:
        bench.add(bench.prompt(40), max_tokens=9)
        bench.engine.step()
        raise torch.OutOfMemoryError

    bench.attempt("a batch of 64", 33, lambda: bench.ttft(50, 5, 1, LIMITS))
    bench.attempt("a batch of 3", 32, runs_out)
    assert capsys.readouterr().err.splitlines() == [
        "Skipped: a batch of 64 takes 33 KV blocks, and 32 fit beside the weights.",
        "Skipped: a batch of 3 takes more scratch memory than the device has left.",
    ]
    assert not bench.engine.has_work()
    bench.attempt("a batch of 2", 32, lambda: bench.decode(2, 32, 2, LIMITS))
    assert capsys.readouterr().out.startswith("| 2 | ")


def check_tables(output: str) -> None:
    rows = [line.split(" | ") for line in output.splitlines() if line.startswith("| ")]
    assert [row[0].strip("| ") for row in rows] == ["prompt tokens", "101", "55", "batch", "1", "3"]
    assert [row[1] for row in rows[1:3]] == ["96", "48"]


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
