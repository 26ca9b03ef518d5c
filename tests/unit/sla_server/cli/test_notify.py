"""sla notify, silence, ack; what is undelivered; one event."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from sla_server.agreements.periods import MAX_WINDOW_S
from sla_server.cli import notify
from sla_server.events.delivery_state import write_delivery_state
from tests.support.cli import Terminal

WAITING = {"event_id": "e0001", "recipient": "mail", "attempt": 4, "reason": "HTTP 503", "state": "failing"}


@pytest.fixture
def delivery(sla: Terminal, tmp_path: Path) -> Any:
    """Makes the file that the delivery process writes."""
    sla.context.metrics.folder = tmp_path

    def write(recipients: Any = (), undelivered: Any = ()) -> None:
        write_delivery_state(tmp_path, recipients, undelivered)

    return write


def test_a_recipients_state_is_that_which_delivery_reports(sla: Terminal, delivery: Any) -> None:
    row = sla("get", "recipients").output.splitlines()[2]
    assert row.split() == ["mail", "inbox", "unknown", "-", "-", "-"]
    delivery(
        [{"name": "mail", "state": "failing", "waiting": 3, "dead_letters": 1, "last_answer": "HTTP 503"}]
    )
    row = sla("get", "recipients").output.splitlines()[2]
    assert row.split() == ["mail", "inbox", "failing", "3", "1", "HTTP", "503"]


def test_recipients_can_be_applied_again(sla: Terminal) -> None:
    assert "kind: Recipient" in sla("get", "recipients", "-o", "yaml").output
    assert "kind: Route" in sla("get", "routes", "-o", "yaml").output


def test_undelivered_events_are_listed_or_said_to_be_unknown(sla: Terminal, delivery: Any) -> None:
    done = sla("get", "events", "--undelivered")
    assert done.exit_code == 75
    assert "The delivery process is silent" in done.stderr
    delivery()
    assert sla("get", "events", "--undelivered").output == "All recipients have confirmed all events.\n"
    delivery([], [WAITING])
    assert "HTTP 503" in sla("get", "events", "--undelivered").output
    (row,) = json.loads(sla("get", "events", "--undelivered", "-o", "json").output)
    assert (row["event_id"], row["recipient"]) == ("e0001", "mail")
    refused = sla("get", "slas", "--undelivered")
    assert (refused.exit_code, "Use it with: sla get events" in refused.stderr) == (2, True)


def test_an_event_is_described_with_what_became_of_it(sla: Terminal, delivery: Any) -> None:
    delivery([], [WAITING])
    lines = sla("describe", "event", "e0001").output.splitlines()
    assert lines[0] == "e0001: throttle-set, warning"
    assert any(line.startswith("acknowledged ") and line.endswith(" by ann: disk ordered") for line in lines)
    assert "delivery: mail has not confirmed it, 4 tries: HTTP 503" in lines
    assert any(
        line.startswith("delivery: oncall confirmed ") and line.endswith(" after 3 tries") for line in lines
    )
    assert "goes to mail: route all: severities warning, critical" in lines
    assert any(line.startswith("  held back now by silence now until ") for line in lines)
    other = sla("describe", "event", "e0002").output.splitlines()
    assert "delivery: no recipient is behind with it" in other
    assert "goes to no recipient" in other
    assert "route all does not match: severity is info" in other
    gone = sla("describe", "event", "gone")
    assert (gone.exit_code, "'sla get events' lists the newest" in gone.stderr) == (1, True)


def test_what_waits_behind_a_failing_recipient_is_not_called_delivered(sla: Terminal, delivery: Any) -> None:
    delivery([{"name": "mail", "state": "failing", "waiting": 300}], [{**WAITING, "event_id": "e0000"}])
    lines = sla("describe", "event", "e0001").output.splitlines()
    assert "delivery: no answer of mail is recorded; 300 notices wait there" in lines
    assert "delivery: no recipient is behind with it" not in lines
    listed = sla("get", "events", "--undelivered").output.splitlines()
    assert listed[-1] == "299 more wait in queues to be looked at: sla get recipients"
    delivery([{"name": "mail", "state": "ok", "waiting": 2}])
    assert sla("get", "events", "--undelivered").output.splitlines() == [
        "2 more wait in queues to be looked at: sla get recipients"
    ]


def test_route_says_who_would_get_an_event(sla: Terminal, tmp_path: Path) -> None:
    by_options = sla("notify", "route", "--kind", "violation-opened", "--subject", "erp-gold/latency")
    assert by_options.exit_code == 0
    file = tmp_path / "event.json"
    event = {
        "kind": "violation-opened",
        "severity": "critical",
        "element": "sla",
        "subject": "erp-gold/latency",
    }
    file.write_text(json.dumps(event))
    by_file = sla("notify", "route", "--event", str(file))
    assert by_file.output == by_options.output
    assert by_file.output.startswith("goes to mail: route all: ")
    found = json.loads(sla("notify", "route", "--event", str(file), "-o", "json").output)
    assert [each["recipient"] for each in found["recipients"]] == ["mail"]
    assert sla.asked == [], "nothing is raised"


@pytest.mark.parametrize(
    ("content", "problem"), [("[]", "holds no event"), ("{", "is not JSON"), (None, "cannot be read")]
)
def test_what_is_no_event_is_refused(
    sla: Terminal, tmp_path: Path, content: str | None, problem: str
) -> None:
    file = tmp_path / "event.json"
    if content is not None:
        file.write_text(content)
    done = sla("notify", "route", "--event", str(file))
    assert (done.exit_code, problem in done.stderr) == (2, True)
    assert sla("notify", "route").exit_code == 2


def _raised(sla: Terminal, event_id: str) -> None:
    sla.mailbox.answer = lambda _header: (True, 200, {"event_id": event_id})


def test_a_test_waits_until_it_is_confirmed_or_has_failed(sla: Terminal, delivery: Any) -> None:
    _raised(sla, "e0003")
    silent = sla("notify", "test", "mail")
    assert (silent.exit_code, "the delivery process is silent" in silent.output) == (1, True)
    delivery([], [{**WAITING, "event_id": "e0003"}])
    failed = sla("notify", "test", "mail")
    assert (failed.exit_code, failed.output) == (1, "mail: not confirmed: HTTP 503\n")
    assert "sla describe event e0003" in sla("notify", "test", "mail", "--no-wait").output
    _raised(sla, "e0001")
    confirmed = sla("notify", "test", "oncall")
    assert (confirmed.exit_code, confirmed.output) == (0, "oncall: confirmed\n")
    assert [op for op, _ in sla.asked] == ["notify_test"] * 4


def test_nothing_undelivered_is_no_confirmation(
    sla: Terminal, delivery: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "WAIT_S", 0.0)  # else a minute
    delivery()
    for event_id in ("e0002", "not-in-sql-yet"):
        _raised(sla, event_id)
        done = sla("notify", "test", "mail")
        assert (done.exit_code, done.output) == (1, "mail: not confirmed: it has not answered yet\n")


def test_a_silence_is_begun_by_a_document(sla: Terminal) -> None:
    sla.mailbox.answer = lambda _header: (
        True,
        200,
        {"applied": [{"kind": "Silence", "name": "s", "version": 1, "changed": True}], "warnings": []},
    )
    done = sla(
        "silence", "start", "--for", "2h", "--reason", "move", "--kind", "gateway-*", "--recipient", "mail"
    )
    assert done.exit_code == 0
    assert "To end it early: sla silence end s" in done.output
    ((op, body),) = sla.asked
    document = YAML(typ="safe", pure=True).load(body["documents"])
    assert (op, document["kind"], document["spec"]["duration"]) == ("apply", "Silence", "7200s")
    assert document["spec"]["match"] == {"kinds": ["gateway-*"]}
    assert (document["spec"]["recipients"], document["spec"]["catch_up"]) == (["mail"], True)


def test_a_silence_says_what_it_holds_back(sla: Terminal) -> None:
    done = sla("silence", "start", "--for", "2h", "--reason", "move")
    assert (done.exit_code, "or --all" in done.stderr) == (2, True)
    assert sla("silence", "start", "--for", "2h", "--reason", "a", "--all", "--kind", "b").exit_code == 2
    assert notify.MOST_S == MAX_WINDOW_S


def test_an_acknowledgement_has_a_note(sla: Terminal) -> None:
    assert sla("ack", "e0001", "--note", "disk ordered").output == "e0001: acknowledged\n"
    ((op, body),) = sla.asked
    assert (op, body["event_id"], body["note"]) == ("acknowledge", "e0001", "disk ordered")
    assert sla("ack", "e0001").exit_code == 2
