"""Documents of images by Locust against replicas that take images, and against one that does not."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.load.locust_run import HeadlessRun, LoadTestFailed, run_headless
from loadtests.load.options import LoadOptions
from loadtests.load.target import TargetError, find_target, page_tokens
from loadtests.reports.run_figures import images_of
from loadtests.reports.run_file import Run
from loadtests.stacks.local_stack import LocalStack, free_port, local_stack
from replicas.toy_model.make_image_model import write_image_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

REPLICA = {"engine": "simulated", "model_name": "pictures", "num_blocks": 4096, "simulated_speed": 4.0}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalStack, list[str]]]:
    """The stack, and where its two replicas show their metrics."""
    model = tmp_path_factory.mktemp("model")
    write_image_model(model)
    ports = [free_port(), free_port()]
    replica = {**REPLICA, "model": str(model)}
    with local_stack(replica_settings={**replica, "metrics_port": ports[0]}) as stack:
        own = {"replica_id": "replica-1", **stack.shared, "metrics_port": ports[1]}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**replica, **own}.items()]
        stack.start("replica-1", [sys.executable, "-m", "replicas", *flags])
        stack.wait_ready(2)
        yield stack, [f"replica-{number}=127.0.0.1:{port}" for number, port in enumerate(ports)]


def load(url: str, output: Path, replica_metrics: list[str], *, seed: int, processes: int = 1) -> Run:
    return run_headless(
        HeadlessRun(
            base_url=url,
            model="pictures",
            workload="documents",
            options={"qps": "3", "num_documents": "4", "think_seconds": "1"},
            seed=seed,
            duration_seconds=6.0,
            replica_metrics=replica_metrics,
            output=output,
            processes=processes,
        )
    )


@pytest.mark.parametrize(("seed", "processes"), [pytest.param(1, 1, marks=pytest.mark.slow), (2, 2)])
def test_documents_are_cached_for_the_users_of_a_tenant_and_for_no_other(
    seed: int, processes: int, cluster: tuple[LocalStack, list[str]], tmp_path: Path
) -> None:
    stack, replica_metrics = cluster
    run = load(stack.url, tmp_path / "run.json", replica_metrics, seed=seed, processes=processes)
    assert [record.error for record in run.records] == [None] * len(run.records)
    assert sum(record.num_cross_user_tokens or 0 for record in run.records) > 0
    assert [record.num_other_tenant_tokens for record in run.records] == [0] * len(run.records)
    totals = run.engine_totals
    assert totals is not None
    assert totals.num_prompt_tokens == sum(record.num_input_tokens for record in run.records)
    assert totals.num_cached_tokens == sum(record.num_cached_tokens or 0 for record in run.records)

    # Each of two tenants has the files of four documents, and each of two replicas gets one at most once.
    workload, _ = _options(seed).make_workload(8192)
    num_different = len({image.content for request in workload.requests for image in request.images})
    images = images_of(run)
    assert images is not None
    assert images.num_in_prompts == sum(len(request.images) for request in workload.requests)
    assert num_different <= images.num_taken <= 2 * num_different < images.num_in_prompts
    assert images.num_taken_bytes > 1000 * images.num_taken
    # What was cached has not been encoded; blocks at an image's ends belong to texts as well.
    num_text = sum(record.num_input_tokens for record in run.records) - images.num_tokens
    num_cached_images = images.num_tokens - images.num_encoded_tokens
    assert 0 <= totals.num_cached_tokens - num_cached_images <= num_text
    assert images.cached_share > 0.3


def _options(seed: int) -> LoadOptions:
    parameters = "num_documents=4 think_seconds=1"
    return LoadOptions("documents", "pictures", seed, 6.0, qps=3.0, parameters=parameters)


def test_the_tokens_of_pages_are_the_servers_own(cluster: tuple[LocalStack, list[str]]) -> None:
    target = find_target(cluster[0].url, None, "")
    found = page_tokens(target, "")
    assert found == {"page_tokens": 94, "slide_tokens": 94, "table_tokens": 57}
    options = _options(1).with_defaults({**found, "num_documents": 9, "slide_tokens": 50})
    (first, *_) = options.make_workload(None)[0].requests
    assert options.parameters.split()[-3:] == ["page_tokens=94", "slide_tokens=50", "table_tokens=57"]
    assert "num_documents=4" in options.parameters and "num_documents=9" not in options.parameters
    assert {image.num_tokens for image in first.images} <= {94, 50, 57}


def test_a_model_of_text_is_told_in_one_sentence_before_anything_is_sent(tmp_path: Path) -> None:
    with local_stack(replica_settings=REPLICA) as stack:
        with pytest.raises(TargetError, match=r"takes no images for the model pictures, .*reads text only"):
            page_tokens(find_target(stack.url, None, ""), "")
        with pytest.raises(LoadTestFailed, match="takes no images for the model pictures") as failed:
            load(stack.url, tmp_path / "run.json", [], seed=1)
    assert len(str(failed.value).splitlines()) == 1
    assert not (tmp_path / "run.json").exists()
