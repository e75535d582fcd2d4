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

MONITORING = {"monitors": {"enabled": True}, "rules": {"enabled": True}, "dashboards": {"enabled": True}}
GATEWAYS: Values = {"gatewayFrom": [{"podSelector": {"matchLabels": {"app": "envoy"}}}]}
EXTERNAL: Values = {"host": "redis.example", "passwordSecret": "credentials"}
PROMETHEUS = "http://prometheus.monitoring:9090"
EVERY_TARGET: Values = {
    **{"minReplicas": 2, "maxReplicas": 8, "upSeconds": 2.5},
    **{"targetInFlight": 24, "targetPendingTokens": 1e6, "targetQueueSeconds": 0.5, "targetKvShare": 0.8},
}
TOGGLES: dict[str, Values] = {
    "nothing set": {},
    "long names": {"fullnameOverride": "a" * 40, "pools": {"b" * 15: {}}},
    "autoscaling": {"router": {"autoscaling": {"enabled": True, "targetInFlight": 100}}},
    "autoscaling by load only": {
        "router": {"autoscaling": {"enabled": True, "targetInFlight": 100, "targetCPUPercent": 0}}
    },
    "no extras": {
        "networkPolicy": {"enabled": False},
        "router": {"podDisruptionBudget": {"enabled": False}, "topologySpread": {"enabled": False}},
        "poolDefaults": {"podDisruptionBudget": False},
    },
    "ways in": {
        "service": {"type": "LoadBalancer", "port": 8080, "annotations": {"a/b": "c"}},
        "ingress": {"enabled": True, "hosts": ["a.example", "b.example"], "path": "/"},
        "gateway": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["a.example"]},
        "networkPolicy": {"routerFrom": [{"namespaceSelector": {}}], "metricsFrom": []},
    },
    "endpoint picker": {
        "router": {"picker": {"enabled": True, "selector": {"app": "vllm"}, "targetPorts": [8000, 8001]}},
        "networkPolicy": GATEWAYS,
    },
    "endpoint picker over TLS": {
        "router": {"picker": {"enabled": True, "selector": {"app": "vllm"}, "tlsSecret": "picker"}},
        "networkPolicy": {**GATEWAYS, "routerFrom": [{"podSelector": {}}]},
    },
    "external Redis": {"redis": {"mode": "external", "external": EXTERNAL}},
    "external Redis over TLS": {
        "redis": {"mode": "external", "external": {**EXTERNAL, "tls": {"enabled": True, "caSecret": "ca"}}}
    },
    "external Redis without password": {"redis": {"mode": "external", "external": {"host": "redis.example"}}},
    "external Redis by address": {"redis": {"mode": "external", "external": {"urlSecret": "address"}}},
    "persistent Redis": {"redis": {"builtin": {"persistence": {"enabled": True, "storageClass": "fast"}}}},
    "given secret": {"clusterSecret": {"existingSecret": "mine", "key": "hex"}},
    "monitoring": {"monitoring": MONITORING},
    "settings": {
        "router": {
            "settings": {
                **{"max_in_flight": 10_000_000, "room_price": 1.5, "log_requests": True},
                **{"cors_origins": ["https://a.example", "https://b.example"], "off": ["caches"]},
            }
        },
        "poolDefaults": {
            "engine": "vllm",
            "settings": {
                **{"kv_cache_bytes": 2**40, "engine_args": {"tensor_parallel_size": 2, "seed": None}},
                "model_aliases": ["gpt-4o", "a,b"],
            },
        },
        "traces": {"endpoint": "http://collector:4318", "sampleRatio": 0.25},
    },
    "model from a hub": {
        "poolDefaults": {
            "model": {"source": "hub", "repository": "Qwen/Qwen3-8B", "tokenSecret": "hub"},
            "gpu": {"count": 2, "product": "L40S"},
            "sharedMemory": "2Gi",
            "runtimeClassName": "nvidia",
        }
    },
    "model from a hub, kept": {
        "poolDefaults": {"model": {"source": "hub", "repository": "Qwen/Qwen3-8B", "cacheSize": "40Gi"}}
    },
    "KV in memory": {"poolDefaults": {"kv": {"memory": "512Mi"}}},
    "mTLS, KV pulled by peers": {
        "poolDefaults": {"kv": {"memory": "1Gi"}, "settings": {"pull_bytes_per_second": 10**9}},
        "mtls": {"enabled": True, "replicaName": "replica.example"},
    },
    "KV on the node": {"poolDefaults": {"kv": {"memory": "64Gi", "disk": "500Gi"}}},
    "KV in a folder of the node": {
        "poolDefaults": {"kv": {"memory": "64Gi", "disk": "2Ti", "volume": "hostPath", "hostPath": "/srv/kv"}}
    },
    "KV in claims": {
        "poolDefaults": {
            "kv": {"memory": "64Gi", "disk": "500Gi", "volume": "claim", "storageClass": "local-nvme"},
            "model": {"source": "hub", "repository": "Qwen/Qwen3-8B", "cacheSize": "40Gi"},
            "settings": {"disk_reserve_bytes": 100 * 2**30, "spill_seconds": 30.5},
        }
    },
    "KubeRay, KV in claims": {
        "fleet": {"mode": "kuberay"},
        "poolDefaults": {"kv": {"memory": "64Gi", "disk": "500Gi", "volume": "claim"}},
    },
    "model on a volume": {
        "poolDefaults": {"model": {"source": "claim", "claim": "models", "path": "/qwen/"}},
        "imagePullSecrets": [{"name": "registry"}],
        "commonLabels": {"team": "llm"},
    },
    "model in the image": {"poolDefaults": {"model": {"source": "image", "path": "/opt/model"}}},
    "KubeRay": {
        "fleet": {"mode": "kuberay"},
        "monitoring": MONITORING,
        "networkPolicy": {"routerFrom": [{"namespaceSelector": {}}]},
    },
    "KubeRay, external Redis": {
        "fleet": {"mode": "kuberay"},
        "redis": {
            "mode": "external",
            "external": {**EXTERNAL, "username": "me", "tls": {"enabled": True, "caSecret": "ca"}},
        },
        "ray": {"head": {"tolerations": [{"operator": "Exists"}]}},
    },
    "KubeRay without fault tolerance": {
        "fleet": {"mode": "kuberay"},
        "ray": {"faultTolerance": False},
        "redis": {"mode": "external", "external": {"urlSecret": "address"}},
        "networkPolicy": {"enabled": False},
        "pools": {"a": {"replicas": 1, "surge": 1}, "b": {"settings": {"num_threads": 4}}},
    },
    "KubeRay, pools that scale": {
        "fleet": {"mode": "kuberay"},
        "poolDefaults": {"surge": 1},
        "pools": {
            "a": {"autoscaling": {"enabled": True, "minReplicas": 2, "maxReplicas": 5}, "replicas": 9},
            "b": {
                "autoscaling": {
                    **{"enabled": True, "targetInFlight": 0, "targetPendingTokens": 1e6},
                    **{"upSeconds": 2.5, "downSeconds": 0, "tolerance": 0},
                }
            },
            "c": {"replicas": 3, "engine": "torch", "model": {"name": "fixed"}},
        },
        "ray": {"autoscaler": {"idleSeconds": 90}, "image": {"pullPolicy": "Always"}},
    },
    "pools that scale by hpa and keda": {
        "fleet": {"mode": "statefulset"},
        "monitoring": {"rules": {"labels": {"prometheus": "ours"}}},
        "pools": {
            "a": {"autoscaling": {"enabled": True, "by": "hpa", **EVERY_TARGET}, "replicas": 9},
            "b": {
                "autoscaling": {"enabled": True, "by": "keda", "prometheus": PROMETHEUS, **EVERY_TARGET},
                "model": {"source": "image", "path": "/opt/qwen"},
            },
            "c": {
                "autoscaling": {"enabled": True, "by": "keda", "prometheus": PROMETHEUS, "downSeconds": 9000},
                "model": {"source": "image", "path": "/opt/qwen"},
            },
            "d": {"replicas": 3, "model": {"source": "image", "path": "/opt/other"}},
        },
    },
    "a pool that goes down to zero": {
        "fleet": {"mode": "statefulset"},
        "router": {"settings": {"wait_for_replica_seconds": 600}},
        "redis": {"builtin": {"persistence": {"enabled": True}}},
        "poolDefaults": {
            "autoscaling": {"enabled": True, "by": "keda", "prometheus": PROMETHEUS, "minReplicas": 0},
            "startSeconds": 900,
        },
    },
    "mTLS": {"mtls": {"enabled": True}},
    "mTLS, given issuer": {
        "mtls": {
            "enabled": True,
            "replicaName": "replica.example",
            "certManager": {
                "issuerRef": {"name": "private", "kind": "ClusterIssuer"},
                "duration": "48h",
                "renewBefore": "16h",
            },
        }
    },
    "mTLS, given secrets": {
        "mtls": {"enabled": True, "existingSecrets": {"router": "for-routers", "replica": "for-replicas"}},
        "redis": {
            "mode": "external",
            "external": {**EXTERNAL, "tls": {"enabled": True, "caSecret": "ca"}},
        },
    },
    "mTLS, KubeRay": {"mtls": {"enabled": True}, "fleet": {"mode": "kuberay"}},
    "servers of a Service": {
        "pools": {
            "run": {
                "engines": {"service": "vllm", "port": 8000, "keySecret": "for-servers"},
                "model": {"source": "hub", "repository": "Qwen/Qwen3-8B"},
                "settings": {"max_running": 512},
            }
        },
        "monitoring": MONITORING,
        "traces": {"endpoint": "http://collector:4318"},
    },
    "mTLS, servers of an InferencePool": {
        "pools": {"run": {"engines": {"inferencePool": "qwen", "namespace": "models"}}, "own": {}},
        "mtls": {"enabled": True},
        "networkPolicy": {"metricsFrom": []},
    },
    "servers in DNS, KubeRay": {
        "pools": {
            "run": {
                "engines": {"dns": "http://vllm:8000", "atMost": 3},
                "model": {"source": "claim", "claim": "models", "path": "/qwen", "name": "qwen"},
            },
            "own": {},
        },
        "fleet": {"mode": "kuberay"},
    },
    "open to everyone": {"router": {"keys": {"open": True}}},
    "keys in a Secret": {
        "router": {"keys": {"existingSecret": "mine", "key": "tenants"}},
        "test": {"apiKeySecret": "for-tests", "apiKeyKey": "token"},
    },
    "placed": {
        "router": {
            "nodeSelector": {"a": "b"},
            "tolerations": [{"operator": "Exists"}],
            "priorityClassName": "high",
        },
        "poolDefaults": {"affinity": {"nodeAffinity": {}}, "podAnnotations": {"a": "b"}},
    },
}
CASES = [*EXAMPLES, *TOGGLES]


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
