"""A report that the schedule issues reaches a recipient with its link; a revision is another document."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import begin, make_engine
from sla_server.db.schema import agreements, slices
from tests.support.agreements import simple
from tests.support.receivers import HttpReceiver
from tests.support.reports import DAY_US, MINUTE_US, slice_row, version_row
from tests.support.stage import Stage

pytestmark = pytest.mark.e2e
DAILY = simple(extra="  window: {type: calendar, period: day, tz: UTC}\n")
SETTINGS = '[reports]\nschedule = "every 10s"\nperiod = "day"\n'
OUTSIDE = "https://sla.example"
NOTIFY = """
apiVersion: storage-sla/v1
kind: Recipient
metadata: {{name: customer}}
spec: {{webhook: {{url: "{url}"}}, timeout: 30s}}
---
apiVersion: storage-sla/v1
kind: Route
metadata: {{name: reports}}
spec: {{recipients: [customer], match: {{kinds: [report-issued]}}}}
"""


def put(stage: Stage, table: Any, rows: list[dict[str, Any]]) -> None:
    """Rows as the server would have stored them long ago."""
    names = {column.name for column in table.c}
    engine = make_engine(DatabaseConfig(), stage.folder / "data")
    with begin(engine) as connection:
        connection.execute(table.insert(), [{key: row[key] for key in names & set(row)} for row in rows])
    engine.dispose()


def announced(receiver: HttpReceiver) -> dict[str, dict[str, Any]]:
    """Details of the events about reports that have come, by report."""
    events = [
        alert["delivery"]["event"]
        for (_method, _path, _headers, body) in list(receiver.requests)
        for alert in json.loads(body)["alerts"]
    ]
    assert {event["kind"] for event in events} <= {"report-issued"}
    return {event["details"]["report"]: {**event["details"], "text": event["text"]} for event in events}


def test_a_scheduled_report_is_announced_with_its_link_and_so_is_its_revision(tmp_path: Path) -> None:
    now_us = time.time_ns() // 1000
    day_us = (now_us - 2 * DAY_US) // DAY_US * DAY_US - DAY_US  # late data revise nothing in it any more
    day = time.strftime("%Y-%m-%d", time.gmtime(day_us / 1e6))
    first, second = f"gold-{day}", f"gold-{day}-r1"
    outside = {"SLA__API__EXTERNAL_URL": OUTSIDE, "SLA__API__READING": "login"}
    with HttpReceiver() as receiver, Stage(tmp_path, extra_toml=SETTINGS, environment=outside) as stage:
        stage.start_server()
        (tmp_path / "notify.yaml").write_text(NOTIFY.format(url=receiver.url))
        stage.sla("apply", "-f", str(tmp_path / "notify.yaml"))
        version = version_row(DAILY, 1, day_us, document=DAILY)
        put(stage, slices, [slice_row(day_us + minute * MINUTE_US) for minute in range(1440)])
        put(stage, agreements, [{**version, "spec": json.dumps(version["spec"])}])

        stage.wait(lambda: first in announced(receiver), "the report, by the schedule alone")
        told = announced(receiver)[first]
        assert (told["agreement"], told["period"], told["revises"]) == ("gold", day, "")
        assert told["link"] == f"{OUTSIDE}/reports/{first}"
        assert told["text"].endswith(f"latency kept (100.000% of 90.000% promised). {told['link']}")
        issued = stage.get(f"reports/{first}")
        assert issued["digest"] == told["digest"]
        assert stage.client.get(told["path"]).status_code == 200, "where the link leads"
        assert [row["kind"] for row in stage.get("jobs")["items"]].count("reports") >= 1

        put(stage, slices, [{**slice_row(day_us, "bad"), "revision": 1, "judged_us": now_us}])
        issue = "report", "issue", "gold", "--period", day
        stage.wait(lambda: stage.sla(*issue, check=False).returncode == 0, "no run of the schedule under way")
        stage.wait(lambda: second in announced(receiver), "the revision")
        again = announced(receiver)[second]
        assert (again["revises"], again["link"]) == (first, f"{OUTSIDE}/reports/{second}")
        revised = stage.get(f"reports/{second}")
        assert revised["report"]["previous"] == issued["digest"], "chained to the one that it revises"
        changed = {each["field"]: (each["before"], each["after"]) for each in revised["report"]["revised"]}
        assert changed["objectives[latency].slices.bad"] == (0, 1), "it says what has changed"
        assert stage.get(f"reports/{first}") == issued, "what was issued stays as it was"
        assert stage.sla("report", "verify", second).returncode == 0
        assert sorted(announced(receiver)) == [first, second]
        assert len(receiver.requests) == 2, "each once, however often the schedule has run since"
