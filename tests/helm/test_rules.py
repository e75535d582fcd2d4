"""The alert rules are valid, ask for what exists, say what to do, and are tested."""

import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.helm.promql import asked
from tests.metric_catalog import Labels, series_labels
from tests.tools import needed_tool

ROOT = Path(__file__).resolve().parent.parent.parent
RULES = ROOT / "helm/rules/kvasir.yaml"
RUNBOOK = ROOT / "docs/alerts.md"
UNIT_TESTS = ROOT / "helm/rules/kvasir_test.yaml"


@cache
def rules() -> list[dict[str, Any]]:
    content = yaml.load(RULES.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    return [rule for group in content["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


@cache
def recorded_labels() -> dict[str, Labels]:
    """Labels of all series, those that the rules record included. A rule knows only what stands above it."""
    known = series_labels()
    for rule in rules():
        if "record" in rule:
            known[rule["record"]] = asked(rule["expr"], known).labels
    return known


def run_promtool(*arguments: str | Path) -> None:
    done = subprocess.run([needed_tool("promtool"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_nothing_wrong_with_rules_and_configuration() -> None:
    run_promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)
    run_promtool("check", "config", ROOT / "deploy/prometheus/prometheus.yml")


def test_the_rules_pass_their_unit_tests() -> None:
    run_promtool("test", "rules", UNIT_TESTS)


def test_every_rule_names_metrics_and_labels_that_exist() -> None:
    known = recorded_labels()
    for rule in rules():
        found = asked(rule["expr"], known)
        assert found.metrics <= known.keys(), rule
        assert not found.complaints, rule
        if "alert" in rule:
            text = " ".join(rule["annotations"].values())
            assert set(re.findall(r"\$labels\.(\w+)", text)) <= found.labels, rule["alert"]


def test_every_series_that_is_recorded_is_used() -> None:
    used = {name for rule in rules() for name in asked(rule["expr"], recorded_labels()).metrics}
    assert {rule["record"] for rule in rules() if "record" in rule} <= used


def test_every_alert_says_what_is_wrong_what_to_do_and_how_urgent_it_is() -> None:
    for alert in alerts():
        assert re.fullmatch(r"Kvasir[A-Z]\w+", alert["alert"])
        assert alert["labels"]["severity"] in ("critical", "warning")
        assert set(alert["annotations"]) == {"summary", "description", "runbook"}
        assert len(alert["annotations"]["description"]) > 80, alert["alert"]
    names = [alert["alert"] for alert in alerts()]
    assert len(set(names)) == len(names)


def test_every_alert_has_a_section_in_the_documentation_that_says_how_urgent_it_is() -> None:
    sections = re.findall(
        r"^## (\w+)\n\n\*\*(\w+)\.\*\* \S.+\n\n\S", RUNBOOK.read_text("utf-8"), re.MULTILINE
    )
    assert dict(sections).keys() == {alert["alert"] for alert in alerts()}
    for alert in alerts():
        assert alert["annotations"]["runbook"] == f"docs/alerts.md#{alert['alert'].lower()}"
        assert dict(sections)[alert["alert"]].lower() == alert["labels"]["severity"], alert["alert"]


def test_every_alert_has_a_unit_test_in_which_it_fires_and_one_in_which_it_is_silent() -> None:
    fires: set[str] = set()
    silent: set[str] = set()
    for group in yaml.safe_load(UNIT_TESTS.read_text(encoding="utf-8"))["tests"]:
        for check in group.get("alert_rule_test", ()):
            (fires if check["exp_alerts"] else silent).add(check["alertname"])
        for check in group.get("promql_expr_test", ()):
            expected = " ".join(sample["labels"] for sample in check["exp_samples"])
            fires.update(re.findall(r'alertname="(Kvasir\w+)", alertstate="firing"', expected))
            if not check["exp_samples"]:
                silent.update(re.findall(r"Kvasir\w+", check["expr"]))
    names = {alert["alert"] for alert in alerts()}
    assert fires == names
    assert silent == names
