"""A batch: some queue records, decoded into what the ingest transaction and the archive need. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pmdaemon.errors import WireError
from pmdaemon.wire import cut as cuts
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from sla_server.db.errors import BadRecord
from sla_server.db.ingest_queue import Record
from sla_server.db.records import check_row
from sla_server.db.rollup import Ingested, screen


@dataclass(frozen=True, slots=True)
class Refused:
    """A part of a record that cannot be stored; becomes an event, never silence."""

    queue_seq: int
    position: int
    element: str
    reason: str


@dataclass(slots=True)
class Batch:
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
    refused: list[Refused] = field(default_factory=list)


def decode_batch(records: Sequence[Record], after_seq: int) -> Batch:
    """Decode the records (at least one) that follow ``after_seq`` in the queue.

    What does not decode is listed in ``refused``, never raised.
    """
    batch = Batch(after_seq + 1, records[-1].queue_seq)
    for record in records:
        try:
            message = frame.decode(record.payload)
        except WireError as exc:
            batch.refused.append(Refused(record.queue_seq, 0, "queue", str(exc)))
            continue
        if message.kind == Kind.CUTS:
            _add_cuts(batch, record.queue_seq, message)
        elif message.kind == Kind.GATEWAY:
            batch.gateways.append(message.header)
        elif message.kind == Kind.STREAMS_SEEN:
            batch.streams_seen.append(message.header)
        elif message.kind == Kind.RECORD:
            _add_rows(batch, record.queue_seq, message.header.get("rows"))
    return batch


def _add_cuts(batch: Batch, queue_seq: int, message: frame.Frame) -> None:
    header = message.header
    received, offsets = header["recv_us"], header["offset_us"]
    for position, raw in enumerate(frame.split(message.blob)):
        part = frame.decode(raw)
        gateway_id, epoch, seq = cuts.identity(part.header)
        key = (gateway_id, epoch)
        batch.marks[key] = max(seq, batch.marks.get(key, 0))
        try:
            item = Ingested(cuts.decode(part), offsets[position], received[position])
            problem = screen(item)
        except WireError as exc:
            problem = str(exc)
        if problem is None:
            batch.cuts.append(item)
        else:
            text = f"cut {seq} of epoch {epoch} was left out: {problem}"
            batch.refused.append(Refused(queue_seq, position, gateway_id, text))


def _add_rows(batch: Batch, queue_seq: int, rows: object) -> None:
    for position, pair in enumerate(rows if isinstance(rows, list) else ()):
        try:
            batch.rows.append(check_row(pair[0], pair[1]))
        except (BadRecord, LookupError, TypeError) as exc:
            batch.refused.append(Refused(queue_seq, position, "record", str(exc)))
