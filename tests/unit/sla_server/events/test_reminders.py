"""Reminders and escalations end with what they remind of, whatever order things are seen in."""

from __future__ import annotations

from pathlib import Path

import pytest

from sla_server.events.event import Event
from sla_server.events.recipients.base import CONFIRMED, Held, Routed, refused, retry
from tests.support.deliveries import InlineSender, Rig, ToAll, event


class OnlyTo(ToAll):
    """Routes to one recipient, and escalates to ``boss``, whom no route names."""

    def __init__(self) -> None:
        super().__init__(Routed("r", "all", remind_s=60.0, escalate_s=90.0, escalate_to=("boss",)))


def opened(number: int) -> Event:
    return event(number, "storage-fault", severity="critical")


def ended(number: int) -> Event:
    return event(number, "storage-recovered")


def acknowledged(number: int, of: str) -> Event:
    return event(number, "event-acknowledged", element="event", details={"event_id": of})


@pytest.mark.parametrize("end", [ended(2), acknowledged(2, "e1")])
def test_what_ends_in_the_same_batch_is_not_reminded_of(tmp_path: Path, end: Event) -> None:
    sender, boss = InlineSender("r"), InlineSender("boss")
    rig = Rig(tmp_path, OnlyTo(), [sender, boss])
    rig.add(opened(1), end)
    rig.run(200)
    assert (sender.got(), boss.got(), len(rig.later)) == (["e1", "e2"], [], 0)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("end", [ended(2), acknowledged(2, "e1")])
def test_what_ended_before_it_was_confirmed_is_not_reminded_of(
    tmp_path: Path, end: Event, restarts: bool
) -> None:
    sender, boss = InlineSender("r", retry("away")), InlineSender("boss")
    rig = Rig(tmp_path, OnlyTo(), [sender, boss], most_notices=1)
    rig.add(opened(1))
    rig.run(5)
    rig.add(end)
    rig.run(5)
    sender.answer = CONFIRMED
    if restarts:
        rig.restart()
    rig.run(300)
    assert (list(dict.fromkeys(sender.got())), boss.got(), len(rig.later)) == (["e1", "e2"], [], 0)
    assert rig.engine._lanes[""].firing == {}  # nothing is kept that nobody needs


def test_what_was_acknowledged_while_it_was_held_back_is_not_reminded_of(tmp_path: Path) -> None:
    sender, boss, router = InlineSender("r"), InlineSender("boss"), OnlyTo()
    rig = Rig(tmp_path, router, [sender, boss])
    until_us = rig.clock.unix_us() + 30_000_000
    router.holds = lambda found, _r, now_us: (
        Held("quiet", until_us) if found.event_id == "e1" and now_us < until_us else None
    )
    rig.add(opened(1), acknowledged(2, "e1"))
    rig.run(300)
    assert (sender.got(), boss.got()) == (["e2", "e1"], [])


def test_a_condition_that_begins_again_is_reminded_of_once_an_interval(tmp_path: Path) -> None:
    sender, boss = InlineSender("r"), InlineSender("boss")
    rig = Rig(tmp_path, OnlyTo(), [sender, boss])
    rig.add(opened(1), ended(2), opened(3))
    rig.run(130)
    assert (sender.got(), boss.got()) == (["e1", "e2", "e3", "e3/1", "e3/2"], ["e3/escalated"])


def test_a_reminder_that_was_due_before_the_end_was_seen_is_the_last(tmp_path: Path) -> None:
    sender, boss = InlineSender("r"), InlineSender("boss")
    rig = Rig(tmp_path, OnlyTo(), [sender, boss])
    rig.add(opened(1))
    rig.run(30)
    rig.clock.advance(40.0)
    rig.add(ended(2))  # read in the step in which the reminder enters the queue behind it
    rig.run(300)
    assert (sender.got(), boss.got(), len(rig.later)) == (["e1", "e2"], [], 0)


def test_who_was_escalated_to_is_told_the_end(tmp_path: Path) -> None:
    sender, boss = InlineSender("r"), InlineSender("boss")
    rig = Rig(tmp_path, OnlyTo(), [sender, boss])
    rig.add(opened(1))
    rig.run(95)
    rig.add(ended(2), ended(3))
    rig.run(5)
    assert boss.got() == ["e1/escalated", "e2"]


def held_until(router: ToAll, event_id: str, until_us: int) -> None:
    """Quiet hours for one event."""
    router.holds = lambda found, _r, now_us: (
        Held("quiet", until_us) if found.event_id == event_id and now_us < until_us else None
    )


def test_what_quiet_hours_held_back_is_reminded_of_and_escalated(tmp_path: Path) -> None:
    sender, boss, router = InlineSender("r"), InlineSender("boss"), OnlyTo()
    rig = Rig(tmp_path, router, [sender, boss])
    held_until(router, "e1", rig.clock.unix_us() + 30_000_000)
    rig.add(opened(1))
    rig.run(100)
    assert (sender.got(), boss.got()) == (["e1", "e1/1"], [])
    rig.run(30)
    assert (sender.got(), boss.got()) == (["e1", "e1/1"], ["e1/escalated"])


@pytest.mark.parametrize("restarts", [False, True])
def test_what_a_dead_recipient_does_not_confirm_is_escalated_once(tmp_path: Path, restarts: bool) -> None:
    sender, boss = InlineSender("r", retry("away")), InlineSender("boss")
    rig = Rig(tmp_path, OnlyTo(), [sender, boss], most_notices=1)
    rig.add(opened(1))
    rig.run(20)
    rig.add(event(2, "clock-skew", severity="warning"), event(3, "mode-changed"))  # behind what fails
    rig.run(60)
    assert boss.got() == []
    rig.run(15)
    assert boss.got() == ["e1/escalated"]
    if restarts:
        rig.restart()
    rig.run(20)
    assert boss.got() == ["e1/escalated", "e2/escalated"]
    sender.answer = CONFIRMED
    rig.run(300)
    assert boss.got() == ["e1/escalated", "e2/escalated"]
    assert list(dict.fromkeys(sender.got()))[:3] == ["e1", "e2", "e3"]


@pytest.mark.parametrize("end", [ended(2), acknowledged(2, "e1")])
def test_what_a_dead_recipient_does_not_confirm_is_escalated_only_while_it_lasts(
    tmp_path: Path, end: Event
) -> None:
    sender, boss = InlineSender("r", retry("away")), InlineSender("boss")
    rig = Rig(tmp_path, OnlyTo(), [sender, boss])
    rig.add(opened(1))
    rig.run(60)
    rig.add(end)
    rig.run(120)
    assert boss.got() == []


def test_what_is_held_back_behind_a_dead_recipient_is_escalated_when_quiet_hours_have_passed(
    tmp_path: Path,
) -> None:
    sender, boss, router = InlineSender("r", retry("away")), InlineSender("boss"), OnlyTo()
    rig = Rig(tmp_path, router, [sender, boss], most_notices=1)
    rig.add(event(1, "clock-skew", severity="warning"))
    rig.run(5)
    held_until(router, "e2", rig.clock.unix_us() + 60_000_000)
    rig.add(opened(2))
    rig.run(140)
    assert boss.got() == ["e1/escalated"]
    rig.run(20)
    assert boss.got() == ["e1/escalated", "e2/escalated"]


def test_what_is_refused_is_escalated(tmp_path: Path) -> None:
    sender, boss = InlineSender("r", refused("no")), InlineSender("boss")
    rig = Rig(tmp_path, OnlyTo(), [sender, boss])
    rig.add(opened(1), event(2, "clock-skew", severity="warning"))
    rig.run(100)
    assert boss.got() == ["e1/escalated", "e2/escalated"]


def test_a_condition_that_two_processes_noticed_is_escalated_once_behind_a_dead_recipient(
    tmp_path: Path,
) -> None:
    sender, boss = InlineSender("r", retry("away")), InlineSender("boss")
    rig = Rig(tmp_path, OnlyTo(), [sender, boss], most_notices=1)
    rig.add(opened(1))
    rig.run(5)
    rig.add(opened(2))
    rig.run(200)
    assert boss.got() == ["e1/escalated"]


@pytest.mark.parametrize("end", [ended(2), acknowledged(2, "e1")])
def test_a_kill_brings_no_reminder_back_of_what_has_ended(tmp_path: Path, end: Event) -> None:
    sender, boss = InlineSender("r"), InlineSender("boss")
    rig = Rig(tmp_path, OnlyTo(), [sender, boss])
    rig.add(opened(1))
    rig.run(5)
    rig.add(end)
    rig.run(5)
    rig.restart()  # what was deleted from the queue of later events may be back
    rig.run(200)
    assert (sender.got(), boss.got(), len(rig.later)) == (["e1", "e2"], [], 0)
