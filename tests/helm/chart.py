"""The chart, rendered as `helm install` would, and what is in it by kind, label and port.

Owns the examples and the toggles that tests go through. Does not know a cluster: `lookup` finds nothing.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import yaml

FOLDER = Path(__file__).resolve().parent.parent.parent / "helm"
KUBERNETES = "1.37"
"""The version whose schemas objects are held against."""

DEFINED_BY_OTHERS = {
    ("monitoring.coreos.com/v1", "PodMonitor"),
    ("monitoring.coreos.com/v1", "PrometheusRule"),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"),
    ("inference.networking.k8s.io/v1", "InferencePool"),
    ("ray.io/v1", "RayCluster"),
    ("keda.sh/v1alpha1", "ScaledObject"),
    ("cert-manager.io/v1", "Issuer"),
    ("cert-manager.io/v1", "Certificate"),
}
"""Kinds whose schemas are not Kubernetes' own; other tests look at their fields."""

EXAMPLES = sorted(path.stem for path in (FOLDER / "ci").glob("*.yaml"))

Object = dict[str, Any]
Values = Mapping[str, Any]

PROMETHEUS = "http://prometheus.monitoring:9090"
TOGGLES: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "cases.yaml").read_text("utf-8"))
BASES = {case: str(values.pop("from", "nothing set")) for case, values in TOGGLES.items()}
CASES = [*EXAMPLES, *(case for case in TOGGLES if not case.startswith(("overlays", "additions")))]
"""Cases without those in which values change what the chart counts on."""


def with_keys(values: Values) -> Values:
    """The chart demands that something is said of API keys; here it is said unless the values do."""
    return {**values, "router": {"keys": {"existingSecret": "keys"}, **values.get("router", {})}}


def values_of(case: str) -> Values:
    if case in TOGGLES:
        return with_keys(TOGGLES[case])
    loaded: Values = yaml.safe_load((FOLDER / "ci" / f"{case}.yaml").read_text(encoding="utf-8"))
    return loaded


@cache
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(FOLDER)


def render(values: Values) -> list[Object]:
    """All objects, hooks included. Raises HelmValuesError or HelmRenderError."""
    return objects_in(chart().render(dict(with_keys(values)), name="demo", namespace="llm", is_install=True))


def objects_in(files: Mapping[str, str]) -> list[Object]:
    return [
        found
        for path, text in files.items()
        if not path.endswith("NOTES.txt")
        for found in yaml.load_all(text, Loader=yaml.CSafeLoader)
        if found is not None
    ]


@cache
def rendered(case: str) -> tuple[Object, ...]:
    return tuple(render(values_of(case)))


_VALID: set[str] = set()
"""Objects that Kubernetes takes, as JSON: cases share most of them, and a look reads a megabyte."""


def check_fields(item: Object) -> None:
    """Raises kubernetes_validate.ValidationError if it has a field that Kubernetes does not know."""
    text = json.dumps(item, sort_keys=True)
    if (item["apiVersion"], item["kind"]) not in DEFINED_BY_OTHERS and text not in _VALID:
        kubernetes_validate.validate(item, KUBERNETES, strict=True)
        _VALID.add(text)


def named(kind: str, name: str, objects: tuple[Object, ...]) -> Object:
    (found,) = [item for item in objects if item["kind"] == kind and item["metadata"]["name"] == name]
    return found


def of_kind(kind: str, objects: tuple[Object, ...]) -> list[Object]:
    return [item for item in objects if item["kind"] == kind]


def pods(objects: tuple[Object, ...]) -> Iterator[tuple[str, Object]]:
    """Name, and what a pod of it will look like: of everything that makes pods."""
    for item in objects:
        name = item["metadata"]["name"]
        if item["kind"] == "Pod":
            yield name, item
        elif item["kind"] in ("Deployment", "StatefulSet"):
            yield name, item["spec"]["template"]
        elif item["kind"] == "RayCluster":
            yield f"{name}-head", item["spec"]["headGroupSpec"]["template"]
            for group in item["spec"]["workerGroupSpecs"]:
                yield f"{name}-pool-{group['groupName']}", group["template"]


def containers(pod: Object) -> list[Object]:
    """Those of the chart. KubeRay adds one to Ray's head where pools scale: `ray_autoscaler`."""
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def ray_autoscaler(objects: tuple[Object, ...]) -> Object | None:
    """The container that KubeRay puts beside Ray's head, as far as the chart describes it."""
    for cluster in of_kind("RayCluster", objects):
        if cluster["spec"].get("enableInTreeAutoscaling"):
            options: Object = cluster["spec"]["autoscalerOptions"]
            return options
    return None


def main_containers(module: str, objects: tuple[Object, ...]) -> list[Object]:
    """Containers that run `python -m module`."""
    command = ["python", "-m", module]
    return [
        item for _, pod in pods(objects) for item in containers(pod) if item.get("command", [])[:3] == command
    ]


def component_of(item: Object) -> str:
    return str(item["metadata"]["labels"]["app.kubernetes.io/component"])


def matches(selector: Mapping[str, str], pod: Object) -> bool:
    return selector.items() <= pod["metadata"]["labels"].items()


def ports(pod: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for item in containers(pod) for port in item.get("ports", [])}
