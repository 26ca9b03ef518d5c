"""A batch: some queue records, decoded into what the ingest transaction and the archive need.

Everything but ``put_aside`` is pure.

``decode_batch`` lists what cannot be stored in ``refused``. Cuts whose numbers cannot be true are among it
(``wire.cut``: ``fault_of``, ``time_fault_of``); otherwise one of them could overflow a sum and stop the
ingest of all gateways. ``CutRows`` are the rows of many cuts as columns, which a window adds. ``put_aside``
alone writes: it keeps a record that the database refuses although it passed all checks as a file, and reports
it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import structlog

from pmdaemon.errors import WireError
from pmdaemon.runtime.files import make_directory, write_whole
from pmdaemon.wire import cut as cuts
from pmdaemon.wire import frame
from pmdaemon.wire.cut import (
    COL,
    FAILED,
    IO_ANY,
    IO_READ,
    IO_WRITE,
    NOT_PLACED,
    OUTSTANDING,
    OVERDUE,
    Cut,
    overflows,
    problem_of,
    sequential_counts,
)
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.server import RecordRows, cut_times
from pmdaemon.wire.messages.stored import StoredGateway, StoredStreams
from sla_server.db.errors import BadRecord
from sla_server.db.histogram_codec import TOTAL_BUCKETS, Int64s
from sla_server.db.ingest.queue import IngestRecord
from sla_server.db.ingest.records import check_row, event_row
from sla_server.db.schema import COUNTERS

KINDLESS: Final = 3
"""As an io kind: all kinds of requests together, also flush and trim."""
_BUCKET_BITS: Final = 0xFFFF << 16
_COUNTER_ROWS: Final = [COL[name] for name in COUNTERS]
log = structlog.get_logger("db-writer")


@dataclass(frozen=True, slots=True)
class IngestedCut:
    """One cut with what was learned at receipt.

    Attributes:
        start_us: corrected start, us UTC.
        offset_us: what was added to the agent's clock.
        recv_us: server's wall clock at receipt.
        part: of a cut that was shared out over several slots (``spread``) which part, from 1; else 0.
    """

    cut: Cut
    offset_us: int
    recv_us: int
    part: int = 0

    @property
    def start_us(self) -> int:
        """Corrected start."""
        return self.cut.start_unix_us + self.offset_us

    @property
    def end_us(self) -> int:
        """Corrected end."""
        return self.start_us + self.cut.duration_us


@dataclass(frozen=True, slots=True)
class CutColumns:
    """The columns of many cuts, at least one, each behind the other.

    Attributes:
        rows: of each cut, shape (cuts,); ``hist_entries`` and ``missed_entries`` alike.
        counters: shape (len(COLUMNS), all rows).
        hist: HIST_DTYPE; ``row`` counts from its cut's first row.
        missed: MISSED_DTYPE, likewise.
    """

    rows: npt.NDArray[np.int64]
    counters: npt.NDArray[np.int64]
    hist: npt.NDArray[Any]
    hist_entries: npt.NDArray[np.int64]
    missed: npt.NDArray[Any]
    missed_entries: npt.NDArray[np.int64]

    @property
    def is_sound(self) -> bool:
        """Whether each of the cuts passes ``cut.fault_of``."""
        hist_rows = np.repeat(self.rows, self.hist_entries)
        missed_rows = np.repeat(self.rows, self.missed_entries)
        problem = problem_of(self.counters, self.hist, self.missed, hist_rows, missed_rows)
        return problem is None and not overflows(self.counters)


def columns_of(items: Sequence[IngestedCut]) -> CutColumns:
    """Join the columns of some cuts, at least one."""
    cuts = [item.cut for item in items]
    return CutColumns(
        rows=np.array([cut.rows for cut in cuts], dtype=np.int64),
        counters=np.concatenate([cut.counters for cut in cuts], axis=1),
        hist=_joined([cut.hist for cut in cuts]),
        hist_entries=np.array([len(cut.hist) for cut in cuts], dtype=np.int64),
        missed=_joined([cut.missed for cut in cuts]),
        missed_entries=np.array([len(cut.missed) for cut in cuts], dtype=np.int64),
    )


def _joined(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Structured arrays of one type, one behind another; as bytes, which is faster than by fields."""
    return np.frombuffer(b"".join([np.ascontiguousarray(one).data for one in arrays]), arrays[0].dtype)


_Found = tuple[int, int, IngestedCut]  # queue_seq, position in its message, cut


@dataclass(frozen=True, slots=True)
class RefusedRecord:
    """A part of a record that cannot be stored; becomes an event, never silence."""

    queue_seq: int
    position: int
    element: str
    reason: str


@dataclass(slots=True)
class DecodedBatch:
    """Decoded records: all that the queue holds from ``first_seq`` to ``last_seq``.

    Attributes:
        first_seq: one behind the record before these, which need not be the first of these: numbers have
            holes.
        marks: (gateway_id, epoch) to the highest seq, also of refused cuts: they must not come again.
        gateways: of GATEWAY, in order.
        streams_seen: of STREAMS_SEEN, in order.
        rows: RECORD rows, checked, in order.
        row_bytes: size of the messages that have no cuts.
        left_out: (volume, gateway_id) to how many rows ``ownership`` has left out of the cuts.
    """

    first_seq: int
    last_seq: int
    cuts: list[IngestedCut] = field(default_factory=list)
    marks: dict[tuple[str, int], int] = field(default_factory=dict)
    gateways: list[StoredGateway] = field(default_factory=list)
    streams_seen: list[StoredStreams] = field(default_factory=list)
    rows: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    refused: list[RefusedRecord] = field(default_factory=list)
    left_out: Counter[tuple[str, str]] = field(default_factory=Counter)
    row_bytes: int = 0
    _columns: CutColumns | None = None

    @property
    def columns(self) -> CutColumns | None:
        """Of ``cuts``, joined once for all uses; None if there are none."""
        if self._columns is None and self.cuts:
            self._columns = columns_of(self.cuts)
        return self._columns


def decode_batch(records: Sequence[IngestRecord], after_seq: int) -> DecodedBatch:
    """Decode the records (at least one) that follow ``after_seq`` in the queue.

    What does not decode is listed in ``refused``, never raised.
    """
    batch = DecodedBatch(after_seq + 1, records[-1].queue_seq)
    found: list[_Found] = []
    for record in records:
        try:
            message = frame.decode_own(record.payload)
        except WireError as exc:
            batch.refused.append(RefusedRecord(record.queue_seq, 0, "queue", str(exc)))
            continue
        if message.kind == Kind.CUTS:
            found += _cuts_of(batch, record.queue_seq, message)
            continue
        batch.row_bytes += len(record.payload)
        if message.kind == Kind.GATEWAY:
            batch.gateways.append(StoredGateway.read(message.header))
        elif message.kind == Kind.STREAMS_SEEN:
            batch.streams_seen.append(StoredStreams.read(message.header))
        elif message.kind == Kind.RECORD:
            _add_rows(batch, record.queue_seq, RecordRows.parse(message.header).rows)
    _take_sound(batch, found)
    return batch


def _cuts_of(batch: DecodedBatch, queue_seq: int, message: frame.Frame) -> Iterator[_Found]:
    """The cuts of a message whose headers can be true; their columns are not checked yet."""
    received, offsets = cut_times(message.header)
    for position, raw in enumerate(frame.split(message.blob)):
        part = frame.decode_own(raw)
        gateway_id, epoch, seq = cuts.identity(part.header)
        key = (gateway_id, epoch)
        batch.marks[key] = max(seq, batch.marks.get(key, 0))
        try:
            item = IngestedCut(cuts.view(part), offsets[position], received[position])
            problem = cuts.time_fault_of(item.cut, item.offset_us)
        except WireError as exc:
            problem = str(exc)
        if problem is None:
            yield queue_seq, position, item
        else:
            batch.refused.append(_left_out(queue_seq, position, (gateway_id, epoch, seq), problem))


def _take_sound(batch: DecodedBatch, found: list[_Found]) -> None:
    """Look at the columns of all cuts together, and only if something is wrong at each cut's."""
    batch.cuts = [item for _seq, _position, item in found]
    if batch.columns is None or batch.columns.is_sound:
        return
    batch.cuts, batch._columns = [], None
    for queue_seq, position, item in found:
        cut = item.cut
        problem = cuts.fault_of(cut)
        if problem is None:
            batch.cuts.append(item)
        else:
            identity = (cut.gateway_id, cut.epoch, cut.seq)
            batch.refused.append(_left_out(queue_seq, position, identity, problem))


def _left_out(queue_seq: int, position: int, identity: tuple[str, int, int], problem: str) -> RefusedRecord:
    gateway_id, epoch, seq = identity
    return RefusedRecord(
        queue_seq, position, gateway_id, f"cut {seq} of epoch {epoch} was left out: {problem}"
    )


def _add_rows(batch: DecodedBatch, queue_seq: int, rows: object) -> None:
    for position, pair in enumerate(rows if isinstance(rows, list) else ()):
        try:
            batch.rows.append(check_row(pair[0], pair[1]))
        except (BadRecord, LookupError, TypeError, ValueError, OverflowError) as exc:
            batch.refused.append(RefusedRecord(queue_seq, position, "record", str(exc)))


class CutRows:
    """All rows of all cuts, one behind another; ``n`` of them.

    Attributes:
        item: index of each row's cut, shape (n,).
        sums: the columns of SUMS that each row has, each of shape (n,).
        maxima: those of MAXIMA.
        hist_row: row of each entry of the two total histograms; ``hist_bucket`` and ``hist_count`` alike.
        missed: MISSED_DTYPE, entries that compare I/Os with a limit: completions, OVERDUE and FAILED.
        missed_row: row of each of them.
        failed: (kind, count) of I/Os that failed, columns of shape (entries,); ``failed_row`` alike.
        outstanding: (io, oldest_ms, stalled_ms) likewise, as IO_ANY, IO_READ, IO_WRITE, or KINDLESS for all
            kinds together of agents that do not tell them apart (beside IO_ANY); ``outstanding_row`` alike.
        settled_failed: (io, threshold_us, most, least) of settled completions that failed, which a cut does
            not tell; ``settled_failed_row`` alike.
        completed: reads and writes, shape (n,).
        refused: whether clients were refused and nothing completed, (n,).
        tells_kind: whether outstanding I/O is of one kind, which agents of before do not tell, (n,).
        tells: whether anything is said of I/O that waits or failed; agents before those say nothing, (n,).
    """

    def __init__(self, items: Sequence[IngestedCut], columns: CutColumns) -> None:
        lengths, counters = columns.rows, columns.counters
        self.n = int(lengths.sum())
        offsets = np.cumsum(lengths) - lengths
        self.gateways = [item.cut.gateway_id for item in items]
        self.item: Int64s = np.repeat(np.arange(len(items), dtype=np.int64), lengths)
        self.stream_id: Int64s = counters[COL["stream_id"]]
        start_us = np.array([item.start_us for item in items], dtype=np.int64)
        self.start_us: Int64s = start_us[self.item]
        durations_us = np.array([item.cut.duration_us for item in items], dtype=np.int64)
        duration_us = durations_us[self.item]
        part = np.array([item.part for item in items], dtype=np.int64)[self.item]
        # As one number each: row, bucket << 16, count << 32.
        entries: Int64s = columns.hist.view("<i8")
        offset = np.repeat(offsets, columns.hist_entries)
        total = np.flatnonzero((entries & _BUCKET_BITS) < TOTAL_BUCKETS << 16)
        entries = entries[total]
        self.hist_row: Int64s = (entries & 0xFFFF) + offset[total]
        self.hist_bucket: Int64s = (entries >> 16) & 0xFFFF
        self.hist_count: Int64s = (entries >> 32) & 0xFFFF_FFFF
        self.completed: Int64s = counters[COL["reads"]] + counters[COL["writes"]]
        self._starts_us, self._durations_us = start_us, durations_us
        entry_row = columns.missed["row"] + np.repeat(offsets, columns.missed_entries)
        self._sort_missed(columns.missed, entry_row, counters[COL["others"]])
        held = counters[COL["held"]]
        was_held = (counters[COL["delay_sum_us"]] > 0) | (held > 0)
        self.sums = [
            *(counters[row_of] for row_of in _COUNTER_ROWS),
            duration_us,
            np.where(was_held, duration_us, 0),
            self._missed_any(),
            (part <= 1).astype(np.int64),
            np.where(part > 0, duration_us, 0),
            np.where(self.tells, duration_us, 0),
            *self._placed(items, counters[COL["arrived"]]),
        ]
        self.maxima = [held, counters[COL["inflight"]], self.start_us + duration_us]

    def _placed(self, items: Sequence[IngestedCut], arrived: Int64s) -> tuple[Int64s, Int64s]:
        """Sequential I/Os of each row, and those of which it is known whether they are; shapes (n,)."""
        said = [item.cut.sequential for item in items]
        if not any(said):  # of agents of before, and of sources that do not count it
            return np.zeros_like(arrived), np.zeros_like(arrived)
        none = NOT_PLACED.to_bytes(4, "little")
        parts = [each or none * item.cut.rows for each, item in zip(said, items, strict=True)]
        counts = sequential_counts(b"".join(parts))
        placed = np.where(counts < 0, 0, arrived)
        return np.minimum(np.maximum(counts, 0), placed), placed

    def span_of(self, item: int) -> tuple[int, int]:
        """Start and end of a cut, corrected, us UTC."""
        start_us = int(self._starts_us[item])
        return start_us, start_us + int(self._durations_us[item])

    def _sort_missed(self, missed: npt.NDArray[Any], row: Int64s, others: Int64s) -> None:
        """Entries by what they say; nearly always all of them compare completions with a limit.

        ``others``: completions of no read and no write, shape (n,).
        """
        nothing: Int64s = np.zeros(0, dtype=np.int64)
        self.missed, self.missed_row = missed, row
        self.failed = nothing, nothing
        self.outstanding = nothing, nothing, nothing
        self.failed_row = self.outstanding_row = nothing
        self.settled_failed, self.settled_failed_row = (nothing, nothing, nothing, nothing), nothing
        self.tells_kind = np.zeros(self.n, dtype=np.bool_)
        self.tells = np.zeros(self.n, dtype=np.bool_)
        self.refused = np.zeros(self.n, dtype=np.bool_)
        kind = missed["io"]
        if not len(kind) or int(kind.max()) < OVERDUE:
            return
        self.tells[row[kind >= OVERDUE]] = True
        is_outstanding = kind >= OUTSTANDING
        is_failed = (kind >= FAILED) & ~is_outstanding & (missed["threshold_us"] == 0)
        self.tells_kind = self._sort_outstanding(missed[is_outstanding], row[is_outstanding])
        found = missed[is_failed]
        self.failed_row = row[is_failed]
        self.failed = found["io"].astype(np.int64) - FAILED, found["counted"].astype(np.int64)
        self.refused = has_refusals(self.completed, others, self.failed, self.failed_row)
        of_limits = ~is_outstanding & ~is_failed
        self.missed, self.missed_row = missed[of_limits], row[of_limits]
        if len(self.missed):
            self._pair_settled()

    def _sort_outstanding(self, found: npt.NDArray[Any], row: Int64s) -> npt.NDArray[np.bool_]:
        """Entries of outstanding I/O; returns which rows tell kinds apart."""
        io = found["io"].astype(np.int64) - OUTSTANDING
        tells_kind = np.zeros(self.n, dtype=np.bool_)
        tells_kind[row[io != IO_ANY]] = True
        is_kindless = (io == IO_ANY) & ~tells_kind[row]
        ages = found["counted"].astype(np.int64), found["missed"].astype(np.int64)
        self.outstanding_row = np.concatenate((row, row[is_kindless]))
        kindless = np.full(int(is_kindless.sum()), KINDLESS, dtype=np.int64)
        oldest, stalled = (np.concatenate((age, age[is_kindless])) for age in ages)
        self.outstanding = np.concatenate((io, kindless)), oldest, stalled
        return tells_kind

    def _pair_settled(self) -> None:
        """Where completions of a limit were settled and others, or the same ones, failed beyond it."""
        entries, kind = self.missed, self.missed["io"].astype(np.int64) >> 2
        settles = (kind == OVERDUE >> 2) & (entries["missed"] > 0)
        fails = (kind == FAILED >> 2) & (entries["missed"] > 0)
        if not settles.any() or not fails.any():
            return
        # 32 bits of limit, 2 of io, the rest of row.
        key = (self.missed_row << 34) | ((entries["io"].astype(np.int64) & 3) << 32) | entries["threshold_us"]
        both, at, beside = np.intersect1d(key[settles], key[fails], return_indices=True)
        if not len(both):
            return
        settled = entries["missed"][settles][at].astype(np.int64)
        failed = entries["missed"][fails][beside].astype(np.int64)
        compared = np.flatnonzero(kind == 0)
        order = compared[np.argsort(key[compared], kind="stable")]
        place = np.minimum(np.searchsorted(key[order], both), max(len(order) - 1, 0))
        missed = np.zeros(len(both), dtype=np.int64)
        if len(order):
            missed = np.where(key[order][place] == both, entries["missed"][order][place].astype(np.int64), 0)
        most = np.minimum(settled, failed)
        least = np.maximum(settled + failed - np.maximum(missed, np.maximum(settled, failed)), 0)
        self.settled_failed_row = both >> 34
        self.settled_failed = (both >> 32) & 3, both & 0xFFFF_FFFF, most, least

    def _missed_any(self) -> Int64s:
        """Completed I/Os of each row above the lowest threshold that applied to them."""
        worst = np.zeros((3, self.n), dtype=np.int64)
        io = self.missed["io"].astype(np.int64)
        done = io <= IO_WRITE
        flat = io[done] * self.n + self.missed_row[done]
        np.maximum.at(worst.reshape(-1), flat, self.missed["missed"][done].astype(np.int64))
        most: Int64s = np.maximum(worst[IO_ANY], worst[IO_READ] + worst[IO_WRITE])
        return most


def has_refusals(
    completed: Int64s, others: Int64s, failed: tuple[Int64s, Int64s], row: Int64s
) -> npt.NDArray[np.bool_]:
    """Rows in which clients were refused because the storage is not there, and nothing succeeded.

    A refused client counts as a failed request of no kind, in ``others``, too. So does a flush or trim that
    fails: storage of which that is all there is to tell is taken to be gone.

    Args:
        completed: reads and writes, shape (rows,).
        others: completions of no read and no write, shape (rows,).
        failed: (io, count) of FAILED entries with threshold 0.
        row: of each of them.
    """
    io, count = failed
    refused = np.zeros(len(completed), dtype=np.int64)
    np.add.at(refused, row, np.where(io == IO_ANY, count, -count))
    found: npt.NDArray[np.bool_] = (completed == 0) & (refused > 0) & (others <= refused)
    return found


def put_aside(directory: Path, record: IngestRecord, reason: str, now_us: int) -> dict[str, Any]:
    """Keep a record's bytes in ``directory``, made if missing; returns the event that says so.

    Durability: on disk on return, because the queue forgets the record next.

    Raises:
        OSError: it is not kept; the record must stay in the queue.
    """
    make_directory(directory, 0o700)
    path = directory / f"{record.queue_seq:020d}.rec"
    write_whole(path, record.payload, synced=True)
    log.error("record-refused", queue_seq=record.queue_seq, error=reason)
    text = f"a record could not be stored and was put aside as {path.name}: {reason}"
    identity = (record.queue_seq, reason)
    return event_row(
        identity, now_us, "data-refused", "critical", element="dbmanager", subject="ingest", text=text
    )
