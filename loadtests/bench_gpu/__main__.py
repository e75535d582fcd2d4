"""Benchmarks our engine on a GPU: time to first token with and without a cached prefix, and decoding.

Builds the torch engine in this process, with random weights in the shape of a Llama, made on the device.
Nothing else runs: no router, no Redis, no Ray, no network, no checkpoint. Beside each figure is its share of
the device's best, by a matrix product and a copy that are measured first.

    python -m loadtests.bench_gpu                               an 8B Llama in bfloat16 on the GPU
    python -m loadtests.bench_gpu --attention gather kernel     both ways to cached keys, one after the other
    python -m loadtests.bench_gpu --shape tiny --device cpu     the benchmark itself, on any machine
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from loadtests.arguments import count
from loadtests.bench_gpu.device_limits import describe, free_bytes, measure_limits, wait_for
from loadtests.bench_gpu.model_work import (
    DeviceLimits,
    Extent,
    Work,
    kv_bytes_per_token,
    num_parameters,
    step_work,
)
from loadtests.bench_gpu.random_model import SHAPES, random_checkpoint
from loadtests.figures import percentiles, print_header
from replicas.checkpoints.model_config import ModelConfig
from replicas.config import ATTENTIONS, DEFAULT_BLOCK_SIZE, ReplicaConfig
from replicas.engine import expand
from replicas.process.settings import SettingsError
from replicas.protocol.blocks import HASH_BYTES, BlockHash, pack_token_ids
from replicas.protocol.frames import PromptUsage, RequestKey, SamplingParams, Submit
from replicas.torch_engine.engine import DTYPES, TorchEngine

Figures = TypeVar("Figures")
CLAIMED_PREFIX, CLAIMED_SAVING = 4096, 0.85
"""A common claim about prefix caching: a cached prefix of this length saves this share of the TTFT."""
ROOT = BlockHash(b"g" * HASH_BYTES)
UNMEASURED_STEPS = 3
USABLE_RATIO = 0.85
"""The share of the memory left by the weights that the cache may have; the rest is scratch memory."""


@dataclass(frozen=True, slots=True)
class TtftFigures:
    """Seconds of each round. `num_cached_tokens` is what the engine counted for every hit."""

    num_prompt_tokens: int
    num_cached_tokens: int
    misses: list[float]
    hits: list[float]

    @property
    def saving(self) -> float:
        return 1 - percentiles(self.hits).p50 / percentiles(self.misses).p50


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """Seconds of each step, and for each the work that it was."""

    batch: int
    steps: list[float]
    works: list[Work]

    @property
    def tokens_per_second(self) -> float:
        return self.batch * len(self.steps) / sum(self.steps)

    def share(self, limits: DeviceLimits) -> float:
        return sum(map(limits.least_seconds, self.works)) / sum(self.steps)


@dataclass(slots=True)
class Bench:
    """An engine with random weights, and the way to time it."""

    engine: TorchEngine
    model: ModelConfig
    device: torch.device
    itemsize: int
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    num_requests: int = 0

    def prompt(self, num_tokens: int) -> list[int]:
        return self.rng.choices(range(self.model.vocab_size), k=num_tokens)

    def add(self, token_ids: Sequence[int], max_tokens: int) -> RequestKey:
        number = self.num_requests
        self.num_requests += 1
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        submit = Submit(number, pack_token_ids(token_ids), sampling, ROOT)
        [request] = expand(submit, number)
        self.engine.add(request)
        return request.key

    def first_token(self, token_ids: Sequence[int]) -> tuple[float, PromptUsage]:
        """Seconds from a prompt's arrival to its only token, and how much of it was cached."""
        wait_for(self.device)
        started = time.perf_counter()
        self.add(token_ids, max_tokens=1)
        while not (deltas := self.engine.step().deltas):
            pass
        wait_for(self.device)
        seconds = time.perf_counter() - started
        assert deltas[0].usage is not None
        return seconds, deltas[0].usage

    def forget(self) -> None:
        assert self.engine.reset_prefix_cache(), "a request is still there"
        while self.engine.has_work():
            self.engine.step()

    def abandon(self) -> None:
        """End what a measurement has left that broke off."""
        for number in range(self.num_requests):
            self.engine.abort(RequestKey(number, 0))
        self.forget()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def ttft(self, num_prefix_tokens: int, num_question_tokens: int, rounds: int) -> TtftFigures:
        """A prompt that was never seen, then another question behind its prefix; one round unmeasured."""
        misses, hits, num_cached = [], [], 0
        for _ in range(rounds + 1):
            prefix = self.prompt(num_prefix_tokens)
            miss, first = self.first_token(prefix + self.prompt(num_question_tokens))
            hit, second = self.first_token(prefix + self.prompt(num_question_tokens))
            num_cached = second.num_cached_tokens or 0
            self._check(first.num_cached_tokens or 0, 0)
            self._check(num_cached, num_prefix_tokens // DEFAULT_BLOCK_SIZE * DEFAULT_BLOCK_SIZE)
            misses.append(miss)
            hits.append(hit)
            self.forget()
        return TtftFigures(num_prefix_tokens + num_question_tokens, num_cached, misses[1:], hits[1:])

    def decode(self, batch: int, num_context_tokens: int, num_steps: int) -> DecodeFigures:
        """Sequences with equally long prompts, which are in the cache already, so that all start at once."""
        prompts = [self.prompt(num_context_tokens) for _ in range(batch)]
        for prompt in prompts:
            self.first_token(prompt)
        most = answer_tokens(batch, num_steps)
        lengths = {self.add(prompt, max_tokens=most): num_context_tokens for prompt in prompts}
        started: set[RequestKey] = set()
        while len(started) < batch:
            started |= self._step(lengths)
        for _ in range(UNMEASURED_STEPS):
            self._step(lengths)
        seconds, works = [], []
        for _ in range(num_steps):
            extents = [Extent(length - 1, 1) for length in lengths.values()]
            works.append(step_work(self.model, extents, self.itemsize))
            begun = time.perf_counter()
            moved = self._step(lengths)
            seconds.append(time.perf_counter() - begun)
            assert len(moved) == batch, "a sequence stood still"
        for key in lengths:
            self.engine.abort(key)
        self.forget()
        return DecodeFigures(batch, seconds, works)

    def _step(self, lengths: dict[RequestKey, int]) -> set[RequestKey]:
        frame = self.engine.step()
        wait_for(self.device)
        for delta in frame.deltas:
            lengths[delta.key] += len(delta.token_ids)
        return {delta.key for delta in frame.deltas}

    def _check(self, num_cached: int, expected: int) -> None:
        if num_cached != expected:
            raise RuntimeError(f"{num_cached} tokens of a prompt were cached where {expected} should be")


def blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // DEFAULT_BLOCK_SIZE)


def answer_tokens(batch: int, num_steps: int) -> int:
    """More than a sequence decodes: a token in each step, and a batch has started after `batch` steps."""
    return batch + UNMEASURED_STEPS + num_steps + 1


def ttft_blocks(num_prefix_tokens: int, num_question_tokens: int) -> int:
    """A prefix once, and two questions with a token of answer each."""
    return blocks_of(num_prefix_tokens) + 2 * blocks_of(num_question_tokens + 1)


def decode_blocks(batch: int, num_context_tokens: int, num_steps: int) -> int:
    return batch * blocks_of(num_context_tokens + answer_tokens(batch, num_steps))


def block_needs(arguments: argparse.Namespace) -> list[int]:
    """Blocks that each measurement needs."""
    return [
        *(ttft_blocks(prefix, arguments.question) for prefix in arguments.prefixes),
        *(decode_blocks(batch, arguments.context, arguments.steps) for batch in arguments.batches),
    ]


def fitting_blocks(num_free_bytes: int, model: ModelConfig, itemsize: int) -> int:
    """KV blocks that there is room for beside the weights."""
    left = num_free_bytes - num_parameters(model) * itemsize
    bytes_per_block = DEFAULT_BLOCK_SIZE * kv_bytes_per_token(model, itemsize)
    return max(0, int(left * USABLE_RATIO)) // bytes_per_block


def build(
    arguments: argparse.Namespace, device: torch.device, num_blocks: int, attention: str = "auto"
) -> Bench:
    dtype, model = DTYPES[arguments.dtype], SHAPES[arguments.shape]
    longest = max(
        max(arguments.prefixes) + arguments.question + 1,
        arguments.context + answer_tokens(max(arguments.batches), arguments.steps),
    )
    config = ReplicaConfig(
        model_name=arguments.shape,
        device=arguments.device,
        dtype=arguments.dtype,
        num_blocks=num_blocks,
        context_length=longest,
        max_running=max(arguments.batches),
        attention=attention,
    )
    engine = TorchEngine(config, random_checkpoint(arguments.shape, device, dtype))
    return Bench(engine, model, device, dtype.itemsize)


def percent(ratio: float) -> str:
    return f"{ratio * 100:.1f} %"


def spread(seconds: Sequence[float]) -> str:
    found = percentiles(seconds)
    return f"{found.p50 * 1e3:,.2f} / {found.p90 * 1e3:,.2f}"


def share_of_limit(limits: DeviceLimits, work: Work, seconds: Sequence[float]) -> str:
    share = limits.least_seconds(work) / percentiles(seconds).p50
    return f"{percent(share)} ({limits.bound(work)})"


def ttft_row(bench: Bench, limits: DeviceLimits, figures: TtftFigures) -> str:
    whole, cached = figures.num_prompt_tokens, figures.num_cached_tokens
    miss = step_work(bench.model, [Extent(0, whole)], bench.itemsize)
    hit = step_work(bench.model, [Extent(cached, whole - cached)], bench.itemsize)
    return (
        f"| {whole:,} | {cached:,} | {spread(figures.misses)} | {spread(figures.hits)} "
        f"| {percent(figures.saving)} | {share_of_limit(limits, miss, figures.misses)} "
        f"| {share_of_limit(limits, hit, figures.hits)} |"
    )


def decode_row(limits: DeviceLimits, figures: DecodeFigures) -> str:
    middle = figures.works[len(figures.works) // 2]
    return (
        f"| {figures.batch} | {figures.tokens_per_second:,.1f} | {spread(figures.steps)} "
        f"| {middle.num_bytes / 1e6:,.2f} | {percent(figures.share(limits))} ({limits.bound(middle)}) |"
    )


def claim(figures: TtftFigures) -> str:
    verdict = "holds" if figures.saving >= CLAIMED_SAVING else "does not hold"
    return (
        f"That a cached prefix of {CLAIMED_PREFIX:,} tokens cuts the time to first token by "
        f"{CLAIMED_SAVING:.0%} {verdict} here: it is {percent(figures.saving)}."
    )


def attempt(bench: Bench, what: str, num_blocks: int, measure: Callable[[], Figures]) -> Figures | str:
    """The figures, or the sentence that says why there are none."""
    num_here = bench.engine.card.num_blocks
    if num_blocks > num_here:
        return f"Skipped: {what} takes {num_blocks:,} KV blocks, and {num_here:,} fit beside the weights."
    try:
        return measure()
    except torch.OutOfMemoryError:
        pass  # what the failed step held is let go with the exception, so the rest comes after it
    bench.abandon()
    return f"Skipped: {what} takes more scratch memory than the device has left."


def print_ttft(bench: Bench, limits: DeviceLimits, arguments: argparse.Namespace) -> None:
    """A row for each prefix, then what is to be said of those that are no rows."""
    print(f"\n### Time to first token, {arguments.rounds} rounds, miss and hit in turn\n")
    print("| prompt tokens | cached when hit | miss p50 / p90 ms | hit p50 / p90 ms | saved ", end="")
    print("| miss: share of limit | hit: share of limit |")
    print("|---|---|---|---|---|---|---|")
    remarks = []
    for prefix in arguments.prefixes:
        found = attempt(
            bench,
            f"a prefix of {prefix:,} tokens",
            ttft_blocks(prefix, arguments.question),
            partial(bench.ttft, prefix, arguments.question, arguments.rounds),
        )
        if isinstance(found, str):
            remarks.append(found)
            continue
        print(ttft_row(bench, limits, found), flush=True)
        if prefix == CLAIMED_PREFIX:
            remarks.append(claim(found))
    print_remarks(remarks)


def print_decode(bench: Bench, limits: DeviceLimits, arguments: argparse.Namespace) -> None:
    print(f"\n### Decoding behind {arguments.context:,} tokens, {arguments.steps} steps\n")
    print("| batch | tokens/s | step p50 / p90 ms | MB to read per step | share of limit |")
    print("|---|---|---|---|---|")
    remarks = []
    for batch in arguments.batches:
        found = attempt(
            bench,
            f"a batch of {batch} behind {arguments.context:,} tokens",
            decode_blocks(batch, arguments.context, arguments.steps),
            partial(bench.decode, batch, arguments.context, arguments.steps),
        )
        if isinstance(found, str):
            remarks.append(found)
        else:
            print(decode_row(limits, found), flush=True)
    print_remarks(remarks)


def print_remarks(remarks: Sequence[str]) -> None:
    for remark in remarks:
        print(f"\n{remark}")


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument(
        "--attention", choices=ATTENTIONS, nargs="+", default=["auto"], help="how cached keys are read"
    )
    parser.add_argument("--prefixes", type=count, nargs="+", default=[CLAIMED_PREFIX, 512, 16_384])
    parser.add_argument("--question", type=count, default=32, help="tokens behind the prefix")
    parser.add_argument("--rounds", type=count, default=9)
    parser.add_argument("--batches", type=count, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=count, default=1024, help="prompt tokens of decoding sequences")
    parser.add_argument("--steps", type=count, default=32)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 where nothing can be measured."""
    chosen = options().parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no GPU here; --device cpu measures the processor instead", file=sys.stderr)
        return 2
    device, dtype, model = torch.device(chosen.device), DTYPES[chosen.dtype], SHAPES[chosen.shape]
    num_free = free_bytes(device)
    num_fitting = fitting_blocks(num_free, model, dtype.itemsize)
    num_weight_bytes = num_parameters(model) * dtype.itemsize
    weights = f"{num_weight_bytes / 1e6:,.1f} MB of weights in {chosen.dtype}"
    if num_fitting < min(block_needs(chosen)):
        print(
            f"{chosen.shape} has {weights}, and {num_free / 1e6:,.1f} MB are free: take a smaller --shape",
            file=sys.stderr,
        )
        return 2
    print_header(f"GPU check: a random Llama of {num_parameters(model) / 1e6:,.1f} M parameters")
    print(f"device: {describe(device)}")
    limits, line = measure_limits(device, dtype)
    print(line, flush=True)
    num_blocks = min(max(block_needs(chosen)), num_fitting)
    print(f"engine: {weights}, {num_blocks:,} KV blocks of {DEFAULT_BLOCK_SIZE} tokens", flush=True)
    return max([measure(chosen, device, limits, num_blocks, attention) for attention in chosen.attention])


def measure(
    arguments: argparse.Namespace,
    device: torch.device,
    limits: DeviceLimits,
    num_blocks: int,
    attention: str,
) -> int:
    """All tables with one way to cached keys. 0, or 2 where it cannot be had."""
    started = time.perf_counter()
    try:
        bench = build(arguments, device, num_blocks, attention)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    seconds = time.perf_counter() - started
    print(
        f"\n## Attention: {bench.engine.attention}, wanted: {attention}, built in {seconds:.1f} s", flush=True
    )
    print_ttft(bench, limits, arguments)
    print_decode(bench, limits, arguments)
    bench.engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
