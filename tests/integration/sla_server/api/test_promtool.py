"""Prometheus' own tool on what is exposed and shipped: names and units of metrics, rules, alerts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any, cast

from flask.testing import FlaskClient

import dashboard
from pmdaemon.poller import metrics as poller_metrics
from pmdaemon.poller.channel import PairReport
from sla_server.events.metrics import render
from tests.support import api

SHIPPED = Path(__file__).parents[4] / "deploy" / "prometheus"
KNOWN = {
    "sla_pmdaemon_cpu_us_a_poll metric names should not contain abbreviated units",
    "sla_pmdaemon_t_ptmax_us metric names should not contain abbreviated units",
}
"""Names of before; what reads them would have to follow."""


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


class FakeChild:
    index, is_running, restarts = 0, True, 0
    last = PairReport(metrics={"polls": 10.0, "refusal_not_tls": 1.0})


class FakePairManager:
    needed, moves, passed_on, lost = 3, 64, 12, 0
    children = (FakeChild(),)


def exposed(tmp_path: Path) -> str:
    """What the endpoint answers with the files of all parts."""
    poller = poller_metrics.text(cast(Any, FakePairManager()), 5)
    (tmp_path / "pmdaemon.prom").write_text(poller)
    recipient = {"name": "mail", "waiting": 3, "attempt": 2, "confirmed": 40, "dead_letters": 1}
    (tmp_path / "delivery.prom").write_text(render([recipient], {"a": 0.25}, {"b": 0.5}, {"accepted": 7}))
    mailbox = api.AnsweringMailbox()
    try:
        context = api.make_context(mailbox)
        context.metrics.folder = tmp_path
        context.live.put(api.snapshot())
        web: FlaskClient = dashboard.create_app(context).test_client()
        web.get("/api/v1/totals", base_url="http://127.0.0.1:8411")
        return web.get("/api/v1/metrics", base_url="http://127.0.0.1:8411").text
    finally:
        mailbox.close()


def test_names_units_and_help_of_all_metrics_are_as_prometheus_wants_them(tmp_path: Path) -> None:
    found = promtool("check", "metrics", text=exposed(tmp_path))
    assert set(found.stderr.splitlines()) == KNOWN, found.stderr


def test_the_rules_are_right_and_the_alerts_fire_when_they_should() -> None:
    checked = promtool("check", "config", "prometheus.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "17 rules found" in checked.stdout + checked.stderr
    cases = promtool("test", "rules", "sla-rules-test.yml")
    assert cases.returncode == 0, cases.stdout + cases.stderr
