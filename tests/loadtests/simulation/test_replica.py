"""The virtual replica against the engine whose rules it follows, and against sums made by hand."""

from dataclasses import replace

import pytest

from loadtests.simulation.fleet import new_replica
from loadtests.simulation.replica import VirtualReplica
from loadtests.simulation.request import ROOT, HashedRequest, VirtualRequest, prepare
from loadtests.simulation.shape import ReplicaShape
from loadtests.workloads import ImageSpan, Workload
from replicas.engine import EngineRequest, expand
from replicas.media.probes import probe_png
from replicas.protocol.blocks import ImageTokens, pack_token_ids
from replicas.protocol.frames import SamplingParams, Submit, UserTag
from replicas.protocol.image_rules import CellRule, written_rule
from replicas.protocol.images import media_hash
from replicas.protocol.media import ImageQuery
from replicas.protocol.status import ModelCard
from replicas.scheduling.speed_meter import SpeedMeter
from replicas.simulated_engine.engine import SimulatedEngine
from replicas.simulated_engine.groups import parse_groups
from tests.loadtests.simulation.builders import (
    IMAGE_TOKENS,
    plain_shape,
    random_workload,
    request,
    small_shape,
    with_images,
)

RULE = CellRule(2**30 - 1, cell=28, min_pixels=784, max_pixels=784 * 400)
Timeline = dict[int, tuple[float, float, int]]
"""Number of a request: when its first token came, when its last one did, and its cached tokens."""


def virtual_request(prepared: HashedRequest) -> VirtualRequest:
    return VirtualRequest(
        prepared.number,
        num_prompt_tokens=prepared.trace.num_input_tokens,
        max_tokens=prepared.trace.num_output_tokens,
        prompt_hashes=prepared.block_hashes,
        user=prepared.user,
        media=prepared.media,
    )


def serve_virtually(workload: Workload, shape: ReplicaShape) -> tuple[Timeline, VirtualReplica]:
    replica = new_replica(shape, SpeedMeter())
    first: dict[int, float] = {}
    timeline: Timeline = {}
    arrivals = [(prepared.trace.arrival_seconds, virtual_request(prepared)) for prepared in prepare(workload)]
    while arrivals or replica.ends_at is not None:
        ends_at = replica.ends_at
        if arrivals and (ends_at is None or arrivals[0][0] <= ends_at):
            now, virtual = arrivals.pop(0)
            replica.submit(virtual, now)
            continue
        assert ends_at is not None
        outcome = replica.advance(ends_at)
        first.update({virtual.number: ends_at for virtual in outcome.first_tokens})
        for virtual in outcome.finished:
            assert virtual.num_output_tokens == virtual.max_tokens
            timeline[virtual.number] = (first[virtual.number], ends_at, virtual.num_cached_tokens)
        replica.pool.check()
    return timeline, replica


def serve_with_the_engine(workload: Workload, shape: ReplicaShape) -> tuple[Timeline, int]:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    card = ModelCard("m", "f", "simulated", shape.block_size, shape.num_blocks + 1, 10**6, 2**31)
    card = replace(card, image_rule=written_rule(RULE))
    card = replace(card, is_sparse=bool(shape.groups), retention_interval=shape.retention)
    engine = SimulatedEngine(
        card,
        shape.cost,
        num_blocks=shape.num_blocks + 1,
        max_batched_tokens=shape.max_batched_tokens,
        max_running=shape.max_running,
        max_waiting=10**6,
        sleep=sleep,
        printable=range(2**30, 2**30 + 1000),
        image_bytes=1 << 20,
        groups=shape.groups,
    )
    for content in {image.content for each in workload.requests for image in each.images}:
        engine.take_media(ImageQuery(1, ROOT, png_of(content)))
    waiting = [
        (prepared.trace.arrival_seconds, engine_request(prepared, workload.block_tokens))
        for prepared in prepare(workload)
    ]
    first: dict[int, tuple[float, int]] = {}
    timeline: Timeline = {}
    num_preempted = 0
    while waiting or engine.has_work():
        if not engine.has_work():
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now:
            engine.add(waiting.pop(0)[1])
        running_before = engine._scheduler.load().num_running
        frame = engine.step()
        num_finished = sum(delta.finish_reason is not None for delta in frame.deltas)
        num_preempted += frame.load.num_running < running_before - num_finished
        for delta in frame.deltas:
            number = delta.key.number
            if delta.usage is not None:
                first[number] = (now, delta.usage.num_cached_tokens)
            if delta.finish_reason is not None:
                timeline[number] = (first[number][0], now, first[number][1])
    return timeline, num_preempted


def engine_request(prepared: HashedRequest, block_tokens: int) -> EngineRequest:
    """Equal blocks get equal tokens, and each block those of its own id, but where images stand."""
    token_ids = [block_id % 2**29 for block_id in prepared.trace.prefix_ids for _ in range(block_tokens)]
    media = []
    for image in prepared.trace.images:
        token_ids[image.start : image.start + image.num_tokens] = [RULE.placeholder] * image.num_tokens
        content_hash = media_hash(ROOT, png_of(image.content))
        media.append(ImageTokens(content_hash, image.start, image.num_tokens))
    submit = Submit(
        prepared.number,
        pack_token_ids(token_ids[: prepared.trace.num_input_tokens]),
        SamplingParams(max_tokens=prepared.trace.num_output_tokens, seed=prepared.number, ignore_eos=True),
        ROOT,
        user=UserTag(prepared.user[:16]),
        media=tuple(media),
    )
    return expand(submit, prepared.number)[0]


def png_of(content: str) -> bytes:
    return probe_png(28 * IMAGE_TOKENS, 28, int(content).to_bytes(3, "big"))


def served_alike(workload: Workload, shape: ReplicaShape) -> tuple[Timeline, VirtualReplica, int]:
    expected, num_preempted = serve_with_the_engine(workload, shape)
    found, replica = serve_virtually(workload, shape)
    assert found.keys() == expected.keys()
    for number, (first, last, num_cached) in expected.items():
        assert found[number] == (pytest.approx(first), pytest.approx(last), num_cached), number
    assert replica.pool.num_used == 0
    return found, replica, num_preempted


@pytest.mark.parametrize("seed", range(8))
def test_it_serves_every_request_at_the_time_and_with_the_hits_of_the_simulated_engine(seed: int) -> None:
    served_alike(random_workload(seed), small_shape())


@pytest.mark.parametrize("retention", [0, 16, 48])
@pytest.mark.parametrize("groups", ["window:16:40 full:16", "2*state:16 full:16", "chunked:16:48 full:16"])
def test_so_it_does_where_layers_keep_different_kv(groups: str, retention: int) -> None:
    shape = small_shape(160, groups=parse_groups(groups), retention=retention)
    workload = random_workload(retention)
    found, _, _ = served_alike(workload, shape)
    assert sum(num_cached for _, _, num_cached in found.values()) > 0


@pytest.mark.parametrize("seed", range(6))
def test_so_it_does_with_images_whose_encoding_takes_time(seed: int) -> None:
    workload = with_images(random_workload(seed, num_requests=120))
    shape = small_shape()
    shape = replace(shape, cost=replace(shape.cost, encode=2e-3))
    _, replica, _ = served_alike(workload, shape)
    num_in_prompts = sum(request.num_image_tokens for request in workload.requests)
    assert 0 < replica.num_encoded_tokens < num_in_prompts
    assert replica.report(0.0).load.num_pending_image_tokens == 0
    assert replica.report(0.0).load.encode_seconds_per_token > 0


def test_images_of_requests_that_wait_are_told_as_still_to_be_encoded() -> None:
    image = ImageSpan("1", 3, 15)
    shown = replace(request(0.0, [1, 2, 3]), images=(image,))
    workload = Workload("shown", 10, (shown, replace(shown, user="bob")))
    replica = VirtualReplica(plain_shape(num_blocks=20), SpeedMeter())
    first, second = map(virtual_request, prepare(workload))
    replica.submit(first, 0.0)
    replica.submit(second, 0.1)  # what is being computed for the first counts as there
    assert replica.report(0.1).load.num_pending_image_tokens == 0
    other = replace(shown, prefix_ids=(7, 8, 9))
    replica.submit(virtual_request(prepare(Workload("other", 10, (other,)))[0]), 0.2)
    assert replica.report(0.2).load.num_pending_image_tokens == 15


def test_so_it_does_when_blocks_run_out_and_requests_are_preempted() -> None:
    workload = random_workload(3, num_requests=60, qps=60.0)
    shape = small_shape(num_blocks=40)
    _, replica, num_preempted = served_alike(workload, shape)
    assert num_preempted and replica.num_preemptions


def test_decoding_beside_costs_a_prompt_nothing() -> None:
    """As above, but the first one's last token does not wait for the second one's prompt."""
    workload = Workload("beside", 10, (request(0.0, [1, 2], output=3), request(0.75, [1, 3])))
    shape = plain_shape(num_blocks=8, decodes_beside=True)
    found, _ = serve_virtually(workload, shape)
    assert found[1] == (pytest.approx(1.4), pytest.approx(1.4), 10)


def test_an_answer_that_would_not_fit_ends_where_the_cache_is_full() -> None:
    replica = VirtualReplica(plain_shape(num_blocks=3), SpeedMeter())
    (prepared,) = prepare(Workload("long", 10, (request(0.0, [1, 2], output=1000),)))
    virtual = virtual_request(prepared)
    replica.submit(virtual, 0.0)
    while (ends_at := replica.ends_at) is not None:
        outcome = replica.advance(ends_at)
    assert outcome.finished == [virtual]
    assert virtual.num_tokens == 31


def test_a_crash_tells_how_far_each_answer_was() -> None:
    replica = VirtualReplica(plain_shape(num_blocks=8), SpeedMeter())
    (prepared,) = prepare(Workload("lost", 10, (request(0.0, [1, 2], output=50),)))
    virtual = virtual_request(prepared)
    replica.submit(virtual, 0.0)
    replica.advance(replica.ends_at or 0.0)
    assert replica.crash(0.7 + 0.35) == [virtual]
    assert virtual.num_output_tokens == 1 + 3
