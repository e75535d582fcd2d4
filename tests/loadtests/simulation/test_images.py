"""Images in a simulated fleet: what encoding takes, what routers know of it, and what is counted."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.cli import main
from loadtests.simulation.fleet import FleetResult
from loadtests.simulation.options import FleetOptions, Kill
from loadtests.simulation.request import prepare
from loadtests.simulation.shape import TierShape
from loadtests.workloads import ImageSpan, Workload
from tests.loadtests.simulation.builders import (
    NO_DELAYS,
    new_fleet,
    plain_shape,
    random_workload,
    request,
    serve,
    small_shape,
    with_images,
)

SHOWN = replace(request(0.0, [1, 2, 3]), images=(ImageSpan("a", 2, 10),))


def one_replica(*, decodes_beside: bool = False, encode: float = 0.05) -> FleetOptions:
    shape = plain_shape(num_blocks=50, decodes_beside=decodes_beside)
    shape = replace(shape, cost=replace(shape.cost, encode=encode))
    return FleetOptions(shape, num_replicas=1, delays=NO_DELAYS, index_stride=10)


def ttfts(result: FleetResult) -> list[float]:
    return [record.ttft_seconds or 0.0 for record in result.records]


@pytest.mark.parametrize("decodes_beside", [False, True])
def test_an_image_takes_its_encoding_besides_and_nothing_where_it_is_cached(decodes_beside: bool) -> None:
    """30 tokens in 0.3 + 0.5 s, and 10 of an image in 0.5 s; the second user's prompt has 10 tokens left."""
    workload = Workload("shown", 10, (SHOWN, replace(SHOWN, arrival_seconds=5.0, user="bob")))
    result = serve(workload, one_replica(decodes_beside=decodes_beside))
    assert ttfts(result) == [pytest.approx(1.3), pytest.approx(0.6)]
    assert result.images is not None
    assert (result.images.num_in_prompts, result.images.num_taken) == (2, 1)
    assert (result.images.num_tokens, result.images.num_encoded_tokens) == (20, 10)
    assert [record.num_image_tokens for record in result.records] == [10, 10]


def test_what_a_dead_replica_had_is_encoded_and_taken_again() -> None:
    workload = Workload("shown", 10, (SHOWN, replace(SHOWN, arrival_seconds=5.0, user="bob")))
    kill = Kill(0, at=3.0, back_after=1.0)
    result = serve(workload, replace(one_replica(), kills=(kill,)))
    assert ttfts(result) == [pytest.approx(1.3), pytest.approx(1.3)]
    assert result.images is not None
    assert (result.images.num_taken, result.images.num_encoded_tokens) == (2, 20)


def test_images_of_prompts_that_were_never_computed_do_not_count_as_cached() -> None:
    """The second is longer than the whole cache."""
    large = replace(request(5.0, range(10, 90)), images=(ImageSpan("b", 2, 500),))
    result = serve(Workload("large", 10, (SHOWN, large)), one_replica())
    assert [record.error for record in result.records] == [None, "too long"]
    assert result.images is not None
    assert (result.images.num_in_prompts, result.images.cached_share) == (1, 0.0)


TIERS = TierShape(1000, host_bytes=2e6, disk_bytes=1e7, chunk_tokens=64, pull_bytes_per_second=1e9)


@pytest.mark.parametrize("tiers", [None, TIERS], ids=["device", "tiers"])
def test_with_images_and_accidents_every_request_ends_and_everything_is_given_back(
    tiers: TierShape | None,
) -> None:
    workload = with_images(random_workload(1, num_requests=300, qps=15.0))
    shape = small_shape()
    options = FleetOptions(
        replace(shape, cost=replace(shape.cost, encode=1e-3), tiers=tiers),
        num_replicas=4,
        num_routers=3,
        kills=(Kill(0, at=5.0, back_after=3.0), Kill(1, at=9.0)),
    )
    fleet = new_fleet(options)
    result = fleet.serve(prepare(workload))
    assert all(record.error is None for record in result.records)
    images = result.images
    assert images is not None and 0 < images.num_encoded_tokens < images.num_tokens
    different = {image.content for each in workload.requests for image in each.images}
    assert len(different) <= images.num_taken <= 5 * len(different)
    for host in fleet.hosts:
        if host.replica is not None:
            assert host.replica.report(1e9).load.num_pending_image_tokens == 0
    for router in fleet.routers:
        assert router.table.loads.num_reserved == 0
        assert all(book.num_pending_image_tokens == 0 for book in router.table.loads._books.values())


def test_an_image_that_lies_below_the_device_is_brought_and_not_encoded_again() -> None:
    """As many other prompts come between as the device holds; then host memory has the first one."""
    others = [request(10.0 * number, range(100 * number, 100 * number + 20)) for number in range(1, 6)]
    workload = Workload("shown", 10, (SHOWN, *others, replace(SHOWN, arrival_seconds=90.0, user="bob")))
    options = one_replica()
    tiers = replace(TIERS, chunk_tokens=10, host_bytes=1e9, pull_bytes_per_second=None)
    num_encoded = []
    for shape in (options.shape, replace(options.shape, tiers=tiers)):
        images = serve(workload, replace(options, shape=shape)).images
        assert images is not None
        num_encoded.append(images.num_encoded_tokens)
    assert num_encoded == [20, 10]


def test_policies_are_compared_on_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    words = ["documents", "--policy", "kvasir,round_robin", "--replicas", "4", "--set", "page_tokens=200"]
    assert main(["simulate", *words, "--json", str(file)]) == 0
    assert "image tokens cached" in capsys.readouterr().out
    ours, theirs = (each["figures"] for each in json.loads(file.read_text())["results"])
    assert ours["image_hit_rate"] > 1.2 * theirs["image_hit_rate"] > 0
    assert 0 < 1.5 * ours["images_taken"] < theirs["images_taken"] < 1
    assert main(["simulate", "rag", "--limit", "20"]) == 0
    assert "image" not in capsys.readouterr().out
