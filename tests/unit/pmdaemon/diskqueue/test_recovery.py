"""Decisions of recovery that no ordinary crash shows: loops, wrong lists, floors, order of syncs.

Some tests read private state: how far a round is, and how much memory is held, is no part of the interface.
"""

from __future__ import annotations

import random
import struct
import zlib

import numpy as np

from pmdaemon.diskqueue import format as layout
from pmdaemon.diskqueue.format import (
    DAMAGED,
    ENTRY_BYTES,
    FREE,
    IN_USE,
    INDEX_START,
    NONE,
    SLOT_FIELDS,
    UNUSED,
    IndexHeader,
    pack_free,
    read_file_header,
    read_index_header,
    read_slots,
    scan,
    span_bytes,
)
from pmdaemon.diskqueue.recovery import count_list_faults
from tests.support.diskqueue import contents, drain, open_queue
from tests.support.faulty_disk import FaultDisk


def slot(status: int, following: int) -> tuple[int, ...]:
    return (status, 0, 1, 0, 256, 10, 0, 0, 0, 0, NONE, following, 0)


def faults(of: IndexHeader, *slots: tuple[int, ...]) -> int:
    return count_list_faults(of, np.array(list(slots), SLOT_FIELDS))


def header(head: int, free: int) -> IndexHeader:
    return IndexHeader(1, b"s" * 16, b"q" * 8, 4096, 8, head=head, free=free)


def test_sound_lists_have_no_faults() -> None:
    assert faults(header(0, 1), slot(IN_USE, 2), slot(FREE, NONE), slot(IN_USE, NONE)) == 0


def test_a_loop_is_broken_and_counted() -> None:
    assert faults(header(0, NONE), slot(IN_USE, 1), slot(IN_USE, 0)) == 1


def test_entries_in_the_wrong_list_or_in_none_are_counted() -> None:
    assert faults(header(0, NONE), slot(IN_USE, 1), slot(FREE, NONE)) == 2
    assert faults(header(NONE, NONE), slot(IN_USE, NONE), slot(FREE, NONE)) == 2
    assert faults(header(77, NONE), slot(IN_USE, NONE)) == 2
    assert faults(header(77, NONE)) == 1


def test_lists_in_the_file_are_sound_after_close_and_after_recovery() -> None:
    disk = FaultDisk()
    queue = open_queue(disk)
    for number in range(60):
        queue.put(b"x" * (number * 13 % 190))
        if number % 12 != 1:
            message = queue.lock(1)[0]
            queue.delete([message.seq])
    queue.close()
    for later in (disk, disk.after_crash(random.Random(1))):
        assert open_queue(later).report.list_faults == 0


def test_what_was_deleted_before_the_sync_stays_deleted_and_after_it_may_return() -> None:
    disk = FaultDisk()
    queue = open_queue(disk)
    queue.put_many([b"1", b"2", b"3", b"4"])
    held = queue.lock(4)
    queue.delete([held[1].seq])
    queue.sync_index()
    queue.delete([held[3].seq])
    again = open_queue(disk.after_kill())
    assert list(contents(again).values()) == [b"1", b"3", b"4"]
    assert again.report.deleted == 1


def test_floor_in_later_records_keeps_deleted_ones_away_even_without_an_index() -> None:
    disk = FaultDisk()
    queue = open_queue(disk)
    queue.put_many([b"1", b"2", b"3"])
    drain(queue)
    queue.put(b"4")
    lost = FaultDisk({"data": bytes(disk.open("data").cached)})
    assert list(contents(open_queue(lost)).values()) == [b"4"]


def test_free_entry_of_the_file_does_not_hide_a_record() -> None:
    """In the free list, though its record is live and newer than the sync: restored."""
    disk = FaultDisk()
    queue = open_queue(disk)
    queue.put(b"kept")
    index = disk.open("index")
    file, _copies = read_file_header(disk.open("data").view())
    assert file is not None
    index.write(INDEX_START, [pack_free(0, NONE, file.seed)])
    again = open_queue(disk.after_kill())
    assert list(contents(again).values()) == [b"kept"]
    assert again.report.restored == 1


def test_index_header_comes_after_its_entries() -> None:
    disk = FaultDisk()
    queue = open_queue(disk)
    queue.put(b"x")
    before = read_index_header(disk.open("index").view())
    assert before is not None
    order: list[tuple[int, str]] = []
    index = disk.open("index")
    write, sync = index.write, index.sync

    def noted_write(offset: int, buffers: object) -> None:
        order.append((offset, "write"))
        write(offset, buffers)  # type: ignore[arg-type]

    def noted_sync() -> None:
        order.append((-1, "sync"))
        sync()

    index.write, index.sync = noted_write, noted_sync  # type: ignore[method-assign]
    assert queue.sync_index() == 1
    after = read_index_header(index.view())
    assert after is not None
    assert order == [(INDEX_START, "write"), (-1, "sync"), (after.place, "write"), (-1, "sync")]
    assert after.place != before.place
    assert (after.generation, after.synced_seq) == (before.generation + 1, 1)


def test_entries_never_straddle_a_block_and_are_bound_to_their_slot() -> None:
    assert 512 % ENTRY_BYTES == 0
    assert INDEX_START % 4096 == 0
    spoilt = bytearray(pack_free(3, NONE, 5))
    spoilt[-1] = 1
    packed = [pack_free(0, NONE, 5), pack_free(0, NONE, 5), bytes(ENTRY_BYTES), bytes(spoilt)]
    view = memoryview(bytes(INDEX_START) + b"".join(packed))
    first, misplaced, never, torn = read_slots(view, 4, 5)
    assert (first["status"], first["next"]) == (FREE, NONE)
    assert misplaced["status"] == DAMAGED, "an entry written to the wrong place"
    assert never["status"] == UNUSED
    assert torn["status"] == DAMAGED, "damage behind what the checksum covers"
    assert read_slots(view, 1, 6)["status"] == DAMAGED, "an entry of another queue"


def test_scan_skips_by_length_and_ignores_noise() -> None:
    disk = FaultDisk()
    queue = open_queue(disk)
    queue.put(b"x" * 700)
    queue.put(b"y")
    ring = bytearray(disk.open("data").cached[8192:])
    ring[2048:2052] = b"\xfc\x58\x84\x85"
    found = scan(memoryview(bytes(ring)), queue._state.seed)
    assert found.intact["offset"].tolist() == [0, span_bytes(700)]
    assert list(found.broken) == [2048]


def test_the_larger_capacity_of_new_settings_is_taken() -> None:
    disk = FaultDisk()
    open_queue(disk, entries=4).put(b"x")
    queue = open_queue(disk, entries=12)
    queue.put_many([b"."] * 10)
    assert queue.stat()["capacity"] == 12
    assert open_queue(disk.after_kill(), entries=4).stat()["capacity"] == 12


def test_numbers_are_never_given_twice() -> None:
    disk = FaultDisk()
    queue = open_queue(disk)
    given = [queue.put(b"x")]
    drain(queue)
    for seed in range(8):
        queue.submit([b"never synced"])
        disk = disk.after_crash(random.Random(seed)) if seed % 2 else disk
        if seed % 2 == 0:
            queue.close()
        queue = open_queue(disk)
        drain(queue)
        given.append(queue.put(b"x"))
        drain(queue)
    assert given == sorted(set(given))


def test_the_lap_begins_anew_when_its_32_bits_are_full() -> None:
    disk = FaultDisk()
    queue = open_queue(disk)
    queue._state.ring.lap = 2**32 - 2
    for _ in range(12):
        newest = queue.put(b"x" * 900)
        queue.delete_through(newest - 1)
    assert queue._state.ring.lap < 10
    again = open_queue(disk.after_kill())
    assert max(contents(again)) == newest
    assert again._state.ring.lap == queue._state.ring.lap
    again.put(b"goes on")


def test_the_spare_fields_of_the_header_may_hold_what_an_earlier_release_counted() -> None:
    disk = FaultDisk()
    queue = open_queue(disk)
    seq = queue.put(b"kept")
    queue.close()
    header = read_index_header(disk.open("index").view())
    assert header is not None
    packed = bytearray(header.following().pack())
    body = bytes(packed[: layout._HEADER.size - 16]) + struct.pack("<QQ", 7, 700)
    packed[: layout._HEADER.size + 4] = body + struct.pack("<I", zlib.crc32(body))
    disk.open("index").write(header.following().place, [bytes(packed)])
    again = open_queue(disk)
    assert again.report.clean
    assert contents(again) == {seq: b"kept"}


def test_a_record_deleted_after_the_index_header_was_lost_stays_deleted() -> None:
    """Entries of before, which nothing refers to any more, must not vouch for their records."""
    disk = FaultDisk()
    queue = open_queue(disk)
    seqs = queue.put_many([b"a"] * 8)
    queue.discard(seqs[:6])
    queue.put(b"b")  # says that the first six were deleted
    queue.close()
    files = {name: bytearray(file.cached) for name, file in disk.files.items()}
    files["index"][:INDEX_START] = bytes(INDEX_START)
    disk = FaultDisk(files)
    queue = open_queue(disk)
    assert sorted(contents(queue)) == [7, 8, 9]
    queue.discard([8])
    queue.close()
    assert sorted(contents(open_queue(disk.after_kill()))) == [7, 9]
