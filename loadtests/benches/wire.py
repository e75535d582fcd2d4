"""Measures the cost of writing and reading a frame between router and replica.

Frames of 1, 32 and 64 deltas of one token each, as a replica sends them with every step, and of one submit of
1,000 and of 100,000 tokens, as a router sends it with every request. Times are CPU seconds of the thread, the
least of several rounds; reading includes all checks, and unpacking the tokens where the engine does it.

    python -m loadtests.benches.wire
"""

import time
from collections.abc import Callable
from functools import partial

from loadtests.benches.harness import bench_options
from loadtests.figures import print_header
from replicas.protocol.blocks import BlockHash, pack_token_ids
from replicas.protocol.frames import (
    LoadSnapshot,
    RequestKey,
    SamplingParams,
    ServerFrame,
    Submit,
    TokenDelta,
)
from replicas.protocol.wire import (
    checked_delta,
    decode_client_frame,
    decode_server_frame,
    encode,
    encode_client_frame,
    encode_submit,
)

ROUNDS = 9
VOCABULARY = 150_000

LOAD = LoadSnapshot(
    num_running=30,
    num_waiting=4,
    num_pending_tokens=4_000,
    num_context_tokens=50_000,
    num_used_blocks=3_000,
    num_cached_blocks=20_000,
    num_total_blocks=30_000,
    prefill_seconds_per_token=1e-4,
    decode_step_seconds=0.02,
)
SAMPLING = SamplingParams(max_tokens=32, temperature=0.7, top_p=0.95, seed=2**60)


def frame_of(num_deltas: int) -> ServerFrame:
    deltas = (TokenDelta(RequestKey(100_000 + n, 0), (30_000 + n,)) for n in range(num_deltas))
    return ServerFrame(tuple(deltas), LOAD, 100_000)


def submit_of(num_tokens: int) -> Submit:
    token_ids = [n * 7919 % VOCABULARY for n in range(num_tokens)]
    return Submit(100_000, pack_token_ids(token_ids), SAMPLING, BlockHash(bytes(16)), request_id="r" * 20)


def written(submit: Submit) -> bytes:
    """Encode as a router does: encoded and tried alone, then put into a frame."""
    return encode_client_frame([encode_submit(submit)])


def read_frame(encoded: bytes) -> None:
    for delta in decode_server_frame(encoded).deltas:
        checked_delta(delta, VOCABULARY)


def read_submit(encoded: bytes) -> None:
    decode_client_frame(encoded).submits[0].token_ids()


def microseconds(work: Callable[[], object], repeats: int) -> float:
    rounds: list[float] = []
    for _ in range(ROUNDS):
        started = time.thread_time()
        for _ in range(repeats):
            work()
        rounds.append((time.thread_time() - started) / repeats)
    return min(rounds) * 1e6


def main() -> None:
    options = bench_options(__doc__)
    options.add_argument("--repeats", type=int, default=5000, help="of the smallest; the others take fewer")
    repeats: int = options.parse_args().repeats
    print_header(f"Frames between router and replica, the least of {ROUNDS} rounds")
    print("| | bytes | written, µs | read, µs |\n|---|---|---|---|")
    for num_deltas in (1, 32, 64):
        frame = frame_of(num_deltas)
        encoded, times = encode(frame), max(1, repeats // num_deltas)
        write = microseconds(partial(encode, frame), times)
        read = microseconds(partial(read_frame, encoded), times)
        print(f"| frame of {num_deltas} deltas | {len(encoded):,} | {write:.2f} | {read:.2f} |")
    for num_tokens in (1_000, 100_000):
        submit = submit_of(num_tokens)
        encoded, times = written(submit), max(1, repeats * 50 // num_tokens)
        write = microseconds(partial(written, submit), times)
        read = microseconds(partial(read_submit, encoded), times)
        print(f"| submit of {num_tokens:,} tokens | {len(encoded):,} | {write:.1f} | {read:.1f} |")


if __name__ == "__main__":
    main()
