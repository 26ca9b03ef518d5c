"""The spool: every cut stands here from before it is sent until the server has it on disk.

    append ──► segment files, oldest first ──► read_from (as often as asked for) ──► forget (acknowledged)
                    └── too many bytes: the oldest segment is dropped, its cuts counted

Holds: an index (epoch, seq) -> place of every cut that is not forgotten, in spool order; the number of such
cuts per segment; ``dropped`` (lifetime) and ``gaps`` (cuts lost directly before a cut), both also in
``dropped.json``.

Invariants: within an epoch the seqs grow; a segment without an unforgotten cut is deleted, except the one
with the newest cut, whose header says what the data planes need not repeat (``dp``). So the spool always
knows that much.

Recovery, in this order: 1. read ``dropped.json``; 2. delete the segments it says are dropped (we died between
counting and deleting); 3. scan the others, each up to its first record that is not whole; 4. a hole between
two seqs of an epoch (a damaged file) is counted like a drop; 5. delete segments without records; 6. drop the
oldest epochs beyond what a registration may name.

What a crash can leave: a torn last record (it was never promised to anybody: its sources still have it); cuts
that were acknowledged already (they are offered again, and the server knows them); an empty segment.

Limits: no fsync, so a power cut loses what the kernel had not written; after a restart an acknowledged cut
that comes back may be counted as dropped if the spool overflows before it is acknowledged again.

Thread: the link's loop only.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog

from gateway_agent.link import segment, state
from gateway_agent.link.errors import SpoolUnusable, SpoolWriteFailed, StateFileBroken
from pmdaemon.wire import frame

log = structlog.get_logger("spool")

SEGMENTS_PER_SPOOL: Final = 16  # a full spool drops a sixteenth at a time
SEGMENT_MAX_BYTES: Final = 4 << 20  # read whole at recovery
MAX_EPOCHS: Final = 200  # the server accepts 256 in a registration
_COUNTS: Final = "dropped.json"

Key = tuple[int, int]


class Spooled(NamedTuple):
    """One cut as it stands in the spool, its ``gap`` filled in."""

    epoch: int
    seq: int
    raw: bytes


class _Epoch:
    """Unforgotten cuts of one epoch: two parallel lists, oldest first."""

    def __init__(self) -> None:
        self.seqs: list[int] = []
        self.places: list[segment.Place] = []

    def cut_front(self, count: int) -> list[segment.Place]:
        gone = self.places[:count]
        del self.seqs[:count], self.places[:count]
        return gone


class Spool:
    """See the module docstring. Construction recovers what is there.

    Raises:
        SpoolUnusable: the directory cannot be created, read or written.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._segment_bytes = min(limit_bytes // SEGMENTS_PER_SPOOL, SEGMENT_MAX_BYTES)
        self._epochs: dict[int, _Epoch] = {}
        self._alive: dict[int, int] = {}  # segment -> unforgotten cuts in it
        self._sizes: dict[int, int] = {}  # segment -> bytes
        self._gaps: dict[Key, int] = {}
        self._writer: segment.SegmentWriter | None = None
        self._newest: tuple[Key, segment.Place] | None = None
        self._newest_raw = b""
        self.dropped = 0
        self.marks: dict[str, int] = {}
        try:
            state.make_private_directory(directory)
            self._recover()
        except OSError as exc:
            raise SpoolUnusable(str(directory), str(exc)) from exc

    # -- recovery

    def _recover(self) -> None:
        through = self._read_counts()
        self._next_segment = through + 1
        for number in segment.numbers(self._directory):
            self._next_segment = number + 1
            if number <= through:
                segment.path_of(self._directory, number).unlink()
            else:
                self._recover_segment(number)
        while len(self._epochs) > MAX_EPOCHS:
            self._drop_oldest_epoch()
        self._gaps = {key: count for key, count in self._gaps.items() if self.holds(*key)}
        self._delete_dead()

    def _read_counts(self) -> int:
        """Returns the number of the last segment that was counted as dropped."""
        path = self._directory / _COUNTS
        try:
            counts = state.read_json(path, "It is begun anew") or {}
            self.dropped = int(counts.get("dropped", 0))
            self._gaps = {(int(epoch), int(seq)): int(count) for epoch, seq, count in counts.get("gaps", [])}
            return int(counts.get("through", 0))
        except (StateFileBroken, AttributeError, TypeError, ValueError) as exc:
            # Only the counts are lost; refusing to start would lose the statistics too.
            log.error("dropped-counts-lost", path=str(path), problem=str(exc))
            return 0

    def _recover_segment(self, number: int) -> None:
        records, rest_bytes = segment.scan(self._directory, number)
        if rest_bytes:
            log.warning("torn-record", segment=number, ignored_bytes=rest_bytes)
        self._sizes[number] = segment.path_of(self._directory, number).stat().st_size
        self._alive[number] = 0
        for record in records:
            seqs = self._epochs.setdefault(record.epoch, _Epoch()).seqs
            hole = record.seq - seqs[-1] - 1 if seqs else 0
            key = (record.epoch, record.seq)
            if hole and key not in self._gaps:
                self._count_dropped(hole, key)
            self._enter(key, record.place)
            marks = record.header.get("dp")
            self.marks = dict(marks) if isinstance(marks, dict) else {}
        if records:
            self._newest_raw = segment.read(self._directory, records[-1].place)

    def holds(self, epoch: int, seq: int) -> bool:
        """Whether the cut is here and not forgotten."""
        held = self._epochs.get(epoch)
        return held is not None and bool(held.seqs) and held.seqs[0] <= seq <= held.seqs[-1]

    # -- append

    def append(self, epoch: int, seq: int, raw: bytes, marks: dict[str, int]) -> int:
        """Put a cut behind the newest; returns how many old cuts had to be dropped for it.

        Durability: on return the cut survives kill -9 of this process, not a power cut.

        Raises:
            SpoolWriteFailed: it is not in the spool; the state is as before.
        """
        try:
            if self._writer is None or self._writer.size_bytes >= self._segment_bytes:
                self._begin_segment()
            writer = self._writer
            assert writer is not None  # begun above
            place = writer.append(raw)
        except OSError as exc:
            self.close()
            raise SpoolWriteFailed(str(self._directory), str(exc)) from exc
        self._sizes[place.segment] = writer.size_bytes
        self._enter((epoch, seq), place)
        self._newest_raw, self.marks = raw, dict(marks)
        self._delete_dead()
        return self._make_room()

    def _begin_segment(self) -> None:
        self.close()
        number = self._next_segment
        self._next_segment += 1
        self._writer = segment.SegmentWriter(self._directory, number)
        self._alive[number], self._sizes[number] = 0, self._writer.size_bytes

    def _enter(self, key: Key, place: segment.Place) -> None:
        held = self._epochs.setdefault(key[0], _Epoch())
        held.seqs.append(key[1])
        held.places.append(place)
        self._alive[place.segment] += 1
        self._newest = (key, place)

    # -- dropping and forgetting

    def _make_room(self) -> int:
        before = self.dropped
        while sum(self._sizes.values()) > self._limit_bytes:
            oldest = next(iter(self._sizes))
            if self._newest is None or oldest == self._newest[1].segment:
                break  # a single segment: the newest cut stays whatever the limit says
            self._drop_segment(oldest)
        return self.dropped - before

    def _drop_segment(self, number: int) -> None:
        lost, gap = 0, 0
        for epoch, held in self._epochs.items():
            count = bisect_right(held.places, number, key=lambda place: place.segment)
            gap += self._take_gaps(epoch, held.seqs[:count])
            lost += len(held.cut_front(count))
        self._epochs = {epoch: held for epoch, held in self._epochs.items() if held.seqs}
        if lost:
            epoch, held = next(iter(self._epochs.items()))  # the newest cut is never dropped
            key = (epoch, held.seqs[0])
            self._count_dropped(lost, key, gap)
        # Crash: the count is on disk first; recovery deletes what it covers.
        self._write_counts(through=number)
        self._delete(number)

    def _drop_oldest_epoch(self) -> None:
        """At recovery only."""
        oldest, held = next(iter(self._epochs.items()))
        lost, gap = len(held.seqs), self._take_gaps(oldest, held.seqs)
        for place in held.cut_front(lost):
            self._alive[place.segment] -= 1
        self._epochs = {epoch: rest for epoch, rest in self._epochs.items() if rest.seqs}
        epoch, rest = next(iter(self._epochs.items()))
        self._count_dropped(lost, (epoch, rest.seqs[0]), gap)
        self._write_counts(through=0)

    def _take_gaps(self, epoch: int, seqs: list[int]) -> int:
        """Gaps told by cuts that are dropped themselves: the next cut must tell them."""
        return sum(self._gaps.pop((epoch, seq), 0) for seq in seqs)

    def _count_dropped(self, lost: int, before: Key, told: int = 0) -> None:
        """``lost`` cuts before ``before`` are gone, and with them the word of ``told`` earlier ones."""
        self.dropped += lost
        self._gaps[before] = self._gaps.get(before, 0) + lost + told

    def _write_counts(self, through: int) -> None:
        gaps = [[epoch, seq, count] for (epoch, seq), count in self._gaps.items()]
        # A full disk must not stop the dropping that makes room on it: the count then lives in memory only.
        with suppress(OSError):
            state.write_json(
                self._directory / _COUNTS, {"dropped": self.dropped, "gaps": gaps, "through": through}
            )

    def forget(self, epoch: int, seq: int) -> None:
        """The server has every cut of ``epoch`` up to ``seq`` on disk."""
        held = self._epochs.get(epoch)
        if held is None:
            return
        count = bisect_right(held.seqs, seq)
        for done in held.seqs[:count]:
            self._gaps.pop((epoch, done), None)
        for place in held.cut_front(count):
            self._alive[place.segment] -= 1
        if not held.seqs:
            del self._epochs[epoch]
        if count:
            self._delete_dead()

    def _delete_dead(self) -> None:
        keep = self._newest[1].segment if self._newest else 0
        writing = self._writer.number if self._writer else 0
        for number in [number for number, alive in self._alive.items() if alive == 0]:
            if number not in (keep, writing):
                self._delete(number)

    def _delete(self, number: int) -> None:
        del self._alive[number], self._sizes[number]
        with suppress(FileNotFoundError):
            segment.path_of(self._directory, number).unlink()

    # -- reading

    def epochs(self) -> list[list[int]]:
        """``[epoch, first seq, last seq]`` of what is not forgotten, oldest first; REGISTER's ``spool``."""
        return [[epoch, held.seqs[0], held.seqs[-1]] for epoch, held in self._epochs.items()]

    def read_from(self, start: Key | None) -> Iterator[Spooled]:
        """Cuts in order, from ``start`` on; from the oldest when ``start`` is None or its epoch is not held.

        Neither append nor forget while the iterator is in use.

        Raises:
            SpoolUnusable: a segment cannot be read any more.
        """
        started = start is None or start[0] not in self._epochs
        for epoch, held in list(self._epochs.items()):
            first = 0
            if not started and start is not None:
                if epoch != start[0]:
                    continue
                started = True
                first = bisect_left(held.seqs, start[1])
            for index in range(first, len(held.seqs)):
                yield self._spooled((epoch, held.seqs[index]), held.places[index])

    def newest(self) -> Spooled | None:
        """The cut appended last, even if it is forgotten; None for an empty spool."""
        if self._newest is None:
            return None
        return self._spooled(*self._newest)

    def _spooled(self, key: Key, place: segment.Place) -> Spooled:
        if self._newest is not None and key == self._newest[0]:
            raw = self._newest_raw
        else:
            try:
                raw = segment.read(self._directory, place)
            except OSError as exc:
                raise SpoolUnusable(str(self._directory), str(exc)) from exc
        gap = self._gaps.get(key, 0)
        return Spooled(*key, with_gap(raw, gap) if gap else raw)

    @property
    def cuts(self) -> int:
        """Cuts not forgotten."""
        return sum(len(held.seqs) for held in self._epochs.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(self._sizes.values())

    def close(self) -> None:
        """Let go of the segment being written; the next append begins another."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def with_gap(raw: bytes, gap: int) -> bytes:
    """The same cut, saying that ``gap`` cuts before it were dropped."""
    parsed = frame.decode(raw)
    header: dict[str, Any] = {**parsed.header, "gap": gap}
    return frame.encode(parsed.kind, header, parsed.blob, parsed.flags)
