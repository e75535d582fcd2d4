"""Load tests by Locust against a router and two replicas, all of them real processes."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.load.locust_run import HeadlessRun, run_headless
from loadtests.reports.run_file import Run
from loadtests.stacks.local_stack import LocalStack, free_port, local_stack

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[LocalStack, list[str]]]:
    """The stack, and where its replicas show their metrics."""
    ports = [free_port(), free_port()]
    replica = {"engine": "simulated", "model_name": "toy", "num_blocks": 4096, "simulated_speed": 4.0}
    with local_stack(replica_settings={**replica, "metrics_port": ports[0]}) as stack:
        own = {"replica_id": "replica-1", **stack.shared, "metrics_port": ports[1]}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**replica, **own}.items()]
        stack.start("replica-1", [sys.executable, "-m", "replicas", *flags])
        stack.wait_ready(2)
        yield stack, [f"replica-{number}=127.0.0.1:{port}" for number, port in enumerate(ports)]


def load(
    cluster: tuple[LocalStack, list[str]], output: Path, workload: str, *, seed: int, processes: int = 1
) -> Run:
    stack, replica_metrics = cluster
    return run_headless(
        HeadlessRun(
            base_url=stack.url,
            model="toy",
            workload=workload,
            seed=seed,
            duration_seconds=6.0,
            replica_metrics=replica_metrics,
            output=output,
            processes=processes,
        )
    )


@pytest.mark.parametrize(
    ("workload", "seed", "processes"),
    [("cross-user", 1, 2), pytest.param("mixed", 3, 1, marks=pytest.mark.slow)],
)
def test_the_hits_of_the_records_are_those_of_the_engines_to_the_token(
    workload: str, seed: int, processes: int, cluster: tuple[LocalStack, list[str]], tmp_path: Path
) -> None:
    run = load(cluster, tmp_path / "run.json", workload, seed=seed, processes=processes)
    assert [record.error for record in run.records] == [None] * len(run.records)
    totals = run.engine_totals
    assert totals is not None
    assert totals.num_prompt_tokens == sum(record.num_input_tokens for record in run.records)
    assert totals.num_cached_tokens == sum(record.num_cached_tokens or 0 for record in run.records)
    assert totals.num_cross_user_tokens == sum(record.num_cross_user_tokens or 0 for record in run.records)
    assert totals.num_cross_user_tokens > 0
    assert sum(record.num_own_tokens or 0 for record in run.records) == (
        totals.num_cached_tokens - totals.num_cross_user_tokens
    )
    assert [record.num_other_tenant_tokens for record in run.records] == [0] * len(run.records)
    assert {sample.replica for sample in run.samples} == {"replica-0", "replica-1"}
    assert {sample.num_total_blocks for sample in run.samples[-2:]} == {4096}
    assert run.info.num_replicas == 2


def test_the_control_hits_nothing(cluster: tuple[LocalStack, list[str]], tmp_path: Path) -> None:
    run = load(cluster, tmp_path / "run.json", "no-reuse", seed=4)
    assert len(run.records) > 5
    assert {record.error for record in run.records} == {None}
    assert sum(record.num_cached_tokens or 0 for record in run.records) == 0


def test_earlier_traffic_with_the_same_seed_is_not_taken_for_ones_own(
    cluster: tuple[LocalStack, list[str]], tmp_path: Path
) -> None:
    """What another run left is nobody's of this run, and the oracle says so."""
    load(cluster, tmp_path / "first.json", "rag", seed=5)
    again = load(cluster, tmp_path / "second.json", "rag", seed=5)
    assert sum(record.num_other_tenant_tokens or 0 for record in again.records) > 0
