"""The inbox from SQL: filters, pages, acknowledgements from the audit log."""

from __future__ import annotations

from typing import Any

import pytest

from sla_server.services.rows import audit_row
from sla_server.services.store import SqlReads
from tests.support.samples import T0, record_message

DELIVERY: dict[str, Any] = {
    "delivery_id": "e1",
    "event_id": "e1",
    "number": 1,
    "attempts": 2,
    "answer": "HTTP 503",
}


def _event(number: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    row = {
        "event_id": f"e{number}",
        "at_us": T0 + 1_000_000 * number,
        "kind": "violation-opened",
        "severity": "critical",
        "element": "sla",
        "subject": f"agreement_{number}/latency",
        "text": f"100% of {number}",
        "details": {"n": number},
    }
    return "events", {**row, **fields}


@pytest.fixture
def reader(rig: Any) -> Any:
    rows = [
        _event(1),
        _event(2, severity="warning", kind="gateway-lost", element="gateway", subject="gw-a"),
        _event(3, severity="info", kind="gateway-back", element="gateway", subject="gw-a"),
        _event(4, severity="error"),
        audit_row("ann", "acknowledge", "e1", T0 + 9_000_000, after={"note": "disk ordered"}),
        audit_row("bob", "acknowledge", "e1", T0 + 9_500_000, after={"note": "arrived"}),
        audit_row("bob", "apply", "e2", T0 + 9_500_000),
        ("deliveries", {**DELIVERY, "recipient": "mail", "state": "confirmed", "at_us": T0 + 9_000_000}),
        ("deliveries", {**DELIVERY, "recipient": "chat", "state": "dead", "at_us": T0 + 8_000_000}),
    ]
    rig.feed(record_message(rows))
    rig.drain(final=True)
    return rig.reader


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({}, ["e4", "e3", "e2", "e1"]),
        ({"severities": ["warning", "critical"]}, ["e4", "e2", "e1"]),
        ({"kind": "gateway-*"}, ["e3", "e2"]),
        ({"kind": "gateway-lost"}, ["e2"]),
        ({"kind": "gateway_lost"}, []),
        ({"kind": "gateway_*"}, []),
        ({"elements": ["gateway", "volume"], "severities": ["info"]}, ["e3"]),
        ({"subject": "agreement_"}, ["e4", "e1"]),
        ({"subject": "100% of 4"}, ["e4"]),
        ({"subject": "100%% of"}, []),
        ({"only_open": True}, ["e4", "e3", "e2"]),
        ({"event_ids": ["e3", "e1", "gone"]}, ["e3", "e1"]),
        (
            {"kinds": ["gateway-lost", "gateway-back"], "subjects": ["gw-a"], "since_us": T0 + 3_000_000},
            ["e3"],
        ),
        ({"kinds": [], "subjects": []}, []),
    ],
)
def test_events_are_filtered(reader: Any, wanted: dict[str, Any], found: list[str]) -> None:
    assert [row["event_id"] for row in reader.inbox(**wanted)] == found


def test_pages_go_on_where_the_one_before_ended(reader: Any) -> None:
    first = reader.inbox(2, severities=["critical", "warning"])
    rest = reader.inbox(2, first[-1]["cursor"], severities=["critical", "warning"])
    assert [row["event_id"] for row in [*first, *rest]] == ["e4", "e2", "e1"]


def test_one_event_and_who_acknowledged_it(reader: Any) -> None:
    assert reader.event("e2")["details"] == {"n": 2}
    assert reader.event("gone") is None
    said = reader.acknowledgements(["e1", "e2"])
    assert [(row["event_id"], row["who"], row["after"]["note"]) for row in said] == [
        ("e1", "ann", "disk ordered"),
        ("e1", "bob", "arrived"),
    ]
    assert reader.acknowledgements([]) == []
    assert [(row["recipient"], row["state"]) for row in reader.deliveries("e1")] == [
        ("chat", "dead"),
        ("mail", "confirmed"),
    ]
    assert reader.deliveries("e2") == []


def test_events_whose_ids_begin_so(rig: Any) -> None:
    rows = [_event(1, event_id="ab_1"), _event(2, event_id="ab_2"), _event(3, event_id="abc")]
    rig.feed(record_message(rows))
    rig.drain(final=True)
    named = {part: [row["event_id"] for row in rig.reader.events_of(part, 2)] for part in ("ab", "ab_", "x")}
    assert named == {"ab": ["abc", "ab_2"], "ab_": ["ab_2", "ab_1"], "x": []}
    assert rig.reader.events_of("abc", 2)[0]["details"] == {"n": 3}


def test_backends_at_fault_are_those_whose_newest_event_says_so(rig: Any) -> None:
    def fault(number: int, kind: str, backend: str) -> tuple[str, dict[str, Any]]:
        return _event(number, kind=kind, element="backend", subject=backend, details={"fault": "hangs"})

    began, ended = "storage-fault", "storage-recovered"
    rows = [fault(1, began, "a"), fault(2, ended, "a"), fault(3, began, "b"), fault(4, began, "a")]
    rows += [fault(5, began, "c"), fault(6, ended, "c"), fault(0, began, "old")]
    rig.feed(record_message(rows))
    rig.drain(final=True)
    assert SqlReads(rig.reader).storage_faults(T0 + 1_000_000) == {"a": "hangs", "b": "hangs"}


def test_dead_letters_are_those_of_these_that_were_not_taken_since(rig: Any) -> None:
    def became(delivery_id: str, state: str, recipient: str = "mail") -> tuple[str, dict[str, Any]]:
        return "deliveries", {
            **DELIVERY,
            "delivery_id": delivery_id,
            "recipient": recipient,
            "state": state,
            "at_us": T0,
        }

    rows = [became("d1", "dead-letter"), became("d2", "dead-letter"), became("d3", "confirmed")]
    rows += [became("d1", "dead-letter", "chat"), became("d2", "confirmed")]  # it came again, and was taken
    rig.feed(record_message(rows))
    rig.drain(final=True)
    found = rig.reader.dead_letters("mail", ["d1", "d2", "d3", "d4"])
    assert [(row["recipient"], row["delivery_id"]) for row in found] == [("mail", "d1")]
    assert rig.reader.dead_letters("mail", []) == []
