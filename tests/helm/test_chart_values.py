"""Values are documented, a typo is refused with its name, and settings are those that the programs have."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import HelmError

from cluster.fleet_file import AUTOSCALING_FIELDS, ENGINES_FIELDS
from helm.make_readme import documented_values, values_table, with_table
from replicas.config import ReplicaConfig
from router.config import RouterConfig
from tests.helm.chart import FOLDER, Values, check_fields, render

VALUES = (FOLDER / "values.yaml").read_text(encoding="utf-8")
SCHEMA = json.loads((FOLDER / "values.schema.json").read_text(encoding="utf-8"))

CHART_SETS = {"redis_url", "secret", "secret_file", "host", "port", "index_stride", "drain_seconds"}
CHART_SETS |= {"log_format", "log_level", "otlp_endpoint", "trace_sample_ratio"}
"""Settings with values of their own in the chart, for routers and replicas."""

ROUTER_PORTS = {"admin_host", "admin_port", "picker_host", "picker_port", "admin_socket", "processes"}
ROUTER_PORTS |= {"picker_tls_certificate", "picker_tls_key"}
"""The chart sets all but `admin_socket` and `processes`, which are for machines: pods are for themselves."""

ROUTER_KEYS = {"keys_file", "keys_in_redis", "open"}
"""What `router.keys` sets; in Kubernetes a Secret has the keys, so Redis has none."""

REPLICA_TLS = {"tls_certificate", "tls_key", "tls_client_ca", "tls_peer_name", "health_socket"}
ROUTER_TLS = {"replica_tls_ca", "replica_tls_certificate", "replica_tls_key", "replica_tls_name"}
"""What `mtls` sets."""

REPLICA_KV = {"host_kv_bytes", "disk_kv_bytes", "kv_folder"}
"""What `kv` sets."""


def test_the_readme_has_the_table_that_the_comments_make() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert with_table(readme, values_table(VALUES)) == readme, "run python helm/make_readme.py"


def test_every_comment_is_a_sentence() -> None:
    for value in documented_values(VALUES):
        assert value.text.endswith("."), value.path


def test_a_value_without_a_comment_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"a\.c has no comment"):
        list(documented_values("a:\n  # Said.\n  b: 1\n  c: 2\n"))


def groups(schema: Any) -> Iterator[Any]:
    """Every object of the schema whose names are fixed."""
    if isinstance(schema, dict):
        if "properties" in schema and "additionalProperties" in schema:
            yield schema
        for inner in schema.values():
            yield from groups(inner)


def test_the_schema_has_just_the_values_that_are_documented() -> None:
    def walk(values: Any, schema: Mapping[str, Any], path: str) -> None:
        if "$ref" in schema:
            schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
        if "properties" in schema and path.rpartition(".")[2] not in ("settings", "resources"):
            assert set(schema["properties"]) - {"global"} == set(values), path
            for name, item in values.items():
                walk(item, schema["properties"][name], f"{path}.{name}")

    walk(yaml.safe_load(VALUES), SCHEMA, "")
    assert all(group["additionalProperties"] is False for group in groups(SCHEMA))


@pytest.mark.parametrize(
    ("definition", "kind", "chart_sets"),
    [
        ("router", RouterConfig, CHART_SETS | ROUTER_TLS | ROUTER_PORTS | ROUTER_KEYS),
        (
            "pool",
            ReplicaConfig,
            CHART_SETS
            | REPLICA_TLS
            | REPLICA_KV
            | {"replica_id", "engine", "model", "model_name", "metrics_port", "role"},
        ),
    ],
)
def test_every_setting_of_the_programs_can_be_set_once(
    definition: str, kind: type[Any], chart_sets: set[str]
) -> None:
    known = set(SCHEMA["definitions"][definition]["properties"]["settings"]["properties"])
    assert known | chart_sets == {field.name for field in dataclasses.fields(kind)}
    assert not known & chart_sets


REFUSED = yaml.safe_load((Path(__file__).parent / "refused.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_values_that_are_wrong_or_do_not_go_together_are_refused(values: Values, words: str) -> None:
    with pytest.raises(HelmError, match=words):
        render(values)


def test_pools_of_one_model_may_differ_in_everything_else() -> None:
    model = {"source": "hub", "repository": "Qwen/Qwen3-8B"}
    render({"pools": {"a": {"model": model}, "b": {"model": model, "settings": {"context_length": 4096}}}})
    render({"pools": {"a": {"model": model}, "b": {"model": {**model, "revision": "v2", "name": "other"}}}})


def test_there_is_a_value_for_every_field_of_the_fleet_file() -> None:
    def in_camel_case(name: str) -> str:
        first, *others = {"min": "min_replicas", "max": "max_replicas"}.get(name, name).split("_")
        return first + "".join(other.title() for other in others)

    pool = SCHEMA["definitions"]["pool"]["properties"]
    elsewhere = {"enabled", "by", "targetQueueSeconds", "targetKvShare", "prometheus"}
    scaling = set(pool["autoscaling"]["properties"]) - elsewhere
    assert scaling == {in_camel_case(name) for name in AUTOSCALING_FIELDS}
    found = set(pool["engines"]["properties"]) - {"keySecret", "keySecretKey"}
    assert found == {in_camel_case(name) for name in ENGINES_FIELDS} - {"file"}


@pytest.mark.parametrize("page", ["helm/README.md", "docs/kubernetes.md"])
def test_the_overlays_of_the_pages_are_valid(page: str) -> None:
    text = (FOLDER.parent / page).read_text(encoding="utf-8")
    (block,) = [part for part in text.split("```\n") if part.startswith("overlays:")]
    for item in render({"pools": {"qwen": {}}, "service": {"type": "LoadBalancer"}, **yaml.safe_load(block)}):
        check_fields(item)
