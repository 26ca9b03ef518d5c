"""Issued reports are announced by services: once each, in the audit log and to the recipients."""

from __future__ import annotations

from typing import Any

from sla_server.events.event import Event
from sla_server.events.stages.route import route
from sla_server.services.reports import MOST, SINCE_US, announcement, announcement_text
from sla_server.services.sql_worker import SqlState
from tests.support.services import Bench

AT = 1_795_996_800_000_000
KEPT = {"name": "latency", "compliance": 0.9995, "target": 0.995, "is_kept": True}
BROKEN = {"name": "rate", "compliance": 0.9, "target": 0.95, "is_kept": False}


def issued(**changed: Any) -> dict[str, Any]:
    row = {
        "number": 3, "report_id": "gold-2026-10", "name": "gold", "period": "2026-10", "revises": "",
        "issued_us": AT, "issued_by": "schedule", "is_preliminary": False, "digest": "d" * 64,
        "previous": "c" * 64, "summary": {"objectives": [KEPT, BROKEN], "credit": 0.1},
    }  # fmt: skip
    return {**row, **changed}


def test_the_text_says_the_outcome() -> None:
    assert announcement_text(issued()) == (
        "the report of gold for 2026-10 was issued as gold-2026-10: "
        "latency kept (99.950% of 99.500% promised), rate NOT kept (90.000% of 95.000% promised), credit 10%"
    )
    revised = announcement_text(issued(revises="gold-2026-10", report_id="gold-2026-10-r1"))
    assert "issued as gold-2026-10-r1, a revision of gold-2026-10: " in revised
    near = {**KEPT, "compliance": 0.9949999, "is_kept": False}
    assert "NOT kept (99.499% of" in announcement_text(issued(summary={"objectives": [near]}))
    edited = {**KEPT, "compliance": 0.994, "promised": 0.993}
    assert "kept (99.400% of 99.300% promised)" in announcement_text(issued(summary={"objectives": [edited]}))
    assert announcement_text(issued(summary={})).endswith(": nothing to judge")


def test_the_audit_log_has_the_digest_and_the_recipients_of_the_agreement_get_the_event() -> None:
    (table, audited), (other, event) = announcement(issued())
    assert (table, other) == ("audit", "events")
    assert (audited["action"], audited["subject"], audited["who"]) == (
        "report-issued", "gold-2026-10", "schedule",
    )  # fmt: skip
    assert (audited["after"]["digest"], audited["after"]["previous"]) == ("d" * 64, "c" * 64)
    names = ("event_id", "at_us", "kind", "severity", "element", "subject", "text", "details")
    raised = Event(**{name: event[name] for name in names})
    found = route(raised, (), ("mail", "other"), {"gold": ["mail"]})
    assert [(each.recipient, each.reason) for each in found] == [("mail", "agreement gold names it")]


def test_identities_depend_on_the_report_alone() -> None:
    ids = {announcement(issued())[1][1]["event_id"] for _ in range(2)}
    ids.add(announcement(issued(), "https://sla.example")[1][1]["event_id"])
    assert len(ids) == 1
    assert announcement(issued(report_id="gold-2026-11"))[1][1]["event_id"] not in ids
    assert (MOST, SINCE_US) == (50, 30 * 86_400_000_000)


def test_services_record_what_the_sql_worker_has_found() -> None:
    bench = Bench()
    bench.sql_worker.found.put(SqlState(reports=[issued()]))
    bench.tick()
    recorded = [(table, row) for table, row in bench.records() if row.get("kind") != "services-started"]
    assert [(table, row.get("action") or row["kind"]) for table, row in recorded] == [
        ("audit", "report-issued"), ("events", "report-issued"),
    ]  # fmt: skip
