"""The proof of event delivery finds what it is there to find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.chaos_events import Arrival, EventsSpan, StoredEvents, journal, prove_events
from sla_server.events.event import Event
from sla_server.events.intake import folded_identity

SPAN = EventsSpan(10, 100, overtaken=True)


def event(number: int, kind: str = "process-restarted", **changed: Any) -> Event:
    values: dict[str, Any] = {
        "event_id": f"e{number}",
        "at_us": 10 + number,
        "kind": kind,
        "severity": "warning",
        "element": "process",
        "subject": "services",
        "text": "text",
    }
    return Event(**{**values, **changed})


def arrived(number: int, of: Event, mode: str = "well", repeats: int = 1) -> Arrival:
    return Arrival(number, of.event_id, of, repeats, mode)


def problems(
    stored: list[Event],
    arrivals: list[Arrival],
    dead: list[tuple[str, str]] | None = None,
    name: str = "broken",
) -> list[str]:
    found = StoredEvents(stored, dead or [])
    return prove_events(found, {name: arrivals}, SPAN, "broken").problems


def test_repeats_and_what_was_before_or_after_are_no_problem() -> None:
    one, two, before, after = event(1), event(2), event(3, at_us=9), event(4, at_us=101)
    found = [arrived(1, one, "fail"), arrived(1, one), arrived(2, two), arrived(1, one)]
    assert problems([one, two, before, after], found) == []


def test_an_event_that_did_not_arrive_is_lost_unless_it_was_folded_or_left_out() -> None:
    one, two = event(1), event(2)
    assert problems([one, two], [arrived(1, one)]) == [
        "broken: e2 (process-restarted of services) did not arrive"
    ]
    assert problems([one, two], [arrived(1, one, repeats=2)]) == []
    apart = event(7, event_id=folded_identity("e1", 17, 1))
    assert problems([one, two, apart], [arrived(1, one), arrived(2, apart)]) == []
    assert len(problems([one, two, event(8), apart], [arrived(1, one), arrived(2, apart)])) == 1
    own = event(3, "recipient-failing", element="recipient", subject="broken")
    assert problems([one, own], [arrived(1, one)]) == []
    lost = event(4, "gateway-lost", severity="critical", element="gateway", subject="a")
    again = event(5, "gateway-lost", severity="critical", element="gateway", subject="a")
    lesser = event(6, "clock-skew", element="gateway", subject="a")
    assert problems([lost, again, lesser], [arrived(1, lost)]) == []
    assert len(problems([lesser, again], [])) == 2


def test_a_number_that_falls_or_is_given_twice_is_seen() -> None:
    one, two = event(1), event(2)
    for first, second in ((2, 1), (1, 1)):
        assert problems([one, two], [arrived(first, one), arrived(second, two)]) == [
            f"broken: e2 (process-restarted) first came as {second}, after {first}"
        ]
        once = EventsSpan(10, 100, overtaken=True, full_disks=1)
        found = {"broken": [arrived(first, one), arrived(second, two)]}
        assert prove_events(StoredEvents([one, two]), found, once, "broken").problems == []


def test_what_was_never_taken_needs_an_event_and_only_the_failing_recipient_may_have_one() -> None:
    one = event(1)
    assert len(problems([one], [arrived(1, one, "refuse")])) == 1
    assert problems([one], [arrived(1, one)], dead=[("broken", "e1")]) == [
        "dead letter without an event: ('broken', 'e1')"
    ]
    said = event(2, "delivery-failed", element="recipient", subject="broken", details={"events": ["e1"]})
    assert problems([one, said], [arrived(1, one, "refuse")], dead=[("broken", "e1")]) == []
    other = event(2, "delivery-failed", element="recipient", subject="healthy", details={"events": ["e1"]})
    assert problems([one, other], [arrived(1, one), arrived(2, other)], name="healthy") == [
        "dead letter of healthy, which did not fail: e1"
    ]


def test_what_is_not_in_sql_and_a_recipient_that_waited_for_another_are_seen() -> None:
    assert problems([], [arrived(1, event(1))]) == [
        "broken: e1 (process-restarted) arrived and is not in SQL"
    ]
    late = EventsSpan(10, 100, overtaken=False)
    assert len(prove_events(StoredEvents(), {}, late, "broken").problems) == 1


def test_the_journal_is_read_up_to_a_line_that_was_cut_off(tmp_path: Path) -> None:
    one = event(1)
    notice = {"number": 1, "delivery_id": "e1", "repeats": 1, "event": one.as_json()}
    line = json.dumps({"mode": "hang", "notices": [notice]})
    (tmp_path / "journal").write_text(f'{line}\n{line}\n{{"mode": "we')
    assert journal(tmp_path / "journal") == [arrived(1, one, "hang")] * 2
