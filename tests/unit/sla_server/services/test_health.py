"""Fullness of the ways through the server: events at the thresholds, figures for the snapshot."""

from __future__ import annotations

from typing import Any

import pytest

from pmdaemon.errors import WireError
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.server import Pressure
from sla_server.services.health import QUIET_NS, STALE_NS, Pressures
from tests.support.services import Bench


def report(fullness: float = 0.1, **refused: int) -> Pressure:
    return Pressure("dbmanager", 5, {"ingest-queue": fullness}, refused)


def texts(rows: list[Any]) -> list[str]:
    return [row["text"] for _table, row in rows]


def test_a_way_is_reported_once_until_it_was_low_again() -> None:
    pressures = Pressures()
    assert pressures.add(report(0.79), 0) == []
    [(table, row)] = pressures.add(report(0.81), 1)
    assert (table, row["kind"], row["subject"]) == ("events", "back-pressure", "dbmanager/ingest-queue")
    assert "81%" in row["text"]
    assert pressures.add(report(0.7), 2) == pressures.add(report(0.9), 3) == []
    assert pressures.add(report(0.5), 4) == []
    assert len(pressures.add(report(0.85), 5)) == 1


def test_refusals_are_reported_after_a_quiet_minute_and_a_restart_counts_anew() -> None:
    pressures = Pressures()
    assert texts(pressures.add(report(queue_full_pauses=2), 0)) == [
        "dbmanager: no room for queue full pauses, 2 since its start"
    ]
    assert pressures.add(report(queue_full_pauses=3), QUIET_NS - 1) == []
    assert pressures.add(report(queue_full_pauses=3), 3 * QUIET_NS) == []
    assert len(pressures.add(report(queue_full_pauses=1), 4 * QUIET_NS)) == 1, "a new process refused once"


def test_figures_of_a_process_that_is_silent_are_not_shown() -> None:
    pressures = Pressures()
    pressures.add(report(0.25, posts=1), 0)
    assert pressures.of("dbmanager", STALE_NS) == {
        "fullness": {"ingest-queue": 0.25},
        "refused": {"posts": 1},
    }
    assert pressures.of("dbmanager", STALE_NS + 1) is None
    assert pressures.of("pair-0", 0) is None


def test_the_core_shows_it_with_the_process_and_raises_the_event() -> None:
    bench = Bench()
    bench.core._shown.processes = [{"name": "dbmanager", "state": "running"}, {"name": "pair-0"}]
    header = {"name": "dbmanager", "at_us": 5, "fullness": {"ingest-queue": 0.9}, "refused": {}}
    bench.message(Kind.PRESSURE, header)
    bench.tick(1)
    [(_, snapshot)] = bench.app.take_posted(Kind.SNAPSHOT)[-1:]
    shown = {row["name"]: row["pressure"] for row in snapshot["processes"]}
    assert shown == {"dbmanager": {"fullness": {"ingest-queue": 0.9}, "refused": {}}, "pair-0": None}
    assert "back-pressure" in {row["kind"] for row in snapshot["events"]}


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"name": "a", "at_us": 1, "fullness": [], "refused": {}},
        {"name": "a", "at_us": 1, "fullness": {"x": "y"}, "refused": {}},
        {"name": "a", "at_us": 1, "fullness": {}, "refused": {}, "problems": {}},
        {"name": "a", "at_us": 1, "fullness": {}, "refused": {}, "problems": [{"what": "x", "since_us": 1}]},
    ],
)
def test_what_is_no_report_is_refused(header: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="PRESSURE"):
        Pressure.parse(header)


def test_a_report_survives_the_wire() -> None:
    raw = Pressure("pair-0", 7, {"services": 0.12345}, {"posts": 3}).encode()
    parsed = frame.decode(raw)
    assert parsed.kind == Kind.PRESSURE
    assert Pressure.parse(parsed.header) == Pressure("pair-0", 7, {"services": 0.123}, {"posts": 3})
