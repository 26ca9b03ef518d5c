"""What is kept for the partner: in order, once, over a kill, and no longer than it is needed."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

from pmdaemon.runtime.clock import FakeClock
from sla_server.events.pair_store import NOTES, MirrorStore, PartnerNotes
from tests.support.faulty_disk import Crashed, FaultDisk

QUEUE, OTHER = "0123456789abcdef", "fedcba9876543210"
BYTES = 1 << 16


class Kept:
    def __init__(self, folder: Path, data_bytes: int = BYTES) -> None:
        self.folder = folder
        self.data_bytes = data_bytes
        self.disk = FaultDisk()
        self.store = self.open()

    def open(self) -> MirrorStore:
        storage = self.disk.open("partner"), self.disk.open("partner.index")
        return MirrorStore(self.folder, self.data_bytes, storage, FakeClock())

    def restart(self) -> None:
        self.disk = self.disk.after_kill()
        self.store = self.open()

    def seqs(self, queue_id: str = QUEUE, after: int = 0) -> list[int]:
        return [seq for seq, _ in self.store.read(queue_id, after, 10_000)]


def records(*seqs: int, size: int = 10) -> list[tuple[int, bytes]]:
    return [(seq, b"%d" % seq * size) for seq in seqs]


def test_events_are_kept_by_queue_and_number_and_once(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    assert kept.store.add(QUEUE, records(3, 4, 7)) == (7, False)
    assert kept.store.add(OTHER, records(1)) == (1, False)
    assert kept.store.add(QUEUE, records(4, 7, 8)) == (8, False)
    assert kept.seqs() == [3, 4, 7, 8]
    assert kept.seqs(after=4) == [7, 8]
    assert kept.store.read(OTHER, 0, 10) == records(1)
    assert kept.store.queue_ids == [QUEUE, OTHER]
    assert len(kept.store) == 5


def test_a_kill_leaves_what_was_kept(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.store.add(QUEUE, records(3, 4, 7))
    kept.store.discard_through(QUEUE, 3)
    kept.restart()
    assert kept.seqs()[-2:] == [4, 7]  # a deletion may be undone; it is repeated
    assert kept.store.newest_seq(QUEUE) == 7
    assert kept.store.discard_through(QUEUE, 4) >= 1
    assert kept.seqs() == [7]


def test_what_the_partner_needs_no_more_leaves(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.store.add(QUEUE, records(1, 2, 3, 4, 5, 6))
    assert kept.store.discard_through(QUEUE, 2) == 2
    assert kept.store.keep_only(QUEUE, [4], 5) == 2  # 6 came behind what the partner speaks of
    assert kept.seqs() == [4, 6]
    assert kept.store.has(QUEUE, 4)
    assert not kept.store.has(QUEUE, 5)
    assert kept.store.add(QUEUE, records(2, 5)) == (6, False)  # had before: not kept again
    assert kept.seqs() == [4, 6]


def test_a_full_store_keeps_what_fits_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    many = records(*range(1, 201), size=300)
    seq, is_full = kept.store.add(QUEUE, many)
    assert is_full
    assert 0 < seq < 200
    assert kept.seqs() == list(range(1, seq + 1))
    assert kept.store.add(QUEUE, many) == (seq, True)
    kept.store.discard_through(QUEUE, seq)
    following, _ = kept.store.add(QUEUE, many)
    assert following > seq
    assert kept.seqs()[0] == seq + 1


def test_a_damaged_record_costs_itself_alone(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.store.add(QUEUE, [(1, b"first" * 20), (2, b"second" * 20), (3, b"third" * 20)])
    file = kept.disk.open("partner")
    file.write(bytes(file.view()).index(b"secondsecond"), [b"XXXX"])
    assert kept.seqs() == [1, 3]
    assert kept.store.damaged == 1
    assert kept.seqs() == [1, 3]


def test_notes_that_cannot_be_read_are_forgotten(tmp_path: Path) -> None:
    notes = PartnerNotes(queues=[("main", QUEUE)], delivered={"r": {"e1": (QUEUE, 7)}}, is_lost=True)
    notes.write(tmp_path)
    assert PartnerNotes.read(tmp_path) == notes
    (tmp_path / NOTES).write_text('{"queues": 7}')
    assert PartnerNotes.read(tmp_path) == PartnerNotes()
    (tmp_path / NOTES).unlink()
    assert PartnerNotes.read(tmp_path) == PartnerNotes()


def test_numbers_that_are_given_again_are_kept_beside_what_had_them_before(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.store.add(QUEUE, records(3, 4, 7))
    assert kept.store.set_back(QUEUE, 3, OTHER) == 2
    assert kept.store.add(QUEUE, [(4, b"another")]) == (4, False)
    assert kept.store.read(QUEUE, 0, 10) == [*records(3), (4, b"another")]
    assert kept.store.read(OTHER, 0, 10) == records(4, 7)
    kept.restart()
    assert kept.store.read(OTHER, 0, 10) == records(4, 7)
    assert kept.store.read(QUEUE, 0, 10)[1] == (4, b"another")


def test_a_full_store_loses_nothing_when_the_partner_is_set_back(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    last, is_full = kept.store.add(QUEUE, records(*range(1, 500), size=300))
    assert is_full
    assert kept.store.set_back(QUEUE, 20, OTHER) == last - 20
    for _ in range(3):
        assert kept.seqs() == list(range(1, 21))
        assert kept.seqs(OTHER) == list(range(21, last + 1))
        assert (kept.store.newest_seq(QUEUE), kept.store.newest_seq(OTHER)) == (20, last)
        kept.restart()
    kept.store.discard_through(QUEUE, 20)
    assert kept.store.add(QUEUE, [(21, b"another")]) == (21, False)
    kept.restart()
    assert kept.store.read(QUEUE, 20, 1) == [(21, b"another")]
    assert kept.seqs(OTHER) == list(range(21, last + 1))


def test_a_crash_while_the_partner_is_set_back_leaves_all_of_it_in_one_place(tmp_path: Path) -> None:
    found = set[tuple[int, int]]()
    for crash_at in range(1, 9):
        kept = Kept(tmp_path)
        kept.store.add(QUEUE, records(*range(1, 31)))
        kept.disk.crash_at = kept.disk.operations + crash_at
        with suppress(Crashed):
            kept.store.set_back(QUEUE, 20, OTHER)
        kept.disk = kept.disk.after_crash(random.Random(crash_at))
        kept.store = kept.open()
        found.add((kept.store.count(QUEUE), kept.store.count(OTHER)))
    assert found == {(30, 0), (20, 10)}


def test_that_it_was_set_back_is_forgotten_with_the_last_of_what_it_lost(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.store.add(QUEUE, records(3, 4, 7))
    kept.store.set_back(QUEUE, 3, OTHER)
    kept.store.discard_through(OTHER, 7)
    kept.disk = kept.disk.after_kill()  # undoes that deletion
    kept.store = kept.open()
    assert kept.seqs(OTHER) == [4, 7]
    kept.store.discard_through(OTHER, 7)
    kept.store.close()
    kept.store = kept.open()
    assert kept.store._queue.stat()["records"] == 1  # no other way to see that it is gone
