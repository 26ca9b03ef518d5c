"""Prometheus' own tool on what is exposed and shipped: names and units of metrics, rules, alerts."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from tests.support.exposition import exposed

SHIPPED = Path(__file__).parents[4] / "deploy" / "prometheus"


def promtool(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    assert shutil.which("promtool"), "promtool is missing: deploy/setup.sh test"
    return subprocess.run(
        ["promtool", *arguments],
        check=False,
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=SHIPPED,
    )


def test_names_units_and_help_of_all_metrics_are_as_prometheus_wants_them(tmp_path: Path) -> None:
    found = promtool("check", "metrics", text=exposed(tmp_path))
    assert found.stderr == ""


def test_the_rules_are_right_and_the_alerts_fire_when_they_should() -> None:
    checked = promtool("check", "config", "prometheus.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "17 rules found" in checked.stdout + checked.stderr
    cases = promtool("test", "rules", "sla-rules-test.yml")
    assert cases.returncode == 0, cases.stdout + cases.stderr


def test_prometheus_understands_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    panels = json.loads((SHIPPED.parent / "grafana" / "storage-sla.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(queries) > 20
    made = [
        {"record": f"q{n}", "expr": query.replace("$__rate_interval", "5m")}
        for n, query in enumerate(queries)
    ]
    rules = tmp_path / "queries.yml"
    rules.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": made}]}))
    checked = promtool("check", "rules", str(rules))
    assert checked.returncode == 0, checked.stdout + checked.stderr
