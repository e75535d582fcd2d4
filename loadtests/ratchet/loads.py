"""Loads: the ratchet's workloads, with fleets of two replicas that just carry them. Pure.

Owns the parameters. They are chosen so that a few hundred requests show what routers differ in: replicas
are busy, and caches are smaller than what is asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from loadtests.simulation.shape import TierShape
from replicas.simulated_engine.hardware import HARDWARE

H100 = HARDWARE["h100-8b"]
GROWING = ("qps", "num_requests", "num_sessions")
"""Parameters that grow with the rate, where as long a time is to be filled."""


@dataclass(frozen=True, slots=True)
class Load:
    """A generator's parameters, and replicas to serve its requests."""

    generator: str
    parameters: tuple[tuple[str, float | int | str], ...]
    cache_tokens: int = H100.cache_tokens
    decodes_beside: bool = True
    num_replicas: int = 2

    def parameters_of(self, times: int) -> tuple[tuple[str, float | int | str], ...]:
        """Return the parameters for `times` the rate."""
        return tuple((name, value * times if name in GROWING else value) for name, value in self.parameters)

    @property
    def seconds(self) -> float:
        """For so long new sessions come, or requests where there are none. Old sessions go on for longer."""
        found = dict(self.parameters)
        return float(found.get("num_sessions") or found["num_requests"]) / float(found["qps"])


def _load(
    generator: str,
    *,
    cache_tokens: int = H100.cache_tokens,
    decodes_beside: bool = True,
    num_replicas: int = 2,
    **parameters: float | int | str,
) -> Load:
    return Load(generator, tuple(parameters.items()), cache_tokens, decodes_beside, num_replicas)


def _conversations(*, qps: float, decodes_beside: bool) -> Load:
    """Long prompts, most of which are asked about only once or twice."""
    return _load(
        "multi-turn",
        decodes_beside=decodes_beside,
        qps=qps,
        num_sessions=130,
        fewest_turns=1,
        most_turns=4,
        mean_own_tokens=11_000,
        most_own_tokens=100_000,
        question_tokens=1000,
        answer_tokens=340,
        think_seconds=15.0,
        block_tokens=256,
    )


def _coding_agents(*, qps: float, decodes_beside: bool) -> Load:
    return _load(
        "coding-agents",
        cache_tokens=1_190_000,
        decodes_beside=decodes_beside,
        qps=qps,
        num_sessions=16,
        mean_turns=30,
        block_tokens=512,
    )


LOADS: Mapping[str, Load] = {
    "conversations": _conversations(qps=1.6, decodes_beside=True),
    "conversations, one batch": _conversations(qps=0.8, decodes_beside=False),
    "conversations at once": _load(
        "multi-turn",
        qps=40.0,
        num_sessions=80,
        fewest_turns=3,
        most_turns=6,
        mean_own_tokens=3000,
        most_own_tokens=20_000,
        question_tokens=500,
        answer_tokens=200,
        think_seconds=10.0,
        block_tokens=256,
    ),
    "tool agents": _load(
        "agentic",
        qps=2.0,
        num_sessions=90,
        mean_turns=6,
        shared_tokens=4000,
        mean_turn_tokens=2500,
        mean_output_tokens=170,
        tool_seconds=3.0,
        block_tokens=256,
    ),
    "coding agents": _coding_agents(qps=0.1, decodes_beside=True),
    "coding agents, one batch": _coding_agents(qps=0.05, decodes_beside=False),
    "B2B": _load("b2b", cache_tokens=200_000, qps=9.0, num_requests=450, num_groups=40, output_tokens=300),
    "Zipf": _load(
        "zipf-b2b", cache_tokens=100_000, qps=13.0, num_requests=450, num_groups=60, output_tokens=100
    ),
    "documents": _load(
        "zipf-b2b",
        cache_tokens=250_000,
        qps=3.2,
        num_requests=220,
        num_groups=60,
        question_tokens=9000,
        output_tokens=150,
    ),
    "one large tenant": _load("one-large-tenant", qps=110.0, num_requests=600),
}

ROOM_LOADS: Mapping[str, Load] = {
    "tool agents, one batch": _load(
        "agentic",
        decodes_beside=False,
        num_replicas=4,
        qps=2.2,
        num_sessions=110,
        mean_turns=6,
        shared_tokens=4000,
        mean_turn_tokens=2500,
        mean_output_tokens=300,
        tool_seconds=3.0,
        block_tokens=256,
    ),
    "coding agents, own memory": _load(
        "coding-agents",
        decodes_beside=False,
        num_replicas=4,
        qps=0.05,
        num_sessions=14,
        mean_turns=30,
        block_tokens=512,
    ),
}
"""Running contexts fill the replicas before prompts keep them busy, and unevenly."""

TIER_LOADS: Mapping[str, Load] = {name: LOADS[name] for name in ("conversations", "Zipf")}


HOST_BYTES = 150_000.0 * H100.bytes_per_token
"""Small enough that the disk gets something."""

WAYS: Mapping[str, TierShape] = {
    "host memory": TierShape(H100.bytes_per_token, HOST_BYTES),
    "host memory and disk": TierShape(H100.bytes_per_token, HOST_BYTES, disk_bytes=1e12),
    "host memory, disk and pulls": TierShape(
        H100.bytes_per_token, HOST_BYTES, disk_bytes=1e12, pull_bytes_per_second=10e9
    ),
}
