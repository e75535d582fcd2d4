"""The load tests that `kvasir loadtest` knows by name: what is sent, to how large a cluster, what may fail.

Owns their sizes. On the simulated engine they are made for two cores: four replicas whose caches together
hold what the traffic shares, while no single one does; a rate at which the caches decide and the load
generator is in time. Engines that really compute get two replicas, half the tenants and less traffic. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from loadtests.workloads import SENDS_IMAGES

SIMULATED = "simulated"
OVERLOAD = frozenset({"refused (429)", "refused (503)"})
"""Errors that an overloaded cluster may give."""

CUT = frozenset({"failed"})
"""Endings of a started answer when no replica came back in time."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A cluster that a test compares with others: what it has, and what `kvasir up` is told for that."""

    name: str
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTest:
    """`qps` and `parameters` are the workload's, `options` the locustfile's. A trace has no `qps`."""

    summary: str
    workload: str
    qps: float | None
    cache_tokens: int
    """Capacity of one replica's cache."""
    parameters: Mapping[str, int | float] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    kill_at: tuple[float, ...] = ()
    """Times of kills, as shares of the duration."""
    expected_errors: frozenset[str] = frozenset()
    computed_share: float = 0.12
    """Share of the rate for an engine that computes on a CPU."""
    kills_all: bool = False
    """Every replica at once."""
    arms: tuple[Arm, ...] = ()
    """Without any, runs differ in their policy."""
    engine: str = SIMULATED
    """Unless told otherwise."""
    duration_seconds: float = 60.0
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings for simulated replicas."""
    slo_ttft: float = 0.5
    has_keys: bool = False
    """Every tenant has an API key, and the time of `slo_ttft` as its own."""

    @property
    def sends_images(self) -> bool:
        return self.workload in SENDS_IMAGES


@dataclass(frozen=True, slots=True)
class Size:
    """How much of a test is run."""

    num_replicas: int
    qps: float | None
    parameters: Mapping[str, int | float]
    cache_tokens: int
    duration_seconds: float
    warmup_seconds: float


CROSS_USER = {"num_tenants": 20, "system_tokens": 2000}
CROSS_USER_CACHE_TOKENS = 24576
OVERLOAD_QPS = 8.0
"""Rate for replicas at a quarter of their speed, so that few requests overload them: the load generator has
the same cores."""

NAMED_TESTS: Mapping[str, NamedTest] = {
    "cross-user": NamedTest(
        summary="Users of many tenants, each under one of the tenant's two long system prompts.",
        workload="cross-user",
        qps=16.0,
        cache_tokens=CROSS_USER_CACHE_TOKENS,
        parameters=CROSS_USER,
    ),
    "chat": NamedTest(
        summary="Conversations of several turns under their tenants' system prompts.",
        workload="chat",
        qps=3.0,
        cache_tokens=24576,
        parameters={"num_tenants": 16, "system_tokens": 1000, "question_tokens": 120, "answer_tokens": 48},
    ),
    "agent": NamedTest(
        summary="Agents that send a growing prompt again with every tool's result, each under its own key.",
        workload="agent",
        qps=1.0,
        cache_tokens=32768,
        parameters={
            "num_tenants": 12,
            "tools_tokens": 1500,
            "system_tokens": 800,
            "mean_result_tokens": 200,
            "most_tokens": 4000,
        },
    ),
    "rag": NamedTest(
        summary="Questions about two of a tenant's documents, in any order, so that few share both.",
        workload="rag",
        qps=10.0,
        cache_tokens=32768,
        parameters={"num_tenants": 4, "documents_per_prompt": 2, "document_tokens": 800},
    ),
    "no-reuse": NamedTest(
        summary="The control: no two prompts begin alike, and no policy can do anything about it.",
        workload="no-reuse",
        qps=10.0,
        cache_tokens=24576,
        parameters={"prompt_tokens": 1000},
    ),
    "mixed": NamedTest(
        summary="All of the above at once, over small caches.",
        workload="mixed",
        qps=14.0,
        cache_tokens=10240,
    ),
    "documents": NamedTest(
        summary="Conversations about documents of images, which users share; needs a --model for images.",
        workload="documents",
        qps=4.0,
        cache_tokens=36864,
        parameters={"num_tenants": 4, "num_documents": 24, "fewest_pages": 8, "most_pages": 16},
    ),
    "trace": NamedTest(
        summary="A recorded trace in Mooncake's format, its prompts and answers a tenth as long.",
        workload="trace",
        qps=None,
        cache_tokens=65536,
        options={"scale-tokens": "0.1", "speed": "4"},
    ),
    "replica-kill": NamedTest(
        summary="cross-user, while one replica after another is killed and comes back empty.",
        workload="cross-user",
        qps=12.0,
        cache_tokens=CROSS_USER_CACHE_TOKENS,
        parameters=CROSS_USER,
        options={"shape": "replica-kill"},
        kill_at=(1 / 3, 2 / 3),
        expected_errors=OVERLOAD,
    ),
    "long-memory": NamedTest(
        summary="Prefixes that are ten times what the devices hold; every replica is killed in the middle.",
        workload="cross-user",
        qps=2.5,
        cache_tokens=3072,
        parameters={"num_tenants": 64, "system_tokens": 960, "question_tokens": 40, "output_tokens": 16},
        kill_at=(1 / 2,),
        kills_all=True,
        expected_errors=OVERLOAD | CUT,
        computed_share=1.0,
        arms=(Arm("device only", ()), Arm("RAM and disk", ("--ram=32MiB", "--disk=1GiB"))),
        engine="torch",
        duration_seconds=120.0,
    ),
    "burst": NamedTest(
        summary="cross-user, whose rate goes up eightfold in bursts.",
        workload="cross-user",
        qps=8.0,
        cache_tokens=CROSS_USER_CACHE_TOKENS,
        parameters=CROSS_USER,
        options={"shape": "burst"},
        expected_errors=OVERLOAD,
    ),
    "ramp": NamedTest(
        summary="cross-user, whose rate rises ninefold from beginning to end.",
        workload="cross-user",
        qps=14.0,
        cache_tokens=CROSS_USER_CACHE_TOKENS,
        parameters=CROSS_USER,
        options={"shape": "ramp"},
        expected_errors=OVERLOAD,
    ),
    "overload": NamedTest(
        summary="cross-user with a key for each tenant, at rates that rise beyond what the fleet carries.",
        workload="cross-user",
        qps=OVERLOAD_QPS,
        cache_tokens=CROSS_USER_CACHE_TOKENS,
        parameters=CROSS_USER,
        options={"shape": "steps", "shape-low": "0.5", "shape-high": "4"},
        expected_errors=OVERLOAD,
        settings={"simulated_speed": "0.25"},
        slo_ttft=2.0,
        has_keys=True,
    ),
    "day": NamedTest(
        summary="cross-user, whose rate follows a day: low, high at noon, low again.",
        workload="cross-user",
        qps=14.0,
        cache_tokens=CROSS_USER_CACHE_TOKENS,
        parameters=CROSS_USER,
        options={"shape": "day"},
    ),
}

SIMULATED_SETTINGS: Mapping[str, str] = {"simulated_hardware": "h100x4-70b", "max_batched_tokens": "2048"}
"""Prefills that last long enough to be seen next to what a busy two-core machine adds, in steps that are
not so long that every answer stutters."""


def size_of(test: NamedTest, engine: str, *, is_quick: bool) -> Size:
    """Unless told otherwise. A quick one has a smaller fleet for fewer tenants, and shows less."""
    if is_quick:
        share = 0.75 if engine == SIMULATED else test.computed_share
        seconds = 6.0 if engine == SIMULATED else 12.0  # of so few requests, twice as many
        return Size(
            num_replicas=2,
            qps=None if test.qps is None else test.qps * share,
            parameters=_with_tenants(test.parameters, 4),
            cache_tokens=test.cache_tokens // 2,
            duration_seconds=seconds,
            warmup_seconds=seconds / 6,
        )
    if engine != SIMULATED:
        return Size(
            num_replicas=2,
            qps=None if test.qps is None else test.qps * test.computed_share,
            parameters=_with_tenants(test.parameters, 2),
            cache_tokens=test.cache_tokens,
            duration_seconds=test.duration_seconds,
            warmup_seconds=10.0,
        )
    return Size(4, test.qps, test.parameters, test.cache_tokens, test.duration_seconds, 8.0)


def _with_tenants(parameters: Mapping[str, int | float], divisor: int) -> dict[str, int | float]:
    return {
        name: max(1, int(value) // divisor) if name == "num_tenants" else value
        for name, value in parameters.items()
    }
