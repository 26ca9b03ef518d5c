"""Intake: from reserves into queues, once each, in order, and nothing released too early."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from pmdaemon.diskqueue.errors import QueueFull
from pmdaemon.reserve.layout import COUNT, DELIVERED, LAST_US
from pmdaemon.reserve.moment import Moments
from pmdaemon.reserve.raising import INITIAL_SLOTS, KEPT_SHARE, SLOTS, EventRaiser
from pmdaemon.reserve.reader import ReserveReader, TakenRecord
from pmdaemon.reserve.writer import RecordOutcome
from pmdaemon.runtime.clock import FakeClock
from sla_server.events.delivery import STUCK_NS
from sla_server.events.first_reading import MOST_IDS
from sla_server.events.intake import LISTING_NS, EventIntake
from sla_server.events.queue import EventQueue, QueuedEvent
from tests.support.deliveries import QUEUE_BYTES, event
from tests.support.faulty_disk import Crashed, FaultDisk


class SetBackClock(FakeClock):
    """Set back by a second whenever it is read."""

    def unix_us(self) -> int:
        self.step_wall(-1)
        return super().unix_us()


class Rigged:
    """Reserves in a folder, queues on a FaultDisk."""

    def __init__(
        self, folder: Path, data_bytes: int = QUEUE_BYTES, clock: type[FakeClock] = FakeClock
    ) -> None:
        self.folder = folder
        self.clock = clock()
        self.disk = FaultDisk()
        self.data_bytes = data_bytes
        self.point = ""
        self.most_ids = MOST_IDS
        self.open()

    def open(self) -> None:
        self.initial, self.normal = (
            EventQueue(
                self.folder / "q",
                name,
                self.data_bytes,
                (self.disk.open(name), self.disk.open(name + ".index")),
                self.clock,
            )
            for name in ("initial", "normal")
        )
        self.intake = EventIntake(
            self.folder, self.initial, self.normal, self.clock, probe=self.probe, most_ids=self.most_ids
        )

    def probe(self, point: str) -> None:
        if point == self.point:
            raise KeyboardInterrupt

    def step(self) -> int:
        self.clock.advance(LISTING_NS / 1e9 + 0.1)
        return self.intake.step()

    def queued(self, queue: EventQueue) -> list[QueuedEvent]:
        found, after = list[QueuedEvent](), 0
        while after < queue.newest_seq:
            items, after = queue.read(after)
            found += items
        return found

    def ids(self, queue: EventQueue) -> list[str]:
        return [item.event.event_id for item in self.queued(queue)]


@pytest.fixture
def rig(tmp_path: Path) -> Rigged:
    return Rigged(tmp_path)


def test_events_of_both_periods_come_into_their_queues_with_source_and_time(rig: Rigged) -> None:
    raiser = EventRaiser(rig.folder, "services")
    raiser.record(event(1).row())
    raiser.initialized()
    raiser.record(event(2).row())
    assert rig.step() == 2
    assert (rig.ids(rig.initial), rig.ids(rig.normal)) == (["e1"], ["e2"])
    (found,) = rig.queued(rig.initial)  # the other one comes behind it
    assert (found.event.source, found.event.recorded_us) == ("services", rig.clock.unix_us())
    assert rig.step() == 0  # released
    raiser.close()


def test_what_a_crash_repeats_of_the_initialization_period_is_known_behind_any_backlog(rig: Rigged) -> None:
    rig.most_ids = 8
    rig.normal.append([QueuedEvent(event(number)) for number in range(100, 120)])
    raiser = EventRaiser(rig.folder, "services")
    raiser.record(event(1).row())
    rig.point = "queued"
    with pytest.raises(KeyboardInterrupt):
        rig.step()
    rig.point, rig.disk = "", rig.disk.after_kill()
    rig.open()
    assert (rig.step(), rig.intake.repeated) == (0, 1)
    assert rig.ids(rig.initial) == ["e1"]
    raiser.close()


def test_an_event_of_two_processes_with_one_identity_is_one(rig: Rigged) -> None:
    first, second = EventRaiser(rig.folder, "services"), EventRaiser(rig.folder, "dbmanager")
    for raiser in (first, second):
        raiser.initialized()
        raiser.record(event(1).row())
    rig.step()
    assert (rig.ids(rig.normal), rig.intake.repeated) == (["e1"], 1)


def test_a_pass_takes_the_reserves_of_all_processes_in_the_order_of_time(rig: Rigged) -> None:
    services, pair = EventRaiser(rig.folder, "services"), EventRaiser(rig.folder, "pair-0")
    for raiser in (services, pair):
        raiser.initialized()
    services.record(event(1, kind="gateway-lost").row())
    pair.record(event(2, kind="gateway-up").row())
    services.record(event(3, kind="gateway-lost").row())
    assert rig.step() == 3
    assert rig.ids(rig.normal) == ["e1", "e2", "e3"]


@pytest.mark.parametrize("clock", [FakeClock, SetBackClock])
def test_an_end_of_the_initialization_period_is_accepted_behind_a_beginning_that_nobody_has_taken_yet(
    tmp_path: Path, clock: type[FakeClock]
) -> None:
    """A process and delivery died at once: the beginning is in the other reserve."""
    rig = Rigged(tmp_path, clock=clock)
    former = EventRaiser(rig.folder, "services")
    former.initialized()
    former.record(event(1, "storage-fault").row())
    former.close()
    raiser = EventRaiser(rig.folder, "services")
    raiser.record(event(2, "storage-recovered").row())
    raiser.record(event(3, "storage-fault", "other").row())
    raiser.initialized()
    raiser.record(event(4, "storage-recovered", "other").row())
    raiser.close()
    assert rig.step() == 4
    accepted_us = {each.event.event_id: each.event.recorded_us for each in rig.queued(rig.initial)}
    assert list(accepted_us) == ["e2", "e3"]
    accepted_us |= {each.event.event_id: each.event.recorded_us for each in rig.queued(rig.normal)}
    assert accepted_us["e1"] < accepted_us["e2"]
    assert accepted_us["e3"] < accepted_us["e4"]


def test_the_clock_is_set_back_between_two_reserves_and_the_end_stays_behind_its_beginning(
    rig: Rigged,
) -> None:
    """Delivery is away meanwhile: one pass finds both."""
    services, pair = EventRaiser(rig.folder, "services"), EventRaiser(rig.folder, "pair-0")
    for raiser in (services, pair):
        raiser.initialized()
    services.record(event(90_000_000, "gateway-lost").row())
    pair.record(event(1, "gateway-up").row())
    services.record(event(2, "gateway-lost").row())
    assert rig.step() == 3
    found = rig.queued(rig.normal)
    assert [item.event.event_id for item in found] == ["e90000000", "e1", "e2"]
    times_us = [item.event.recorded_us for item in found]
    assert times_us == sorted(set(times_us))


def test_the_clock_is_set_back_before_a_restart_and_the_end_stays_behind_its_beginning(rig: Rigged) -> None:
    former = EventRaiser(rig.folder, "services")
    former.initialized()
    former.record(event(90_000_000, "storage-fault").row())
    former.close()
    raiser = EventRaiser(rig.folder, "services")
    raiser.record(event(1, "storage-recovered").row())
    raiser.close()
    assert rig.step() == 2
    (begun,), (ended,) = rig.queued(rig.normal), rig.queued(rig.initial)
    assert begun.event.recorded_us < ended.event.recorded_us


def test_what_a_former_boot_has_raised_comes_first_though_its_clock_was_ahead(rig: Rigged) -> None:
    former = EventRaiser(rig.folder, "services", Moments(lambda: "former-boot", lambda: 10**18))
    former.initialized()
    former.record(event(90_000_000, "gateway-lost").row())
    former.close()
    pair = EventRaiser(rig.folder, "pair-0")
    pair.initialized()
    pair.record(event(1, "gateway-up").row())
    rig.step()
    assert rig.ids(rig.normal) == ["e90000000", "e1"]


def test_records_of_a_former_release_are_merged_by_time(rig: Rigged) -> None:
    unknown = Moments(lambda: "")
    services = EventRaiser(rig.folder, "services", unknown)
    pair = EventRaiser(rig.folder, "pair-0", unknown)
    for raiser in (services, pair):
        raiser.initialized()
    pair.record(event(2, "gateway-up").row())
    services.record(event(1, "gateway-lost").row())
    rig.step()
    assert rig.ids(rig.normal) == ["e1", "e2"]


def half_full(rig: Rigged, name: str) -> EventRaiser:
    """A process whose reserve folds what is equal."""
    raiser = EventRaiser(rig.folder, name)
    raiser.initialized()
    for number in range(SLOTS // 2):
        raiser.record(event(1000 + number, subject=f"other-{number}").row())
    return raiser


def of_gateway(rig: Rigged) -> list[tuple[str, int]]:
    items = rig.queued(rig.normal)
    return [(item.event.kind, item.repeats) for item in items if item.event.subject == "gw"]


def test_a_condition_that_ended_and_began_again_is_not_over_because_its_beginnings_were_folded(
    rig: Rigged,
) -> None:
    services, pair = half_full(rig, "dbmanager"), EventRaiser(rig.folder, "pair-0")
    pair.initialized()
    now_us = rig.clock.unix_us()
    services.record(event(1, "gateway-lost", at_us=now_us).row())
    pair.record(event(2, "gateway-up", at_us=now_us + 1).row())
    far_us = now_us + 3_600_000_000  # behind the moments, which are of the test's own minutes
    assert services.record(event(3, "gateway-lost", at_us=far_us).row()) is RecordOutcome.FOLDED
    services.record(event(4, "gateway-lost", at_us=far_us).row())
    rig.point = "queued"
    with pytest.raises(KeyboardInterrupt):
        rig.step()
    rig.point, rig.disk = "", rig.disk.after_kill()
    rig.open()
    rig.step()
    assert of_gateway(rig) == [("gateway-lost", 1), ("gateway-up", 1), ("gateway-lost", 2)]
    assert rig.step() == 0
    assert rig.intake.repeated > 0


def test_what_was_folded_comes_before_the_end_that_followed_it_though_the_clock_was_set_back(
    rig: Rigged,
) -> None:
    raiser = half_full(rig, "dbmanager")
    far_us = rig.clock.unix_us() + 3_600_000_000
    raiser.record(event(1, "gateway-lost").row())
    assert raiser.record(event(2, "gateway-lost", at_us=far_us).row()) is RecordOutcome.FOLDED
    raiser.record(event(3, "gateway-up").row())
    rig.step()
    assert of_gateway(rig) == [("gateway-lost", 1), ("gateway-lost", 1), ("gateway-up", 1)]


def test_what_is_folded_after_it_was_taken_comes_before_the_end_that_followed_it(rig: Rigged) -> None:
    raiser = half_full(rig, "dbmanager")
    raiser.record(event(1, "gateway-lost").row())
    words, slot = raiser._normal._file.words, raiser._normal._file.slot(SLOTS // 2 + 1)
    rig.step()
    words[slot + COUNT] += 1  # stored by the writer after the reader had looked
    words[slot + LAST_US] = rig.clock.unix_us() + 3_600_000_000
    raiser.record(event(3, "gateway-up").row())
    rig.step()
    assert of_gateway(rig) == [("gateway-lost", 1), ("gateway-lost", 1), ("gateway-up", 1)]


@pytest.mark.parametrize("seed", range(12))
def test_a_power_cut_never_keeps_an_end_without_its_beginning(rig: Rigged, seed: int) -> None:
    """Whoever has raised them raises both again, and the beginning must not come behind."""
    both = [
        QueuedEvent(event(number, kind, text="x" * 700))
        for number, kind in ((1, "storage-fault"), (2, "storage-recovered"))
    ]
    rig.disk.crash_at = rig.disk.operations + 2  # the sync
    with pytest.raises(Crashed):
        rig.intake.accept(both)
    rig.disk = rig.disk.after_crash(random.Random(seed))
    rig.open()
    rig.intake.accept(both)
    assert rig.ids(rig.normal) == ["e1", "e2"]


def test_events_of_one_condition_in_one_pass_have_times_of_their_own(rig: Rigged) -> None:
    kinds = ("storage-fault", "storage-recovered", "storage-fault")
    assert rig.intake.accept([QueuedEvent(event(n, kind)) for n, kind in enumerate(kinds)]) == 3
    times_us = [item.event.recorded_us for item in rig.queued(rig.normal)]
    assert times_us == sorted(set(times_us))


def test_what_is_raised_during_a_pass_does_not_overtake_what_was_raised_before_it(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = EventRaiser(rig.folder, "a"), EventRaiser(rig.folder, "b")
    for raiser in (first, second):
        raiser.initialized()
    take = ReserveReader.take

    def taking(reader: ReserveReader, limit: int) -> list[TakenRecord]:
        found = take(reader, limit)
        if reader.name == "a.normal":  # its pass is over, that of b is not
            monkeypatch.undo()
            first.record(event(1, kind="gateway-lost").row())
            second.record(event(2, kind="gateway-up").row())
        return found

    monkeypatch.setattr(ReserveReader, "take", taking)
    rig.step()
    rig.step()
    assert rig.ids(rig.normal) == ["e1", "e2"]


def test_a_queue_with_little_room_takes_what_fits_and_the_order_stays(tmp_path: Path) -> None:
    rig = Rigged(tmp_path, 64 << 10)
    raisers = [EventRaiser(rig.folder, name) for name in ("b", "a")]
    for number in range(80):
        raiser = raisers[number % 2]
        raiser.initialized()
        raiser.record(event(number, text="x" * 1500, subject=str(number)).row())
    found = list[str]()
    for _ in range(40):
        rig.step()
        found += rig.ids(rig.normal)
        rig.normal.delete_through(rig.normal.newest_seq)
    assert found == [f"e{number}" for number in range(80)]


def test_a_death_between_sync_and_release_repeats_nothing(rig: Rigged) -> None:
    raiser = EventRaiser(rig.folder, "services")
    raiser.initialized()
    raiser.record(event(1).row())
    rig.point = "queued"
    with pytest.raises(KeyboardInterrupt):
        rig.step()
    rig.point, rig.disk = "", rig.disk.after_kill()
    rig.open()
    raiser.record(event(2).row())
    rig.step()
    assert (rig.ids(rig.normal), rig.intake.repeated) == (["e1", "e2"], 1)


def test_the_reserve_of_a_process_that_died_is_taken(rig: Rigged) -> None:
    raiser = EventRaiser(rig.folder, "pair-0")
    raiser.record(event(1).row())
    raiser.close()
    rig.step()
    again = EventRaiser(rig.folder, "pair-0")
    again.record(event(2).row())
    rig.step()
    assert rig.ids(rig.initial) == ["e1", "e2"]


def test_a_flood_is_folded_and_then_counted_and_every_event_is_in_the_sum(rig: Rigged) -> None:
    raiser = EventRaiser(rig.folder, "dbmanager")
    raiser.initialized()
    for number in range(1000):
        raiser.record(event(number, subject=f"gw-{number % 300}", kind="clock-skew").row())
    rig.step()
    items = rig.queued(rig.normal)
    kinds = {item.event.kind for item in items}
    lost = [item.event for item in items if item.event.kind == "events-lost"]
    assert kinds == {"clock-skew", "event-reserve-filling", "events-lost"}
    assert len(items) == SLOTS - SLOTS // KEPT_SHARE + 1
    skews = sum(item.repeats for item in items if item.event.kind == "clock-skew")
    assert skews + lost[0].details["counts"]["clock-skew"] == 1000
    assert "sla get events" in lost[0].text
    assert (lost[0].severity, lost[0].subject) == ("critical", "dbmanager")


def test_what_is_folded_after_it_was_taken_comes_as_an_event_of_its_own(rig: Rigged) -> None:
    raiser = EventRaiser(rig.folder, "services")
    for number in range(INITIAL_SLOTS // 2 + 1):
        raiser.record(event(number, kind="clock-skew").row())
    reader_slot = raiser._initial._file.slot(INITIAL_SLOTS // 2)
    rig.step()
    raiser._initial._file.words[reader_slot + 1] += 4  # stored by the writer after the reader had looked
    rig.step()
    (more,) = [item for item in rig.queued(rig.initial) if item.repeats == 4]
    assert more.event.kind == "clock-skew"
    assert len(more.event.event_id) == 36


def test_with_the_queue_full_nothing_is_released(tmp_path: Path) -> None:
    rig = Rigged(tmp_path, 64 << 10)
    text = "x" * 1500
    fits = 0
    raiser = EventRaiser(rig.folder, "services")
    raiser.initialized()
    for number in range(100):
        raiser.record(event(number, text=text, subject=str(number)).row())
        rig.step()
        if rig.intake.accepted == fits:
            break
        fits += 1
    assert 20 < fits < 60
    raiser.record(event(200).row())
    rig.clock.advance(3600)
    assert rig.step() == 0
    assert rig.intake.silent_ns > STUCK_NS  # it looks at the reserves all the time, in vain
    rig.normal.delete_through(rig.normal.newest_seq)
    rig.step()
    assert rig.intake.silent_ns < STUCK_NS
    assert rig.ids(rig.normal) == [f"e{fits}", "e200"]  # order kept, nothing lost


def test_what_was_folded_waits_in_the_reserve_while_the_queue_is_full(tmp_path: Path) -> None:
    rig = Rigged(tmp_path, 64 << 10)
    raiser = EventRaiser(rig.folder, "services")
    for number in range(INITIAL_SLOTS // 2 + 1):
        raiser.record(event(number, kind="clock-skew").row())
    slot = raiser._initial._file.slot(INITIAL_SLOTS // 2)
    rig.step()
    raiser._initial._file.words[slot + COUNT] += 4  # stored by the writer after the reader had looked
    filled = 0
    with contextlib.suppress(QueueFull):
        while True:
            rig.initial.append([QueuedEvent(event(1000 + filled, text="x" * 200))])
            filled += 1
    assert (filled > 0, rig.step()) == (True, 0)
    rig.initial.delete_through(rig.initial.newest_seq)
    assert (rig.step(), rig.step()) == (1, 0)
    assert [item.repeats for item in rig.queued(rig.initial)] == [4]
    assert raiser._initial._file.words[slot + DELIVERED] == 6


def test_a_death_before_the_sync_does_not_lose_what_was_folded(rig: Rigged) -> None:
    raiser = EventRaiser(rig.folder, "services")
    for number in range(INITIAL_SLOTS // 2 + 1):
        raiser.record(event(number, kind="clock-skew").row())
    rig.step()
    words, slot = raiser._initial._file.words, raiser._initial._file.slot(INITIAL_SLOTS // 2)
    words[slot + COUNT] += 4
    rig.point = "queued"
    with pytest.raises(KeyboardInterrupt):
        rig.step()
    assert (
        words[slot + COUNT] - words[slot + DELIVERED] == 4
    )  # the writer counts these when it needs the slot


def test_what_is_no_event_is_dropped_and_counted(rig: Rigged) -> None:
    raiser = EventRaiser(rig.folder, "services")
    raiser.record({**event(1).row(), "severity": "fatal"})
    raiser.record(event(2).row())
    rig.step()
    assert (rig.ids(rig.initial), rig.intake.unreadable) == (["e2"], 1)


def test_a_reserve_that_was_made_again_is_read_from_its_beginning(rig: Rigged) -> None:
    raiser = EventRaiser(rig.folder, "services")
    raiser.record(event(1).row())
    rig.step()
    raiser.close()
    for path in rig.folder.glob("*.reserve"):
        path.write_bytes(b"\0" * path.stat().st_size)
    raiser = EventRaiser(rig.folder, "services")
    raiser.record(event(2).row())
    rig.step()
    assert rig.ids(rig.initial) == ["e1", "e2"]


def test_the_fill_of_each_reserve_is_a_figure(rig: Rigged) -> None:
    raiser = EventRaiser(rig.folder, "dbmanager")
    raiser.initialized()
    for number in range(SLOTS // 2):
        raiser.record(event(number, subject=str(number)).row())
    rig.step()
    assert rig.intake.fills == {"dbmanager.initial": 0.0, "dbmanager.normal": 0.5}
