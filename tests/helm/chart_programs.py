"""What the chart's containers are started with, as the programs read it, and whom they may reach."""

import re
from typing import Any

from replicas.config import ENVIRONMENT_PREFIX as REPLICA_PREFIX
from replicas.config import ReplicaConfig
from replicas.process.settings import load_settings
from router.config import ENVIRONMENT_PREFIX as ROUTER_PREFIX
from router.config import RouterConfig
from tests.helm.chart import (
    Object,
    component_of,
    main_containers,
    matches,
    of_kind,
    pods,
    rendered,
)


def environment(container: Object) -> dict[str, str]:
    """What the process would see; Kubernetes replaces $(NAME) by what stands above."""
    seen: dict[str, str] = {}
    for variable in container["env"]:
        if "value" in variable:
            value = variable["value"]
            for name in re.findall(r"\$\((\w+)\)", value):
                assert name in seen, f"{variable['name']} names {name}, which does not stand above it"
            seen[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda found: seen[found[1]], value)
        elif "fieldRef" in variable["valueFrom"]:
            seen[variable["name"]] = {"metadata.name": "pod-0", "status.podIP": "10.1.2.3"}[
                variable["valueFrom"]["fieldRef"]["fieldPath"]
            ]
        else:
            assert set(variable["valueFrom"]) == {"secretKeyRef"}
            seen[variable["name"]] = "redis://given" if variable["name"].endswith("_URL") else "pass"
    return seen


def config_of(container: Object, kind: type[Any], prefix: str) -> Any:
    return load_settings(
        kind,
        arguments=container["command"][3:],
        environment=environment(container),
        prefix=prefix,
        program="test",
        description="",
    )


def router_config(case: str) -> RouterConfig:
    (container,) = main_containers("router", rendered(case))
    config = config_of(container, RouterConfig, ROUTER_PREFIX)
    assert isinstance(config, RouterConfig)
    return config


def replica_configs(case: str) -> list[ReplicaConfig]:
    return [
        config_of(item, ReplicaConfig, REPLICA_PREFIX) for item in main_containers("replicas", rendered(case))
    ]


def reachable_from(component: str, objects: tuple[Object, ...]) -> dict[str, set[str | None]]:
    """Components that have a policy, and the ports at which they let pods of `component` in; None is all."""
    pod = next(pod for _, pod in pods(objects) if component_of(pod) == component)
    reached: dict[str, set[str | None]] = {}
    for policy in of_kind("NetworkPolicy", objects):
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        (target,) = {
            component_of(other)
            for _, other in pods(objects)
            if matches(policy["spec"]["podSelector"]["matchLabels"], other)
        }
        allowed = reached.setdefault(target, set())
        for rule in policy["spec"]["ingress"]:
            peers = rule.get("from")
            if peers is None or any(
                "podSelector" in peer and matches(peer["podSelector"]["matchLabels"], pod) for peer in peers
            ):
                allowed |= {port["port"] for port in rule["ports"]} if "ports" in rule else {None}
    return reached
