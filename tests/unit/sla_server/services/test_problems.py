"""What is in trouble: as processes say it, when dbmanager is silent, and when spools overflow."""

from __future__ import annotations

from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.server import Pressure, Problem
from sla_server.services.health import CALM_NS, MOST_AGENTS, SILENT_NS, Problems
from tests.support.services import Bench

DISK = Problem("database", 7, "No space left on device")
ALIVE = Pressure("dbmanager", 9, {}, {})


def test_a_problem_is_there_until_a_report_comes_without_it() -> None:
    problems = Problems(0, 5)
    problems.report(Pressure("dbmanager", 9, {}, {}, (DISK,)), 1, 9)
    row = {"process": "dbmanager", "what": "database", "since_us": 7, "reason": "No space left on device"}
    assert problems.now(2) == [row]
    problems.report(ALIVE, 3, 9)
    assert problems.now(4) == []


def test_a_silent_dbmanager_is_a_problem_and_its_last_words_stay() -> None:
    problems = Problems(0, 5)
    assert problems.now(SILENT_NS) == []
    [never] = problems.now(SILENT_NS + 1)
    assert (never["process"], never["what"], never["since_us"]) == ("dbmanager", "dbmanager", 5)
    assert "10 s" in never["reason"]
    died = Problem("dbmanager", 9, "its thread db-intake died: poisoned")
    problems.report(Pressure("dbmanager", 9, {}, {}, (died,)), 1, 9)
    assert [row["reason"] for row in problems.now(2)] == ["its thread db-intake died: poisoned"]
    assert [row["since_us"] for row in problems.now(SILENT_NS + 2)] == [9, 9]


def test_a_pair_that_is_silent_has_gone_and_takes_its_problems_with_it() -> None:
    problems = Problems(0, 5)
    problems.report(Pressure("pair-3", 9, {}, {}, (DISK,)), 0, 9)
    problems.report(ALIVE, SILENT_NS, 9)
    assert [row["process"] for row in problems.now(SILENT_NS)] == ["pair-3"]
    assert problems.now(SILENT_NS + 1) == []


def test_what_the_supervisor_says_of_a_part_is_shown_as_that_part() -> None:
    problems = Problems(0, 5)
    hangs = Problem("pmdaemon", 7, "pmdaemon has made no progress for 12 s; it is killed")
    problems.report(ALIVE, 1, 9)
    problems.report(Pressure("supervisor", 9, {}, {}, (hangs,)), 1, 9)
    [row] = problems.now(2)
    assert (row["process"], row["what"], row["reason"]) == ("pmdaemon", "pmdaemon", hangs.reason)


def test_a_supervisor_that_was_heard_and_is_silent_is_a_problem() -> None:
    problems = Problems(0, 5)
    hangs = Problem("pmdaemon", 7, "pmdaemon has made no progress for 12 s; it is killed")
    problems.report(Pressure("supervisor", 9, {}, {}, (hangs,)), 0, 9)
    problems.report(ALIVE, SILENT_NS, 9)
    [row] = problems.now(SILENT_NS + 1)
    assert (row["process"], row["since_us"]) == ("supervisor", 9)
    assert "what dies is not started again" in row["reason"]


def test_parts_that_run_without_a_supervisor_do_not_miss_it() -> None:
    problems = Problems(0, 5)
    problems.report(ALIVE, 2 * SILENT_NS, 9)
    assert problems.now(2 * SILENT_NS) == []


def test_an_agent_that_drops_cuts_is_named_from_its_first_alert_until_it_is_calm() -> None:
    problems = Problems(0, 5)
    problems.name("gw-1", "rack-a")
    problems.alert("gw-1", "plane-died", "not ours", 1, 0)
    problems.alert("gw-1", "spool-overflow", "10 cuts were dropped so far", 1, 0)
    problems.alert("gw-1", "spool-overflow", "20 cuts were dropped so far", 8, CALM_NS)
    problems.report(ALIVE, 2 * CALM_NS, 9)
    row = {"process": "rack-a", "what": "spool", "since_us": 1, "reason": "20 cuts were dropped so far"}
    assert problems.now(2 * CALM_NS) == [row]
    assert problems.now(2 * CALM_NS + 1) == []
    problems.alert("gw-1", "spool-overflow", "21", 40, 2 * CALM_NS + 2)
    assert problems.now(2 * CALM_NS + 2)[0]["since_us"] == 40, "a new one"


def test_of_many_agents_only_some_are_named() -> None:
    problems = Problems(0, 5)
    for number in range(MOST_AGENTS + 3):
        problems.alert(f"gw-{number}", "spool-overflow", "full", number, 0)
    rows = problems.now(0)
    assert len(rows) == MOST_AGENTS + 1
    assert (rows[-1]["process"], rows[-1]["since_us"]) == ("agents", MOST_AGENTS)
    assert rows[-1]["reason"].startswith("3 more gateways")


def test_the_core_puts_them_into_the_snapshot() -> None:
    bench = Bench()
    told = {"name": "dbmanager", "at_us": 5, "fullness": {}, "refused": {}, "problems": [DISK._asdict()]}
    bench.message(Kind.PRESSURE, told, sender="dbmanager")
    overflow = {"kind": "spool-overflow", "severity": "critical", "text": "the spool is full", "at_us": 6}
    bench.message(Kind.GATEWAY_ALERT, {"gw": "gw-1", "details": {}, **overflow})
    bench.tick(1)
    [(_, snapshot)] = bench.app.take_posted(Kind.SNAPSHOT)[-1:]
    assert [(row["process"], row["what"]) for row in snapshot["problems"]] == [
        ("dbmanager", "database"),
        ("gw-1", "spool"),
    ]
