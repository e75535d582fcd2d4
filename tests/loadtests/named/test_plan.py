import argparse
from pathlib import Path

import pytest

from loadtests.load.locust_run import HeadlessRun
from loadtests.load.options import add_arguments as add_locust_options
from loadtests.load.options import load_options
from loadtests.load.streaming import REFUSALS
from loadtests.named.named_tests import NAMED_TESTS, OVERLOAD
from loadtests.named.plan import LoadtestError, LoadtestPlan, add_arguments, make_plan, tenants_of
from loadtests.workloads import Workload
from tests.replicas.checkpoints.image_models import write_qwen

TRACE = '{"timestamp": 0, "input_length": 700, "output_length": 10, "hash_ids": [1, 2]}\n'


@pytest.fixture
def trace(tmp_path: Path) -> str:
    (tmp_path / "trace.jsonl").write_text(TRACE)
    return str(tmp_path / "trace.jsonl")


def plan(*words: str) -> LoadtestPlan:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return make_plan(parser.parse_args(words))


def words_of(name: str, trace: str, folder: Path) -> list[str]:
    """With what a load test cannot do without."""
    if name == "documents":
        write_qwen(folder)
        return [name, "--model", str(folder)]
    return [name, trace] if name == "trace" else [name]


def sent(made: LoadtestPlan) -> tuple[Workload, list[str]]:
    """What Locust would send in the first run, and the words that it is started with."""
    run = made.runs[0]
    command = HeadlessRun(
        base_url="http://127.0.0.1:1",
        model="",
        workload=made.test.workload,
        options=made.locust_options(run),
        seed=run.seed,
        duration_seconds=made.size.duration_seconds,
        output=Path("run.json"),
    ).command()
    parser = _LocustParser()
    add_locust_options(parser)
    parsed, _ = parser.parse_known_args(command)
    return load_options(parsed, model="m", seed=run.seed).make_workload(8192)[0], command


class _LocustParser(argparse.ArgumentParser):
    """Knows the words that Locust's own parser has besides argparse's."""

    def add_argument(self, *names: str, **options: object) -> argparse.Action:  # type: ignore[override]
        for word in ("is_secret", "env_var"):
            options.pop(word, None)
        return super().add_argument(*names, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMED_TESTS)
@pytest.mark.parametrize("more", [(), ("--quick",), ("--engine", "torch")], ids=["full", "quick", "torch"])
def test_every_named_test_makes_a_workload_that_the_load_generator_takes(
    name: str, more: tuple[str, ...], trace: str, tmp_path: Path
) -> None:
    if name == "documents" and "torch" in more:
        more = ("--engine", "vllm")  # the torch engine reads text only
    made = plan(*words_of(name, trace, tmp_path), *more)
    workload, command = sent(made)
    assert workload.requests
    assert workload.duration_seconds <= made.size.duration_seconds
    assert f"--test-name={name}" in command


def test_the_prefixes_of_long_memory_are_ten_times_what_the_devices_hold() -> None:
    found = plan("long-memory")
    size = found.size
    shared = size.parameters["num_tenants"] * 2 * size.parameters["system_tokens"]
    assert shared == 10 * size.num_replicas * size.cache_tokens
    assert found.engine == "torch"
    assert [(run.policy, run.label) for run in found.runs] == [
        ("kvasir", "device only"),
        ("kvasir", "RAM and disk"),
    ]
    assert [run.cluster_words[1:] for run in found.runs] == [(), ("--ram=32MiB", "--disk=1GiB")]
    assert [found.locust_options(run)["cluster"] for run in found.runs] == ["device only", "RAM and disk"]


@pytest.mark.parametrize(
    "name", [name for name, test in NAMED_TESTS.items() if test.workload == "cross-user" and not test.arms]
)
def test_no_replica_can_hold_what_the_tenants_share_but_the_fleet_can(name: str) -> None:
    size = plan(name).size
    shared = size.parameters["num_tenants"] * 2 * size.parameters["system_tokens"]
    assert size.cache_tokens < shared / 2
    assert shared < size.num_replicas * size.cache_tokens


def test_policies_take_turns_and_every_round_has_a_seed_of_its_own() -> None:
    runs = plan("chat", "--rounds", "3", "--seed", "7").runs
    assert [(each.policy, each.seed) for each in runs] == [
        ("round_robin", 7),
        ("kvasir", 7),
        ("kvasir", 8),
        ("round_robin", 8),
        ("round_robin", 9),
        ("kvasir", 9),
    ]
    assert len({each.name for each in runs}) == 6


@pytest.mark.parametrize("name", [name for name in NAMED_TESTS if name != "trace"])
def test_a_quick_test_asks_no_more_of_an_engine_that_computes_than_a_whole_one(
    name: str, tmp_path: Path
) -> None:
    words = [*words_of(name, "", tmp_path), "--engine", "vllm" if name == "documents" else "torch"]
    whole, quick = (plan(*words, *more).size for more in ((), ("--quick",)))
    assert quick.qps == whole.qps
    assert quick.duration_seconds < whole.duration_seconds


def test_the_runs_of_an_earlier_load_test_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    assert plan("chat", "--output", str(tmp_path)).output == tmp_path
    (tmp_path / "run-1-kvasir.json.gz").touch()
    with pytest.raises(LoadtestError, match="earlier load test"):
        plan("chat", "--output", str(tmp_path))


def test_no_replica_can_hold_the_documents_that_users_share_but_the_fleet_can(tmp_path: Path) -> None:
    made = plan(*words_of("documents", "", tmp_path))
    sizes = {
        image.content: image.num_tokens for request in sent(made)[0].requests for image in request.images
    }
    assert made.size.cache_tokens < sum(sizes.values()) / 2
    assert sum(sizes.values()) < made.size.num_replicas * made.size.cache_tokens


def test_what_a_full_cluster_may_say_is_what_the_client_calls_it() -> None:
    assert {f"refused ({status})" for status in REFUSALS} == OVERLOAD


def test_overload_takes_the_options_of_the_others_and_its_tenants_have_keys(tmp_path: Path) -> None:
    whole, quick = plan("overload"), plan("overload", "--quick", "--output", str(tmp_path), "--slo-ttft", "9")
    assert (whole.slo_ttft, quick.slo_ttft, quick.output) == (2.0, 9.0, tmp_path)
    assert quick.size.duration_seconds < whole.size.duration_seconds
    assert "--set=simulated_speed=0.25" in whole.cluster_words
    assert "--set=simulated_speed=1" in plan("overload", "--set", "simulated_speed=1").cluster_words
    assert whole.test.has_keys and tenants_of(whole) == sorted(f"cross-user-{number}" for number in range(20))
    arrivals = [request.arrival_seconds for request in sent(whole)[0].requests]
    quarter = whole.size.duration_seconds / 4
    parts = [sum(number * quarter <= at < (number + 1) * quarter for at in arrivals) for number in range(4)]
    assert parts == sorted(parts) and parts[3] > 4 * parts[0]
