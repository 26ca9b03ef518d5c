"""The spool: every cut is stored here from before it is sent until the server has it on disk.

    append ──► disk queue, oldest first ──► read_from (as often as asked for) ──► forget (acknowledged)
                   └── no room: the oldest sixteenth is dropped, its cuts counted

State: the disk queue (``pmdaemon.diskqueue``, files ``cuts`` and ``cuts.index`` at full size from the start);
by epoch, the seq and place of every cut that is not forgotten, in spool order; ``dropped`` (lifetime) and
``gaps`` (cuts lost directly before a cut), which every record carries too.

Invariants: within an epoch the seqs grow; the newest cut stays in the queue even when it is forgotten,
because its header says what the data planes need not repeat (``dp``).

Dropping, in this order: 1. a note with the new counts and the number up to which records are dropped becomes
durable, in room kept for it; 2. those records leave the queue; 3. the cut is appended; 4. the note leaves. If
the process dies before 1 is durable, nothing was dropped; if it dies later, recovery drops what the note
says. So no place is written over before the count is on disk.

Recovery: 1. the queue's own (whole records only); 2. the newest record of either kind has the counts; 3. if
it is a note, what it says is dropped goes (behind a cut nothing of that comes back: diskqueue, floor); 4. of
two records of one cut (the first was never confirmed) the later counts; 5. a hole between two seqs of an
epoch (a damaged record) is counted like a drop; 6. the oldest epochs beyond what a registration may name are
dropped.

A crash can leave a cut that was never confirmed, whole or not at all (its sources still have it, and its
``dp`` says that they need not repeat it), and cuts that were acknowledged since the last append (they are
offered again, and the server knows them).

After a failed write or sync the queue is reopened at once, and what it finds unconfirmed is discarded.

Limits: one fdatasync a cut in the link's loop; a disk that stalls stalls the link, not the I/O path.

Thread: the link's loop only. Source: Q1-Q7; DESIGN.md 4.1.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from gateway_agent.errors import GatewayError, SpoolWriteFailed
from gateway_agent.link import state_files
from pmdaemon.diskqueue import DiskQueue, QueueSettings
from pmdaemon.diskqueue.errors import DiskQueueError, QueueFull, RecordTooLarge
from pmdaemon.runtime.clock import Clock, SystemClock
from pmdaemon.wire.cut_header import CutHeader, marks_in, with_gap

log = structlog.get_logger("spool")


# A record of the spool, little-endian:
#
#     kind 1, a cut            kind 2, a note: cuts were dropped
#     0   8  epoch             0   8  through: records up to this number of the queue are dropped
#     8   8  seq               8   8  0
#     16  8  dropped: cuts this spool has lost in its life
#     24  4  n
#     28  24 each of n gaps: epoch, seq, cuts lost directly before that cut
#     ... a CUT frame          (nothing)
#
# Every record carries the whole account of what was dropped, so the newest one of either kind is the truth,
# and a drop becomes durable together with the record that says so.
RECORD_CUT: Final = 1
RECORD_NOTE: Final = 2
_HEAD: Final = struct.Struct("<QQQI")
_GAP: Final = struct.Struct("<QQQ")

Key = tuple[int, int]
Gaps = dict[Key, int]


class DropAccount(NamedTuple):
    """What was dropped: lifetime count, and by cut what was lost directly before it and not reported yet."""

    dropped: int
    gaps: Gaps


class SpoolRecord(NamedTuple):
    """One record; ``first`` and ``second`` are epoch and seq, or ``through`` and 0."""

    first: int
    second: int
    account: DropAccount
    raw: bytes


def pack_record(first: int, second: int, account: DropAccount, raw: bytes = b"") -> bytes:
    """The record's bytes."""
    gaps = b"".join(_GAP.pack(*key, count) for key, count in account.gaps.items())
    return _HEAD.pack(first, second, account.dropped, len(account.gaps)) + gaps + raw


def unpack_record(data: bytes) -> SpoolRecord:
    """The record in ``data``, which the disk queue has checked.

    Raises:
        ValueError: it is none: not written by this release's spool.
    """
    if len(data) < _HEAD.size:
        raise ValueError(f"a record of {len(data)} bytes")
    first, second, dropped, count = _HEAD.unpack_from(data)
    end = _HEAD.size + count * _GAP.size
    if len(data) < end:
        raise ValueError(f"{count} gaps in a record of {len(data)} bytes")
    gaps = {(epoch, seq): lost for epoch, seq, lost in _GAP.iter_unpack(data[_HEAD.size : end])}
    return SpoolRecord(first, second, DropAccount(dropped, gaps), data[end:])


DROPS_PER_SPOOL: Final = 16  # a full spool drops a sixteenth at a time
MAX_EPOCHS: Final = 200  # the server accepts 256 in a registration
INDEX_SYNC_NS: Final = 10_000_000_000
_READ_BYTES: Final = 4 << 20  # at a time, at recovery


class SpooledCut(NamedTuple):
    """One cut of the spool, its ``gap`` filled in."""

    epoch: int
    seq: int
    raw: bytes


class SpoolPlace(NamedTuple):
    """Where a cut is: its record's number in the queue, and its size."""

    number: int
    size_bytes: int


class _Epoch:
    """Unforgotten cuts of one epoch: two parallel lists, oldest first."""

    def __init__(self) -> None:
        self.seqs: list[int] = []
        self.places: list[SpoolPlace] = []

    def remove_front(self, count: int) -> list[SpoolPlace]:
        gone = self.places[:count]
        del self.seqs[:count], self.places[:count]
        return gone


def queue_settings(directory: Path, limit_bytes: int) -> QueueSettings:
    """The disk queue of a spool of ``limit_bytes``: room kept for a note, an entry for each KB."""
    ring_bytes = max(4096, limit_bytes - limit_bytes % 256)
    return QueueSettings(
        data_path=directory / "cuts",
        data_bytes=ring_bytes,
        entries=max(256, ring_bytes // 1024),
        reserve_bytes=min(16_384, ring_bytes // 8),
        reserve_entries=8,
    )


class Spool:
    """See the module docstring. Construction recovers what is there.

    Args:
        directory: made if missing.
        limit_bytes: size of the queue; an existing one becomes smaller only once its cuts fit.
        open_queue: tests bring their own disk.

    Raises:
        GatewayError: the directory or the queue in it cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        clock: Clock | None = None,
        open_queue: Callable[[QueueSettings], DiskQueue] | None = None,
    ) -> None:
        self._directory = directory
        self._clock = clock or SystemClock()
        self._settings = queue_settings(directory, limit_bytes)
        self._open_queue = open_queue or (lambda settings: DiskQueue(settings, helper=False))
        self._is_broken = False
        self._index_due_ns = self._clock.monotonic_ns() + INDEX_SYNC_NS
        state_files.make_private_directory(directory)
        if list(directory.glob("*.spool")):
            raise _unusable(str(directory), "it holds *.spool files of an earlier version; move them away")
        try:
            self.damaged = self._recover()  # cuts that damage has cost, found at this start
        except (OSError, DiskQueueError, ValueError) as exc:
            raise _unusable(str(directory), str(exc)) from exc

    # -- recovery

    def _recover(self, confirmed: int | None = None) -> int:
        """Open the queue and read it; of what is newer than ``confirmed`` nothing counts, a note least.

        Returns:
            The cuts that are missing between others and were not counted before.
        """
        self._queue = self._open_queue(self._settings)
        if confirmed is not None:
            unconfirmed = [number for number, _, _ in self._records() if number > confirmed]
            if self._queue.discard(unconfirmed):
                self._queue.sync_index()
        if self._queue.ring_bytes != self._settings.data_bytes:
            log.warning(
                "spool-keeps-its-size", bytes=self._queue.ring_bytes, configured=self._settings.data_bytes
            )
        self._epochs: dict[int, _Epoch] = {}
        self._gaps: Gaps = {}
        self._newest: tuple[Key, SpoolPlace] | None = None
        self._newest_raw = b""
        self._notes: list[int] = []
        self.dropped = number = through = 0
        for number, kind, data in self._records():
            record = unpack_record(data)
            self.dropped, self._gaps = record.account
            if kind == RECORD_NOTE:
                self._notes.append(number)
                through = record.first
            else:
                self._add((record.first, record.second), SpoolPlace(number, len(data)))
                self._newest_raw, through = record.raw, 0
        self._queue.delete_through(through)
        self._forget_places(through)
        self.marks: dict[str, int] = marks_in(self._newest_raw)
        missing = self._count_holes()
        self._gaps = {key: count for key, count in self._gaps.items() if self._holds(*key)}
        while len(self._epochs) > MAX_EPOCHS:
            oldest = next(iter(self._epochs.values()))
            self._drop_through(oldest.places[-1].number)
        self._confirmed = max(number, *self._notes, 0)
        return missing

    def _records(self) -> Iterator[tuple[int, int, bytes]]:
        number = 0
        while messages := self._queue.peek(number, _READ_BYTES):
            for message in messages:
                yield message.seq, message.kind, message.data
            number = messages[-1].seq

    def _count_holes(self) -> int:
        before_dropped = self.dropped
        for epoch, entry in self._epochs.items():
            for before, seq in zip(entry.seqs, entry.seqs[1:], strict=False):
                if seq - before > 1 and (epoch, seq) not in self._gaps:
                    self.dropped += seq - before - 1
                    self._gaps[epoch, seq] = seq - before - 1
        return self.dropped - before_dropped

    def _reopen(self) -> None:
        """After a failed write: what is really there, without what was never confirmed."""
        confirmed, self._is_broken = self._confirmed, False
        with suppress(DiskQueueError, OSError):
            self._queue.close()
        try:
            self._recover(confirmed)
        except (OSError, DiskQueueError, ValueError) as exc:
            self._confirmed, self._is_broken = confirmed, True  # the next append tries again
            log.error("spool-cannot-be-reopened", path=str(self._directory), problem=str(exc))

    def _holds(self, epoch: int, seq: int) -> bool:
        entry = self._epochs.get(epoch)
        return entry is not None and bool(entry.seqs) and entry.seqs[0] <= seq <= entry.seqs[-1]

    # -- append

    def append(self, epoch: int, seq: int, raw: bytes, marks: dict[str, int]) -> int:
        """Put a cut behind the newest; returns how many old cuts had to be dropped for it.

        Durability: on return the cut survives a power cut.

        Raises:
            SpoolWriteFailed: it is not in the spool; of the others none is lost.
        """
        if self._is_broken:
            self._reopen()
        before = self.dropped
        try:
            place = self._put((epoch, seq), raw)
        except (QueueFull, RecordTooLarge) as exc:
            raise SpoolWriteFailed(str(self._directory), str(exc)) from exc
        except DiskQueueError as exc:
            self._reopen()
            raise SpoolWriteFailed(str(self._directory), str(exc)) from exc
        done, self._notes = self._notes, []
        if self._newest is not None and not self._holds(*self._newest[0]):
            done.append(self._newest[1].number)
        self._add((epoch, seq), place)
        self._newest_raw, self.marks = raw, dict(marks)
        self._queue.discard(done)
        self._sync_index_if_due()
        log.debug("cut-spooled", epoch=epoch, seq=seq)
        return self.dropped - before

    def _put(self, key: Key, raw: bytes) -> SpoolPlace:
        while True:
            data = pack_record(*key, DropAccount(self.dropped, self._gaps), raw)
            try:
                self._confirmed = self._queue.put(data, kind=RECORD_CUT)
            except QueueFull:
                if not self._drop_oldest(key):
                    raise
            else:
                return SpoolPlace(self._confirmed, len(data))

    def _add(self, key: Key, place: SpoolPlace) -> None:
        entry = self._epochs.setdefault(key[0], _Epoch())
        if entry.seqs and entry.seqs[-1] == key[1]:  # the former record of this cut was never confirmed
            self._queue.discard([entry.places.pop().number])
            entry.seqs.pop()
        entry.seqs.append(key[1])
        entry.places.append(place)
        self._newest = (key, place)

    def _sync_index_if_due(self) -> None:
        # Directly behind an append, whose record says what was forgotten before it: see diskqueue, floor.
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._index_due_ns:
            return
        self._index_due_ns = now_ns + INDEX_SYNC_NS
        try:
            self._queue.sync_index()
        except DiskQueueError as exc:  # the cut is on disk all the same
            log.error("spool-index-not-synced", path=str(self._directory), problem=str(exc))
            self._reopen()

    # -- dropping and forgetting

    def _drop_oldest(self, coming: Key) -> bool:
        """Drop a sixteenth of the spool for the cut ``coming``; False if there is only the newest."""
        wanted_bytes, through = self._queue.ring_bytes // DROPS_PER_SPOOL, 0
        newest = self._newest[1].number if self._newest else 0
        for entry in self._epochs.values():
            for place in entry.places:
                if wanted_bytes <= 0 or place.number == newest:
                    break
                wanted_bytes -= place.size_bytes
                through = place.number
        if through:
            self._drop_through(through, coming)
        return through > 0

    def _drop_through(self, through: int, coming: Key | None = None) -> None:
        """Drop all cuts up to that number in the queue; see the module's text.

        The oldest cut left reports them, and what they would have reported of earlier ones: ``coming``
        when all others are dropped or forgotten.
        """
        lost, unreported, gaps, heir = 0, 0, dict(self._gaps), None
        doomed: list[str] = []
        for epoch, entry in self._epochs.items():
            count = bisect_right(entry.places, through, key=lambda place: place.number)
            lost += count
            doomed += [f"{epoch}:{entry.seqs[0]}-{entry.seqs[count - 1]}"] if count else []
            unreported += sum(gaps.pop((epoch, seq), 0) for seq in entry.seqs[:count])
            if heir is None and count < len(entry.seqs):
                heir = (epoch, entry.seqs[count])
        heir = heir or coming
        assert heir is not None  # at recovery more than one epoch is held
        gaps[heir] = gaps.get(heir, 0) + lost + unreported
        log.debug("dropping-cuts", cuts=",".join(doomed))
        data = pack_record(through, 0, DropAccount(self.dropped + lost, gaps))
        self._confirmed = self._queue.put(data, kind=RECORD_NOTE, reserved=True)
        self._queue.discard(self._notes)
        self._notes = [self._confirmed]
        self.dropped, self._gaps = self.dropped + lost, gaps
        self._queue.delete_through(through)
        self._forget_places(through)

    def _forget_places(self, through: int) -> None:
        for entry in self._epochs.values():
            entry.remove_front(bisect_right(entry.places, through, key=lambda place: place.number))
        self._epochs = {epoch: entry for epoch, entry in self._epochs.items() if entry.seqs}

    def forget(self, epoch: int, seq: int) -> None:
        """The server has every cut of ``epoch`` up to ``seq`` on disk."""
        entry = self._epochs.get(epoch)
        if entry is None:
            return
        count = bisect_right(entry.seqs, seq)
        for done in entry.seqs[:count]:
            self._gaps.pop((epoch, done), None)
        newest = self._newest[1].number if self._newest else 0
        gone = [place.number for place in entry.remove_front(count) if place.number != newest]
        if not entry.seqs:
            del self._epochs[epoch]
        with suppress(
            DiskQueueError
        ):  # refuses since a failed write: they are offered again, which is allowed
            self._queue.discard(gone)

    # -- reading

    def epochs(self) -> list[list[int]]:
        """``[epoch, first seq, last seq]`` of what is not forgotten, oldest first; REGISTER's ``spool``."""
        return [[epoch, entry.seqs[0], entry.seqs[-1]] for epoch, entry in self._epochs.items()]

    def read_from(self, start: Key | None) -> Iterator[SpooledCut]:
        """Cuts in order, from ``start`` on; from the oldest when ``start`` is None or its epoch is not here.

        Neither append nor forget while the iterator is in use.

        Raises:
            GatewayError: a cut cannot be read any more.
        """
        started = start is None or start[0] not in self._epochs
        for epoch, entry in list(self._epochs.items()):
            first = 0
            if not started and start is not None:
                if epoch != start[0]:
                    continue
                started = True
                first = bisect_left(entry.seqs, start[1])
            for index in range(first, len(entry.seqs)):
                yield self._spooled((epoch, entry.seqs[index]), entry.places[index])

    def newest(self) -> SpooledCut | None:
        """The cut appended last, even if it is forgotten; None for an empty spool."""
        if self._newest is None:
            return None
        return self._spooled(*self._newest)

    def _spooled(self, key: Key, place: SpoolPlace) -> SpooledCut:
        if self._newest is not None and key == self._newest[0]:
            raw = self._newest_raw
        else:
            try:
                message = self._queue.read(place.number)
            except DiskQueueError as exc:
                raise _unusable(str(self._directory), str(exc)) from exc
            assert message is not None  # what is not forgotten is in the queue
            raw = unpack_record(message.data).raw
        gap = self._gaps.get(key, 0)
        return SpooledCut(*key, with_gap(raw, gap) if gap else raw)

    def owner_beside(self, gateway_id: str) -> str:
        """Another gateway whose cuts are here; nothing if all are of ``gateway_id``.

        The server takes no session in which a cut of another gateway is offered. An epoch is of one link
        process and so of one gateway: its first cut tells.

        Raises:
            GatewayError: a cut cannot be read any more.
        """
        for epoch, entry in self._epochs.items():
            raw = self._spooled((epoch, entry.seqs[0]), entry.places[0]).raw
            owner = CutHeader.parse(raw).gateway_id
            if owner != gateway_id:
                return owner
        return ""

    @property
    def cuts(self) -> int:
        """Cuts not forgotten."""
        return sum(len(entry.seqs) for entry in self._epochs.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of the queue in use."""
        return self._queue.used_bytes

    @property
    def fullness_ratio(self) -> float:
        """Share of the spool in use, 0 to 1."""
        return self._queue.fullness_ratio

    def close(self) -> None:
        """Sync the index and let go of the files."""
        with suppress(DiskQueueError):  # poisoned: the next start recovers
            self._queue.close()


def _unusable(directory: str, cause: str) -> GatewayError:
    return GatewayError(
        f"{directory}: the spool cannot be used ({cause}). Check state_dir, its owner and its mode"
    )
