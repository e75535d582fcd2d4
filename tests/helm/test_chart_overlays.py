"""Whatever a platform asks of an object is a value: overlays, and objects of one's own."""

from typing import Any

import pytest
import yaml
from helm_python import HelmError

from tests.helm.chart import FOLDER, MONITORING, Object, check_fields, named, pods, render

OVERLAYS = yaml.safe_load("""
Pod: {metadata: {labels: {team: llm, tier: none}}}
Pod/router:
  metadata: {labels: {tier: front}, annotations: {scrape: "no"}}
  spec:
    securityContext: {fsGroup: 1000660000}
    volumes: [{name: ca, configMap: {name: our-ca}}, {name: tmp, emptyDir: {sizeLimit: 1Gi}}]
    initContainers: [{name: wait, image: busybox}]
    containers:
      - {name: proxy, image: envoy}
      - name: router
        envFrom: [{secretRef: {name: more}}]
        env: [{name: HOME, value: /home}, {name: HTTPS_PROXY, value: "http://proxy:3128"}]
        startupProbe: {failureThreshold: 7}
        livenessProbe: null
        volumeMounts: [{name: ca, mountPath: /ca}, {name: tmp, mountPath: /scratch}]
Pod/pool:
  metadata: {annotations: {pool: any}}
  spec:
    schedulerName: volcano
    hostNetwork: true
    hostIPC: true
    resourceClaims: [{name: gpu, resourceClaimTemplateName: gpus}]
    topologySpreadConstraints:
      - {maxSkew: 1, topologyKey: zone, whenUnsatisfiable: ScheduleAnyway, labelSelector: {}}
Pod/pool-a:
  metadata: {annotations: {pool: a}}
  spec: {schedulerName: kueue, containers: [{name: log, image: fluent-bit}]}
Pod/redis: {spec: {priorityClassName: high, affinity: {podAntiAffinity: {}}}}
Deployment/router: {spec: {strategy: {type: Recreate, rollingUpdate: null}}}
Service/router:
  spec:
    loadBalancerClass: ours
    externalTrafficPolicy: Local
    loadBalancerSourceRanges: [10.0.0.0/8]
    ports: [{name: http, nodePort: 30080}]
HTTPRoute/router: {metadata: {annotations: {a: b}}}
NetworkPolicy: {metadata: {annotations: {by: policy}}}
""")
BY_MODE: dict[str, dict[str, Any]] = {
    "statefulset": {
        "StatefulSet/pool": {"spec": {"updateStrategy": {"rollingUpdate": {"maxUnavailable": 2}}}}
    },
    "kuberay": {
        "RayCluster": {"spec": {"workerGroupSpecs": [{"groupName": "a", "idleTimeoutSeconds": 9}]}},
        "Pod/ray-head": {"spec": {"hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a"]}]}},
    },
}
EXTRA = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-mine"}}


def values(mode: str, **more: Any) -> dict[str, Any]:
    return {
        "fleet": {"mode": mode},
        "pools": {"a": {"settings": {"kv_cache_bytes": 2**40}}, "b": {}, "found": {"engines": {"dns": "http://a:1"}}},
        "service": {"type": "LoadBalancer"},
        "gateway": {"enabled": True, "parentRefs": [{"name": "public"}]},
        "monitoring": MONITORING,
        **more,
    }  # fmt: skip


def by_key(objects: tuple[Object, ...]) -> dict[tuple[str, str], Object]:
    return {(item["kind"], item["metadata"]["name"]): item for item in objects}


@pytest.mark.parametrize("mode", ["statefulset", "kuberay"])
def test_overlays_are_merged_into_every_object_and_pod_and_change_nothing_else(mode: str) -> None:
    overlays = {**OVERLAYS, **BY_MODE[mode]}
    objects = tuple(render(values(mode, overlays=overlays, extraObjects=[EXTRA])))
    for item in objects:
        check_fields(item)
    found = dict(pods(objects))
    for name, pod in found.items():
        check_fields({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod["spec"]})
        tier = "front" if name == "demo-kvasir-router" else "none"
        assert (pod["metadata"]["labels"]["team"], pod["metadata"]["labels"]["tier"]) == ("llm", tier)
        if "-pool-" in name:
            spec = pod["spec"]
            assert (spec["hostNetwork"], spec["resourceClaims"][0]["name"]) == (True, "gpu")
            assert spec["topologySpreadConstraints"][0]["topologyKey"] == "zone"
            is_a = name.endswith("-a")
            assert pod["metadata"]["annotations"]["pool"] == ("a" if is_a else "any")
            assert spec["schedulerName"] == ("kueue" if is_a else "volcano")
            assert [item["name"] for item in spec["containers"]][1:] == ["log"] * is_a
    plain = by_key(tuple(render(values(mode))))
    for key, item in by_key(objects).items():
        if item["kind"] not in ("Deployment", "StatefulSet", "RayCluster", "Pod", "Secret", "NetworkPolicy"):
            touched = key in (("Service", "demo-kvasir-router"), ("HTTPRoute", "demo-kvasir-router"))
            assert (item == plain.pop(key, item)) != touched, key
    (old,) = plain["Deployment", "demo-kvasir-router"]["spec"]["template"]["spec"]["containers"]
    router, proxy = found["demo-kvasir-router"]["spec"]["containers"]
    assert (proxy["image"], router["envFrom"]) == ("envoy", [{"secretRef": {"name": "more"}}])
    assert "livenessProbe" not in router
    assert router["startupProbe"] == {**old["startupProbe"], "failureThreshold": 7}
    assert len(router["env"]) == len(old["env"]) + 1
    assert {"name": "HOME", "value": "/home"} in router["env"]
    assert router["volumeMounts"][: len(old["volumeMounts"])] == old["volumeMounts"]
    assert [each["mountPath"] for each in router["volumeMounts"]][-2:] == ["/ca", "/scratch"]
    assert router["securityContext"] == old["securityContext"]
    context = found["demo-kvasir-router"]["spec"]["securityContext"]
    assert (context["fsGroup"], context["runAsUser"]) == (1000660000, 10001)
    deployment = named("Deployment", "demo-kvasir-router", objects)["spec"]
    assert deployment["strategy"] == {"type": "Recreate"}
    (port,) = named("Service", "demo-kvasir-router", objects)["spec"]["ports"]
    assert (port["nodePort"], port["targetPort"]) == (30080, "http")
    assert named("ConfigMap", "demo-mine", objects)
    if mode == "kuberay":
        groups = named("RayCluster", "demo-kvasir", objects)["spec"]["workerGroupSpecs"]
        assert [group.get("idleTimeoutSeconds") for group in groups] == [9, None]
        assert "hostAliases" in found["demo-kvasir-head"]["spec"]


@pytest.mark.parametrize("page", ["helm/README.md", "docs/kubernetes.md"])
def test_the_overlays_of_the_pages_are_valid(page: str) -> None:
    text = (FOLDER.parent / page).read_text(encoding="utf-8")
    (block,) = [part for part in text.split("```\n") if part.startswith("overlays:")]
    for item in render({"pools": {"qwen": {}}, "service": {"type": "LoadBalancer"}, **yaml.safe_load(block)}):
        check_fields(item)


@pytest.mark.parametrize(
    ("overlays", "sentence"),
    [
        ({"Deployment/routers": {}}, "overlays.Deployment/routers is for no object of this release"),
        ({"Pod/pool-c": {"spec": {}}}, "overlays.Pod/pool-c is for no object"),
        ({"Service/redis": {"metadata": {"name": "other"}}}, "Service/redis changes what is the chart.s own"),
        ({"Deployment": {"spec": {"selector": None}}}, "overlays.Deployment changes"),
        ({"Pod/router": {"metadata": {"labels": {"app.kubernetes.io/name": "a"}}}}, "Pod/router changes"),
        ({"Pod/pool": {"metadata": {"labels": {"kvasir/pool": "b"}}}}, "overlays.Pod/pool changes"),
        (
            {"Pod/router": {"spec": {"containers": [
                {"name": "router", "env": [{"name": "KVASIR_ROUTER_PORT", "value": "1"}]}
            ]}}},
            "overlays.Pod/router changes",
        ),
        ({"Pod/router": []}, "want object"),
        ({"pod": {}}, "invalid propertyName 'pod'"),
    ],
)  # fmt: skip
def test_an_overlay_for_nothing_or_of_what_the_chart_counts_on_is_refused(
    overlays: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(HelmError, match=sentence):
        render({"overlays": overlays})
