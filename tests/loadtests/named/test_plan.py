import argparse
from pathlib import Path

import pytest

from loadtests.load.locust_run import HeadlessRun
from loadtests.load.options import add_arguments as add_locust_options
from loadtests.load.options import load_options
from loadtests.load.streaming import REFUSALS
from loadtests.named.named_tests import NAMED_TESTS, OVERLOAD
from loadtests.named.plan import LoadtestError, LoadtestPlan, add_arguments, make_plan, tenants_of
from loadtests.workloads import GENERATORS, Workload
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


def test_memory_below_the_devices_is_what_the_cluster_is_told() -> None:
    words = plan("cross-user", "--engine", "torch", "--ram", "2MiB", "--disk", "1GiB").cluster_words
    assert words[words.index("--ram") + 1] == str(2 << 20)
    assert words[words.index("--disk") + 1] == str(1 << 30)
    with pytest.raises(LoadtestError, match="by itself"):
        plan("long-memory", "--ram", "2MiB")


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


def test_whatever_is_said_overrides_the_test(trace: str) -> None:
    made = plan(
        *("cross-user", "--policy", "random", "--policy", "kvasir", "--replicas", "3", "--rate", "5"),
        *("--duration", "30", "--cache-tokens", "1600", "--parameter", "num_tenants=2"),
        *("--set", "simulated_speed=2", "--set", "block-size=32", "--model", "/m", "--model-name", "n"),
    )
    assert [each.policy for each in made.runs] == ["random", "kvasir"]
    assert (made.size.num_replicas, made.size.duration_seconds, made.size.warmup_seconds) == (3, 30.0, 4.0)
    options = made.locust_options(made.runs[0])
    assert (options["qps"], options["num_tenants"], options["num-replicas"]) == ("5", "2", "3")
    assert made.cluster_words == (
        *("--engine", "simulated", "--replicas", "3", "--model", "/m", "--model-name", "n"),
        *("--set=simulated_hardware=h100x4-70b", "--set=max_batched_tokens=2048"),
        *("--set=simulated_speed=2", "--set=block_size=32"),
        "--set=num_blocks=51",
    )
    assert plan("trace", trace).locust_options(made.runs[0])["trace"] == trace


@pytest.mark.parametrize("name", [name for name in NAMED_TESTS if name != "trace"])
def test_a_quick_test_asks_no_more_of_an_engine_that_computes_than_a_whole_one(
    name: str, tmp_path: Path
) -> None:
    words = [*words_of(name, "", tmp_path), "--engine", "vllm" if name == "documents" else "torch"]
    whole, quick = (plan(*words, *more).size for more in ((), ("--quick",)))
    assert quick.qps == whole.qps
    assert quick.duration_seconds < whole.duration_seconds


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("cross-user", "--policy", "fastest"), "there is no policy fastest; there are "),
        (
            ("cross-user", "--parameter", "tenants=3"),
            "--parameter: tenants=3 is not NAME=VALUE of one of cross-user's parameters: num_tenants, ",
        ),
        (
            ("cross-user", "--parameter", "num_tenants=0"),
            "--parameter: num_tenants takes a whole number",
        ),
        (("cross-user", "--duration", "1e9"), "cross-user: 16000000000 requests are more"),
        (("chat", "--parameter", "most_turns=1"), "chat: "),
        (("mixed", "--parameter", "rag_share=1"), "mixed: the shares of a mixed workload are 0 or above"),
        (("cross-user", "--set", "block_size"), "--set takes NAME=VALUE, not block_size"),
        (
            ("cross-user", "--set", "block_sise=3"),
            "unknown setting block_sise; did you mean block_size?",
        ),
        (
            ("cross-user", "--set", "max-running=many"),
            "setting max_running cannot be 'many'; it takes a whole number",
        ),
        (("cross-user", "--set", "block_size=0"), "setting block_size must be at least 1"),
        (
            ("cross-user", "--set", "adapters=a=/b"),
            "setting adapters is for the engine vllm, not for simulated",
        ),
        (("cross-user", "--set", "simulated_hardware=abacus"), "setting simulated_hardware is h100-8b, "),
        (("cross-user", "--set", "engine=torch"), "--set cannot change engine: use --engine"),
        (
            ("cross-user", "--set", "redis-url=redis://elsewhere"),
            "--set cannot change redis_url: each cluster of a load test has its own Redis",
        ),
        (("cross-user", "somewhere.jsonl"), "cross-user takes no file"),
        (("chat", "--join", "http://a", "--ram", "1GiB"), "--ram is for replicas of ours"),
        (("chat", "--join", "http://a", "--engine", "vllm"), "--engine is for replicas of ours"),
        (("replica-kill", "--join", "http://a"), "replica-kill makes and kills replicas of ours"),
        (("long-memory", "--join", "http://a"), "long-memory makes and kills replicas of ours"),
        (("trace",), "trace takes the file of a trace"),
        (("trace", "/nowhere.jsonl"), "there is no file /nowhere.jsonl"),
        (("trace", __file__), "trace: line 1 of the trace is not JSON"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(LoadtestError) as raised:
        plan(*words)
    assert str(raised.value).startswith(sentence)


def test_servers_that_run_are_joined_by_each_cluster() -> None:
    joins = ("--join", "http://a:1", "--join", "http://b:2")
    made = plan("cross-user", *joins, "--join-key-file", "/k", "--model-name", "m", "--set", "max_waiting=9")
    assert made.cluster_words == (
        *("--join=http://a:1", "--join=http://b:2", "--join-key-file=/k", "--model-name=m"),
        "--set=max_waiting=9",
    )
    assert (made.engine, made.size.num_replicas) == ("remote", 2)
    assert made.size.qps == plan("cross-user", "--engine", "vllm").size.qps


def test_a_trace_has_a_pace_of_its_own(trace: str) -> None:
    with pytest.raises(LoadtestError, match="--rate is not for a trace"):
        plan("trace", trace, "--rate", "3")


def test_the_runs_of_an_earlier_load_test_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    assert plan("chat", "--output", str(tmp_path)).output == tmp_path
    (tmp_path / "run-1-kvasir.json.gz").touch()
    with pytest.raises(LoadtestError, match="earlier load test"):
        plan("chat", "--output", str(tmp_path))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "documents sends images, and the checkpoint .*toy_model takes no images: .*LlamaForCausalLM"),
        (("--engine", "vllm"), "documents sends images, and the checkpoint .* takes no images"),
        (("--engine", "torch"), "documents sends images, and the torch engine reads text only"),
        (("--model", "/no/such/folder"), "cannot read /no/such/folder/config.json"),
    ],
)
def test_documents_starts_nothing_for_a_model_that_takes_no_images(
    words: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(LoadtestError, match=sentence):
        plan("documents", *words)


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


def test_every_workload_of_the_table_exists() -> None:
    assert {test.workload for test in NAMED_TESTS.values()} <= {*GENERATORS, "trace"}
