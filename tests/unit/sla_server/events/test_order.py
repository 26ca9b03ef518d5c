"""The end of a condition never comes before its beginning, whatever way each of them took."""

from __future__ import annotations

from pathlib import Path

import pytest

from sla_server.events import order
from sla_server.events.event import Event
from sla_server.events.order import FORGOTTEN, RoutedConditions
from sla_server.events.recipients.base import CONFIRMED, Held, retry
from tests.support.deliveries import InlineSender, Rig, ToAll, event


def opened(number: int) -> Event:
    return event(number, "storage-fault", severity="critical")


def ended(number: int) -> Event:
    return event(number, "storage-recovered")


def in_order(sender: InlineSender) -> list[str]:
    return list(dict.fromkeys(sender.got()))


@pytest.mark.parametrize("restarts", [False, True])
def test_what_was_held_back_is_not_overtaken_by_its_end_in_the_queue(tmp_path: Path, restarts: bool) -> None:
    sender, router = InlineSender("r"), ToAll("r")
    rig = Rig(tmp_path, router, [sender], most_notices=1)
    until_us = rig.clock.unix_us() + 30_000_000
    router.holds = lambda found, _r, now_us: (
        Held("quiet", until_us) if found.event_id == "e1" and now_us < until_us else None
    )
    rig.add(opened(1))
    rig.run(5)
    sender.answer = retry("away")
    rig.add(event(2))
    rig.run(5)
    rig.add(ended(3), opened(4))
    rig.run(40)  # the silence ends while the recipient is away
    sender.answer = CONFIRMED
    if restarts:
        rig.restart()
    rig.run(60)
    assert in_order(sender) == ["e2", "e1", "e3", "e4"]
    assert (len(rig.later), rig.main.read(0)[0]) == (0, [])


def test_the_initialization_period_does_not_overtake_what_began_before(tmp_path: Path) -> None:
    sender = InlineSender("r", retry("away"))
    rig = Rig(tmp_path, ToAll("r"), [sender], most_notices=1)
    rig.add(event(1))
    rig.run(1)
    rig.add(opened(2), event(3))
    rig.run(1)
    rig.restart()
    sender.batches.clear()
    rig.add(event(4), ended(5), event(6), queue="initial")
    rig.run(1)
    rig.add(opened(7))  # new, and after it
    sender.answer = CONFIRMED
    rig.run(60)
    assert in_order(sender) == ["e1", "e4", "e2", "e5", "e6", "e3", "e7"]  # e1 was handed over before


def test_a_recipient_that_has_what_began_before_gets_the_initialization_period_first(tmp_path: Path) -> None:
    near, far = InlineSender("near"), InlineSender("far", retry("away"))
    rig = Rig(tmp_path, ToAll("near", "far"), [near, far])
    rig.add(opened(1))
    rig.run(1)
    rig.add(event(2))
    rig.add(ended(3), queue="initial")
    rig.run(1)
    assert near.got() == ["e1", "e3", "e2"]
    far.answer = CONFIRMED
    rig.run(10)
    assert in_order(far) == ["e1", "e3", "e2"]


def test_other_documents_release_no_end_whose_beginning_is_still_held(tmp_path: Path) -> None:
    sender, router = InlineSender("r"), ToAll("r")
    rig = Rig(tmp_path, router, [sender])
    until_us = rig.clock.unix_us() + 3600_000_000
    router.holds = lambda found, _r, now_us: (
        Held("quiet", until_us) if found.event_id == "e1" and now_us < until_us else None
    )
    rig.add(opened(1), ended(2))
    rig.run(5)
    rig.engine.set_router(router)
    rig.run(5)
    assert (sender.got(), len(rig.later)) == ([], 2)
    rig.engine.set_router(ToAll("r"))  # the silence has ended
    rig.run(5)
    assert (sender.got(), len(rig.later)) == (["e1", "e2"], 0)


def test_what_two_changes_of_documents_release_comes_once(tmp_path: Path) -> None:
    sender, router = InlineSender("r"), ToAll("r")
    rig = Rig(tmp_path, router, [sender])
    until_us = rig.clock.unix_us() + 3600_000_000
    router.holds = lambda _found, _r, _now: Held("quiet", until_us)
    rig.add(event(1), event(2))
    rig.run()
    rig.engine.set_router(ToAll("r"))
    rig.engine.set_router(ToAll("r"))
    rig.run(5)
    assert (sender.got(), len(rig.later)) == (["e1", "e2"], 0)


@pytest.mark.parametrize("restarts", [False, True])
def test_what_is_made_again_does_not_take_newer_events_past_the_initialization_period(
    tmp_path: Path, restarts: bool
) -> None:
    sender, router = InlineSender("r", retry("away")), ToAll("r")
    rig = Rig(tmp_path, router, [sender])
    rig.add(event(1))
    rig.run(1)
    rig.clock.advance(1.0)
    rig.add(opened(2), queue="initial")
    rig.clock.advance(1.0)
    rig.add(ended(3))
    if restarts:
        rig.restart()
    rig.engine.set_router(router)  # as after ``sla apply``
    rig.run(5)
    sender.answer = CONFIRMED
    rig.run(60)
    assert in_order(sender) == ["e1", "e2", "e3"]


def silenced(tmp_path: Path) -> tuple[Rig, InlineSender, ToAll, list[int]]:
    """A beginning that has been held back for 5 s; the last of the silences, until when (us), counts."""
    sender, router = InlineSender("r"), ToAll("r")
    rig = Rig(tmp_path, router, [sender])
    silences = [rig.clock.unix_us() + 10_000_000]
    router.holds = lambda _found, _r, now_us: Held("quiet", max(silences)) if now_us < max(silences) else None
    rig.add(opened(1))
    rig.run(5)
    return rig, sender, router, silences


def test_a_longer_silence_does_not_turn_beginning_and_end_round(tmp_path: Path) -> None:
    rig, sender, router, silences = silenced(tmp_path)
    silences.append(rig.clock.unix_us() + 20_000_000)
    rig.engine.set_router(router)
    rig.add(ended(2))
    rig.run(60)
    assert sender.got() == ["e1", "e2"]


def test_a_silence_that_ends_early_after_it_was_made_longer_keeps_the_order(tmp_path: Path) -> None:
    rig, sender, router, silences = silenced(tmp_path)
    silences.append(rig.clock.unix_us() + 3600_000_000)
    rig.engine.set_router(router)
    rig.add(ended(2))
    rig.run(20)
    rig.engine.set_router(ToAll("r"))
    rig.run(5)
    assert sender.got() == ["e1", "e2"]


def test_a_condition_that_begins_again_waits_for_the_end_that_was_held_back(tmp_path: Path) -> None:
    sender, router = InlineSender("r"), ToAll("r")
    rig = Rig(tmp_path, router, [sender], most_notices=1)
    rig.add(opened(1))
    rig.run(1)
    until_us = rig.clock.unix_us() + 10_000_000
    router.holds = lambda found, _r, now_us: (
        Held("quiet", until_us) if found.event_id == "e2" and now_us < until_us else None
    )
    rig.add(ended(2))
    rig.run(1)
    sender.answer = retry("away")
    rig.add(event(3))
    rig.run(2)
    rig.add(opened(4))
    rig.run(20)  # the silence ends while the recipient is away
    sender.answer = CONFIRMED
    rig.run(60)
    assert in_order(sender) == ["e1", "e3", "e2", "e4"]


def test_a_shorter_silence_does_not_turn_beginning_and_end_round(tmp_path: Path) -> None:
    sender, router = InlineSender("r"), ToAll("r")
    rig = Rig(tmp_path, router, [sender])
    silence = {"until_us": rig.clock.unix_us() + 30_000_000}
    router.holds = lambda _found, _r, now_us: (
        Held("quiet", silence["until_us"]) if now_us < silence["until_us"] else None
    )
    rig.add(opened(1))
    rig.run(5)
    silence["until_us"] = rig.clock.unix_us() + 5_000_000
    rig.engine.set_router(router)
    rig.add(ended(2))
    rig.run(60)
    assert sender.got() == ["e1", "e2"]


def test_events_that_are_forgotten_give_their_memory_back() -> None:
    known = RoutedConditions()
    keys = [("gateway", f"gw-{number % 7}") for number in range(3 * FORGOTTEN)]
    for number, key in enumerate(keys):
        known.add(2 * number + 1, key, 1000 + number)
    last = 2 * len(keys) - 1
    assert known.newest(keys[-1], 0, 10**9) == last
    assert known.newest(keys[-1], last, 10**9) == 0
    assert known.newest(keys[3], 0, 1003) == 0  # it has to be older
    assert known.newest(keys[3], 0, 1004) == 7
    assert known.newest(("gateway", "gw-9"), 0, 10**9) == 0
    for through in range(0, last, 1000):
        known.forget_through(through)
        assert len(known) == len(keys) - (through + 1) // 2
        assert known.newest(keys[-1], 0, 10**9) == last
    known.forget_through(last)
    assert len(known) == 0
    assert sum(map(len, known._columns)) < 3 * 2 * FORGOTTEN  # what is not shown: memory


def test_what_was_not_there_is_found_when_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "MOST_ABSENT", 3)
    known, key = RoutedConditions(), ("gateway", "gw-1")
    known.add(1, ("gateway", "gw-0"), 1000)
    for number in range(9):
        assert known.newest(("gateway", f"no-{number}"), 0, 10**9) == 0
        assert len(known._absent) <= 3
    for _ in range(2):
        assert known.newest(key, 0, 10**9) == 0
    known.add(2, key, 1001)
    assert known.newest(key, 2, 10**9) == 0  # it is behind the lane, and there all the same
    assert known.newest(key, 0, 10**9) == 2
    assert known.newest(key, 0, 1001) == 0
    assert known.newest(key, 0, 2**70) == 2
