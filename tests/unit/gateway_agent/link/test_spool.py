"""The spool against a plain list; bounds, gaps, damage, failing disks, death at every storage operation."""

import errno
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gateway_agent.errors import GatewayError, SpoolWriteFailed
from gateway_agent.link.spool import INDEX_SYNC_NS, MAX_EPOCHS, Spool, queue_settings
from pmdaemon.diskqueue import DiskQueue
from pmdaemon.diskqueue.format import DATA_START
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire import cut
from tests.support.faulty_disk import Crashed, FaultDisk
from tests.support.link import GATEWAY, abandon

BIG = 1 << 20
SMALL = 16_384


def raw_cut(epoch: int, seq: int, reads: int = 1, marks: dict | None = None) -> bytes:
    row = [reads if name == "reads" else 0 for name in cut.COLUMNS]
    empty = cut.HIST_DTYPE, cut.MISSED_DTYPE
    hist, missed = (cut.np.zeros(0, dtype=dtype) for dtype in empty)
    one = cut.Cut(
        GATEWAY, epoch, seq, 1, 2, 0, 0, cut.rows_array([row]), hist, missed, extra={"dp": marks or {}}
    )
    return cut.encode(one)


def put(spool: Spool, epoch: int, seq: int, marks: dict | None = None) -> int:
    return spool.append(epoch, seq, raw_cut(epoch, seq, marks=marks), marks or {})


def keys(spool: Spool, start=None) -> list[tuple[int, int]]:
    return [(item.epoch, item.seq) for item in spool.read_from(start)]


def gaps(spool: Spool) -> dict[tuple[int, int], int]:
    found = {(item.epoch, item.seq): cut.decode(item.raw).gap for item in spool.read_from(None)}
    return {key: gap for key, gap in found.items() if gap}


def test_cuts_of_another_gateway_are_seen_also_behind_a_restart(tmp_path):
    spool = Spool(tmp_path, BIG)
    assert spool.owner_beside("another") == ""
    put(spool, 7, 1)
    put(spool, 8, 1)
    spool.forget(7, 1)
    spool.forget(8, 1)  # the newest stays in the queue, and is offered again
    spool.close()
    again = Spool(tmp_path, BIG)
    assert (again.owner_beside(GATEWAY), again.owner_beside("another")) == ("", GATEWAY)


def test_what_is_appended_is_read_until_forgotten(tmp_path):
    spool = Spool(tmp_path, BIG)
    for seq in (1, 2, 3):
        put(spool, 7, seq)
    assert keys(spool, (7, 2)) == [(7, 2), (7, 3)]
    spool.forget(7, 2)
    assert keys(spool) == [(7, 3)]
    assert spool.epochs() == [[7, 3, 3]]
    spool.forget(7, 99)
    spool.forget(8, 1)
    assert (keys(spool), spool.epochs()) == ([], [])
    assert spool.newest().seq == 3


def test_reading_starts_at_the_oldest_when_the_epoch_is_unknown(tmp_path):
    spool = Spool(tmp_path, BIG)
    put(spool, 7, 1)
    put(spool, 8, 1)
    assert keys(spool, (99, 5)) == [(7, 1), (8, 1)]
    assert keys(spool, (7, 2)) == [(8, 1)]
    assert keys(spool, (8, 2)) == []


def test_marks_are_those_of_the_newest_cut_also_after_it_was_acknowledged(tmp_path):
    spool = Spool(tmp_path, BIG)
    put(spool, 7, 1, {"nbd-0": 5})
    put(spool, 7, 2, {"nbd-0": 6})
    spool.forget(7, 2)
    spool.close()
    again = Spool(tmp_path, BIG)
    assert again.marks == {"nbd-0": 6}


def test_forgotten_cuts_make_room_but_the_newest_stays(tmp_path):
    spool = Spool(tmp_path, BIG)
    for seq in range(1, 21):
        put(spool, 7, seq)
    held_bytes = spool.size_bytes
    spool.forget(7, 20)
    assert spool.size_bytes == held_bytes // 20
    put(spool, 7, 21)
    assert spool.size_bytes == held_bytes // 20
    assert 0 < spool.fullness_ratio < 0.01


def test_overflow_drops_the_oldest_and_the_next_cut_says_how_many(tmp_path):
    spool = Spool(tmp_path, SMALL)
    dropped = sum(put(spool, 7, seq) for seq in range(1, 101))
    first = spool.epochs()[0][1]
    assert dropped == spool.dropped == first - 1 > 0
    assert gaps(spool) == {(7, first): dropped}
    assert spool.size_bytes <= SMALL
    spool.close()
    again = Spool(tmp_path, SMALL)
    assert (again.dropped, gaps(again)) == (dropped, {(7, first): dropped})


def test_acknowledged_cuts_are_not_counted_as_dropped(tmp_path):
    spool = Spool(tmp_path, SMALL)
    for seq in range(1, 101):
        put(spool, 7, seq)
        spool.forget(7, seq - 1)
    assert (spool.dropped, gaps(spool)) == (0, {})


def test_gaps_of_two_overflows_around_a_delivery_are_counted_apart(tmp_path):
    spool = Spool(tmp_path, SMALL)
    for seq in range(1, 101):
        put(spool, 7, seq)
    first_gap = spool.dropped
    spool.forget(7, spool.epochs()[0][1])  # the cut that carried the gap arrived
    assert gaps(spool) == {}
    for seq in range(101, 201):
        put(spool, 7, seq)
    assert sum(gaps(spool).values()) == spool.dropped - first_gap


def test_a_dropped_cut_is_counted_before_its_place_is_written_over(tmp_path, monkeypatch):
    """Killed between the note and the append: the next spool drops what the note says, and counts once."""
    spool = Spool(tmp_path, SMALL)
    real, tried = DiskQueue.put, []

    def dies_behind_a_note(queue, data, **how):
        if how.get("reserved"):
            real(queue, data, **how)
            raise KeyboardInterrupt
        return real(queue, data, **how)

    def fill():
        for seq in range(1, 100):
            tried.append(seq)
            put(spool, 7, seq)

    monkeypatch.setattr(DiskQueue, "put", dies_behind_a_note)
    with pytest.raises(KeyboardInterrupt):
        fill()
    monkeypatch.undo()
    abandon(spool)
    again = Spool(tmp_path, SMALL)
    held = [key[1] for key in keys(again)]
    assert again.dropped + len(held) == len(tried) - 1
    assert gaps(again) == {(7, held[0]): again.dropped}
    put(again, 8, 1)
    abandon(again)
    assert gaps(Spool(tmp_path, SMALL)) == {(7, held[0]): again.dropped}


def test_all_but_the_newest_forgotten_cut_may_be_dropped(tmp_path):
    spool = Spool(tmp_path, 2 * SMALL)
    put(spool, 7, 1, {str(n): n for n in range(2500)})
    for seq in (1, 2):
        put(spool, 8, seq)
        spool.forget(8, seq)
    assert put(spool, 8, 3, {str(n): n for n in range(1300)}) == spool.dropped == 1
    assert keys(spool) == [(8, 3)]
    assert gaps(spool) == {(8, 3): 1}


def test_a_cut_larger_than_the_spool_is_refused_and_nothing_else_is_lost(tmp_path):
    spool = Spool(tmp_path, SMALL)
    put(spool, 7, 1)
    with pytest.raises(SpoolWriteFailed, match="exceeds"):
        spool.append(7, 2, raw_cut(7, 2, marks={str(n): n for n in range(4000)}), {})
    assert keys(spool) == [(7, 1)]
    put(spool, 7, 2)
    assert keys(spool) == [(7, 1), (7, 2)]


def test_a_damaged_record_is_lost_alone_and_counted(tmp_path):
    spool = Spool(tmp_path, BIG)
    for seq in (1, 2, 3):
        put(spool, 7, seq)
    span_bytes = spool.size_bytes // 3
    spool.close()
    with (tmp_path / "cuts").open("r+b") as file:
        file.seek(DATA_START + span_bytes + span_bytes // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0xFF]))
    again = Spool(tmp_path, BIG)
    assert keys(again) == [(7, 1), (7, 3)]
    assert (again.dropped, again.damaged, gaps(again)) == (1, 1, {(7, 3): 1})
    put(again, 7, 4)
    again.close()
    assert Spool(tmp_path, BIG).damaged == 0, "it was counted once"


def test_a_cut_that_rots_while_it_waits_is_not_sent(tmp_path):
    spool = Spool(tmp_path, BIG)
    put(spool, 7, 1)
    put(spool, 7, 2)
    with (tmp_path / "cuts").open("r+b") as file:
        file.seek(DATA_START + 200)
        file.write(b"????")
    with pytest.raises(GatewayError, match="checksum"):
        keys(spool)


def on(disk: FaultDisk, limit_bytes: int = SMALL, clock: FakeClock | None = None) -> Spool:
    """A spool on a disk in memory."""

    def open_queue(settings):
        return DiskQueue(settings, data=disk.open("cuts"), index=disk.open("cuts.index"), helper=False)

    return Spool(Path("/nowhere/spool"), limit_bytes, clock or FakeClock(), open_queue)


@pytest.fixture
def no_directory(monkeypatch):
    monkeypatch.setattr("gateway_agent.link.state_files.make_private_directory", lambda _path: None)


@pytest.mark.parametrize("which", [1, 2])
def test_a_failed_write_or_sync_leaves_the_spool_as_it_was(no_directory, which):
    disk = FaultDisk()
    spool = on(disk)
    put(spool, 7, 1, {"nbd-0": 1})
    disk.fail_at[disk.operations + which] = errno.EIO
    with pytest.raises(SpoolWriteFailed, match="Check the disk"):
        put(spool, 7, 2, {"nbd-0": 2})
    assert (keys(spool), spool.marks, spool.newest().seq) == ([(7, 1)], {"nbd-0": 1}, 1)
    spool.append(7, 2, raw_cut(7, 2, reads=5), {})
    assert keys(spool) == [(7, 1), (7, 2)]
    for later in (disk.after_kill(), disk.after_crash(random.Random(which))):
        again = on(later)
        assert [cut.decode(item.raw).column("reads")[0] for item in again.read_from(None)] == [1, 5]


def test_a_disk_that_stays_broken_is_tried_again_with_each_cut(no_directory):
    disk = FaultDisk()
    spool = on(disk)
    put(spool, 7, 1)
    for ahead in range(1, 40):
        disk.fail_at[disk.operations + ahead] = errno.EIO
    for _ in range(3):
        with pytest.raises(SpoolWriteFailed):
            put(spool, 7, 2)
    disk.fail_at.clear()
    put(spool, 7, 2)
    assert keys(spool) == [(7, 1), (7, 2)]


def test_a_failed_index_sync_does_not_take_back_the_cut(no_directory):
    disk, clock = FaultDisk(), FakeClock()
    spool = on(disk, clock=clock)
    put(spool, 7, 1)
    clock.advance(INDEX_SYNC_NS / 1e9)
    disk.fail_at[disk.operations + 3] = errno.EIO  # write and sync of the record, then the index
    put(spool, 7, 2, {"nbd-0": 2})
    assert not disk.fail_at.keys() - set(range(disk.operations + 1)), "the failure has happened"
    assert (keys(spool), spool.marks) == ([(7, 1), (7, 2)], {"nbd-0": 2})
    put(spool, 7, 3)
    assert keys(spool) == [(7, 1), (7, 2), (7, 3)]


def busy_life(spool: Spool, clock: FakeClock, confirmed: list[int], taken: list[int]) -> None:
    """Cuts, acknowledgements, an overflow, index syncs; notes what returned."""
    for seq in range(1, 41):
        put(spool, 7, seq)
        confirmed.append(seq)
        if seq % 7 == 0 and seq < 25:
            taken.append(spool.epochs()[0][1] + 2)
            spool.forget(7, taken[-1])
        clock.advance(3.0)


@pytest.mark.parametrize("found", ["after_crash", "after_kill"])
def test_death_at_every_storage_operation(no_directory, found):
    """Every confirmed cut is held, or acknowledged, or counted; and counted ones are not held."""
    total, died = 10_000, 0
    for number in range(1, total):
        disk, clock, confirmed, taken = FaultDisk(crash_at=number), FakeClock(), [], []
        try:
            busy_life(on(disk, 8192, clock), clock, confirmed, taken)
        except Crashed:
            died += 1
        else:
            break
        later = disk.after_kill() if found == "after_kill" else disk.after_crash(random.Random(number))
        spool = on(later, 8192)
        held = [seq for _, seq in keys(spool)]
        newest, acked = max(confirmed, default=0), max(taken, default=0)
        assert held == list(range(held[0], held[-1] + 1)) if held else newest == 0
        if held:
            assert newest <= held[-1] <= newest + 1
        missing = set(range(1, newest + 1)) - set(held) - set(range(1, acked + 1))
        assert len(missing) <= spool.dropped, "never more gone than counted"
        assert spool.dropped <= max(0, (held[0] if held else 1) - 1), "nothing that is held is counted"
        put(spool, 8, 1)
        assert keys(spool)[-1] == (8, 1)
    assert died > 80, "the life was longer than that"


def test_more_epochs_than_a_registration_may_name_drop_the_oldest(tmp_path):
    spool = Spool(tmp_path, BIG)
    for epoch in range(1, MAX_EPOCHS + 4):
        put(spool, epoch, 1)
    spool.close()
    again = Spool(tmp_path, BIG)
    assert len(again.epochs()) == MAX_EPOCHS
    assert (again.dropped, gaps(again)) == (3, {(4, 1): 3})


def test_files_of_an_earlier_version_are_refused(tmp_path):
    (tmp_path / "0000000000000001.spool").write_bytes(b"SLASPL1")
    with pytest.raises(GatewayError, match="earlier version"):
        Spool(tmp_path, BIG)


def test_a_size_changed_later_holds_from_the_next_start(tmp_path):
    spool = Spool(tmp_path, BIG)
    for seq in range(1, 30):
        put(spool, 7, seq, {"nbd-0": seq})
    held = keys(spool)
    for size_bytes in (4 * BIG, SMALL):
        spool.close()
        with capture_logs() as logs:
            spool = Spool(tmp_path, size_bytes)
        assert (keys(spool), spool.marks) == (held, {"nbd-0": 29})
    [told] = [line for line in logs if line["event"] == "spool-keeps-its-size"]
    assert (told["bytes"], told["configured"]) == (4 * BIG, SMALL), "cuts are not dropped for it"
    spool.forget(7, 29)
    spool.close()
    spool = Spool(tmp_path, SMALL)
    assert (tmp_path / "cuts").stat().st_size == DATA_START + SMALL
    assert (keys(spool), spool.marks) == ([(7, 29)], {"nbd-0": 29}), "the newest always stays in the queue"
    put(spool, 7, 30)
    assert keys(spool) == [(7, 29), (7, 30)]


@pytest.mark.parametrize(("acknowledged", "size_bytes"), [(26, 16_384), (39, 4096)])
def test_death_at_every_storage_operation_of_a_change_of_size(no_directory, acknowledged, size_bytes):
    disk, clock = FaultDisk(), FakeClock()
    spool = on(disk, 8192, clock)
    busy_life(spool, clock, [], [])
    spool.forget(7, acknowledged)
    expected = keys(spool), spool.dropped
    spool.close()
    files = {name: bytes(file.durable) for name, file in disk.files.items()}
    for number in range(1, 1000):
        died = FaultDisk(files, crash_at=number)
        try:
            assert (keys(on(died, size_bytes)), on(died, size_bytes).dropped) == expected
            break
        except Crashed:
            again = on(died.after_crash(random.Random(number)), size_bytes)
        held, dropped = keys(again), again.dropped
        assert [key for key in held if key[1] > acknowledged] == expected[0]
        assert dropped == expected[1], "nothing is counted twice"
        put(again, 8, 1)
        assert keys(again)[-1] == (8, 1)
    assert number > 15


def test_another_link_on_the_same_spool_is_refused(tmp_path):
    first = Spool(tmp_path, BIG)
    with pytest.raises(GatewayError, match="owned by another process"):
        Spool(tmp_path, BIG)
    first.close()


def test_the_configured_size_is_room_for_as_many_records_of_a_kilobyte():
    settings = queue_settings(Path("/x"), 64 << 20)
    assert (settings.data_bytes, settings.entries) == (64 << 20, 65536)


def test_a_spool_that_cannot_be_used_says_what_to_check(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(GatewayError, match="state_dir"):
        Spool(tmp_path / "file", BIG)


OPERATIONS = st.lists(
    st.one_of(
        st.just(("append", 0)),
        st.tuples(st.just("forget"), st.integers(0, 40)),
        st.tuples(st.just("restart"), st.integers(0, 1)),
        st.tuples(st.just("read"), st.integers(0, 40)),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(OPERATIONS)
def test_the_spool_is_a_list(tmp_path_factory, operations):
    """Never more than the model, never less; a restart may bring acknowledged cuts back, nothing else."""
    directory = tmp_path_factory.mktemp("spool")
    spool, epoch, seq = Spool(directory, BIG), 1, 0
    unforgotten: list[tuple[int, int]] = []
    back: set[tuple[int, int]] = set()
    for name, number in operations:
        if name == "append":
            seq += 1
            put(spool, epoch, seq)
            unforgotten.append((epoch, seq))
        elif name == "forget" and unforgotten:
            of_epoch, upto = unforgotten[number % len(unforgotten)]
            spool.forget(of_epoch, upto)
            back |= {key for key in unforgotten if key[0] == of_epoch and key[1] <= upto}
            unforgotten = [key for key in unforgotten if key not in back]
        elif name == "restart":
            spool.close() if number else abandon(spool)
            spool, epoch, seq = Spool(directory, BIG), epoch + 1, 0
            for old, _first, last in spool.epochs():  # the server acknowledges again what it has
                acked = [key[1] for key in back if key[0] == old and key[1] <= last]
                spool.forget(old, max(acked, default=0))
        elif name == "read" and unforgotten:
            start = unforgotten[number % len(unforgotten)]
            assert keys(spool, start) == unforgotten[unforgotten.index(start) :]
        assert keys(spool) == unforgotten


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["append", "append", "append", "take", "restart"]), max_size=150))
def test_taken_dropped_and_held_cuts_are_all_the_cuts(tmp_path_factory, operations):
    """Small spool: whatever happens, every cut is taken, held, or counted in the gap of a cut behind it."""
    directory = tmp_path_factory.mktemp("spool")
    spool, epoch, seq, made = Spool(directory, 6_144), 1, 0, 0
    taken, gap_taken = 0, 0
    for name in operations:
        if name == "append":
            seq, made = seq + 1, made + 1
            put(spool, epoch, seq)
        elif name == "take":
            for item in list(spool.read_from(None))[:3]:
                taken, gap_taken = taken + 1, gap_taken + cut.decode(item.raw).gap
                spool.forget(item.epoch, item.seq)
        elif name == "restart" and spool.cuts:
            # A restart with nothing held would bring an acknowledged cut back, which the server drops.
            forgotten = taken and spool.epochs()
            spool.close()
            spool = Spool(directory, 6_144)
            if forgotten:
                for key in [key for key in keys(spool) if key < tuple(forgotten[0][:2])]:
                    spool.forget(*key)
            epoch, seq = epoch + 1, 0
        held_gap = sum(gaps(spool).values())
        assert taken + spool.cuts + gap_taken + held_gap == made
        assert gap_taken + held_gap == spool.dropped
