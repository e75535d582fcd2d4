"""check_models(): asks the machines that would run pools whether their models load.

Owns the choice of machines and the verdict; `replicas.loadable` knows what a model must have. Every machine
that can hold a replica is asked, since Ray may choose any.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import PoolSpec
from cluster.controller import actors
from cluster.controller.capacity import fits
from replicas.config import ReplicaConfig
from replicas.vllm_engine.environment import VLLM_ENVIRONMENT

ANSWER_SECONDS = 60.0
"""Seconds to wait for answers; after that the first replica will tell."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """`refusal` is one sentence, or None; `notes` are about what could not be checked."""

    refusal: str | None = None
    notes: tuple[str, ...] = ()


def check_models(pools: Sequence[PoolSpec], answer_seconds: float = ANSWER_SECONDS) -> ModelCheck:
    """Check the models; blocks while each machine starts a process and reads some files."""
    if not pools:
        return ModelCheck()
    by_machine: dict[str, list[PoolSpec]] = defaultdict(list)
    addresses: dict[str, str] = {}
    for node in actors.nodes():
        addresses[node["NodeID"]] = node["NodeManagerAddress"]
        for pool in pools:
            if fits(pool.bundles()[0], node["Resources"]):
                by_machine[node["NodeID"]].append(pool)
    calls = {_ask(machine, asked): machine for machine, asked in by_machine.items()}
    unknown = {pool.name for pool in pools}
    answered = ray.wait(list(calls), num_returns=len(calls), timeout=answer_seconds)[0] if calls else []
    for call in answered:
        address = addresses[calls[call]]
        try:
            sentences: Mapping[str, str | None] = ray.get(call)
        except RayError as error:
            logger.warning("%s could not check the models: %s", address, error)
            continue
        for name, sentence in sentences.items():
            if sentence is not None:
                return ModelCheck(f"pool {name} would not start on {address}: {sentence}")
            unknown.discard(name)
    return ModelCheck(notes=tuple(_unknown(name) for name in sorted(unknown)))


def _unknown(name: str) -> str:
    return f"no machine could say whether the model of pool {name} loads: its first replica will"


def _ask(machine: str, pools: Iterable[PoolSpec]) -> Any:
    """Start a task on that machine, without resources, since the machine may be full."""
    configs = {pool.name: pool.replica for pool in pools}
    has_vllm = any(config.engine == "vllm" for config in configs.values())
    # A process that may have loaded torch does not stay for nothing.
    task: Any = ray.remote(num_cpus=0, max_retries=0, max_calls=1)(look_at_models)
    return task.options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(machine, soft=False),
        runtime_env={"env_vars": dict(VLLM_ENVIRONMENT)} if has_vllm else None,
    ).remote(configs)


def look_at_models(configs: Mapping[str, ReplicaConfig]) -> dict[str, str | None]:
    """Check the configurations; runs on the machine. Returns a refusal by pool."""
    from replicas.loadable import complaint

    return {name: complaint(config) for name, config in configs.items()}
