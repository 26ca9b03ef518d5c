"""PRESSURE every other second, best effort."""

from __future__ import annotations

from typing import Any

from pmdaemon.mailbox.errors import MailboxFull
from pmdaemon.poller.backpressure import BackpressureReporter
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire import frame
from pmdaemon.wire.messages.server import MOST_PROBLEMS, REASON_CHARS, Pressure, Problem


class Box:
    name = "pair-0"

    def __init__(self) -> None:
        self.posted: list[tuple[str, bytes]] = []
        self.is_full = False

    def post(self, recipients: str, payload: bytes) -> None:
        if self.is_full:
            raise MailboxFull(self.name, (recipients,))
        self.posted.append((recipients, payload))

    def stats(self) -> dict[str, Any]:
        return {"full": 4, "ring_fill_ratio": {"services": 0.5, "dbmanager": 0.0}}


def test_it_tells_rings_and_counters_every_other_second() -> None:
    box, clock = Box(), FakeClock()
    teller = BackpressureReporter(box, clock, lambda: {"ingest-queue": 0.25}, lambda: {"news": 1})
    for _ in range(5):
        teller.tick()
        clock.advance(1)
    assert [to for to, _ in box.posted] == ["services"] * 3
    told = Pressure.parse(frame.decode(box.posted[0][1]).header)
    assert told.fullness == {"services": 0.5, "dbmanager": 0.0, "ingest-queue": 0.25}
    assert told.refused == {"posts": 4, "news": 1}
    assert told.problems == ()


def test_it_tells_problems_at_once_when_asked_to_and_then_in_time() -> None:
    box, clock = Box(), FakeClock()
    trouble = Problem("database", 7, "away " * 200)
    teller = BackpressureReporter(box, clock, dict, dict, lambda: [trouble] * 40)
    teller.tick()
    teller.tell()
    teller.tick()
    assert len(box.posted) == 2
    told = Pressure.parse(frame.decode(box.posted[1][1]).header)
    assert len(told.problems) == MOST_PROBLEMS
    assert told.problems[0] == trouble._replace(reason=trouble.reason[:REASON_CHARS])


def test_others_get_the_same_whoever_has_no_room() -> None:
    box, other, clock = Box(), Box(), FakeClock()
    teller = BackpressureReporter(box, clock, dict, dict, copies=[(other, "appserver")])
    box.is_full = True
    teller.tick()
    assert [to for to, _ in other.posted] == ["appserver"]


def test_without_room_it_says_nothing_and_goes_on() -> None:
    box, clock = Box(), FakeClock()
    teller = BackpressureReporter(box, clock, dict, dict)
    box.is_full = True
    teller.tick()
    box.is_full = False
    clock.advance(2)
    teller.tick()
    assert len(box.posted) == 1
