"""Small workloads and fleets."""

import random
from collections.abc import Sequence
from dataclasses import replace

from loadtests.simulation.fleet import FleetResult, VirtualFleet
from loadtests.simulation.options import Delays, FleetOptions
from loadtests.simulation.request import prepare
from loadtests.simulation.shape import ReplicaShape
from loadtests.workloads import ImageSpan, TraceRequest, Workload
from loadtests.workloads.traces import ids_with_images
from replicas.scheduling.speed_meter import SpeedMeter
from replicas.simulated_engine.hardware import CostModel

PLAIN = CostModel(a=0.5, b=0.01, c=0.0, d0=0.1, d1=0.0)
"""A token of a prompt costs 10 ms and half a second comes on top; a decode step takes 100 ms."""

IMAGE_TOKENS = 20

NO_DELAYS = Delays(event=0.0, load=0.0)


def request(
    arrival: float, prefix_ids: Sequence[int], *, block_tokens: int = 10, output: int = 1, user: str = "ann"
) -> TraceRequest:
    """A prompt of whole blocks."""
    return TraceRequest(
        arrival_seconds=arrival,
        num_input_tokens=len(prefix_ids) * block_tokens,
        num_output_tokens=output,
        prefix_ids=tuple(prefix_ids),
        user=user,
        session=user,
    )


def random_workload(seed: int, *, num_requests: int = 200, qps: float = 4.0) -> Workload:
    """Conversations that share first blocks, in blocks of 16, with partial last blocks."""
    rng = random.Random(seed)
    requests, arrival, known = [], 0.0, [(head,) for head in range(3)]
    for number in range(num_requests):
        arrival += rng.expovariate(qps)
        prefix = rng.choice(known)
        blocks = (*prefix, *(1000 * number + 10 + block for block in range(rng.randint(1, 12))))
        known.append(blocks[:-1])
        requests.append(
            TraceRequest(
                arrival_seconds=arrival,
                num_input_tokens=len(blocks) * 16 - rng.randint(0, 15),
                num_output_tokens=rng.randint(1, 60),
                prefix_ids=blocks,
                user=f"user-{rng.randrange(5)}",
                session=f"s{number}",
            )
        )
    return Workload("random", 16, tuple(requests))


def with_images(workload: Workload) -> Workload:
    """The same prompts, some of whose blocks have the beginning of an image that goes on in the next ones."""

    def shown(request: TraceRequest) -> TraceRequest:
        images: list[ImageSpan] = []
        for number, block_id in enumerate(request.prefix_ids):
            start = number * workload.block_tokens + 3
            is_free = not images or images[-1].start + IMAGE_TOKENS <= start
            if block_id % 3 == 1 and is_free and start + IMAGE_TOKENS <= request.num_input_tokens:
                images.append(ImageSpan(str(block_id), start, IMAGE_TOKENS))
        ids = ids_with_images(request.prefix_ids, images, workload.block_tokens)
        return replace(request, prefix_ids=tuple(ids), images=tuple(images))

    return replace(workload, requests=tuple(map(shown, workload.requests)))


def plain_shape(num_blocks: int, *, decodes_beside: bool = False) -> ReplicaShape:
    """Blocks of 10, and no limit that a few requests would meet."""
    return ReplicaShape(PLAIN, num_blocks, 10, 8192, 256, decodes_beside)


def small_shape(num_blocks: int = 80, **changes: object) -> ReplicaShape:
    cost = CostModel(a=0.01, b=1e-3, c=1e-6, d0=5e-3, d1=1e-6)
    values: dict[str, object] = {"max_batched_tokens": 64, "max_running": 32, **changes}
    return ReplicaShape(cost, num_blocks, 16, **values)  # type: ignore[arg-type]


def new_fleet(options: FleetOptions, seed: int = 1) -> VirtualFleet:
    rng = random.Random(seed)
    return VirtualFleet(
        options,
        rng=rng,
        new_rng=lambda: random.Random(rng.getrandbits(64)),
        new_meter=SpeedMeter,
        stopwatch=lambda: 0.0,
    )


def serve(workload: Workload, options: FleetOptions, seed: int = 1, *, num_warm_up: int = 0) -> FleetResult:
    return new_fleet(options, seed).serve(prepare(workload), num_warm_up=num_warm_up)
