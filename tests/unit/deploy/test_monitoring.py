"""What is shipped for Prometheus and Grafana names only what the endpoint exposes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families
from ruamel.yaml import YAML

from tests.support.exposition import exposed

DEPLOY: Final = Path(__file__).parents[3] / "deploy"
DASHBOARD: Final = DEPLOY / "grafana" / "storage-sla.json"
BY_PROMETHEUS: Final = {"up", "job", "instance", "alertname", "alertstate"}
_METRIC: Final = re.compile(r"(?<![\w:])(?:\w+:)?sla_\w+(?::\w+)?")
_MATCHERS: Final = re.compile(r"([\w:]+)\{([^}]*)\}")
_LEGEND: Final = re.compile(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}")


def rules(name: str) -> list[dict[str, Any]]:
    groups = YAML(typ="safe").load((DEPLOY / "prometheus" / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def queries() -> Iterator[tuple[str, str, str]]:
    """(where, expression, text with labels) of the dashboard, rules and alerts."""
    for panel in panels():
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"], target["legendFormat"]
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            metric, _, label = variable["definition"].removeprefix("label_values(").rpartition(",")
            yield f"variable {variable['name']}", metric, "{{" + label.strip(" )") + "}}"
    for rule in rules("sla-rules.yml"):
        yield f"rule {rule['record']}", rule["expr"], ""
    for rule in rules("sla-alerts.yml"):
        yield f"alert {rule['alert']}", rule["expr"], " ".join(rule["annotations"].values())


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Metric to its labels, as exposed; of recorded ones those of what they are made of."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(exposed(tmp_path_factory.mktemp("metrics"))):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    for rule in rules("sla-rules.yml"):
        made_of = _METRIC.findall(rule["expr"])
        found[rule["record"]] = set.union(*(found[name] for name in made_of)) - {"verdict", "operation"}
    return found


def test_every_metric_and_label_that_is_queried_is_exposed(labels: dict[str, set[str]]) -> None:
    checked = 0
    for where, expression, legend in queries():
        names = _METRIC.findall(expression)
        assert names or "up{" in expression, where
        unknown = set(names) - labels.keys()
        assert not unknown, f"{where}: {unknown}"
        for name, matchers in _MATCHERS.findall(expression):
            used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
            assert used <= labels.get(name, set()) | BY_PROMETHEUS, f"{where}: {used} of {name}"
        shown = set(_LEGEND.findall(legend)) - {"value"}
        known = set[str]().union(*(labels[name] for name in names)) | BY_PROMETHEUS
        assert shown <= known, f"{where}: {shown - known}"
        checked += 1
    assert checked > 50


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    whole = json.loads(DASHBOARD.read_text())
    assert whole["uid"] == "storage-sla"
    assert "id" not in whole, "an import gives it one"
    ids = [panel["id"] for panel in whole["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in whole["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, f"{panel['title']} covers another panel"
        taken |= cells
        assert panel["type"] == "row" or panel["description"]
    sources = [panel["datasource"]["uid"] for panel in whole["panels"] if "datasource" in panel]
    assert set(sources) == {"${datasource}"}, "it works with any Prometheus"
    names = {variable["name"] for variable in whole["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text())) - {"__rate_interval", "__all"}
    assert used == names


def test_each_alert_has_a_severity_and_says_what_to_look_at() -> None:
    for rule in rules("sla-alerts.yml"):
        assert rule["labels"]["severity"] in ("page", "ticket", "info"), rule["alert"]
        assert rule["annotations"].keys() == {"summary", "runbook"}, rule["alert"]
