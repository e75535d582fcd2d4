"""From the arguments of `kvasir loadtest` to a plan: which runs, in which order, how large, on what cluster.

Owns the arguments and their checks, so that nothing is started for a plan that cannot work. Starts nothing.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.errors import ClusterError
from cluster.fleet_file import NOT_OF_A_LOCAL_CLUSTER, settings_from
from cluster.sizes import size as size_in_bytes
from loadtests.arguments import count, positive, seed
from loadtests.load.options import HAVE_OPTIONS, LoadOptions, OptionsError
from loadtests.named.named_tests import (
    NAMED_TESTS,
    SIMULATED,
    SIMULATED_SETTINGS,
    Arm,
    NamedTest,
    Size,
    size_of,
)
from loadtests.reports.comparison import OUR_POLICY
from loadtests.workloads import Workload
from loadtests.workloads.parameters import read_parameter
from replicas.checkpoints.image_rules import read_image_rule
from replicas.config import ReplicaConfig
from replicas.engines import check_simulation
from replicas.process.settings import SettingsError, build
from replicas.toy_model import checkpoint_directory
from router.routing.policies import POLICIES

DEFAULT_POLICIES = ("round_robin", "kvasir")
TRACE = "trace"
TORCH = "torch"
JOINED = "remote"
"""Engine of replicas beside servers that run already."""
NOT_OF_SERVERS = ("engine", "replicas", "cache_tokens", "ram", "disk")
REFUSED_SETTINGS = {**NOT_OF_A_LOCAL_CLUSTER, "redis_url": "each cluster of a load test has its own Redis"}


class LoadtestError(ClusterError):
    """One sentence for the user who typed the command."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One policy's run; runs of one round have the same seed, and so the same traffic."""

    round_number: int
    policy: str
    seed: int
    arm: Arm | None = None

    @property
    def label(self) -> str:
        return self.policy if self.arm is None else self.arm.name

    @property
    def name(self) -> str:
        return f"run-{self.round_number}-{self.label.replace(' ', '-')}"

    @property
    def cluster_words(self) -> tuple[str, ...]:
        """For `kvasir up`: what this run's cluster has that others have not."""
        return (f"--policy={self.policy}", *(() if self.arm is None else self.arm.words))


@dataclass(frozen=True, slots=True)
class LoadtestPlan:
    name: str
    test: NamedTest
    engine: str
    size: Size
    runs: tuple[PlannedRun, ...]
    trace: Path | None
    cluster_words: tuple[str, ...]
    """Arguments of `kvasir up`, without the policy."""
    slo_ttft: float
    output: Path

    def locust_options(self, run: PlannedRun) -> dict[str, str]:
        """Return a run's options besides rate, duration, seed and cluster."""
        options = {name: str(value) for name, value in self.size.parameters.items()}
        options |= self.test.options
        if self.size.qps is not None:
            options["qps"] = f"{self.size.qps:g}"
        if self.trace is not None:
            options["trace"] = str(self.trace)
        return options | {
            "warmup": f"{self.size.warmup_seconds:g}",
            "test-name": self.name,
            "policy": run.policy,
            "engine": self.engine,
            "num-replicas": str(self.size.num_replicas),
            "cluster": "" if run.arm is None else run.arm.name,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Send the same traffic to a fresh cluster per policy, one after the other, and show what each made\n"
        "of it. By default with simulated replicas, in two to three minutes. With --join each cluster\n"
        "stands in front of servers that run; it has a secret of its own, so what they held before is no hit."
    )
    summaries = {name: test.summary for name, test in NAMED_TESTS.items()}
    width = max(map(len, summaries))
    parser.epilog = "load tests:\n" + "\n".join(
        f"  {name:<{width}}  {summary}" for name, summary in summaries.items()
    )
    add = parser.add_argument
    add("name", metavar="NAME", choices=summaries, help="a load test, see below")
    add("file", metavar="FILE", nargs="?", type=Path, help="the trace, in Mooncake's format, for `trace`")
    add(
        "--policy",
        action="append",
        metavar="NAME",
        help=f"repeatable; the first is compared with (default: {', '.join(DEFAULT_POLICIES)}, or "
        f"{OUR_POLICY} alone where clusters are compared)",
    )
    add(
        "--rounds",
        type=count,
        default=1,
        metavar="N",
        help="number of rounds, each with another seed, in alternating order",
    )
    add("--engine", choices=("simulated", "torch", "vllm"), help="default: simulated, or the load test's own")
    add("--model", metavar="DIR", help="checkpoint directory (default: the toy model)")
    add("--model-name", metavar="NAME", help="model name that clients use (default: the directory's name)")
    add("--replicas", type=count, metavar="N", help="how many (default: 4; 2 with other engines)")
    add("--rate", type=positive, metavar="X", help="requests (chat, agent, documents: sessions) per second")
    add("--duration", type=positive, metavar="S", help="seconds in which requests are sent (default: 60)")
    add("--seed", type=seed, default=1, metavar="N", help="seed of the first round (default: 1)")
    add(
        "--join",
        action="append",
        default=[],
        metavar="URL",
        help="a vLLM or SGLang server that runs already, in place of fresh replicas; repeatable",
    )
    add("--join-key-file", metavar="FILE", help="file with the API key of those servers")
    add("--cache-tokens", type=count, metavar="N", help="tokens that the cache of one replica holds")
    _add_replicas_and_goal(parser)
    add("--quick", action="store_true", help="a small version that takes less than a minute")
    add("--output", type=Path, metavar="DIR", help="run files and report (default: loadtest-NAME-TIME)")
    add("--open", action="store_true", help="show the report in a browser")


def _add_replicas_and_goal(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ram", type=size_in_bytes, metavar="SIZE", help="host memory for KV below the device, a replica")
    add("--disk", type=size_in_bytes, metavar="SIZE", help="disk for KV below that, a replica")
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the replicas; repeatable",
    )
    add(
        "--parameter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter of the workload, such as num_tenants; repeatable",
    )
    add(
        "--slo-ttft",
        type=positive,
        metavar="S",
        help="TTFT limit of the SLO (default: 0.5, or the load test's own)",
    )


def make_plan(arguments: argparse.Namespace) -> LoadtestPlan:
    """Raises LoadtestError."""
    test = NAMED_TESTS[arguments.name]
    if arguments.join:
        _check_joined(arguments, test)
        arguments.engine, arguments.replicas = JOINED, len(arguments.join)
    if arguments.engine is None:
        arguments.engine = test.engine
    if test.arms and (arguments.ram or arguments.disk):
        raise LoadtestError(f"{arguments.name} compares clusters with and without --ram and --disk by itself")
    if test.sends_images:
        _check_takes_images(arguments)
    size = _size(arguments, test)
    plan = LoadtestPlan(
        name=arguments.name,
        test=test,
        engine=arguments.engine,
        size=size,
        runs=_runs(test, _policies(arguments.policy, test), arguments.rounds, arguments.seed),
        trace=_trace(arguments),
        cluster_words=_cluster_words(arguments, test, size),
        slo_ttft=test.slo_ttft if arguments.slo_ttft is None else arguments.slo_ttft,
        output=_output(arguments),
    )
    _workload(plan, plan.runs[0].seed)
    return plan


def _check_joined(arguments: argparse.Namespace, test: NamedTest) -> None:
    for name in NOT_OF_SERVERS:
        if getattr(arguments, name) is not None:
            raise LoadtestError(
                f"--{name.replace('_', '-')} is for replicas of ours: --join has servers that run"
            )
    if test.arms or test.kill_at:
        raise LoadtestError(
            f"{arguments.name} makes and kills replicas of ours: it cannot --join servers that run"
        )


def _check_takes_images(arguments: argparse.Namespace) -> None:
    """Before a cluster is started that would refuse every request."""
    if arguments.engine == TORCH:
        raise LoadtestError(
            f"{arguments.name} sends images, and the torch engine reads text only; take another --engine"
        )
    rule, reason = read_image_rule(
        checkpoint_directory(None if arguments.model is None else str(arguments.model))
    )
    if rule is None:
        raise LoadtestError(
            f"{arguments.name} sends images, and {reason}; give it a --model that takes them, such as what"
            " `python -m replicas.toy_model.make_image_model DIR` makes"
        )


def _policies(named: Sequence[str] | None, test: NamedTest) -> tuple[str, ...]:
    policies = tuple(dict.fromkeys(named or ((OUR_POLICY,) if test.arms else DEFAULT_POLICIES)))
    for policy in policies:
        if policy not in POLICIES:
            raise LoadtestError(f"there is no policy {policy}; there are {', '.join(sorted(POLICIES))}")
    return policies


def _runs(test: NamedTest, policies: Sequence[str], num_rounds: int, seed: int) -> tuple[PlannedRun, ...]:
    """Every other round in the opposite order: what a machine does over time then hits all alike."""
    compared = [(policy, arm) for policy in policies for arm in test.arms or (None,)]
    return tuple(
        PlannedRun(number, policy, seed + number - 1, arm)
        for number in range(1, num_rounds + 1)
        for policy, arm in (compared if number % 2 else reversed(compared))
    )


def _size(arguments: argparse.Namespace, test: NamedTest) -> Size:
    size = size_of(test, arguments.engine, is_quick=arguments.quick)
    if arguments.rate is not None:
        if test.qps is None:
            raise LoadtestError("--rate is not for a trace, which has its own pace")
        size = replace(size, qps=arguments.rate)
    if arguments.replicas is not None:
        size = replace(size, num_replicas=arguments.replicas)
    if arguments.cache_tokens is not None:
        size = replace(size, cache_tokens=arguments.cache_tokens)
    if arguments.duration is not None:
        share = size.warmup_seconds / size.duration_seconds
        size = replace(
            size, duration_seconds=arguments.duration, warmup_seconds=round(share * arguments.duration, 1)
        )
    return replace(size, parameters={**size.parameters, **_parameters(test, arguments.parameter)})


def _parameters(test: NamedTest, settings: Sequence[str]) -> dict[str, int | float]:
    try:
        return dict(read_parameter(test.workload, setting, without=HAVE_OPTIONS) for setting in settings)
    except ValueError as error:
        raise LoadtestError(f"--parameter: {error}") from error


def tenants_of(plan: LoadtestPlan) -> list[str]:
    """Return the tenants that send anything in any run."""
    sent = [_workload(plan, seed).requests for seed in sorted({run.seed for run in plan.runs})]
    return sorted({request.tenant for requests in sent for request in requests if request.tenant is not None})


def _workload(plan: LoadtestPlan, seed: int) -> Workload:
    """Make the workload for this seed. Raises LoadtestError for invalid parameters and files."""
    options = plan.test.options
    made = LoadOptions(
        workload=plan.test.workload,
        model="",
        seed=seed,
        duration_seconds=plan.size.duration_seconds,
        qps=plan.size.qps,
        parameters=" ".join(f"{name}={value}" for name, value in plan.size.parameters.items()),
        trace="" if plan.trace is None else str(plan.trace),
        speed=float(options.get("speed", 1)),
        scale_tokens=float(options.get("scale-tokens", 1)),
        shape=options.get("shape", "constant"),
        shape_low=float(options["shape-low"]) if "shape-low" in options else None,
        shape_high=float(options["shape-high"]) if "shape-high" in options else None,
    )
    try:
        return made.make_workload(context_length=None)[0]
    except OptionsError as error:
        raise LoadtestError(str(error).removesuffix(".")) from error


def _trace(arguments: argparse.Namespace) -> Path | None:
    file: Path | None = arguments.file
    if (arguments.name == TRACE) != (file is not None):
        raise LoadtestError(
            f"{arguments.name} takes no file" if file else "trace takes the file of a trace, see --help"
        )
    if file is not None and not file.is_file():
        raise LoadtestError(f"there is no file {file}")
    return None if file is None else file.absolute()


def _cluster_words(arguments: argparse.Namespace, test: NamedTest, size: Size) -> tuple[str, ...]:
    if arguments.join:
        return _words_of_servers(arguments)
    settings = {**SIMULATED_SETTINGS, **test.settings} if arguments.engine == SIMULATED else {}
    try:
        settings |= settings_from(arguments.set, REFUSED_SETTINGS)
        replica = build(ReplicaConfig, {**settings, "engine": arguments.engine})
        if arguments.engine == SIMULATED:
            check_simulation(replica)
    except SettingsError as error:
        raise LoadtestError(str(error)) from error
    # One block more: the null block holds nothing.
    settings.setdefault("num_blocks", str(size.cache_tokens // replica.tokens_per_block + 1))
    words = ["--engine", arguments.engine, "--replicas", str(size.num_replicas)]
    for option in ("model", "model_name", "ram", "disk"):
        if (value := getattr(arguments, option)) is not None:
            words += [f"--{option.replace('_', '-')}", str(value)]
    return (*words, *(f"--set={name}={value}" for name, value in settings.items()))


def _words_of_servers(arguments: argparse.Namespace) -> tuple[str, ...]:
    options = ("join_key_file", "model", "model_name")
    given = {name: getattr(arguments, name) for name in options if getattr(arguments, name) is not None}
    return (
        *(f"--join={url}" for url in arguments.join),
        *(f"--{name.replace('_', '-')}={value}" for name, value in given.items()),
        *(f"--set={setting}" for setting in arguments.set),
    )


def _output(arguments: argparse.Namespace) -> Path:
    output: Path = arguments.output or Path(time.strftime(f"loadtest-{arguments.name}-%Y%m%d-%H%M%S"))
    if any(output.glob("run-*")):
        raise LoadtestError(f"{output} holds the runs of an earlier load test; choose another --output")
    return output.absolute()
