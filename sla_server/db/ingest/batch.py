"""A batch: some queue records, decoded into what the ingest transaction and the archive need. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pmdaemon.errors import WireError
from pmdaemon.wire import cut as cuts
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from sla_server.db.errors import BadRecord
from sla_server.db.ingest.queue import IngestRecord
from sla_server.db.ingest.records import check_row
from sla_server.db.ingest.rollup import CutColumns, Ingested, columns_of

_Found = tuple[int, int, Ingested]  # queue_seq, position in its message, cut


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
    cuts: list[Ingested] = field(default_factory=list)
    marks: dict[tuple[str, int], int] = field(default_factory=dict)
    gateways: list[dict[str, Any]] = field(default_factory=list)
    streams_seen: list[dict[str, Any]] = field(default_factory=list)
    rows: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    refused: list[RefusedRecord] = field(default_factory=list)
    _columns: CutColumns | None = None

    @property
    def columns(self) -> CutColumns | None:
        """Of ``cuts``, joined once for all who need them; None if there are none."""
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
    """The cuts of a message whose headers can be true; nobody has looked at their columns yet."""
    received, offsets = message.header.get("recv_us", ()), message.header.get("offset_us", ())
    for position, raw in enumerate(frame.split(message.blob)):
        part = frame.decode(raw)
        gateway_id, epoch, seq = cuts.identity(part.header)
        key = (gateway_id, epoch)
        batch.marks[key] = max(seq, batch.marks.get(key, 0))
        try:
            item = Ingested(cuts.view(part), offsets[position], received[position])
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
