"""What a survivor delivers of one condition: its beginning before its end, in whichever queue each was."""

from __future__ import annotations

from pathlib import Path

import pytest

from sla_server.events.intake import EventIntake
from sla_server.events.pair_replay import TAKE, TAKE_BYTES
from sla_server.events.queue import QueuedEvent
from sla_server.events.recipients.base import Held
from tests.support.deliveries import event
from tests.support.partners import SILENCE_S, Partners


def test_an_end_of_the_initialization_period_comes_behind_its_beginning(tmp_path: Path) -> None:
    pair = Partners(tmp_path)
    pair.a.answers("r", None)
    pair.a.add(event(1, event_id="a1"))
    pair.a.add(event(2, "violation-opened", event_id="a2"), event(3, event_id="a3"))
    pair.run()
    pair.kill(pair.a)
    pair.a.restart()
    pair.a.rig.add(event(4, "violation-closed", event_id="a4"), queue="initial")
    pair.run()
    pair.kill(pair.a)
    pair.lose()
    assert pair.b.got["r"] == ["a1", "a2", "a3", "a4"]


@pytest.mark.parametrize("disk_is_lost", [False, True])
@pytest.mark.parametrize("silence_s", [20, 5])
def test_an_end_comes_behind_its_beginning_that_was_held_back(
    tmp_path: Path, silence_s: int, *, disk_is_lost: bool
) -> None:
    """The recipient takes nothing, so the end is in no lane's hands yet; the silence may be over by then."""
    pair = Partners(tmp_path)
    until_us = pair.clock.unix_us() + silence_s * 1_000_000
    for server in (pair.a, pair.b):
        server.rig.router.holds = lambda found, _recipient, now_us: (
            Held("quiet", until_us) if found.subject == "quiet" and now_us < until_us else None
        )
    pair.a.answers("r", None)
    pair.a.add(event(1, "violation-opened", "quiet", event_id="a1"))
    pair.run()
    assert len(pair.a.rig.later) == 1
    pair.a.add(event(2, event_id="a2"))
    pair.run()
    pair.a.add(event(3, "violation-closed", "quiet", event_id="a3"))
    pair.run()
    pair.kill(pair.a)
    if disk_is_lost:
        pair.a.restart(disk_is_lost=True)
    pair.lose()
    pair.run(20)
    assert [each for each in pair.b.got["r"] if each != "a2"] == ["a1", "a3"]


def test_many_queues_are_taken_over_as_they_were_recorded(tmp_path: Path) -> None:
    pair = Partners(tmp_path)
    pair.a.answers("r", None)
    expected = []
    for number in range(1, 41):
        name = "initial" if number % 3 == 0 else "main"
        pair.a.rig.add(event(number, event_id=f"a{number}"), queue=name)
        pair.clock.advance(0.001)
        expected.append(f"a{number}")
    pair.run()
    pair.kill(pair.a)
    pair.lose()
    assert pair.b.got["r"] == expected


def test_queues_that_take_turns_are_taken_over_under_few_syncs(tmp_path: Path) -> None:
    pair = Partners(tmp_path)
    pair.a.answers("r", None)
    count = 2 * TAKE + 88
    for number in range(1, count + 1):
        pair.a.rig.add(event(number, event_id=f"a{number}"), queue=("main", "initial")[number % 2])
        pair.clock.advance(0.001)
    pair.run()
    assert len(pair.b.store) == count
    pair.kill(pair.a)
    pair.clock.advance(SILENCE_S)
    before = pair.b.rig.disk.syncs
    while pair.b.rig.main.newest_seq < count:
        pair.b.core.step()
    assert pair.b.rig.disk.syncs - before == 3
    pair.run()
    assert pair.b.got["r"] == [f"a{number}" for number in range(1, count + 1)]


def test_a_run_of_large_events_is_bounded_by_its_bytes(tmp_path: Path) -> None:
    pair = Partners(tmp_path)
    pair.a.answers("r", None)
    for number in range(1, 31):
        pair.a.add(event(number, event_id=f"a{number}", details={"excerpt": "x" * 20_000}))
    pair.run()
    pair.kill(pair.a)
    pair.clock.advance(SILENCE_S)
    pair.b.core.step()
    assert pair.b.rig.main.newest_seq == TAKE_BYTES // 20_500
    pair.run(5)
    assert pair.b.got["r"] == [f"a{number}" for number in range(1, 31)]


def test_an_end_comes_behind_its_beginning_that_was_accepted_together_with_it_and_held_back(
    tmp_path: Path,
) -> None:
    """The recipient takes nothing, so the end is in the queue of events still; both were accepted at once."""
    pair = Partners(tmp_path)
    until_us = pair.clock.unix_us() + 40_000_000
    for server in (pair.a, pair.b):
        server.rig.router.holds = lambda found, _recipient, now_us: (
            Held("quiet", until_us) if found.subject == "quiet" and now_us < until_us else None
        )
    pair.a.answers("r", None)
    opened, closed = (event(n, f"violation-{state}", "quiet") for n, state in ((1, "opened"), (3, "closed")))
    pair.a.add(opened, event(2), closed)
    pair.run()
    assert len(pair.a.rig.later) == 1
    pair.kill(pair.a)
    pair.lose()
    pair.run(40)
    assert pair.b.got["r"] == ["e2", "e1", "e3"]


def test_an_end_comes_behind_its_beginning_though_the_clock_was_set_back_while_that_was_held(
    tmp_path: Path,
) -> None:
    """The beginning waits in the survivor's queue of what is due later; nothing else has its time."""
    pair = Partners(tmp_path)
    until_us = pair.clock.unix_us() + 40_000_000
    for server in (pair.a, pair.b):
        server.rig.router.holds = lambda _found, _recipient, now_us: (
            Held("quiet", until_us) if now_us < until_us else None
        )
    pair.a.add(event(1, "violation-opened", event_id="a1"))
    pair.run()
    pair.kill(pair.a)
    pair.lose()
    assert len(pair.b.rig.later) == 1
    pair.b.restart()
    pair.clock.step_wall(-20)
    pair.a.restart()
    pair.run()
    rig = pair.a.rig
    intake = EventIntake(rig.folder, rig.initial, rig.main, pair.clock, later=rig.later.queue)
    intake.accept([QueuedEvent(event(2, "violation-closed", event_id="a2"))])
    pair.run()
    pair.kill(pair.a)
    pair.lose()
    assert len(pair.b.rig.later) == 2
    pair.run(60)
    assert pair.b.got["r"] == ["a1", "a2"]


def test_a_survivor_that_is_killed_keeps_the_order_of_what_has_moved_and_what_was_held_back_on(
    tmp_path: Path,
) -> None:
    """The beginning was due, waits for its recipient, and is held back again; its end was held on."""
    pair = Partners(tmp_path, most_notices=1)
    now_us = pair.clock.unix_us()
    until_us = {"violation-opened": now_us + 20_000_000, "violation-closed": now_us + 40_000_000}
    for server in (pair.a, pair.b):
        server.rig.router.holds = lambda found, _recipient, now_us: (
            Held("quiet", until_us[found.kind]) if now_us < until_us.get(found.kind, 0) else None
        )
    opened, closed = (event(n, f"violation-{state}") for n, state in ((1, "opened"), (2, "closed")))
    pair.a.add(opened)
    pair.clock.advance(0.001)
    pair.a.add(closed)
    pair.run()
    pair.kill(pair.a)
    pair.lose()
    assert len(pair.b.rig.later) == 2
    pair.b.answers("r", None)
    pair.b.add(event(3))
    pair.run(10)
    assert len(pair.b.rig.later) == 1  # the other one has moved behind what the recipient does not answer
    until_us = dict.fromkeys(until_us, now_us + 60_000_000)
    pair.kill(pair.b)
    pair.b.answers("r")
    pair.b.restart()
    pair.run(60)
    assert [each for each in pair.b.got["r"] if each != "e3"] == ["e1", "e2"]
