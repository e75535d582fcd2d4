"""StatefulSets whose size follows their load: what HPA and KEDA go by, and who else sets the size."""

import copy
from typing import Any

import promql_parser as promql
import pytest

from tests.helm.api_server import api_server, helm_at
from tests.helm.chart import EVERY_TARGET, PROMETHEUS, Object, chart, named, of_kind, rendered, with_keys
from tests.helm.chart_programs import router_config
from tests.helm.promql import asked
from tests.metric_catalog import series_labels

CASE = "pools that scale by hpa and keda"
OF_REPLICAS = {
    "in_flight": {"replica_open_sequences", "router_unplaced_requests"},
    "pending_tokens": {"replica_pending_tokens", "router_unplaced_tokens"},
    "queue_seconds": {
        *("replica_pending_tokens", "router_unplaced_tokens"),
        "replica_prefill_seconds_per_token",
    },
    "kv_share": {"replica_used_blocks", "replica_total_blocks"},
}


def pool_set(pool: str) -> Object:
    spec: Object = named("StatefulSet", f"demo-kvasir-pool-{pool}", rendered(CASE))["spec"]
    return spec


def queries(pool: str) -> list[str]:
    name = f"demo-kvasir-pool-{pool}"
    for item in of_kind("PrometheusRule", rendered(CASE)):
        if item["metadata"]["name"] == name:
            return [rule["expr"] for rule in item["spec"]["groups"][0]["rules"]]
    scaler = named("ScaledObject", name, rendered(CASE))["spec"]
    return [trigger["metadata"]["query"] for trigger in scaler["triggers"]]


def selectors(expression: Any) -> list[Any]:
    """All vector selectors of a parsed expression."""
    if isinstance(expression, promql.VectorSelector):
        return [expression]
    inner = [getattr(expression, name, None) for name in ("expr", "lhs", "rhs")]
    inner += list(getattr(expression, "args", ()))
    return [found for each in inner if each is not None for found in selectors(each)]


def test_no_pool_that_scales_has_a_size_of_the_charts() -> None:
    assert [pool_set(pool).get("replicas") for pool in "abcd"] == [None, None, None, 3]
    scaled = [*of_kind("HorizontalPodAutoscaler", rendered(CASE)), *of_kind("ScaledObject", rendered(CASE))]
    targets = [item["spec"]["scaleTargetRef"] for item in scaled]
    assert [target["name"] for target in targets] == [f"demo-kvasir-pool-{pool}" for pool in "abc"]
    assert {(target["apiVersion"], target["kind"]) for target in targets} == {("apps/v1", "StatefulSet")}


@pytest.mark.parametrize("pool", ["a", "b"])
def test_queries_ask_for_metrics_and_labels_that_exist_and_give_one_number(pool: str) -> None:
    known = series_labels()
    found = [asked(query, known) for query in queries(pool)]
    assert [each.metrics for each in found] == list(OF_REPLICAS.values())
    for each in found:
        assert each.metrics <= known.keys()
        assert not each.complaints
        assert not each.labels


def test_a_pool_counts_its_own_pods_and_its_part_of_what_waits_in_the_routers() -> None:
    for pool, model, part in (("a", "toy_model", ""), ("b", "qwen", " / 2"), ("c", "qwen", " / 2")):
        for query in queries(pool):
            for selector in selectors(promql.parse(query)):
                matched = {each.name: each.value for each in selector.matchers.matchers}
                assert matched.pop("namespace") == "llm"
                if selector.name.startswith("router"):
                    assert matched == {"router": "demo-kvasir-router-.+", "model": model}
                else:
                    assert matched == {"replica": f"demo-kvasir-pool-{pool}-[0-9]+"}
        assert queries(pool)[0].endswith(f"vector(0)){part}")


def test_a_horizontal_autoscaler_reads_what_the_rules_record() -> None:
    name = "demo-kvasir-pool-a"
    rule = named("PrometheusRule", name, rendered(CASE))
    assert rule["metadata"]["labels"]["prometheus"] == "ours", "or Prometheus does not see it"
    recorded = {each["record"]: each["labels"] for each in rule["spec"]["groups"][0]["rules"]}
    assert list(recorded) == [f"kvasir_pool_{measure}" for measure in OF_REPLICAS]
    assert list(recorded.values()) == [{"namespace": "llm", "statefulset": name}] * 4
    spec = named("HorizontalPodAutoscaler", name, rendered(CASE))["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 8)
    external = [metric["external"] for metric in spec["metrics"]]
    assert [each["metric"]["name"] for each in external] == list(recorded)
    assert all(each["metric"]["selector"] == {"matchLabels": {"statefulset": name}} for each in external)
    assert [each["target"] for each in external] == [
        {"type": "AverageValue", "averageValue": "24"},
        {"type": "AverageValue", "averageValue": "1000000"},
        {"type": "AverageValue", "averageValue": "0.5"},
        {"type": "Value", "value": "0.8"},
    ]


def test_keda_asks_prometheus_itself() -> None:
    spec = named("ScaledObject", "demo-kvasir-pool-b", rendered(CASE))["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 8)
    triggers = spec["triggers"]
    assert {trigger["metadata"]["serverAddress"] for trigger in triggers} == {PROMETHEUS}
    assert [(each["metricType"], each["metadata"]["threshold"]) for each in triggers] == [
        ("AverageValue", "24"),
        ("AverageValue", "1000000"),
        ("AverageValue", "0.5"),
        ("Value", "0.8"),
    ]
    assert triggers[0]["metadata"]["query"].startswith("(sum(replica_open_sequences{")


def test_a_pool_without_replicas_gets_its_first_one_for_requests_that_wait_in_routers() -> None:
    case = "a pool that goes down to zero"
    spec = named("ScaledObject", "demo-kvasir-pool-main", rendered(case))["spec"]
    assert (spec["minReplicaCount"], spec["cooldownPeriod"], spec["initialCooldownPeriod"]) == (0, 300, 900)
    assert "router_unplaced_requests" in spec["triggers"][0]["metadata"]["query"]
    assert router_config(case).wait_for_replica_seconds == 600
    kept = named("ScaledObject", "demo-kvasir-pool-b", rendered(CASE))["spec"]
    assert "initialCooldownPeriod" not in kept


def test_it_grows_and_shrinks_as_slowly_as_the_values_say_and_one_cache_goes_at_a_time() -> None:
    a = named("HorizontalPodAutoscaler", "demo-kvasir-pool-a", rendered(CASE))["spec"]["behavior"]
    scalers = [named("ScaledObject", f"demo-kvasir-pool-{pool}", rendered(CASE))["spec"] for pool in "bc"]
    b, c = (each["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] for each in scalers)
    assert a == b
    assert a["scaleUp"] == {"stabilizationWindowSeconds": 3}
    assert a["scaleDown"]["stabilizationWindowSeconds"] == 300
    assert a["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 60}]
    assert c["scaleDown"]["stabilizationWindowSeconds"] == 3600, "Kubernetes allows no more"


def test_what_begins_to_scale_keeps_its_size_until_the_autoscaler_changes_it() -> None:
    fixed: dict[str, Any] = with_keys(
        {
            "fleet": {"mode": "statefulset"},
            "router": {"replicas": 5},
            "pools": {"a": {"replicas": 5}},
        }
    )
    scaling = copy.deepcopy(fixed)
    scaling["router"]["autoscaling"] = {"enabled": True}
    scaling["pools"]["a"]["autoscaling"] = {"enabled": True, "by": "hpa", **EVERY_TARGET}
    with api_server() as server, helm_at(server, "llm") as helm:
        helm.install(chart(), "demo", fixed, namespace="llm")

        def specs() -> list[Object]:
            names = ("StatefulSet", "demo-kvasir-pool-a"), ("Deployment", "demo-kvasir-router")
            return [server.installed()[name]["spec"] for name in names]

        for size in (5, 0, 7):
            for spec in specs():
                spec["replicas"] = size
            helm.upgrade(chart(), "demo", scaling, namespace="llm")
            assert [spec["replicas"] for spec in specs()] == [size, size]


def test_where_a_pool_scales_by_hpa_or_keda_auto_takes_statefulsets() -> None:
    scaling = {"enabled": True, "by": "keda", "prometheus": PROMETHEUS}
    values: dict[str, Any] = with_keys({"pools": {"a": {"autoscaling": scaling}, "b": {}}})
    with api_server() as server, helm_at(server, "llm") as helm:
        notes = helm.install(chart(), "demo", values, namespace="llm")["notes"]
        assert "StatefulSets: a pool scales by hpa or keda." in notes
        assert ("RayCluster", "demo-kvasir") not in server.installed()
