"""Measures a routing decision, from 2 to 1,000 replicas, and the index behind it.

Calls the parts of a decision as the router does, in one process and without a network: the hashes of a prompt
of 4,096 tokens, its bucket, the overlaps, the decision, reservation and prediction, and giving all of it
back. Times are CPU seconds of the thread, so that other work on the machine counts little. Prompts are cold
(no replica holds any of them), warm (one replica holds seven eighths) or hot (besides, every replica holds
the first half). Blocks that a replica holds were hashed by this router before. First with memory below the
device and without it, in turns; then without for every size of fleet, the rate at which the index takes in
changes, and how long the event loop stands still when a replica comes or goes. The index's memory is a row of
the ratchet.

    python -m loadtests.benches.decision
"""

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from loadtests.benches.harness import bench_options
from loadtests.figures import percentiles, print_header
from replicas.protocol.blocks import HASH_BYTES, BlockHash, hash_blocks, pack_token_ids
from replicas.protocol.events import Tier
from replicas.protocol.frames import LoadSnapshot
from replicas.protocol.keys import IndexChange, decode_change, encode_change
from replicas.protocol.status import Epoch, ModelCard, ReplicaId
from router.prompt.chains import ChainHasher
from router.routing.bucket import bucket_of
from router.routing.cost import CostParameters
from router.routing.decision import Replicas, RoutingRequest
from router.routing.holders import StagedHashes
from router.routing.levels import Overlaps
from router.routing.overlap import ChangeOutcome, PrefixIndex
from router.routing.policies import POLICIES
from router.routing.table import RoutingTable

MODEL = "model"
LAYOUT = "one"
"""KV layout of every replica: each may pull from every other."""
ROOT = BlockHash(b"r" * HASH_BYTES)
EPOCH = Epoch("e")
INDEX_STRIDE = 128
FLEET_SIZES = (2, 8, 16, 64, 256, 1000)
NUM_TOKENS = 4096
NUM_HELD = NUM_TOKENS * 7 // 8
NUM_EVERYWHERE = NUM_TOKENS // 2
BATCH = 10
HASHES_PER_CHANGE = 8
HASHES_PER_SCAN = 2048
TIERED_FLEET_SIZES = (8, 1000)
MEASURED_SPEEDS = {
    "host_seconds_per_token": 5e-6,
    "disk_seconds_per_token": 2.5e-5,
    "pull_seconds_per_token": 1.3e-5,
    "move_backlog_seconds": 0.005,
}
STAGES = ("hash", "bucket", "overlap", "decide", "reserve+predict", "release")


@dataclass(frozen=True, slots=True)
class HeldPrompt:
    token_ids: list[int]
    holders: tuple[ReplicaId, ...]
    """Replicas with the first NUM_HELD tokens."""


def random_hashes(rng: random.Random, count: int) -> list[BlockHash]:
    packed = rng.randbytes(count * HASH_BYTES)
    return [BlockHash(packed[start : start + HASH_BYTES]) for start in range(0, len(packed), HASH_BYTES)]


def prompts(kind: str, replica_ids: Sequence[ReplicaId], count: int, rng: random.Random) -> list[HeldPrompt]:
    shared = rng.choices(range(150_000), k=NUM_EVERYWHERE) if kind == "hot" else []
    return [
        HeldPrompt(
            shared + rng.choices(range(150_000), k=NUM_TOKENS - len(shared)),
            () if kind == "cold" else (rng.choice(replica_ids),),
        )
        for _ in range(count)
    ]


def filled_table(
    asked: Sequence[HeldPrompt],
    kind: str,
    num_replicas: int,
    num_hashes: int,
    block_size: int,
    *,
    has_tiers: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> RoutingTable:
    """Busy replicas, whose caches hold what the prompts say and `num_hashes` others together. With tiers, a
    third of each lies in host memory and a third on disk: of a prompt, what is deepest.
    """
    rng = random.Random(num_replicas)
    card = ModelCard(MODEL, "", "simulated", block_size, 1000, 100_000, 1000, kv_layout=LAYOUT)
    table = RoutingTable("kvasir", CostParameters(), rng, clock=clock)
    held: dict[ReplicaId, dict[BlockHash, Tier]] = {}
    for number in range(num_replicas):
        replica_id = ReplicaId(f"replica-{number}")
        table.add_replica(replica_id, card, INDEX_STRIDE)
        held[replica_id] = in_tiers(random_hashes(rng, num_hashes // num_replicas), has_tiers=has_tiers)
        num_running = rng.randrange(20)
        snapshot = LoadSnapshot(
            num_running=num_running,
            num_pending_tokens=rng.randrange(8000),
            num_context_tokens=4000 * num_running,
            prefill_seconds_per_token=3e-5,
            decode_step_seconds=0.01,
        )
        if has_tiers:
            snapshot = msgspec.structs.replace(snapshot, **MEASURED_SPEEDS)
        table.update_load(replica_id, snapshot)
    stride = INDEX_STRIDE // block_size
    for prompt in asked:
        hashes = hash_blocks(ROOT, prompt.token_ids, block_size)[stride - 1 :: stride]
        tiers = in_tiers(hashes[: NUM_HELD // INDEX_STRIDE], has_tiers=has_tiers)
        if kind == "hot":
            everywhere = {each: tiers[each] for each in hashes[: NUM_EVERYWHERE // INDEX_STRIDE]}
            for hashes_held in held.values():
                hashes_held.update(everywhere)
        for replica_id in prompt.holders:
            held[replica_id].update(tiers)
    index = table.index(MODEL)
    for replica_id, hashes_held in held.items():
        with index.stage() as staged:
            for tier in Tier:
                staged.add([each for each, where in hashes_held.items() if where is tier], tier)
            index.replace(replica_id, EPOCH, staged)
    return table


def in_tiers(block_hashes: Sequence[BlockHash], *, has_tiers: bool) -> dict[BlockHash, Tier]:
    tiers = list(Tier) if has_tiers else [Tier.DEVICE]
    return {
        block_hash: tiers[number * len(tiers) // len(block_hashes)]
        for number, block_hash in enumerate(block_hashes)
    }


def timed(stage: Callable[[], object], times: list[float]) -> None:
    started = time.thread_time()
    stage()
    times.append((time.thread_time() - started) / BATCH)


def practised_hasher(batch: Sequence[HeldPrompt], block_size: int) -> ChainHasher:
    """It has hashed the blocks that replicas hold, often enough to remember all of them."""
    hasher = ChainHasher()
    for _ in range(8):
        for prompt in batch:
            if prompt.holders:
                hasher.hash_packed(ROOT, pack_token_ids(prompt.token_ids[:NUM_HELD]), block_size)
    return hasher


def measure_batch(table: RoutingTable, batch: Sequence[HeldPrompt], block_size: int) -> list[float]:
    """CPU seconds per prompt of each stage, and of the whole."""
    hasher = practised_hasher(batch, block_size)
    replica_ids = table.replica_ids(MODEL)
    replicas = Replicas(replica_ids, table.load, dict.fromkeys(replica_ids, LAYOUT))
    index, policy, rng = table.index(MODEL), POLICIES["kvasir"], random.Random(1)
    times: list[float] = []
    packed = [pack_token_ids(each.token_ids) for each in batch]
    hashes: list[list[BlockHash]] = []
    buckets: list[bytes] = []
    overlaps: list[Overlaps] = []
    timed(
        lambda: hashes.extend(
            hasher.hash_packed(ROOT, pack_token_ids(it.token_ids), block_size) for it in batch
        ),
        times,
    )
    timed(
        lambda: buckets.extend(bucket_of(ROOT, None, each, None, block_size) for each in packed),
        times,
    )
    requests = [RoutingRequest(bucket, NUM_TOKENS, block_size) for bucket in buckets]
    timed(lambda: overlaps.extend(index.overlaps(each) for each in hashes), times)
    parameters = CostParameters()
    timed(
        lambda: [
            policy(request, replicas, found, parameters, rng)
            for request, found in zip(requests, overlaps, strict=True)
        ],
        times,
    )
    pairs = list(zip(requests, hashes, strict=True))
    started = time.thread_time()
    routed = [table.route(MODEL, request, each) for request, each in pairs]
    whole = (time.thread_time() - started) / BATCH
    times.append(whole - times[2] - times[3])

    def release() -> None:
        for each in routed:
            each.close()

    timed(release, times)
    return [*times, times[0] + times[1] + whole + times[5]]


def measure_decisions(num_batches: int, num_hashes: int, block_size: int) -> None:
    columns = (*STAGES, "whole", "whole p99")
    print(
        f"\nCPU microseconds per prompt of {NUM_TOKENS} tokens, blocks of {block_size}, {num_hashes:,} hashes"
    )
    print(f"medians over {num_batches} batches of {BATCH}")
    print("replicas  prompts  " + "  ".join(f"{column:>15}" for column in columns))
    for num_replicas in FLEET_SIZES:
        for kind in ("cold", "warm", "hot"):
            replica_ids = [ReplicaId(f"replica-{number}") for number in range(num_replicas)]
            asked = prompts(kind, replica_ids, BATCH * 10, random.Random(7))
            table = filled_table(asked, kind, num_replicas, num_hashes, block_size)
            batches = [asked[start : start + BATCH] for start in range(0, len(asked), BATCH)]
            rows = [measure_batch(table, batches[n % len(batches)], block_size) for n in range(num_batches)]
            found = [percentiles([row[stage] for row in rows]) for stage in range(len(STAGES) + 1)]
            figures = [*(each.p50 for each in found), found[-1].p99]
            print(f"{num_replicas:8}  {kind:7}  " + "  ".join(f"{figure * 1e6:15.1f}" for figure in figures))


def measure_tiers(num_batches: int, num_hashes: int, block_size: int) -> None:
    """With memory below the device and without it, in turns."""
    print(
        f"\nCPU microseconds per prompt without tiers, with them, and the ratio; {num_batches} batches each"
    )
    print("replicas  prompts  " + "  ".join(f"{name:>24}" for name in (*STAGES[2:], "decision", "whole")))
    for num_replicas in TIERED_FLEET_SIZES:
        for kind in ("cold", "warm", "hot"):
            replica_ids = [ReplicaId(f"replica-{number}") for number in range(num_replicas)]
            asked = prompts(kind, replica_ids, BATCH * 10, random.Random(7))
            tables = [
                filled_table(asked, kind, num_replicas, num_hashes, block_size, has_tiers=has_tiers)
                for has_tiers in (False, True)
            ]
            batches = [asked[start : start + BATCH] for start in range(0, len(asked), BATCH)]
            rows: list[list[list[float]]] = [[], []]
            for number in range(num_batches):
                for table, measured in zip(tables, rows, strict=True):
                    times = measure_batch(table, batches[number % len(batches)], block_size)
                    measured.append([*times[2:6], sum(times[2:6]), times[6]])
            without, with_tiers = (
                [percentiles(list(column)).p50 * 1e6 for column in zip(*measured, strict=True)]
                for measured in rows
            )
            cells = [
                f"{before:8.1f} {after:8.1f} {after / before:6.2f}"
                for before, after in zip(without, with_tiers, strict=True)
            ]
            print(f"{num_replicas:8}  {kind:7}  " + "  ".join(cells))


def changes(replica_ids: Sequence[ReplicaId], num_hashes: int, count: int) -> Iterator[IndexChange]:
    """Full caches in use: each change stores as many blocks as it evicts, the oldest first."""
    rng = random.Random(3)
    kept = {each: deque(random_hashes(rng, num_hashes // len(replica_ids))) for each in replica_ids}
    for replica_id, hashes in kept.items():
        yield IndexChange(replica_id, EPOCH, 1, added=tuple(hashes))
    for number in range(count):
        replica_id = replica_ids[number % len(replica_ids)]
        added = random_hashes(rng, HASHES_PER_CHANGE)
        removed = [kept[replica_id].popleft() for _ in added]
        kept[replica_id].extend(added)
        yield IndexChange(replica_id, EPOCH, 2 + number // len(replica_ids), tuple(added), tuple(removed))


def measure_apply(num_hashes: int, num_changes: int) -> None:
    print(f"\nchanges that store {HASHES_PER_CHANGE} hashes and remove as many, {num_hashes:,} in the index")
    for num_replicas in (8, 1000):
        index = PrefixIndex(16, INDEX_STRIDE)
        replica_ids = [ReplicaId(f"replica-{number}") for number in range(num_replicas)]
        for replica_id in replica_ids:
            index.replace(replica_id, EPOCH, ())
        stream = changes(replica_ids, num_hashes, num_changes)
        for _ in replica_ids:
            index.apply(next(stream))
        encoded = [
            {
                name.encode(): value if isinstance(value, bytes) else value.encode()
                for name, value in each.items()
            }
            for each in map(encode_change, stream)
        ]
        started = time.thread_time()
        decoded = [decode_change(fields) for fields in encoded]
        decode_seconds = time.thread_time() - started
        started = time.thread_time()
        outcomes = {index.apply(change) for change in decoded}
        apply_seconds = time.thread_time() - started
        assert outcomes == {ChangeOutcome.APPLIED}
        num_events = num_changes * 2 * HASHES_PER_CHANGE
        print(
            f"{num_replicas:8} replicas: {num_events / apply_seconds:12,.0f} hashes applied per CPU second,"
            f" {num_events / (apply_seconds + decode_seconds):12,.0f} decoded and applied"
        )


def longest(calls: Iterable[object]) -> tuple[float, int]:
    """Seconds of the longest of the calls that are made in going on, and how many there were."""
    seconds, count = 0.0, 0
    started = time.thread_time()
    for count, _ in enumerate(calls, 1):  # noqa: B007
        ended = time.thread_time()
        seconds, started = max(seconds, ended - started), ended
    return seconds, count


def once(call: Callable[[], object]) -> Iterator[None]:
    call()
    yield


def measure_stalls(num_hashes: int) -> None:
    """Measure the event loop's longest pause when a replica comes or goes, with each hash at two of eight."""
    print(f"\nlongest calls, {num_hashes:,} hashes in the index, each at two of 8 replicas")
    rng = random.Random(9)
    index = PrefixIndex(16, INDEX_STRIDE)
    gone, other, *_ = replica_ids = [ReplicaId(f"replica-{number}") for number in range(8)]
    quarters = [random_hashes(rng, num_hashes // 4) for _ in range(4)]
    for number, replica_id in enumerate(replica_ids):
        index.replace(replica_id, EPOCH, quarters[number // 2])

    def show(what: str, calls: Iterable[object]) -> None:
        seconds, count = longest(calls)
        print(f"{what:55} {seconds * 1e3:7.2f} ms in one of {count}")

    def read(staged: StagedHashes, hashes: Sequence[BlockHash]) -> Iterator[None]:
        for start in range(0, len(hashes), HASHES_PER_SCAN):
            staged.add(hashes[start : start + HASHES_PER_SCAN])
            yield

    show(f"forget a replica with {index.num_stored(gone):,} hashes", once(lambda: index.forget(gone)))
    show("sweep a slice of what it left", iter(index.sweep, False))
    staged = index.stage()
    show(f"read {HASHES_PER_SCAN} hashes of a replica that comes", read(staged, quarters[0]))
    show("put it in its place", once(lambda: index.replace(gone, EPOCH, staged)))
    change = IndexChange(other, EPOCH, 1, tuple(random_hashes(rng, 8)), cleared=True)
    show("apply a change that clears a replica", once(lambda: index.apply(change)))
    show("sweep a slice of what it left", iter(index.sweep, False))
    fresh = random_hashes(rng, num_hashes)
    show(f"read {HASHES_PER_SCAN} hashes that no replica has", read(index.stage(), fresh))


def main() -> None:
    options = bench_options(__doc__)
    options.add_argument("--batches", type=int, default=300)
    options.add_argument("--hashes", type=int, default=200_000, help="in the index besides the prompts'")
    options.add_argument("--block-size", type=int, default=16)
    options.add_argument("--changes", type=int, default=20_000)
    options.add_argument("--held-hashes", type=int, default=1_000_000, help="when a replica comes or goes")
    options.add_argument("--only-tiers", action="store_true", help="only memory below the device")
    arguments = options.parse_args()
    print_header("Routing decision")
    measure_tiers(arguments.batches, arguments.hashes, arguments.block_size)
    if arguments.only_tiers:
        return
    measure_decisions(arguments.batches, arguments.hashes, arguments.block_size)
    measure_apply(arguments.hashes, arguments.changes)
    measure_stalls(arguments.held_hashes)


if __name__ == "__main__":
    main()
