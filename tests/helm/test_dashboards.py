"""The dashboards ask for what exists, say what they mean, and are what the script makes."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helm.promql import asked
from tests.metric_catalog import series_labels

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "helm/dashboards"
NAMES = ("fleet", "router", "cache", "tenant")
BUILT_IN = {"__rate_interval", "__range", "__interval"}


@pytest.fixture(params=NAMES)
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(json.loads((FOLDER / f"{request.param}.json").read_text(encoding="utf-8")))


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def targets(dashboard: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for panel in panels(dashboard):
        for target in panel["targets"]:
            yield panel["title"], target


def variables(dashboard: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {variable["name"]: variable for variable in dashboard["templating"]["list"]}


def test_the_files_are_what_the_script_makes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-B", FOLDER / "make_dashboards.py", tmp_path], check=True)
    assert {path.stem for path in tmp_path.iterdir()} == set(NAMES)
    assert {path.stem for path in FOLDER.glob("*.json")} == set(NAMES)
    for name in NAMES:
        made = (tmp_path / f"{name}.json").read_bytes()
        assert made == (FOLDER / f"{name}.json").read_bytes(), "run helm/dashboards/make_dashboards.py"


def test_every_expression_names_metrics_and_labels_that_exist(dashboard: dict[str, Any]) -> None:
    known = series_labels()
    for title, target in targets(dashboard):
        found = asked(target["expr"], known)
        assert found.metrics, title
        assert found.metrics <= known.keys(), title
        assert not found.complaints, title
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= found.labels, title


def test_one_panel_shows_each_series_under_its_own_name(dashboard: dict[str, Any]) -> None:
    known = series_labels()
    for panel in panels(dashboard):
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert len(set(legends)) == len(legends), panel["title"]
        if panel["type"] == "table":
            continue  # there labels are columns
        for target in panel["targets"]:
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            hidden = asked(target["expr"], known).labels - shown - {"job", "instance", "namespace", "pool"}
            assert not hidden, f"{panel['title']}: two lines may bear one name"


def test_every_variable_is_used_and_every_one_that_is_used_exists(dashboard: dict[str, Any]) -> None:
    known = variables(dashboard)
    queries = [variable["query"]["query"] for variable in known.values() if variable["type"] == "query"]
    text = "\n".join([target["expr"] for _, target in targets(dashboard)] + queries)
    assert set(re.findall(r"\$(\w+)", text)) - BUILT_IN == known.keys() - {"datasource"}


def test_every_list_to_choose_from_comes_from_a_metric_with_that_label(dashboard: dict[str, Any]) -> None:
    labels_of = series_labels()
    for name, variable in variables(dashboard).items():
        if name == "datasource":
            continue
        match = re.fullmatch(r"label_values\((\w+)(\{.*\})?, (\w+)\)", variable["query"]["query"])
        assert match is not None
        assert match[3] == name and name in labels_of[match[1]]
        # "All" must find targets without that label, too.
        assert variable["includeAll"] and variable["allValue"] == ".*"


def test_no_data_source_is_hard_coded(dashboard: dict[str, Any]) -> None:
    parts = [*panels(dashboard), *(target for _, target in targets(dashboard))]
    parts += [variable for variable in variables(dashboard).values() if variable["type"] == "query"]
    for part in parts:
        assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert variables(dashboard)["datasource"]["type"] == "datasource"
    assert dashboard["id"] is None


def test_every_panel_says_what_it_means_in_which_unit_and_has_a_place_of_its_own(
    dashboard: dict[str, Any],
) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    for panel in panels(dashboard):
        defaults = panel["fieldConfig"]["defaults"]
        assert len(panel["description"]) > 20 and panel["description"].endswith("."), panel["title"]
        assert defaults["unit"] and defaults["thresholds"]["steps"][0]["value"] is None, panel["title"]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in dashboard["panels"]]
    assert len(set(titles)) == len(titles)


def test_uids_and_titles_are_unique() -> None:
    read = [json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")) for name in NAMES]
    assert [one["uid"] for one in read] == [f"kvasir-{name}" for name in NAMES]
    assert len({one["title"] for one in read}) == len(NAMES)
