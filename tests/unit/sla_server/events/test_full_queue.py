"""Queues without room: whoever does not confirm gives up, with notice; no other recipient waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from sla_server.events.config import EventsConfig
from sla_server.events.event import Event
from sla_server.events.recipients.base import CONFIRMED, Held, Routed, retry
from tests.support.deliveries import InlineSender, Rig, ToAll, event


def numbered(count: int, first: int = 1) -> list[Event]:
    return [event(number) for number in range(first, first + count)]


def large(count: int, first: int) -> list[Event]:
    """Events that fill a queue soon."""
    return [event(number, text="x" * 2000) for number in range(first, first + count)]


def ids(count: int, first: int = 1) -> list[str]:
    return [f"e{number}" for number in range(first, first + count)]


def quiet_until(router: ToAll, until_us: int) -> None:
    """Hold everything back from the recipient ``quiet``."""
    router.holds = lambda _found, name, now_us: (
        Held("night", until_us) if name == "quiet" and now_us < until_us else None
    )


def test_with_the_queue_nearly_full_who_is_furthest_behind_gives_up_its_oldest(tmp_path: Path) -> None:
    dead, good = InlineSender("dead", retry("away")), InlineSender("good")
    rig = Rig(tmp_path, ToAll("dead", "good"), [dead, good], most_notices=50)
    added = 0
    while rig.main.fullness_ratio < 0.95 and added < 3000:
        rig.add(*numbered(100, added + 1))
        added += 100
        rig.run()
    assert rig.main.fullness_ratio < 0.9  # it never fills up
    assert good.got() == ids(added)
    assert rig.engine.lanes["dead"].dead_letters > 0
    assert ("delivery-failed", "dead") in rig.raised


def test_who_fails_with_events_of_the_initialization_period_gives_up_too(tmp_path: Path) -> None:
    dead, good = InlineSender("dead", retry("away")), InlineSender("good")
    rig = Rig(tmp_path, ToAll("dead", "good"), [dead, good], most_notices=50)
    rig.add(event(1), queue="initial")
    rig.run()
    added = 1
    while rig.main.fullness_ratio < 0.95 and added < 3000:
        rig.add(*numbered(100, added + 1))
        added += 100
        rig.run()
    assert rig.main.fullness_ratio < 0.9
    assert good.got() == ids(added)
    assert [row["event_id"] for row in rig.rows if row["state"] == "dead-letter"][:2] == ["e1", "e2"]


def test_nothing_is_given_up_while_nothing_can_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, good = InlineSender("dead", retry("away")), InlineSender("good")
    rig = Rig(tmp_path, ToAll("dead", "good"), [dead, good])

    def full(*_args: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rig.engine._state, "write", full)
    added = 0
    while rig.main.fullness_ratio < 0.85:
        rig.add(*large(20, added + 1))
        added += 20
        rig.run(2)
    assert (rig.engine.lanes["dead"].dead_letters, good.got()) == (0, ids(added))
    monkeypatch.undo()
    rig.run(3)
    assert rig.engine.lanes["dead"].dead_letters > 0
    assert rig.main.fullness_ratio < 0.8


def test_two_dead_recipients_that_give_up_singly_do_not_fill_the_queue_with_events_about_it(
    tmp_path: Path,
) -> None:
    dead = [InlineSender("a", retry("away")), InlineSender("b", retry("away"))]
    rig = Rig(tmp_path, ToAll("a", "b"), dead, most_notices=1)
    added = 0
    while sum(lane.dead_letters for lane in rig.engine.lanes.values()) < 100 and added < 3000:
        rig.add(*numbered(20, added + 1))
        added += 20
        for _ in range(20):
            rig.run()
    assert [kind for kind, _ in rig.raised].count("delivery-failed") == 2
    assert rig.main.fullness_ratio < 0.9
    rig.raised.clear()
    rig.clock.advance(61.0)
    rig.run()
    assert sorted(rig.raised) == [("delivery-failed", "a"), ("delivery-failed", "b")]


def test_a_silence_without_room_delays_no_other_recipient_and_is_an_event(tmp_path: Path) -> None:
    quiet, good = InlineSender("quiet"), InlineSender("good")
    router = ToAll("quiet", "good")
    rig = Rig(tmp_path, router, [quiet, good], most_notices=10)
    quiet_until(router, rig.clock.unix_us() + 8 * 3600_000_000)
    added = 0
    while rig.engine.lanes["quiet"].dead_letters < 100 and added < 2_000:
        rig.add(*large(20, added + 1))
        added += 20
        rig.run()
    assert rig.main.fullness_ratio < 0.9
    assert good.got() == ids(added)
    assert rig.raised[:2] == [("held-back-full", "quiet"), ("delivery-failed", "quiet")]
    assert rig.engine.lanes["quiet"].no_room == "main"
    assert quiet.got() == []
    rig.run(100)
    rig.clock.advance(8 * 3600.0)
    rig.run(100)
    given_up = [row["event_id"] for row in rig.rows if row["state"] == "dead-letter"]
    assert sorted([*quiet.got(), *given_up]) == sorted(ids(added))  # sent, or given up with notice; once each
    assert rig.engine.lanes["quiet"].no_room == ""


def test_an_end_that_is_given_up_takes_its_beginning_that_is_held_with_it(tmp_path: Path) -> None:
    quiet, router = InlineSender("quiet"), ToAll("quiet")
    rig = Rig(tmp_path, router, [quiet], most_notices=10)
    quiet_until(router, rig.clock.unix_us() + 3600_000_000)
    rig.add(event(1, "storage-fault", severity="critical"))
    rig.run()
    number = 2
    while not rig.engine.lanes["quiet"].no_room and number < 2_000:
        rig.add(*large(20, number))
        number += 20
        rig.run()
    rig.add(event(number, "storage-recovered"))
    after = number + 1
    while not any(row["event_id"] == f"e{number}" for row in rig.rows) and after < 4_000:
        rig.add(*large(20, after))
        after += 20
        rig.run()
    of_condition = [row["event_id"] for row in rig.rows if row["event_id"] in ("e1", f"e{number}")]
    assert of_condition == ["e1", f"e{number}"]
    rig.clock.advance(3601.0)
    rig.run(5)
    assert not {"e1", f"e{number}"} & set(quiet.got())


def test_reminders_without_room_are_dropped_with_an_event(tmp_path: Path) -> None:
    sender = InlineSender("r")
    rig = Rig(tmp_path, ToAll(Routed("r", "all", remind_s=60.0)), [sender], most_notices=100)
    added = 0
    while not rig.raised and added < 20_000:
        more = range(added, added + 100)
        rig.add(*(event(n, "storage-fault", str(n), severity="critical") for n in more))
        added += 100
        rig.run()
    assert rig.raised == [("reminders-dropped", "r")]
    assert len(sender.got()) == added


def test_what_is_due_and_finds_no_room_waits_without_a_busy_loop_and_nothing_is_lost(tmp_path: Path) -> None:
    quiet, other, router = InlineSender("quiet"), InlineSender("other", None), ToAll("quiet", "other")
    rig = Rig(tmp_path, router, [quiet, other], most_notices=10)
    quiet_until(router, rig.clock.unix_us() + 3600_000_000)
    rig.add(*large(300, 1))
    rig.run()
    other.answer = CONFIRMED
    rig.engine.answered(other.reply(CONFIRMED))
    rig.run()
    assert (len(rig.later), quiet.got()) == (300, [])
    rig.clock.advance(3601.0)
    router.routed = []
    while rig.main.fullness_ratio < 0.78:  # no lane has read these yet
        rig.add(*large(10, 1000))
    assert rig.engine.step() > 0.0
    rig.run(60)
    assert quiet.got() == ids(300)
    assert rig.raised == []


def test_more_than_the_queue_has_room_for_moves_in_parts(tmp_path: Path) -> None:
    quiet, router = InlineSender("quiet"), ToAll("quiet")
    rig = Rig(tmp_path, router, [quiet], most_notices=10)
    until_us = rig.clock.unix_us() + 3600_000_000
    quiet_until(router, until_us)
    for first in range(1, 301, 30):
        rig.add(*large(30, first))
        rig.run()
    assert len(rig.later) == 300  # two thirds of the other queue
    rig.clock.advance(3601.0)
    rig.run(120)
    assert (quiet.got(), len(rig.later)) == (ids(300), 0)


def test_a_queue_that_a_pass_of_the_reserves_fills_is_refused() -> None:
    with pytest.raises(ValidationError, match="16777216"):
        EventsConfig(queue_bytes=1 << 20)
    assert EventsConfig(queue_bytes=16 << 20).queue_bytes == 16 << 20


def test_a_body_that_may_never_find_room_is_refused_at_the_start() -> None:
    receive = {"sender": [{"name": "site-a", "secret_file": "a.key"}], "max_body_bytes": 3_355_444}
    with pytest.raises(ValidationError, match="set max_body_bytes to 3,355,443 at most"):
        EventsConfig.model_validate({"queue_bytes": 16 << 20, "receive": receive})
    receive["max_body_bytes"] = 3_355_443
    assert EventsConfig.model_validate({"queue_bytes": 16 << 20, "receive": receive}).receive is not None


def test_a_first_try_under_way_is_waited_for_until_the_queue_is_fuller_still(tmp_path: Path) -> None:
    slow = InlineSender("slow", None)
    rig = Rig(tmp_path, ToAll("slow"), [slow])
    added = 0
    while rig.main.fullness_ratio < 0.85:
        rig.add(*large(10, added + 1))
        added += 10
        rig.run()
    assert (rig.engine.lanes["slow"].dead_letters, slow.abandoned) == (0, 0)
    while rig.main.fullness_ratio < 0.9:
        rig.add(*large(10, added + 1))
        added += 10
    rig.run()
    assert (rig.engine.lanes["slow"].dead_letters > 0, slow.abandoned) == (True, 1)
