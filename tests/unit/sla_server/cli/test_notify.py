"""sla notify, silence, ack; what is undelivered; one event."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from sla_server.agreements.periods import MAX_WINDOW_S
from sla_server.cli import formatting, notify
from sla_server.cli.notifications import routing_lines
from sla_server.events.delivery_state import write_delivery_state
from tests.support import api
from tests.support.cli import Terminal, replace_sleep

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
    more = {"name": "mail", "state": "failing", "waiting": 1500, "waiting_is_at_most": True}
    delivery([more])
    assert sla("get", "recipients").output.splitlines()[2].split()[2:5] == ["failing", "<=", "1,500"]


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
    assert "  to do: `sla why VOLUME`. (http://127.0.0.1:8411/runbook#throttle-set)" in lines
    assert any(line.startswith("acknowledged ") and line.endswith(" by ann: disk ordered") for line in lines)
    assert "  no reminder and no escalation of it any more" in lines
    assert "delivery: mail has not confirmed it, 4 tries: HTTP 503" in lines
    assert any(
        line.startswith("delivery: oncall confirmed ") and line.endswith(" after 3 tries") for line in lines
    )
    assert "goes to mail: route all: severities warning, critical" in lines
    assert any(line.startswith("  held back now by silence now until ") for line in lines)
    assert any(line.endswith(": night (by ann)") for line in lines), "who is behind the silence, and why"
    other = sla("describe", "event", "e0002").output.splitlines()
    assert "not acknowledged: sla ack e0002 --note TEXT" in other
    assert "delivery: no recipient is behind with it" in other
    assert "goes to no recipient" in other
    assert "route all does not match: severity is info" in other
    gone = sla("describe", "event", "gone")
    assert (gone.exit_code, "'sla get events' lists the newest" in gone.stderr) == (1, True)


def test_what_a_silence_holds_back_is_said_with_the_silence(sla: Terminal, delivery: Any) -> None:
    delivery([], [{"event_id": "e0001", "recipient": "mail", "attempt": 0, "reason": "", "state": "held"}])
    lines = sla("describe", "event", "e0001").output.splitlines()
    silence = "silence now until 2027-01-15 08:30:00Z: night (by ann)"
    assert f"delivery: mail has not confirmed it: held back by {silence}" in lines
    assert sum(silence in line for line in lines) == 1, "once is enough"


def test_what_is_acknowledged_or_confirmed_waits_for_nothing() -> None:
    to = {
        "recipient": "mail",
        "reason": "route all",
        "held": "silence now",
        "held_until_us": 5,
        "remind_s": 60,
    }
    routing = {"recipients": [{**to, "escalate_s": 900, "escalate_to": ["boss"]}]}
    open_lines = list(routing_lines(routing))
    assert open_lines[1:] == [
        "  held back now by silence now",
        "  reminder every 60s until it is acknowledged",
        "  after 15m without acknowledgement also to boss",
    ]
    assert list(routing_lines(routing, {"mail"}, is_acknowledged=True)) == open_lines[:1]
    (_, dropped) = routing_lines({"recipients": [{**to, "held_until_us": 0, "remind_s": 0}]})
    assert dropped == "  not delivered because of silence now"


def test_what_waits_behind_a_failing_recipient_is_not_called_delivered(sla: Terminal, delivery: Any) -> None:
    delivery([{"name": "mail", "state": "failing", "waiting": 300}], [{**WAITING, "event_id": "e0000"}])
    lines = sla("describe", "event", "e0001").output.splitlines()
    assert "delivery: no answer of mail is recorded; 300 events wait there" in lines
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


def test_the_severity_of_an_event_is_that_of_its_kind_unless_it_is_given(
    sla: Terminal, tmp_path: Path
) -> None:
    """mail's route wants warning or critical."""
    words = ("notify", "route", "--element", "gateway", "--subject", "gateway-a", "--kind")
    assert "severity is info" in sla(*words, "gateway-enrolled").output
    assert sla(*words, "gateway-stalled").output.startswith("goes to mail")
    assert sla(*words, "gateway-enrolled", "--severity", "critical").output.startswith("goes to mail")
    file = tmp_path / "event.json"
    file.write_text('{"kind": "gateway-stalled", "element": "gateway", "subject": "gateway-a"}')
    assert sla("notify", "route", "--event", str(file)).output.startswith("goes to mail")
    file.write_text(sla("get", "events", "--limit", "1", "-o", "json").output)
    assert sla("notify", "route", "--event", str(file)).exit_code == 0


def test_a_kind_that_no_event_has_is_met_by_those_that_resemble_it(sla: Terminal) -> None:
    done = sla("notify", "route", "--kind", "violation-openned", "--subject", "erp-gold/latency")
    assert done.exit_code == 1
    assert "no event is of kind 'violation-openned'" in done.stderr
    assert "Did you mean violation-opened" in done.stderr


def test_an_agreement_that_is_not_there_is_noted(sla: Terminal) -> None:
    done = sla("notify", "route", "--kind", "violation-opened", "--subject", "erp-gld/latency")
    assert done.stderr == "note: no agreement 'erp-gld' is in force; did you mean erp-gold?\n"
    assert done.stdout.startswith("goes to mail")
    assert sla("notify", "route", "--kind", "violation-opened", "--subject", "erp-gold/latency").stderr == ""


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
    assert (failed.exit_code, failed.output.splitlines()) == (
        1,
        [
            "mail: not confirmed: HTTP 503",
            "  Mend what receives it, or its document and files: what waits is sent then by itself.",
            "  How it went: sla describe event e0003",
        ],
    )
    assert "sla describe event e0003" in sla("notify", "test", "mail", "--no-wait").output
    _raised(sla, "e0001")
    confirmed = sla("notify", "test", "oncall")
    assert (confirmed.exit_code, confirmed.output) == (0, "oncall: confirmed\n")
    assert [op for op, _ in sla.asked] == ["notify_test"] * 4


def test_an_event_that_was_not_taken_is_listed_and_sent_again(sla: Terminal, delivery: Any) -> None:
    delivery()
    failed = {"event_id": "t1", "at_us": api.NOW_US, "kind": "delivery-failed", "subject": "oncall"}
    sla.source.ended = [{**failed, "details": {"events": ["e0002"], "count": 3}}]
    listed = sla("get", "events", "--undelivered").output
    assert "oncall" in listed
    assert "given up: HTTP 400" in listed
    assert "2 more were given up, and are only counted: sla get events --kind delivery-failed" in listed
    lines = sla("describe", "event", "e0002").output.splitlines()
    assert "  to send it there again: sla notify again e0002 oncall" in lines
    _raised(sla, "e0001")
    again = sla("notify", "again", "e0002", "oncall")
    assert (again.exit_code, again.output) == (0, "oncall: confirmed\n")
    ((op, body),) = sla.asked
    assert (op, body["name"], body["event_id"]) == ("event_again", "oncall", "e0002")


def test_a_test_behind_a_recipient_that_fails_says_why_and_until_when(sla: Terminal, delivery: Any) -> None:
    """The test itself was not tried: other events are sent first, and the next try is in an hour."""
    _raised(sla, "e0002")
    now_us = time.time_ns() // 1000
    failing = {
        "name": "mail",
        "state": "failing",
        "attempt": 7,
        "waiting": 12,
        "last_answer": "retry: HTTP 503",
        "failing_since_us": now_us - 600_000_000,
        "next_try_us": now_us + 3_600_000_000,
        "is_trying": False,
    }
    delivery([failing], [{**WAITING, "event_id": "e0000"}])
    done = sla("notify", "test", "mail")
    lines = done.output.splitlines()
    assert (done.exit_code, lines[0]) == (1, "mail: not confirmed: retry: HTTP 503")
    since, again = (formatting.when(failing[key]) for key in ("failing_since_us", "next_try_us"))
    assert lines[1:] == [
        f"  It has failed since {since} (7 tries); the next try is at {again}.",
        "  12 events wait for it, this among them; they are sent in their order.",
        "  Mend what receives it, or its document and files: what waits is sent then by itself.",
        "  How it went: sla describe event e0002",
    ]
    found = json.loads(sla("notify", "test", "mail", "-o", "json").output)
    assert (found["state"], found["delivery"]["attempt"]) == ("failing", 7)


def test_a_next_try_that_comes_in_time_is_waited_for(
    sla: Terminal, delivery: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _raised(sla, "e0002")
    next_us = time.time_ns() // 1000 + 20_000_000
    failing = {
        "name": "mail",
        "state": "failing",
        "attempt": 2,
        "waiting": 2,
        "last_answer": "retry: HTTP 503",
    }
    steps = [{"is_trying": True, "attempt": 3}, {"attempt": 3, "last_answer": "retry: HTTP 500"}]
    delivery([{**failing, "next_try_us": next_us}])
    replace_sleep(monkeypatch, notify, lambda _s: delivery([{**failing, **steps.pop(0)}]))
    done = sla("notify", "test", "mail")
    assert (done.exit_code, steps) == (1, [])
    assert done.stderr == f"mail fails; its next try is at {formatting.when(next_us)}\n"
    assert done.stdout.splitlines()[:3] == [
        "mail: not confirmed: retry: HTTP 500",
        "  It has failed (3 tries).",
        "  2 events wait for it, this among them; they are sent in their order.",
    ]


def test_nothing_undelivered_is_no_confirmation(
    sla: Terminal, delivery: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "WAIT_S", 0.0)  # else a minute
    delivery()
    for event_id in ("e0002", "not-in-sql-yet"):
        _raised(sla, event_id)
        done = sla("notify", "test", "mail")
        assert (done.exit_code, done.output.splitlines()[0]) == (
            1,
            "mail: not confirmed: it has not answered yet",
        )
        assert done.output.endswith(f"  How it went: sla describe event {event_id}\n")


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
