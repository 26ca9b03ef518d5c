"""Reserves of events: what is recorded is taken, in order and with its counts, whatever dies in between."""

from __future__ import annotations

import errno
import json
import mmap
import random
from pathlib import Path

import pytest

from pmdaemon.reserve import layout, raising, writer
from pmdaemon.reserve.layout import (
    COUNT,
    DELIVERED,
    MOST_PAYLOAD,
    NUMBER,
    PAGE_BYTES,
    PAYLOAD_AT,
    WORD,
    MappedReserve,
    make_reserve,
)
from pmdaemon.reserve.reader import ReserveReader, TakenRecord
from pmdaemon.reserve.writer import RecordOutcome, ReserveWriter
from pmdaemon.runtime.clock import FakeClock


def row(number: int, kind: str = "gateway-lost", subject: str = "gw-1", **more: object) -> dict[str, object]:
    return {
        "event_id": f"id-{number}", "at_us": 1000 + number, "kind": kind, "severity": "critical",
        "element": "gateway", "subject": subject, "text": f"number {number}", "details": {}, **more,
    }  # fmt: skip


def record(
    reserve: ReserveWriter,
    number: int,
    kind: str = "a-kind",
    subject: str = "x",
    *,
    severity: str = "",
) -> RecordOutcome:
    payload = json.dumps(row(number, kind, subject)).encode()
    return reserve.record(
        payload, event_id=f"id-{number}", subject=subject, kind=kind, at_us=number, severity=severity
    )


def numbers(taken: list[TakenRecord]) -> list[int]:
    return [int(json.loads(each.payload)["event_id"][3:]) for each in taken]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events" / "services.normal.reserve"


def test_records_are_taken_in_order_and_once(path: Path) -> None:
    writer = ReserveWriter(path, 8)
    reader = ReserveReader(path)
    for number in range(5):
        assert record(writer, number, subject=str(number)) is RecordOutcome.KEPT
    taken = reader.take(3)
    assert numbers(taken) == [0, 1, 2]
    assert numbers(reader.take(10)) == [0, 1, 2, 3, 4]  # not released: they come again
    reader.release(taken)
    assert numbers(reader.take(10)) == [3, 4]
    assert (writer.waiting, reader.waiting) == (2, 2)


def test_every_byte_of_the_file_is_written_when_it_is_made(path: Path) -> None:
    ReserveWriter(path, 16).close()
    found = path.stat()
    assert found.st_size == 17 * PAGE_BYTES
    assert found.st_blocks * 512 >= found.st_size


def test_a_repeat_changes_nothing_while_its_record_waits(path: Path) -> None:
    writer, reader = ReserveWriter(path, 8), ReserveReader(path)
    assert [record(writer, 1), record(writer, 1)] == [RecordOutcome.KEPT, RecordOutcome.REPEATED]
    assert [each.events for each in reader.take(9)] == [1]


def test_from_half_full_on_equal_events_are_folded(path: Path) -> None:
    writer, reader = ReserveWriter(path, 8), ReserveReader(path)
    found = [record(writer, number) for number in range(10)]
    assert found == [RecordOutcome.KEPT] * 4 + [RecordOutcome.FOLDED] * 6
    taken = reader.take(9)
    assert [(each.events, each.last_us) for each in taken] == [(1, 0), (1, 1), (1, 2), (7, 9)]


def test_opened_and_closed_in_turn_are_never_folded(path: Path) -> None:
    writer, reader = ReserveWriter(path, 8), ReserveReader(path)
    kinds = ["opened", "closed"] * 4
    assert [record(writer, number, kind) for number, kind in enumerate(kinds)] == [RecordOutcome.KEPT] * 8
    assert [json.loads(each.payload)["kind"] for each in reader.take(9)] == kinds


def test_what_finds_no_slot_is_counted_by_kind(path: Path) -> None:
    writer, reader = ReserveWriter(path, 4), ReserveReader(path)
    for number in range(4):
        record(writer, number, subject=str(number))
    for number in range(4, 10):
        assert record(writer, number, f"kind-{number % 2}", str(number)) is RecordOutcome.COUNTED
    counts = reader.take_counts()
    assert [(each.kind, each.events, each.first_us, each.last_us) for each in counts] == [
        ("kind-0", 3, 4, 8),
        ("kind-1", 3, 5, 9),
    ]
    reader.release_counts(counts)
    assert reader.take_counts() == []
    record(writer, 11, "kind-1", "11")
    assert [(each.kind, each.events, each.first_us) for each in reader.take_counts()] == [("kind-1", 1, 11)]


def test_the_last_quarter_is_kept_for_critical_events_of_other_kinds(path: Path) -> None:
    writer, reader = ReserveWriter(path, 16, kept_slots=4), ReserveReader(path)
    found = [record(writer, n, "gateway-lost", str(n), severity="critical") for n in range(20)]
    assert found == [RecordOutcome.KEPT] * 12 + [RecordOutcome.COUNTED] * 8
    assert record(writer, 20, "gateway-up", "20") is RecordOutcome.COUNTED
    kept = [record(writer, n, "violation-opened", str(n), severity="critical") for n in range(21, 26)]
    assert kept == [RecordOutcome.KEPT] * 4 + [RecordOutcome.COUNTED]
    assert numbers(reader.take(99)) == [*range(12), *range(21, 25)]
    reader.release(reader.take(99))
    assert record(writer, 30, "gateway-up", "30") is RecordOutcome.KEPT


def test_more_kinds_than_counters_are_counted_together(path: Path) -> None:
    writer, reader = ReserveWriter(path, 1), ReserveReader(path)
    for number in range(100):
        record(writer, number, f"kind-{number}", str(number))
    counts = reader.take_counts()
    assert sum(each.events for each in counts) == 99
    assert counts[-1][:2] == ("others", 99 - 39)


def test_a_count_raised_while_its_record_is_taken_is_seen_by_the_next_pass(path: Path) -> None:
    writer, reader = ReserveWriter(path, 4), ReserveReader(path)
    for number in range(3):
        record(writer, number)
    taken = reader.take(9)
    record(writer, 7)  # folded into the last, between take and release
    reader.release(taken)
    more = reader.take_more()
    assert [(each.number, each.events) for each in more] == [(taken[-1].number, 1)]
    reader.release_more(more)
    assert reader.take_more() == []


def test_what_was_folded_comes_again_until_it_is_released(path: Path) -> None:
    writer, reader = ReserveWriter(path, 4), ReserveReader(path)
    for number in range(3):
        record(writer, number)
    taken = reader.take(9)
    record(writer, 7)
    reader.release(taken)
    assert [each.events for each in reader.take_more()] == [1]
    more = reader.take_more()
    assert [each.events for each in more] == [1]
    reader.release_more(more)
    words, at = reader._file.words, reader._file.slot(taken[-1].number)
    assert words[at + COUNT] == words[at + DELIVERED]


def test_a_count_that_no_pass_saw_is_counted_when_its_slot_is_used_again(path: Path) -> None:
    writer, reader = ReserveWriter(path, 4), ReserveReader(path)
    for number in range(2):
        record(writer, number)
    reader.release(reader.take(9))
    at = writer._file.slot(2)  # as if the writer was stopped between its check and its store
    writer._file.words[at + COUNT] += 5
    reader.close()
    reader = ReserveReader(path)  # another process delivers now
    for number in range(2, 6):
        record(writer, number, subject=str(number))
    assert [(each.kind, each.events) for each in reader.take_counts()] == [("a-kind", 5)]


def test_a_writer_that_died_in_a_slot_leaves_no_record_there(path: Path) -> None:
    writer, reader = ReserveWriter(path, 4), ReserveReader(path)
    record(writer, 0)
    at = writer._file.slot(2)
    writer._file.bytes[at * WORD + PAYLOAD_AT : at * WORD + PAYLOAD_AT + 3] = b"{{{"
    writer._file.words[at + NUMBER] = 0
    writer.close()
    writer = ReserveWriter(path, 4)
    record(writer, 1)
    assert numbers(reader.take(9)) == [0, 1]


def test_records_torn_by_a_power_cut_are_skipped_and_counted(path: Path) -> None:
    writer = ReserveWriter(path, 4)
    for number in range(3):
        record(writer, number, subject=str(number))
    writer._file.bytes[writer._file.slot(1) * WORD + PAYLOAD_AT] ^= 1
    reader = ReserveReader(path)
    assert (numbers(reader.take(9)), reader.damaged) == ([1, 2], 1)


def test_a_record_that_a_power_cut_has_taken_holds_up_none_behind_it(path: Path) -> None:
    """Pages reach the disk in any order: of 0 to 5 the third and the sixth did not."""
    writer = ReserveWriter(path, 8)
    for number in range(6):
        record(writer, number, subject=str(number))
    for lost in (3, 6):
        at = writer._file.slot(lost) * WORD
        writer._file.bytes[at : at + PAGE_BYTES] = bytes(PAGE_BYTES)
    writer.close()
    writer, reader = ReserveWriter(path, 8), ReserveReader(path)
    record(writer, 6, subject="6")  # in the place of the sixth
    assert reader.tail() == 6
    for _ in range(2):
        found = reader.take(9)
        assert numbers(found) == [0, 1, 3, 4, 6]
    reader.release(found[:2])
    assert numbers(reader.take(9)) == [3, 4, 6]
    reader.release(found)
    assert (reader.damaged, reader.waiting, writer.waiting) == (1, 0, 0)
    record(writer, 7, subject="7")
    assert numbers(reader.take(9)) == [7]


@pytest.mark.parametrize("bit", [9, 31, 32, 40, 63])
def test_a_number_that_a_bad_disk_has_changed_is_no_newer_record(path: Path, bit: int) -> None:
    writer = ReserveWriter(path, 8)
    for number in range(4):
        record(writer, number, subject=str(number))
    writer._file.words[writer._file.slot(2) + NUMBER] ^= 1 << bit
    writer.close()
    writer, reader = ReserveWriter(path, 8), ReserveReader(path)
    record(writer, 4, subject="4")
    assert numbers(reader.take(9)) == [0, 2, 3, 4]
    assert reader.damaged == 1


def test_a_number_that_a_bad_disk_has_changed_in_what_was_taken_holds_up_no_start(path: Path) -> None:
    writer, reader = ReserveWriter(path, 8), ReserveReader(path)
    for number in range(4):
        record(writer, number, subject=str(number))
    reader.release(reader.take(9))
    writer._file.words[writer._file.slot(2) + NUMBER] ^= 1 << 62
    writer.close()
    writer, reader = ReserveWriter(path, 8), ReserveReader(path)  # which looked for all numbers in between
    record(writer, 4, subject="4")
    assert (numbers(reader.take(9)), reader.damaged) == ([4], 0)


def test_a_first_page_that_is_older_than_the_slots_costs_repeats_alone(path: Path) -> None:
    writer, reader = ReserveWriter(path, 4), ReserveReader(path)
    first_page = bytes(writer._file.bytes[:PAGE_BYTES])
    for number in range(100):
        record(writer, number, subject=str(number))
        reader.release(reader.take(9))
    record(writer, 100, subject="100")
    writer._file.bytes[:PAGE_BYTES] = first_page
    again = ReserveReader(path)
    assert (numbers(again.take(9)), again.damaged) == ([97, 98, 99, 100], 0)


def test_what_was_folded_behind_a_reader_that_died_comes_from_the_next_one(path: Path) -> None:
    writer, reader = ReserveWriter(path, 4), ReserveReader(path)
    for number in range(3):
        record(writer, number)
    found = reader.take(9)
    assert [each.events for each in found] == [1, 2]
    record(writer, 3)  # folded after the look
    reader.release(found)
    reader.close()
    again = ReserveReader(path)
    more = again.take_more()
    assert [(each.number, each.events) for each in more] == [(2, 1)]
    again.release_more(more)
    assert again.take_more() == []
    assert ReserveReader(path).take_more() == []


def test_a_counter_that_a_torn_page_sets_back_counts_on(path: Path) -> None:
    writer = ReserveWriter(path, 4)
    writer.count("a-kind", 5, 1)
    reader = ReserveReader(path)
    reader.release_counts(reader.take_counts())
    writer._file.words[layout.COUNTERS_WORD + COUNT - 1] = 2
    assert reader.take_counts() == []
    again = ReserveReader(path)
    writer.count("a-kind", 3, 2)
    assert [(each.kind, each.events) for each in again.take_counts()] == [("a-kind", 3)]


class WatchedMap:
    """A mapping that says which ranges were synced, or fails to."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self.synced: list[tuple[int, int]] = []
        self.fails = False

    def flush(self, offset: int, size: int) -> None:
        if self.fails:
            raise OSError(errno.EIO, "Input/output error")
        self._mapped.flush(offset, size)
        self.synced.append((offset, size))

    def close(self) -> None:
        self._mapped.close()


@pytest.mark.parametrize("synced", [True, False])
def test_each_record_of_the_initialization_period_is_on_disk_when_it_is_recorded(
    path: Path, monkeypatch: pytest.MonkeyPatch, synced: bool
) -> None:
    writer = ReserveWriter(path, 4, synced=synced)
    watched = WatchedMap(writer._file._map)
    monkeypatch.setattr(writer._file, "_map", watched)  # there is no other way to see a sync of a mapping
    for number in (1, 2, 3):
        assert record(writer, number, subject=str(number)) is RecordOutcome.KEPT
        expected = [(PAGE_BYTES * (1 + made % 4), PAGE_BYTES) for made in range(1, number + 1)]
        assert watched.synced == (expected if synced else [])
    watched.fails = True
    if synced:
        with pytest.raises(OSError, match="Input/output"):
            record(writer, 4, subject="4")
    else:
        assert record(writer, 4, subject="4") is RecordOutcome.KEPT
    assert numbers(ReserveReader(path).take(9)) == [1, 2, 3, 4]
    writer.close()


def test_a_file_has_one_writer(path: Path) -> None:
    writer = ReserveWriter(path, 4)
    with pytest.raises(BlockingIOError):
        ReserveWriter(path, 4)
    writer.close()
    ReserveWriter(path, 4).close()


def test_a_damaged_file_is_made_again_and_the_reader_notices(path: Path) -> None:
    ReserveWriter(path, 4).close()
    reader = ReserveReader(path)
    path.write_bytes(b"x" * 5 * PAGE_BYTES)
    ReserveWriter(path, 4).close()
    assert not reader.is_current()
    assert ReserveReader(path).take(9) == []


def test_random_histories_lose_and_repeat_nothing(path: Path) -> None:
    chance = random.Random(5)
    writer, reader = ReserveWriter(path, 8), ReserveReader(path)
    taken, raised = 0, 0
    for _ in range(3000):
        match chance.randrange(6):
            case 0 | 1 | 2:
                raised += 1
                record(writer, raised, chance.choice("ab"), chance.choice("xyz"))
            case 3:
                some = reader.take(chance.randrange(4))
                if chance.random() < 0.3:
                    raised += 1
                    record(writer, raised, "a", "x")
                reader.release(some)
                taken += sum(each.events for each in some)
            case 4:
                more = reader.take_more()
                taken += sum(each.events for each in more)
                reader.release_more(more)
                counts = reader.take_counts()
                taken += sum(each.events for each in counts)
                reader.release_counts(counts)
            case 5 if chance.random() < 0.2:
                writer.close()
                writer = ReserveWriter(path, 8)
    taken += sum(each.events for each in reader.take_more())
    rest = reader.take(99)
    taken += sum(each.events for each in rest) + sum(each.events for each in reader.take_counts())
    assert taken == raised


# The one call.


@pytest.fixture
def reserves(tmp_path: Path) -> Path:
    return tmp_path


def test_events_of_the_initialization_period_have_a_reserve_of_their_own(reserves: Path) -> None:
    raising.attach_reserves("services", reserves)
    assert raising.raise_event(row(1))
    raising.initialized()
    assert raising.raise_event(row(2))
    raising.detach_reserves()
    assert not raising.raise_event(row(3))
    found = {path.name: numbers(ReserveReader(path).take(9)) for path in sorted(reserves.iterdir())}
    assert found == {"services.initial.reserve": [1], "services.normal.reserve": [2]}


def test_without_a_directory_there_is_nothing_to_raise_events_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(raising.EVENTS_DIR, raising=False)
    raising.attach_reserves("services")
    assert not raising.raise_event(row(1))


def test_reserves_that_had_no_room_are_made_later_and_get_what_waited(
    reserves: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()

    def full(path: Path, slots: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(writer, "make_reserve", full)
    raising.attach_reserves("dbmanager", reserves, clock)
    raising.initialized()
    clock.advance(raising.RETRY_NS / 1e9)
    assert not any(raising.raise_event(row(number)) for number in (1, 2))
    monkeypatch.setattr(writer, "make_reserve", make_reserve)
    assert not raising.raise_event(row(3))  # not tried again yet
    clock.advance(raising.RETRY_NS / 1e9)
    assert raising.raise_event(row(4))
    assert raising.raise_event(row(5))
    raising.detach_reserves()
    assert numbers(ReserveReader(reserves / "dbmanager.normal.reserve").take(9)) == [1, 2, 3, 4, 5]


def test_what_waits_for_a_reserve_is_bounded_and_what_goes_is_said(
    reserves: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    (reserves / "events").write_bytes(b"")  # no directory
    raising.attach_reserves("dbmanager", reserves / "events", clock)
    for number in range(raising.MOST_WAITING + 3):
        raising.raise_event(row(number, subject=str(number)))
    (reserves / "events").unlink()
    clock.advance(raising.RETRY_NS / 1e9)
    raising.initialized()
    raising.detach_reserves()
    assert numbers(ReserveReader(reserves / "events" / "dbmanager.normal.reserve").take(999)) == [
        *range(3, raising.MOST_WAITING + 3)
    ]
    counts = ReserveReader(reserves / "events" / "dbmanager.normal.reserve").take_counts()
    assert [(count.kind, count.events) for count in counts] == [(row(0)["kind"], 3)]


def test_an_event_too_long_for_a_slot_is_cut_and_stays_json() -> None:
    found = raising.packed(row(1, text="\u20ac" * 3000, details={"all": ["\u20ac" * 100] * 100}))
    assert len(found) <= MOST_PAYLOAD
    assert json.loads(found)["event_id"] == "id-1"


def test_an_event_that_is_cut_keeps_the_names_that_routes_and_conditions_need() -> None:
    names = {"alert": "fast", "volume": "v" * 128, "gateway": "g" * 128, "agreement": "gold"}
    found = raising.packed(row(1, details={"all": ["x"] * 3000, "figure": 1.5, **names}))
    assert len(found) <= MOST_PAYLOAD
    details = json.loads(found)["details"]
    assert {name: details[name] for name in names} == names
    assert (details["figure"], details["cut"][:5]) == (1.5, '{"all')


@pytest.mark.parametrize("character", ["\U0001f525", "\\", '"', "\x01"])
def test_whatever_its_characters_an_event_fits_a_slot(character: str) -> None:
    many = character * 5000
    details = {f"name-{number}": character * 100 for number in range(100)}
    found = raising.packed(row(1, subject=many, text=many, source=many, details={"volume": many, **details}))
    assert len(found) <= MOST_PAYLOAD
    assert json.loads(found)["event_id"] == "id-1"


@pytest.mark.parametrize(("period", "at"), [("normal", 205), ("initial", 52)])
def test_eighty_percent_is_an_event_once_also_in_a_flood_of_lesser_events(
    reserves: Path, period: str, at: int
) -> None:
    raiser = raising.EventRaiser(reserves, "dbmanager")
    if period == "normal":
        raiser.initialized()
    for number in range(raising.SLOTS - 2):
        raiser.record(row(number, subject=str(number)))
    reader = ReserveReader(reserves / f"dbmanager.{period}.reserve")
    kinds = [json.loads(each.payload)["kind"] for each in reader.take(999)]
    assert kinds.count("event-reserve-filling") == 1
    assert kinds.index("event-reserve-filling") == at  # 80 % of 256 or 64, rounded up
    raiser.close()


def test_a_fleet_that_goes_in_one_tick_is_kept_and_what_is_critical_after_it_too(reserves: Path) -> None:
    raiser = raising.EventRaiser(reserves, "services")
    raiser.initialized()
    found = [raiser.record(row(number, subject=f"gw-{number}")) for number in range(1000)]
    found += [
        raiser.record(row(number, "violation-opened", f"gold/{number}")) for number in range(1000, 1003)
    ]
    assert set(found) == {RecordOutcome.KEPT}
    flood = [raiser.record(row(number, subject=f"gw-{number}")) for number in range(2000, 4000)]
    assert RecordOutcome.COUNTED in flood
    assert raiser.record(row(5000, "violation-opened", "silver/a")) is RecordOutcome.KEPT
    raiser.close()


@pytest.mark.parametrize("name", raising.TOLD_APART)
def test_what_is_about_different_things_of_one_subject_is_never_folded(reserves: Path, name: str) -> None:
    raiser = raising.EventRaiser(reserves, "services")
    for number in range(raising.INITIAL_SLOTS // 2):
        raiser.record(row(number, subject=f"gw-{number}"))
    found = [
        raiser.record(row(100 + number, subject="gold/p99", details={name: value}))
        for number, value in enumerate("aabba")
    ]
    kept, folded = RecordOutcome.KEPT, RecordOutcome.FOLDED
    assert found == [kept, folded, kept, folded, kept]
    raiser.close()


def test_what_has_become_worse_is_never_folded(reserves: Path) -> None:
    raiser = raising.EventRaiser(reserves, "services")
    for number in range(raising.INITIAL_SLOTS // 2):
        raiser.record(row(number, subject=f"gw-{number}"))
    severities = ["warning", "warning", "critical", "warning"]
    found = [
        raiser.record(row(100 + number, "space-low", "pool", severity=severity))
        for number, severity in enumerate(severities)
    ]
    kept, folded = RecordOutcome.KEPT, RecordOutcome.FOLDED
    assert found == [kept, folded, kept, kept]
    raiser.close()


def counted_in(path: Path) -> dict[str, int]:
    """What a reserve has counted and not kept, by kind."""
    reader = ReserveReader(path)
    found = {count.kind: count.events for count in reader.take_counts()}
    assert reader.take(99) == []
    reader.close()
    return found


def test_what_cannot_be_recorded_is_counted_not_raised(reserves: Path) -> None:
    raiser = raising.EventRaiser(reserves, "services")
    assert raiser.record({"kind": "no-identity"}) is None
    assert raiser.record({"kind": "no-identity"}) is None
    assert raiser.lost == 2
    raiser.close()
    assert counted_in(reserves / "services.initial.reserve") == {"no-identity": 2}


def test_without_any_memory_events_are_counted(reserves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raiser = raising.EventRaiser(reserves, "services")
    raiser.initialized()

    def none_left(_found: dict[str, object]) -> bytes:
        raise MemoryError

    monkeypatch.setattr(raising, "packed", none_left)
    assert [raiser.record(row(number)) for number in (1, 2, 3)] == [None] * 3
    raiser.close()
    assert counted_in(reserves / "services.normal.reserve") == {str(row(1)["kind"]): 3}


def test_an_event_of_the_initialization_period_that_no_disk_takes_is_kept(
    reserves: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raiser = raising.EventRaiser(reserves, "services")

    def broken(_self: object, _number: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(MappedReserve, "sync", broken)
    assert raiser.record(row(1)) is RecordOutcome.KEPT
    assert raiser.lost == 0
    raiser.close()
    reader = ReserveReader(reserves / "services.initial.reserve")
    assert (numbers(reader.take(9)), reader.take_counts()) == ([1], [])


def test_without_memory_the_spare_is_given_up_and_the_event_recorded(
    reserves: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raiser = raising.EventRaiser(reserves, "services")
    packed, tries = raising.packed, []

    def failing_once(found: dict[str, object]) -> bytes:  # as an allocation does while the spare is held
        tries.append(raiser._spare is not None)
        if raiser._spare is not None:
            raise MemoryError
        return packed(found)

    monkeypatch.setattr(raising, "packed", failing_once)
    assert raiser.record(row(1)) is RecordOutcome.KEPT
    assert tries == [True, False]
    raiser.close()
