"""What was held back and has moved into the queue of events does so once, wherever the process dies."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from pmdaemon.runtime.clock import FakeClock
from sla_server.events.event import Event
from sla_server.events.first_reading import FirstReading
from sla_server.events.intake import EventIntake
from sla_server.events.later import LaterQueue, moved
from sla_server.events.queue import QueuedEvent
from sla_server.events.recipients.base import Held
from tests.support.deliveries import InlineSender, Rig, ToAll, event
from tests.support.faulty_disk import Crashed, FaultDisk

HELD_S = 5
BEGIN, END, OTHER = "e1", "e2", "e3"


def begin() -> Event:
    return event(1, "storage-fault", severity="critical")


def end() -> Event:
    return event(2, "storage-recovered")


class Story:
    """A beginning is held back and moves; its end comes after it; then the server starts twice more."""

    def __init__(self, folder: Path, crash_at: int, *, is_power_cut: bool) -> None:
        folder.mkdir()
        self.sender, self.router, self.clock = InlineSender("r"), ToAll("r"), FakeClock()
        until_us = self.clock.unix_us() + HELD_S * 1_000_000
        self.router.holds = lambda found, _name, now_us: (
            Held("quiet", until_us) if found.event_id == BEGIN and now_us < until_us else None
        )
        self.rig = Rig(folder, self.router, [self.sender], clock=self.clock)
        self.rig.disk.crash_at = crash_at and self.rig.disk.operations + crash_at
        self.chance = random.Random(crash_at) if is_power_cut else None
        self.died = 0

    def tell(self) -> None:
        self.live(begin())
        self.live(None, HELD_S + 1)
        self.live(event(3))
        self.live(end())
        for _ in range(2):
            self.start_again()
            self.live(None, HELD_S)

    def live(self, added: Event | None, seconds: float = 0.0) -> None:
        for _ in range(2):
            try:
                if added is not None and not self.is_accepted(added):
                    self.rig.add(added)
                added = None
                self.rig.run(seconds)
                return
            except Crashed:
                self.died += 1
                self.rig.disk.crash_at = 0
                self.start_again()

    def is_accepted(self, added: Event) -> bool:
        """A death before the answer, not before the sync: intake, which knows identities, drops it."""
        return added.event_id in {item.event.event_id for item in self.rig.main.read(0)[0]}

    def start_again(self) -> None:
        if self.chance is not None:
            self.rig.disk = self.rig.disk.after_crash(self.chance)
        self.rig.restart()


@pytest.mark.parametrize("is_power_cut", [False, True])
def test_a_death_at_each_store_puts_no_beginning_after_its_end(tmp_path: Path, is_power_cut: bool) -> None:
    deaths = 0
    for crash_at in range(0, 400):
        story = Story(tmp_path / str(crash_at), crash_at, is_power_cut=is_power_cut)
        story.tell()
        got = story.sender.got()
        assert set(got) == {BEGIN, END, OTHER}, (crash_at, got)
        last_begin = len(got) - 1 - got[::-1].index(BEGIN)
        assert last_begin < got.index(END), (crash_at, got)
        numbers = {(notice.delivery_id, notice.number) for batch in story.sender.batches for notice in batch}
        assert len(numbers) == 3, (crash_at, numbers)  # what comes again has the number that it had
        assert len(story.rig.later) == 0
        if crash_at and not story.died:
            break
        deaths += story.died
    assert deaths > 10


def both(rig: Rig) -> tuple[QueuedEvent, QueuedEvent]:
    """The two events of a condition, held back until now."""
    items = [QueuedEvent(each, recipient="r", due_us=1, purpose="held") for each in (begin(), end())]
    rig.later.add(items)
    first, second = rig.later.held_for("r")
    return first, second


def test_a_move_of_which_a_power_cut_left_the_end_alone_is_repeated_whole(tmp_path: Path) -> None:
    sender = InlineSender("r")
    rig = Rig(tmp_path, ToAll("r"), [sender])
    first, second = both(rig)
    assert first.event.event_id == BEGIN
    rig.main.append([moved(second)])
    rig.restart()
    rig.run()
    assert sender.got() == [BEGIN, END]
    rig.restart()
    rig.run()
    assert sender.got() == [BEGIN, END]


def test_what_was_moved_and_is_held_back_again_waits_on_after_a_restart(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ToAll("r"), [InlineSender("r")])
    rig.later.add([QueuedEvent(event(3), recipient="other", due_us=20, purpose="held")])
    first, second = both(rig)
    rig.main.append([moved(first), moved(second)])
    again = rig.main.read(0)[0]
    rig.later.remove([first, second])
    rig.later.add([QueuedEvent(item.event, later_seq=item.later_seq, recipient="r", due_us=9, purpose="held")
                   for item in again])  # fmt: skip
    rig.disk = rig.disk.after_kill()
    later = LaterQueue(rig.queue("later"))
    assert len(later) == 3  # what was deleted is on the disk again, and what was written last counts
    main = rig.queue("main")
    assert later.repeat_moves(main, FirstReading(main, later).moves) == []
    assert [item.due_us for item in later.held_for("r")] == [9, 9]


def test_what_was_accepted_together_and_is_held_back_again_keeps_its_order(tmp_path: Path) -> None:
    """The end first: its beginning had moved behind it when the next silence began."""
    sender = InlineSender("r")
    rig = Rig(tmp_path, ToAll("r"), [sender])
    for each in (end(), begin()):
        rig.later.add([QueuedEvent(each, recipient="r", due_us=1, purpose="held")])
    rig.run()
    assert sender.got() == [BEGIN, END]


def test_what_was_accepted_together_keeps_its_order_where_the_clock_was_set_back(tmp_path: Path) -> None:
    sender = InlineSender("r")
    rig = Rig(tmp_path, ToAll("r"), [sender])
    late = replace(begin(), at_us=end().at_us + 1)
    rig.main.append([QueuedEvent(late), QueuedEvent(end())], late.at_us)
    rig.main.show()
    accepted, _last = rig.main.read(0)
    assert len(accepted) == 2
    for item in reversed(accepted):
        rig.later.add([QueuedEvent(item.event, recipient="r", due_us=1, purpose="held")])
    assert [item.event.event_id for item in rig.later.due(2, most=9)] == [BEGIN, END]


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("is_initial", [False, True])
def test_an_end_that_was_accepted_after_the_clock_was_set_back_comes_behind_its_beginning(
    tmp_path: Path, is_initial: bool, is_restarted: bool
) -> None:
    """Both are held back until the silence ends; the beginning is in the queue of later events alone."""
    sender, router, clock = InlineSender("r"), ToAll("r"), FakeClock()
    until_us = clock.unix_us() + 60_000_000
    router.holds = lambda _event, _name, now_us: Held("quiet", until_us) if now_us < until_us else None
    rig = Rig(tmp_path, router, [sender], clock=clock)
    for number, each in enumerate((begin(), end())):
        intake = EventIntake(tmp_path, rig.initial, rig.main, clock, later=rig.later.queue)
        each = replace(each, at_us=clock.unix_us())
        assert intake.accept([QueuedEvent(each)], is_initial=is_initial and number == 1) == 1
        rig.run()
        if number == 0:
            clock.step_wall(-30)
            if is_restarted:
                rig.restart()
    assert len(rig.later) == 2
    rig.run(100)
    assert sender.got() == [BEGIN, END]


def test_an_end_comes_behind_a_beginning_of_the_partner_that_was_taken_over_before_the_clock_was_set_back(
    tmp_path: Path,
) -> None:
    """What the partner held back enters the queue of later events alone, while the intake is there."""
    sender, clock = InlineSender("r"), FakeClock()
    rig = Rig(tmp_path, ToAll("r"), [sender], clock=clock)
    intake = EventIntake(tmp_path, rig.initial, rig.main, clock, later=rig.later.queue)
    until_us = clock.unix_us() + 5_000_000
    taken = replace(begin(), recorded_us=clock.unix_us())
    rig.later.take_over(QueuedEvent(taken, recipient="r", due_us=until_us, purpose="held", origin="theirs"))
    clock.step_wall(-30)
    assert intake.accept([QueuedEvent(end())]) == 1
    rig.run(40)
    assert sender.got() == [BEGIN, END]


@pytest.mark.parametrize(("of_begin_us", "of_end_us"), [(1, 2), (7, 0)])
def test_of_one_condition_what_the_partner_has_accepted_first_comes_first(
    tmp_path: Path, of_begin_us: int, of_end_us: int
) -> None:
    """Its beginning is taken over again behind its end; an event of this server stays behind all."""
    sender = InlineSender("r")
    rig = Rig(tmp_path, ToAll("r"), [sender])
    begun, ended = (
        QueuedEvent(each, recipient="r", due_us=1, purpose="held", origin="theirs", origin_us=origin_us)
        for each, origin_us in ((begin(), of_begin_us), (end(), of_end_us))
    )
    for place, item in enumerate((ended, begun) if of_end_us else (begun, ended)):
        timed = replace(item.event, recorded_us=100 + 10 * place)
        rig.later.take_over(replace(item, event=timed, origin_seq=place))
    rig.run()
    assert sender.got() == [BEGIN, END]


def test_an_end_is_not_due_before_its_beginning_that_a_longer_silence_holds_back_again(
    tmp_path: Path,
) -> None:
    """The silence was made longer twice: the end waits from the first time, its beginning from the second."""
    sender = InlineSender("r")
    rig = Rig(tmp_path, ToAll("r"), [sender])
    now_us = rig.clock.unix_us()
    for each, due_s in ((end(), 2), (begin(), 3)):
        due_us = now_us + due_s * 1_000_000
        rig.later.add([QueuedEvent(each, recipient="r", due_us=due_us, purpose="held")])
    for _ in range(2):
        rig.clock.advance(1.25)  # the second time: only the end would be due
        rig.restart()
        rig.run()
        assert sender.got() == []
    rig.clock.advance(1)  # as after a time in which the server was down
    rig.run()
    assert sender.got() == [BEGIN, END]


def test_a_reminder_moves_once(tmp_path: Path) -> None:
    sender = InlineSender("r")
    rig = Rig(tmp_path, ToAll("r"), [sender], FaultDisk())
    rig.later.add([QueuedEvent(begin(), recipient="r", reminder=1, due_us=1, purpose="remind")])
    rig.run()
    rig.restart()
    rig.run()
    assert sender.got() == ["e1/1"]
