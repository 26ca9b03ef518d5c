"""A batch: some queue records, decoded into what the ingest transaction and the archive need.

Everything but ``put_aside`` is pure.

``decode_batch`` lists what cannot be stored in ``refused``. Cuts whose numbers cannot be true are among it
(``wire.cut``: ``fault_of``, ``time_fault_of``); otherwise one of them could overflow a sum and stop the
ingest of all gateways. ``CutRows`` are the rows of many cuts as columns, which a window adds. ``put_aside``
alone writes: it keeps a record that the database refuses although it passed all checks as a file, and reports
it.
"""

from __future__ import annotations

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
    OUTSTANDING,
    OVERDUE,
    Cut,
    overflows,
    problem_of,
)
from pmdaemon.wire.kinds import Kind
from sla_server.db.errors import BadRecord
from sla_server.db.histogram_codec import TOTAL_BUCKETS, Int64s
from sla_server.db.ingest.queue import IngestRecord
from sla_server.db.ingest.records import check_row, event_row
from sla_server.db.schema import COUNTERS

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
    """

    cut: Cut
    offset_us: int
    recv_us: int

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
        gateways: GATEWAY headers, in order.
        streams_seen: STREAMS_SEEN headers, in order.
        rows: RECORD rows, checked, in order.
    """

    first_seq: int
    last_seq: int
    cuts: list[IngestedCut] = field(default_factory=list)
    marks: dict[tuple[str, int], int] = field(default_factory=dict)
    gateways: list[dict[str, Any]] = field(default_factory=list)
    streams_seen: list[dict[str, Any]] = field(default_factory=list)
    rows: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    refused: list[RefusedRecord] = field(default_factory=list)
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
            message = frame.decode(record.payload)
        except WireError as exc:
            batch.refused.append(RefusedRecord(record.queue_seq, 0, "queue", str(exc)))
            continue
        if message.kind == Kind.CUTS:
            found += _cuts_of(batch, record.queue_seq, message)
        elif message.kind == Kind.GATEWAY:
            batch.gateways.append(message.header)
        elif message.kind == Kind.STREAMS_SEEN:
            batch.streams_seen.append(message.header)
        elif message.kind == Kind.RECORD:
            _add_rows(batch, record.queue_seq, message.header.get("rows"))
    _take_sound(batch, found)
    return batch


def _cuts_of(batch: DecodedBatch, queue_seq: int, message: frame.Frame) -> Iterator[_Found]:
    """The cuts of a message whose headers can be true; their columns are not checked yet."""
    received, offsets = message.header.get("recv_us", ()), message.header.get("offset_us", ())
    for position, raw in enumerate(frame.split(message.blob)):
        part = frame.decode(raw)
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
        outstanding: (oldest_ms, stalled_ms) likewise; ``outstanding_row`` alike.
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
        duration_us = np.array([item.cut.duration_us for item in items], dtype=np.int64)[self.item]
        # As one number each: row, bucket << 16, count << 32.
        entries: Int64s = columns.hist.view("<i8")
        offset = np.repeat(offsets, columns.hist_entries)
        total = np.flatnonzero((entries & _BUCKET_BITS) < TOTAL_BUCKETS << 16)
        entries = entries[total]
        self.hist_row: Int64s = (entries & 0xFFFF) + offset[total]
        self.hist_bucket: Int64s = (entries >> 16) & 0xFFFF
        self.hist_count: Int64s = (entries >> 32) & 0xFFFF_FFFF
        self._sort_missed(columns.missed, columns.missed["row"] + np.repeat(offsets, columns.missed_entries))
        held = counters[COL["held"]]
        was_held = (counters[COL["delay_sum_us"]] > 0) | (held > 0)
        self.sums = [
            *(counters[row_of] for row_of in _COUNTER_ROWS),
            duration_us,
            np.where(was_held, duration_us, 0),
            self._missed_any(),
            np.ones(self.n, dtype=np.int64),
        ]
        self.maxima = [held, counters[COL["inflight"]], self.start_us + duration_us]

    def _sort_missed(self, missed: npt.NDArray[Any], row: Int64s) -> None:
        """Entries by what they say; nearly always all of them compare completions with a limit."""
        nothing: Int64s = np.zeros(0, dtype=np.int64)
        self.missed, self.missed_row = missed, row
        self.failed = self.outstanding = nothing, nothing
        self.failed_row = self.outstanding_row = nothing
        kind = missed["io"]
        if not len(kind) or int(kind.max()) < OVERDUE:
            return
        is_outstanding = kind >= OUTSTANDING
        is_failed = (kind >= FAILED) & ~is_outstanding & (missed["threshold_us"] == 0)
        found = missed[is_outstanding]
        self.outstanding_row = row[is_outstanding]
        self.outstanding = found["counted"].astype(np.int64), found["missed"].astype(np.int64)
        found = missed[is_failed]
        self.failed_row = row[is_failed]
        self.failed = found["io"].astype(np.int64) - FAILED, found["counted"].astype(np.int64)
        of_limits = ~is_outstanding & ~is_failed
        self.missed, self.missed_row = missed[of_limits], row[of_limits]

    def _missed_any(self) -> Int64s:
        """Completed I/Os of each row above the lowest threshold that applied to them."""
        worst = np.zeros((3, self.n), dtype=np.int64)
        io = self.missed["io"].astype(np.int64)
        done = io <= IO_WRITE
        flat = io[done] * self.n + self.missed_row[done]
        np.maximum.at(worst.reshape(-1), flat, self.missed["missed"][done].astype(np.int64))
        most: Int64s = np.maximum(worst[IO_ANY], worst[IO_READ] + worst[IO_WRITE])
        return most


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
