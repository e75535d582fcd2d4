"""Documents and panels speak of the metrics that there are, and of all of them."""

import dataclasses
import re
from pathlib import Path

import pytest

from replicas.config import ReplicaConfig
from router.config import RouterConfig
from router.misses import Cause
from tests.metric_catalog import families, series_labels

ROOT = Path(__file__).resolve().parent.parent
WITH_METRICS = re.compile(r"`((?:(?:router|replica|fleet)_|vllm:)[a-z_:]+)(?:\{[^`]*\})?`")


DOCUMENTS = [
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "loadtests/RESULTS.md", "helm/README.md"),
    *(f"loadtests/log/{page.name}" for page in sorted((ROOT / "loadtests/log").glob("*.md"))),
    *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))),
]


def documented() -> dict[str, str]:
    """Name to type, of all tables on the page of metrics."""
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w:]+)[^|]*` \| (counter|gauge|histogram) \| \S.*\|$", page, re.MULTILINE)
    assert len(rows) == len(dict(rows)), "a metric stands there twice"
    return dict(rows)


def test_every_metric_is_documented_and_every_one_there_exists() -> None:
    assert documented() == {name: kind for name, (kind, _) in families().items()}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_a_document_calls_by_a_metrics_name_is_one(name: str) -> None:
    settings = {
        field.name for config in (ReplicaConfig, RouterConfig) for field in dataclasses.fields(config)
    }
    named = set(WITH_METRICS.findall((ROOT / name).read_text(encoding="utf-8")))
    assert named - settings - set(Cause) <= families().keys() | series_labels().keys()
