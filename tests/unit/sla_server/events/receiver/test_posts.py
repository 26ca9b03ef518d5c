"""Bodies of webhooks as another server sends them: read whole, or refused with the field that is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sla_server.events.queue import QueuedEvent
from sla_server.events.receiver.posts import MOST_ALERTS, MOST_DEPTH, PostRefused, depth, posted
from sla_server.events.recipients.base import Notice
from sla_server.events.recipients.webhook import body
from tests.support.notices import closed, event, notice


def sent(*notices: Notice) -> bytes:
    return json.dumps(body("relay", notices)).encode()


def changed(**delivery: Any) -> bytes:
    content = body("relay", [notice(1)])
    content["alerts"][0]["delivery"].update(delivery)
    return json.dumps(content).encode()


def test_what_a_webhook_sends_is_read_with_identity_count_and_reminder() -> None:
    first = notice(1, repeats=3, is_caught_up=True)
    again = notice(1, reminder=2)
    found = posted(sent(first, again, closed(2), notice(4, escalated=True)))
    assert found == [
        QueuedEvent(event(1), repeats=3),
        QueuedEvent(event(1), reminder=2),
        QueuedEvent(closed(2).event),
        QueuedEvent(event(4), escalated=True),
    ]
    assert [each.identity for each in found] == ["event-1", "event-1/2", "event-2", "event-4/escalated"]
    assert found[1].identity == again.delivery_id
    assert found[3].identity == notice(4, escalated=True).delivery_id


def test_times_of_recording_are_our_own() -> None:
    (found,) = posted(sent(notice(1, event_fields={"recorded_us": 77})))
    assert found.event.recorded_us == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "'alerts' is None"),
        (b"{", "'alerts' is None"),
        (b"[]", "'alerts' is None"),
        (b'{"alerts":[]}', "'alerts' is []"),
        (b'{"alerts":{}}', "'alerts' is {}"),
        (json.dumps({"alerts": [{}] * (MOST_ALERTS + 1)}).encode(), f"a list of 1 to {MOST_ALERTS}"),
        (b'{"alerts":[{"labels":{}}]}', "alerts[0].delivery is None, expected a notice with its event"),
        (b'{"alerts":[7]}', "alerts[0].delivery is None"),
        (changed(event={"kind": "x"}), "alerts[0].delivery.event: 'severity' is None"),
        (changed(event=[]), "expected a notice with its event"),
        (changed(event={**event(1).as_json(), "event_id": "e" * 257}), "'event_id' is 'eee"),
        (changed(event={**event(1).as_json(), "event_id": "e" * 300 + "1"}), "at most 256 characters"),
        (changed(event={**event(1).as_json(), "event_id": "e\n1"}), "all of them printable"),
        (changed(repeats=0), "alerts[0].delivery: 'repeats' is 0, expected a whole number from 1 on"),
        (changed(repeats=True), "'repeats' is True"),
        (changed(reminder=-1), "'reminder' is -1, expected a whole number from 0 on"),
        (changed(reminder=1 << 31), "'reminder' is 2147483648"),
        (changed(event={**event(1).as_json(), "at_us": -5}), "'at_us' is -5, expected microseconds"),
        (changed(event={**event(1).as_json(), "at_us": 10**40}), "expected microseconds since 1970"),
    ],
)
def test_what_is_wrong_is_named(content: bytes, said: str) -> None:
    with pytest.raises(PostRefused) as refused:
        posted(content)
    assert said in str(refused.value)


def test_one_wrong_notice_refuses_the_body() -> None:
    content = body("relay", [notice(1), notice(2)])
    content["alerts"][1]["delivery"]["event"]["severity"] = "fatal"
    with pytest.raises(PostRefused, match=r"alerts\[1\].delivery.event: 'severity' is 'fatal'"):
        posted(json.dumps(content).encode())


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", 0),
        (b"{}", 1),
        (b'{"a":[[1],{}]}', 3),
        (b'"[[[["', 0),
        (b'{"a\\"[[[":"]]\\\\"}', 1),
        (b'{"a": "no end [[[', 1),
        (b"]]]][[", 0),
        (b"[" * 100_000, 100_000),
    ],
)
def test_depth_counts_brackets_outside_of_texts(content: bytes, expected: int) -> None:
    assert depth(content) == expected


def test_a_deep_body_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(PostRefused, match=f"100000 levels deep, at most {MOST_DEPTH}"):
        posted(b"[" * 100_000)
