"""Benchmarks our engine on a GPU: time to first token with and without a cached prefix, and decoding.

Builds the torch engine in this process, with random weights in the shape of a Llama, made on the device:
no router, no network, no checkpoint. Beside each figure is its share of the device's best, by a matrix
product and a copy that are measured first.

    python -m loadtests.bench_gpu                               an 8B Llama in bfloat16 on the GPU
    python -m loadtests.bench_gpu --attention gather kernel     both ways to cached keys, one after the other
    python -m loadtests.bench_gpu --shape tiny --device cpu     the benchmark itself, on any machine
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence

import psutil
import torch

from loadtests.arguments import count
from loadtests.bench_gpu.work import (
    SHAPES,
    DeviceLimits,
    Extent,
    kv_bytes_per_token,
    num_parameters,
    random_checkpoint,
    step_work,
)
from loadtests.figures import percentiles, print_header
from replicas.config import ATTENTIONS, DEFAULT_BLOCK_SIZE, ReplicaConfig
from replicas.engine import expand
from replicas.process.settings import SettingsError
from replicas.protocol.blocks import HASH_BYTES, BlockHash, pack_token_ids
from replicas.protocol.frames import RequestKey, SamplingParams, Submit
from replicas.torch_engine.engine import DTYPES, TorchEngine

ROOT = BlockHash(b"g" * HASH_BYTES)
UNMEASURED_STEPS = 3
USABLE_RATIO = 0.85
"""The share of the memory left by the weights that the cache may have; the rest is scratch memory."""


class Bench:
    """An engine with random weights, and the way to time it."""

    def __init__(self, arguments: argparse.Namespace, num_blocks: int, attention: str) -> None:
        self.device, dtype = torch.device(arguments.device), DTYPES[arguments.dtype]
        self.model, self.itemsize = SHAPES[arguments.shape], dtype.itemsize
        config = ReplicaConfig(
            model_name=arguments.shape,
            device=arguments.device,
            dtype=arguments.dtype,
            num_blocks=num_blocks,
            context_length=max(
                max(arguments.prefixes) + arguments.question + 1,
                arguments.context + answer_tokens(max(arguments.batches), arguments.steps),
            ),
            max_running=max(arguments.batches),
            attention=attention,
        )
        self.engine = TorchEngine(config, random_checkpoint(arguments.shape, self.device, dtype))
        self._rng, self._num_requests = random.Random(1), 0

    def prompt(self, num_tokens: int) -> list[int]:
        return self._rng.choices(range(self.model.vocab_size), k=num_tokens)

    def add(self, token_ids: Sequence[int], max_tokens: int) -> RequestKey:
        number = self._num_requests
        self._num_requests += 1
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        [request] = expand(Submit(number, pack_token_ids(token_ids), sampling, ROOT), number)
        self.engine.add(request)
        return request.key

    def first_token(self, token_ids: Sequence[int], num_expected: int | None = None) -> float:
        """Return seconds from a prompt's arrival to its only token; check how much of it was cached."""
        wait_for(self.device)
        started = time.perf_counter()
        self.add(token_ids, max_tokens=1)
        while not (deltas := self.engine.step().deltas):
            pass
        wait_for(self.device)
        seconds = time.perf_counter() - started
        num_cached = (deltas[0].usage and deltas[0].usage.num_cached_tokens) or 0
        if num_expected not in (None, num_cached):
            raise RuntimeError(f"{num_cached} tokens of a prompt were cached where {num_expected} should be")
        return seconds

    def forget(self) -> None:
        """End what a measurement has left, and empty the cache."""
        for number in range(self._num_requests):
            self.engine.abort(RequestKey(number, 0))
        assert self.engine.reset_prefix_cache(), "a request is still there"
        while self.engine.has_work():
            self.engine.step()

    def ttft(self, num_prefix: int, num_question: int, rounds: int, limits: DeviceLimits) -> str:
        """Return the row of prompts never seen, then other questions behind their prefixes."""
        misses, hits = [], []
        num_cached = num_prefix // DEFAULT_BLOCK_SIZE * DEFAULT_BLOCK_SIZE
        for _ in range(rounds + 1):  # one unmeasured
            prefix = self.prompt(num_prefix)
            misses.append(self.first_token(prefix + self.prompt(num_question), 0))
            hits.append(self.first_token(prefix + self.prompt(num_question), num_cached))
            self.forget()
        whole = num_prefix + num_question
        miss, hit = percentiles(misses[1:]).p50, percentiles(hits[1:]).p50
        work_of_miss = step_work(self.model, [Extent(0, whole)], self.itemsize)
        work_of_hit = step_work(self.model, [Extent(num_cached, whole - num_cached)], self.itemsize)
        return (
            f"| {whole:,} | {num_cached:,} | {spread(misses[1:])} | {spread(hits[1:])} "
            f"| {1 - hit / miss:.1%} "
            f"| {limits.share(work_of_miss, miss)} | {limits.share(work_of_hit, hit)} |"
        )

    def decode(self, batch: int, num_context: int, num_steps: int, limits: DeviceLimits) -> str:
        """Return the row of sequences with equally long prompts, which are in the cache already."""
        prompts = [self.prompt(num_context) for _ in range(batch)]
        for prompt in prompts:
            self.first_token(prompt)
        lengths = {self.add(prompt, answer_tokens(batch, num_steps)): num_context for prompt in prompts}
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
            assert len(self._step(lengths)) == batch, "a sequence stood still"
            seconds.append(time.perf_counter() - begun)
        self.forget()
        middle, least = works[num_steps // 2], sum(map(limits.least_seconds, works))
        share = limits.share(middle, limits.least_seconds(middle) * sum(seconds) / least)
        return (
            f"| {batch} | {batch * num_steps / sum(seconds):,.1f} | {spread(seconds)} "
            f"| {middle.num_bytes / 1e6:,.2f} | {share} |"
        )

    def _step(self, lengths: dict[RequestKey, int]) -> set[RequestKey]:
        deltas = self.engine.step().deltas
        wait_for(self.device)
        for delta in deltas:
            lengths[delta.key] += len(delta.token_ids)
        return {delta.key for delta in deltas}

    def attempt(self, what: str, num_blocks: int, measure: Callable[[], str]) -> None:
        """Print the row, or the sentence that says why there is none."""
        num_here = self.engine.card.num_blocks
        if num_blocks > num_here:
            fitting = f"{num_blocks:,} KV blocks, and {num_here:,} fit beside the weights"
            print(f"Skipped: {what} takes {fitting}.", file=sys.stderr)
            return
        try:
            print(measure(), flush=True)
            return
        except torch.OutOfMemoryError:
            pass  # what the failed step held is let go with the exception, so the rest comes after it
        self.forget()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"Skipped: {what} takes more scratch memory than the device has left.", file=sys.stderr)


def wait_for(device: torch.device) -> None:
    """Wait for a GPU's queue; a CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_limits(device: torch.device, dtype: torch.dtype) -> tuple[DeviceLimits, str]:
    """Return the best of several rounds each, over random numbers; and a line that says what was done."""
    size, num_bytes, num_calls = (8192, 2**30, 20) if device.type == "cuda" else (1024, 2**26, 1)

    def best(call: Callable[[], object]) -> float:
        rounds = []
        for _ in range(6):
            wait_for(device)
            started = time.perf_counter()
            for _ in range(num_calls):
                call()
            wait_for(device)
            rounds.append((time.perf_counter() - started) / num_calls)
        return min(rounds[1:])

    left, right = (torch.randn((size, size), device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    flops_per_second = 2 * size**3 / best(lambda: torch.mm(left, right, out=product))
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    bytes_per_second = 2 * num_bytes / best(lambda: target.copy_(source))
    return DeviceLimits(flops_per_second, bytes_per_second), (
        f"limits: {flops_per_second / 1e12:,.2f} TFLOP/s in a product of {size} x {size} matrices, "
        f"{bytes_per_second / 1e9:,.1f} GB/s read and written in a copy of {num_bytes // 2**20} MiB"
    )


def free_bytes(device: torch.device) -> int:
    is_gpu = device.type == "cuda"
    return int(torch.cuda.mem_get_info(device)[0] if is_gpu else psutil.virtual_memory().available)


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, torch {torch.__version__}"
    return f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"


def blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // DEFAULT_BLOCK_SIZE)


def answer_tokens(batch: int, num_steps: int) -> int:
    """Bound what a sequence decodes: a token in each step, and a batch has started after `batch` steps."""
    return batch + UNMEASURED_STEPS + num_steps + 1


def spread(seconds: Sequence[float]) -> str:
    found = percentiles(seconds)
    return f"{found.p50 * 1e3:,.2f} / {found.p90 * 1e3:,.2f}"


def block_needs(arguments: argparse.Namespace) -> tuple[dict[int, int], dict[int, int]]:
    """Return the blocks of each prefix with two questions, and of each batch."""
    question = 2 * blocks_of(arguments.question + 1)
    return (
        {prefix: blocks_of(prefix) + question for prefix in arguments.prefixes},
        {
            batch: batch * blocks_of(arguments.context + answer_tokens(batch, arguments.steps))
            for batch in arguments.batches
        },
    )


def options() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="8b")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--attention", choices=ATTENTIONS, nargs="+", default=["auto"], help="how cached keys are read")
    add("--prefixes", type=count, nargs="+", default=[4096, 512, 16_384])
    add("--question", type=count, default=32, help="tokens behind the prefix")
    add("--rounds", type=count, default=9)
    add("--batches", type=count, nargs="+", default=[1, 16, 64])
    add("--context", type=count, default=1024, help="prompt tokens of decoding sequences")
    add("--steps", type=count, default=32)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, or 2 where nothing can be measured."""
    chosen = options().parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no GPU here; --device cpu measures the processor instead", file=sys.stderr)
        return 2
    device, dtype, model = torch.device(chosen.device), DTYPES[chosen.dtype], SHAPES[chosen.shape]
    num_weight_bytes, num_free = num_parameters(model) * dtype.itemsize, free_bytes(device)
    weights = f"{num_weight_bytes / 1e6:,.1f} MB of weights in {chosen.dtype}"
    bytes_per_block = DEFAULT_BLOCK_SIZE * kv_bytes_per_token(model, dtype.itemsize)
    num_fitting = int(max(0, num_free - num_weight_bytes) * USABLE_RATIO) // bytes_per_block
    needs = [need for each in block_needs(chosen) for need in each.values()]
    if num_fitting < min(needs):
        small = f"{num_free / 1e6:,.1f} MB are free: take a smaller --shape"
        print(f"{chosen.shape} has {weights}, and {small}", file=sys.stderr)
        return 2
    print_header(f"GPU check: a random Llama of {num_parameters(model) / 1e6:,.1f} M parameters")
    limits, line = measure_limits(device, dtype)
    num_blocks = min(max(needs), num_fitting)
    print(f"device: {describe(device)}\n{line}")
    print(f"engine: {weights}, {num_blocks:,} KV blocks of {DEFAULT_BLOCK_SIZE} tokens", flush=True)
    return max([measure(chosen, limits, num_blocks, attention) for attention in chosen.attention])


def measure(arguments: argparse.Namespace, limits: DeviceLimits, num_blocks: int, attention: str) -> int:
    """Print all tables with one way to cached keys. Return 0, or 2 where it cannot be had."""
    started = time.perf_counter()
    try:
        bench = Bench(arguments, num_blocks, attention)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    seconds, context = time.perf_counter() - started, arguments.context
    print(f"\n## Attention: {bench.engine.attention}, wanted: {attention}, built in {seconds:.1f} s")
    of_prefixes, of_batches = block_needs(arguments)
    print(f"\n### Time to first token, {arguments.rounds} rounds, miss and hit in turn\n")
    print("| prompt tokens | cached when hit | miss p50 / p90 ms | hit p50 / p90 ms | saved ", end="")
    print("| miss: share of limit | hit: share of limit |\n|---|---|---|---|---|---|---|")
    for prefix, need in of_prefixes.items():
        asked = prefix, arguments.question, arguments.rounds, limits
        bench.attempt(f"a prefix of {prefix:,} tokens", need, lambda asked=asked: bench.ttft(*asked))  # type: ignore[misc]
    print(f"\n### Decoding behind {context:,} tokens, {arguments.steps} steps\n")
    print(
        "| batch | tokens/s | step p50 / p90 ms | MB to read per step | share of limit |\n" + "|---" * 5 + "|"
    )
    for batch, need in of_batches.items():
        wanted = batch, context, arguments.steps, limits
        what = f"a batch of {batch} behind {context:,} tokens"
        bench.attempt(what, need, lambda wanted=wanted: bench.decode(*wanted))  # type: ignore[misc]
    bench.engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
