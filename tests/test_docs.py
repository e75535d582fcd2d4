"""The README names every setting and every metric, and none that does not exist."""

import dataclasses
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from replicas.config import ReplicaConfig
from replicas.metrics import ReplicaMetrics
from router.config import RouterConfig
from router.metrics import RouterMetrics

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")


def table_after(heading: str) -> dict[str, str]:
    """First column (without backticks) to the rest of the row, of the first table after `heading`."""
    rows: dict[str, str] = {}
    for line in README.split(heading, 1)[1].splitlines():
        if line.startswith("| `"):
            name, _, rest = line.strip("| ").partition(" | ")
            rows[name.strip("`")] = rest
        elif rows and not line.startswith("|"):
            break
    return rows


@pytest.mark.parametrize(
    ("heading", "config_class"),
    [("**Settings of a replica**", ReplicaConfig), ("**Settings of a router**", RouterConfig)],
)
def test_every_setting_stands_in_the_readme_with_its_default(heading: str, config_class: type) -> None:
    documented = table_after(heading)
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    assert list(documented) == list(fields)
    for name, field in fields.items():
        assert documented[name].split(" | ")[0] == f"`{field.default}`", name


def test_every_metric_stands_in_the_readme_and_every_one_there_exists() -> None:
    registry = CollectorRegistry()
    RouterMetrics(registry)
    ReplicaMetrics(registry)
    actual = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in registry.collect()
        if not re.fullmatch(r"(process|python)_.*", family.name)
    }
    assert set(table_after("## Metrics")) == actual
