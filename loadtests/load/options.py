"""The options of the Locust load tests, and the workload that they ask for.

Owns their names, defaults and sentences. The leader and every worker make the same workload from them. Does
not know how requests are sent.
"""

import inspect
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from loadtests.workloads import (
    GENERATORS,
    SENDS_IMAGES,
    Workload,
    first_seconds,
    read_trace,
    scale,
    shrink,
    without_longer_than,
)
from loadtests.workloads.parameters import read_parameter
from loadtests.workloads.shapes import SHAPES, Shape, bend, make_shape

CHATS = ("cross-user", "chat", "agent", "rag", "no-reuse", "mixed", "documents")
TRACE = "trace"
TOKENS_PER_WORD = 1.25
"""At most, in plain messages: a workload counts words, and a server tokens."""
MOST_REQUESTS = 2_000_000
"""Or sessions: what arrives in a week at three a second. Each is some kilobyte in memory."""
HAVE_OPTIONS = ("seed", "qps", "duration_seconds")
"""Parameters of generators that --set does not take."""


class OptionsError(Exception):
    """One sentence for the user who typed the options."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of one run; plain values only, since they travel to workers."""

    workload: str
    model: str
    seed: int
    duration_seconds: float
    qps: float | None = None
    parameters: str = ""
    trace: str = ""
    speed: float = 1.0
    scale_tokens: float = 1.0
    shape: str = "constant"
    shape_low: float | None = None
    shape_high: float | None = None
    shape_period: float | None = None
    closed_loop: int = 0
    timeout_seconds: float = 120.0
    is_standard: bool = False
    api_key: str = ""
    api_keys: Mapping[str, str] = field(default_factory=dict)
    """By tenant; others, and the questions before a run, have `api_key`."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def sends_images(self) -> bool:
        return self.workload in SENDS_IMAGES

    def with_defaults(self, parameters: Mapping[str, int]) -> "LoadOptions":
        """These for the workload's parameters that are not given."""
        given = self._parameters()
        more = [f"{name}={value}" for name, value in parameters.items() if name not in given]
        return replace(self, parameters=" ".join([self.parameters, *more]).strip())

    def make_shape(self) -> Shape:
        try:
            return make_shape(
                self.shape,
                self.duration_seconds,
                low=self.shape_low,
                high=self.shape_high,
                period_seconds=self.shape_period,
            )
        except ValueError as error:
            raise OptionsError(f"{error}.") from error

    def make_workload(self, context_length: int | None) -> tuple[Workload, int]:
        """And how many requests were left out since they exceed the context. Raises OptionsError."""
        shape = self.make_shape()
        # A closed loop has no arrivals, and the shape bends the number of users.
        amount = self.duration_seconds if self.closed_loop else shape.amount
        try:
            workload = self._trace() if self.workload == TRACE else self._generated(amount)
            if self.scale_tokens != 1:
                workload = shrink(workload, self.scale_tokens)
        except (ValueError, OSError, EOFError) as error:
            raise OptionsError(f"{self.workload}: {error}.") from error
        workload = first_seconds(workload, amount)
        if not self.closed_loop:
            workload = bend(workload, shape)
        num_all = len(workload.requests)
        if context_length is not None:
            workload = without_longer_than(workload, int(context_length / TOKENS_PER_WORD))
        if not workload.requests:
            raise OptionsError(
                f"{self.workload}: nothing is left to send; see --duration and --scale-tokens."
            )
        return workload, num_all - len(workload.requests)

    def _trace(self) -> Workload:
        if not self.trace:
            raise OptionsError("the workload trace needs --trace FILE.")
        if self.qps is not None or self.parameters:
            raise OptionsError("--qps and --set are for generators; a trace has its own pace, see --speed.")
        workload = read_trace(self.trace, seed=self.seed)
        if workload.has_images:
            raise ValueError("it names images and does not have them, so they cannot be sent, only simulated")
        return scale(workload, self.speed)

    def _generated(self, amount: float) -> Workload:
        known = inspect.signature(GENERATORS[self.workload]).parameters
        given = self._parameters()
        if self.qps is not None:
            given["qps"] = self.qps
        number = given.get("qps", known["qps"].default) * amount * self.speed
        if number > MOST_REQUESTS:
            raise ValueError(f"{number:.0f} requests are more than the {MOST_REQUESTS} that can be prepared")
        if "duration_seconds" in known:
            given["duration_seconds"] = amount * self.speed
        return scale(GENERATORS[self.workload](seed=self.seed, **given), self.speed)

    def _parameters(self) -> dict[str, Any]:
        settings = self.parameters.replace(",", " ").split()
        try:
            return dict(read_parameter(self.workload, setting, without=HAVE_OPTIONS) for setting in settings)
        except ValueError as error:
            raise OptionsError(f"--set: {error}.") from error


@dataclass(frozen=True, slots=True)
class LeaderOptions:
    """Options of the process that leads the run."""

    run_file: str
    replica_metrics: tuple[str, ...]
    warmup_seconds: float
    kill_command: str
    kill_at: tuple[float, ...]
    test_name: str
    policy: str | None
    engine: str | None
    num_replicas: int | None
    cluster: str


def add_arguments(parser: Any) -> None:
    """To Locust's parser; its web form shows them too, and would take a list that is empty for numbers."""
    add = parser.add_argument
    names = [*CHATS, TRACE, *(name for name in GENERATORS if name not in CHATS)]
    add("--workload", choices=names, default="cross-user", help="what is sent (default: cross-user)")
    add("--model", default="", help="model to ask for (default: the first that the server names)")
    add("--seed", default="", help="another seed, other texts and times (default: another one for each run)")
    add("--qps", default="", help="requests (chat, agent, documents: sessions) per second, on average")
    add("--duration", default="60", help="seconds in which requests are sent (default: 60)")
    add("--set", action="append", help="NAME=VALUE of the workload's parameters; repeatable")
    add("--trace", default="", help="a file in Mooncake's format, for the workload trace")
    add("--speed", default="1", help="speed up arrivals by this factor (default: 1)")
    add("--scale-tokens", default="1", help="shrink prompts and answers by this factor (default: 1)")
    add("--shape", choices=list(SHAPES), default="constant", help="how the rate changes over time")
    add("--shape-low", default="", help="lowest rate, as a multiple of the workload's")
    add("--shape-high", default="", help="highest rate, as a multiple of the workload's")
    add("--shape-period", default="", help="seconds of a step, a burst's cycle, a day")
    add(
        "--closed-loop",
        default="0",
        help="number of users who each wait for an answer before the next request",
    )
    add("--request-timeout", default="120", help="seconds for a whole answer (default: 120)")
    add("--standard-body", default="no", choices=["no", "yes"], help="yes: only OpenAI's own fields")
    add("--api-key", default="", is_secret=True, env_var="OPENAI_API_KEY", help="the bearer token")
    add("--api-keys", default="", help="a file with a bearer token for each tenant: a JSON object")
    add("--run-file", default="", help="write the run to this file, as JSON (.gz: compressed)")
    add("--replica-metrics", action="append", help="a replica's /metrics, [NAME=]URL; repeatable")
    add("--warmup", default="0", help="seconds at the beginning whose requests do not count (default: 0)")
    add("--kill-command", default="", help="a command that causes a failure, such as killing a replica")
    add("--kill-at", action="append", help="seconds at which it runs; repeatable")
    add("--test-name", default="", help="name in the run file (default: the workload's)")
    add("--policy", default="", help="the cluster's routing policy, for the run file")
    add("--engine", default="", help="the cluster's engine, for the run file")
    add("--num-replicas", default="", help="the cluster's replicas, for the run file")
    add("--cluster", default="", help="what the cluster has that others have not, for the run file")


def load_options(parsed: Namespace, *, model: str, seed: int) -> LoadOptions:
    """Raises OptionsError. The web form gives texts, and so does the command line."""
    return LoadOptions(
        workload=parsed.workload,
        model=model,
        seed=seed,
        qps=_number("qps", parsed.qps, above=0.0),
        duration_seconds=_needed("duration", parsed.duration, above=0.0),
        parameters=" ".join(_several(parsed.set)),
        trace=parsed.trace or "",
        speed=_needed("speed", parsed.speed, above=0.0),
        scale_tokens=_needed("scale-tokens", parsed.scale_tokens, above=0.0),
        shape=parsed.shape,
        shape_low=_number("shape-low", parsed.shape_low),
        shape_high=_number("shape-high", parsed.shape_high),
        shape_period=_number("shape-period", parsed.shape_period, above=0.0),
        closed_loop=int(_needed("closed-loop", parsed.closed_loop)),
        timeout_seconds=_needed("request-timeout", parsed.request_timeout, above=0.0),
        is_standard=parsed.standard_body == "yes",
        api_key=api_key_of(parsed),
        api_keys=_api_keys(parsed),
    )


def api_key_of(parsed: Namespace) -> str:
    """For what is asked of no tenant's. Raises OptionsError."""
    return parsed.api_key or next(iter(_api_keys(parsed).values()), "")


def _api_keys(parsed: Namespace) -> dict[str, str]:
    if not parsed.api_keys:
        return {}
    try:
        return msgspec.json.decode(Path(parsed.api_keys).read_bytes(), type=dict[str, str])
    except (OSError, ValueError) as error:
        raise OptionsError(f"--api-keys: {parsed.api_keys} holds no JSON object of keys: {error}.") from error


def leader_options(parsed: Namespace) -> LeaderOptions:
    """Raises OptionsError."""
    duration = _needed("duration", parsed.duration, above=0.0)
    kill_at = tuple(_needed("kill-at", text) for text in _several(parsed.kill_at))
    if parsed.shape == "replica-kill" and not parsed.kill_command:
        raise OptionsError("the shape replica-kill needs --kill-command.")
    if parsed.kill_command and not kill_at:
        kill_at = (duration / 2,)
    num_replicas = _number("num-replicas", parsed.num_replicas, above=0.0)
    return LeaderOptions(
        run_file=parsed.run_file or "",
        replica_metrics=tuple(_several(parsed.replica_metrics)),
        warmup_seconds=_needed("warmup", parsed.warmup),
        kill_command=parsed.kill_command or "",
        kill_at=kill_at,
        test_name=parsed.test_name or parsed.workload,
        policy=parsed.policy or None,
        engine=parsed.engine or None,
        num_replicas=None if num_replicas is None else int(num_replicas),
        cluster=parsed.cluster or "",
    )


def seed_of(parsed: Namespace) -> int | None:
    """None: another one for each run. Raises OptionsError."""
    number = _number("seed", parsed.seed)
    return None if number is None else int(number)


def _several(value: object) -> list[str]:
    """The web form sends one text."""
    values = [value] if isinstance(value, str) else list(value or [])  # type: ignore[call-overload]
    return [word for each in values for word in str(each).split()]


def _needed(name: str, value: object, *, above: float = -1e-9) -> float:
    number = _number(name, value, above=above)
    if number is None:
        raise OptionsError(f"--{name} needs a number.")
    return number


def _number(name: str, value: object, *, above: float = -1e-9) -> float | None:
    if value in ("", None):
        return None
    try:
        number = float(str(value))
    except ValueError:
        number = float("nan")
    if not above < number < float("inf"):
        raise OptionsError(f"--{name} takes a number {'above 0' if above == 0 else 'from 0'}, not {value}.")
    return number
