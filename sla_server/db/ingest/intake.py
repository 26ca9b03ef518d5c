"""What to keep of arriving messages, and what to answer once it is on disk. Pure: no queue, no mailbox.

``absorb`` turns messages into queue records and notices. The caller appends the records, and only when
their sync is confirmed sends the notices: that order is the promise of DURABLE and RECORDED.

A CUTS message is stored as it came if all its cuts are new, else again with the new ones only, so the queue
holds every cut once. DURABLE names the high water of *every* gateway in a CUTS message, also when all of it
was known already: a pair that sends a cut again has not got the notice, so lost notices repair themselves.

``HighWater`` keeps the highest contiguous cut kept, of each (gateway, epoch). A cut is *new* if it directly
continues what is kept; ``gap`` cuts that its agent had to drop before it count as bridged. At or below the
high water it is a *duplicate*. Anything else leaves a *hole*: it is not kept, the PMDaemon rewinds to ack + 1
after 10 s without progress, and the missing cuts come first.

An epoch begins at 1, also when nothing of it was ever received: a first cut may have been refused by a full
mailbox, and taking the second would make the agent forget the first. When the agent does not hold the cuts
below some ``first`` any more (its spool overflowed, or this server's memory was lost), GATEWAY says so in
``spool``; the high water is then raised to first - 1, which is the only way over such a hole.

Invariant: ``high_water`` runs ahead of the disk only between ``absorb`` and the sync; if the sync fails,
the process ends and reads back what is really there.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Final, NamedTuple, Protocol

import structlog

from pmdaemon.errors import WireError
from pmdaemon.reserve import event_row, raise_event
from pmdaemon.runtime.excerpt import excerpt, printable
from pmdaemon.wire import frame
from pmdaemon.wire.cut_header import CutHeader
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.server import (
    CutsHeader,
    DurableNotice,
    GatewayReport,
    Recorded,
    RecordRows,
    WatermarksNotice,
    spool_floors,
)
from sla_server.db.errors import BadRecord
from sla_server.db.ingest.queue import IngestRecord
from sla_server.db.ingest.records import check_row
from sla_server.gateway_states import NAMESPACE

Epoch = tuple[str, int]
"""(gateway_id, epoch)."""
log = structlog.get_logger("db-intake")
HIGH_WATERS_A_FRAME: Final = 900  # at most 64 bytes each, within the 64 KiB header


class CutAdmission(Enum):
    """What to do with a cut, and why."""

    NEW = auto()
    DUPLICATE = auto()
    HOLE = auto()


class HighWater:
    """The table of high waters. Not thread-safe: belongs to the intake thread."""

    def __init__(self, rows: Iterable[tuple[str, int, int]] = ()) -> None:
        self._seq: dict[Epoch, int] = {}
        self._epochs: dict[str, list[int]] = {}
        for gateway_id, epoch, seq in rows:
            self.raise_to(gateway_id, epoch, seq)

    def of(self, gateway_id: str, epoch: int) -> int:
        """Highest contiguous seq kept, 0 for none."""
        return self._seq.get((gateway_id, epoch), 0)

    def raise_to(self, gateway_id: str, epoch: int, seq: int) -> bool:
        """Everything up to ``seq`` is kept, or known to be lost; returns whether that changes anything."""
        key = (gateway_id, epoch)
        if key not in self._seq:
            self._epochs.setdefault(gateway_id, []).append(epoch)
        elif seq <= self._seq[key]:
            return False
        self._seq[key] = seq
        return True

    def correct(self, gateway_id: str, epoch: int, seq: int) -> None:
        """Replace what was stored of a known epoch, which was wrong."""
        self._seq[gateway_id, epoch] = seq

    def knows(self, gateway_id: str) -> bool:
        """Whether anything of this gateway was ever kept."""
        return gateway_id in self._epochs

    def admit(self, gateway_id: str, epoch: int, seq: int, gap: int = 0) -> CutAdmission:
        """Judge one cut; a new one raises the high water."""
        high = self.of(gateway_id, epoch)
        if seq <= high:
            return CutAdmission.DUPLICATE
        if seq - 1 - gap > high:
            return CutAdmission.HOLE
        self.raise_to(gateway_id, epoch, seq)
        return CutAdmission.NEW

    def rows(self, gateway_id: str | None = None) -> list[list[Any]]:
        """[gateway_id, epoch, seq] of one gateway or of all, as WATERMARKS carries them."""
        names = self._epochs if gateway_id is None else (gateway_id,)
        return [
            [name, epoch, self._seq[name, epoch]] for name in names for epoch in self._epochs.get(name, ())
        ]


class Incoming(Protocol):
    """A mailbox message."""

    @property
    def sender(self) -> str:
        """The process that posted it."""

    @property
    def payload(self) -> bytes:
        """One frame."""


@dataclass(frozen=True, slots=True)
class IntakeNotice:
    """A frame to post once the records are on disk."""

    recipient: str
    payload: bytes


@dataclass(slots=True)
class IntakeResult:
    """What a batch of messages comes to.

    Attributes:
        records: payloads for the ingest queue, in order.
        notices: to be sent after the sync.
        is_urgent: holds a RECORD: the writer should not wait for its interval.
    """

    records: list[bytes] = field(default_factory=list)
    notices: list[IntakeNotice] = field(default_factory=list)
    is_urgent: bool = False


class CorrectedWatermark(NamedTuple):
    """A high water that SQL had wrong: ``had`` instead of ``seq``."""

    gateway_id: str
    epoch: int
    had: int
    seq: int


class IngestIntake:
    """Keeps the high waters. Thread: ``db-intake`` alone.

    Args:
        incarnation: of this dbmanager process; a new number makes every pair rewind.
        high_water: from SQL.
        dropped: gateway_id to the cuts its agent said it had dropped, from SQL.

    Attributes:
        counts: cuts kept, duplicate, hole; messages malformed; rows refused; since the start.
    """

    def __init__(
        self, incarnation: int, high_water: HighWater, dropped: Mapping[str, int] | None = None
    ) -> None:
        self._incarnation = incarnation
        self._high_water = high_water
        self._dropped = dict(dropped or {})
        self.counts: Counter[str] = Counter()

    def recover(
        self, records: Iterable[IngestRecord], sql_seq: int, *, is_complete: bool = True
    ) -> list[CorrectedWatermark]:
        """Count what lies in the queue and is not in SQL yet, and compare the rest with what SQL says.

        The queue keeps records for a while after they are in SQL, and those of an epoch have rising numbers:
        so they say exactly what was kept of it. SQL says something else if it was changed, or restored, while
        the server was stopped; the queue is believed, or cuts would be dropped as known, or kept twice.

        Call before anything is absorbed.

        Args:
            records: all that the queue holds, in order.
            sql_seq: those up to it are in SQL.
            is_complete: none of the newest records is missing. If some are, SQL may rightly know more.
        """
        kept, in_sql = HighWater(), HighWater()
        for record in records:
            for gateway_id, epoch, seq in _kept_by(record):
                kept.raise_to(gateway_id, epoch, seq)
                if record.queue_seq <= sql_seq:
                    in_sql.raise_to(gateway_id, epoch, seq)
        corrected = []
        for gateway_id, epoch, seq in kept.rows():
            had, least = self._high_water.of(gateway_id, epoch), in_sql.of(gateway_id, epoch)
            if had < least or (had > seq and is_complete):
                corrected.append(CorrectedWatermark(gateway_id, epoch, had, least if had < least else seq))
                self._high_water.correct(gateway_id, epoch, corrected[-1].seq)
            self._high_water.raise_to(gateway_id, epoch, seq)
        return corrected

    def all_watermarks(self, pairs: Iterable[str]) -> list[IntakeNotice]:
        """WATERMARKS of everything, for every pair, at start."""
        return [notice for pair in pairs for notice in self._watermarks(pair, self._high_water.rows())]

    def absorb(self, messages: Iterable[Incoming]) -> IntakeResult:
        """Decide on messages, in order. What is malformed is counted and logged, never stored."""
        result = IntakeResult()
        durable: dict[str, set[tuple[str, int]]] = {}
        for message in messages:
            try:
                parsed = frame.decode_own(message.payload)
                if parsed.kind == Kind.CUTS:
                    keys = self._absorb_cuts(parsed, message.payload, result)
                    durable.setdefault(message.sender, set()).update(keys)
                elif parsed.kind == Kind.GATEWAY:
                    self._absorb_gateway(parsed.header, message, result)
                elif parsed.kind == Kind.STREAMS_SEEN:
                    result.records.append(message.payload)
                elif parsed.kind == Kind.RECORD:
                    self._absorb_record(parsed.header, message, result)
                else:
                    self.counts["unknown"] += 1
            except (WireError, LookupError, TypeError, ValueError, OverflowError) as exc:
                self.counts["malformed"] += 1
                log.warning("malformed-message", sender=message.sender, error=printable(str(exc), 500))
        for sender, keys in durable.items():
            rows = [[gw, ep, self._high_water.of(gw, ep)] for gw, ep in sorted(keys)]
            result.notices += self._frames(DurableNotice, sender, [row for row in rows if row[2]])
        return result

    def _absorb_cuts(self, parsed: frame.Frame, payload: bytes, result: IntakeResult) -> set[tuple[str, int]]:
        raws = list(frame.split(parsed.blob))
        header = CutsHeader.parse(parsed.header)
        _check_times(header, len(raws))
        heads = [CutHeader.parse(raw) for raw in raws]  # all, before the first is admitted
        fresh: list[int] = []
        holes = 0
        for position, (gateway_id, epoch, seq, gap) in enumerate(heads):
            verdict = self._high_water.admit(gateway_id, epoch, seq, gap)
            self.counts[verdict.name.lower()] += 1
            if verdict is CutAdmission.NEW:
                fresh.append(position)
            elif verdict is CutAdmission.HOLE and not holes:
                high = self._high_water.of(gateway_id, epoch)
                log.info("hole", gateway=gateway_id, epoch=epoch, seq=seq, high_water=high)
            holes += verdict is CutAdmission.HOLE  # one line a message is enough
        if len(fresh) == len(raws):
            result.records.append(payload)
        elif fresh:
            kept = CutsHeader(
                header.pair,
                len(fresh),
                [header.recv_us[position] for position in fresh],
                [header.offset_us[position] for position in fresh],
                [header.live[position] for position in fresh],
            )
            blob = b"".join(raws[position] for position in fresh)
            result.records.append(kept.encode_with(blob))
        return {(head.gateway_id, head.epoch) for head in heads}

    def _absorb_gateway(self, header: dict[str, Any], message: Incoming, result: IntakeResult) -> None:
        report = GatewayReport.parse(header)
        gateway_id, known_dropped = report.gateway_id, self._dropped.get(report.gateway_id, 0)
        reported = report.dropped if type(report.dropped) is int else 0
        lost = self._raise_floors(gateway_id, spool_floors(header)) - max(0, reported - known_dropped)
        self._dropped[gateway_id] = max(reported, known_dropped)
        if lost > 0:
            event = _lost_event(report, lost)
            raise_event(event)
            result.records.append(replace(report, lost_cuts=lost).encode())
            result.records.append(RecordRows([["events", event]], None, "dbmanager").encode())
        else:
            result.records.append(message.payload)
        if report.state == "up":
            result.notices += self._watermarks(message.sender, self._high_water.rows(gateway_id))

    def _raise_floors(self, gateway_id: str, floors: Iterable[tuple[str, int, int]]) -> int:
        """Pass what the agent does not hold any more; returns how many cuts this server lacks for good."""
        lacking = 0
        is_known = self._high_water.knows(gateway_id)
        for _gateway_id, epoch, seq in floors:
            before = self._high_water.of(gateway_id, epoch)
            if self._high_water.raise_to(gateway_id, epoch, seq):
                # Of a gateway that comes from another server, that one has them.
                lacking += seq - before if is_known else 0
                held_by = (
                    "neither agent nor server" if is_known else "the agent does not, perhaps another server"
                )
                log.warning(
                    "agent-lacks-cuts",
                    gateway=gateway_id,
                    epoch=epoch,
                    first=before + 1,
                    last=seq,
                    held_by=held_by,
                )
        return lacking

    def _absorb_record(self, header: dict[str, Any], message: Incoming, result: IntakeResult) -> None:
        """A row that cannot be stored is left out; with ``together`` none is stored without the others."""
        record = RecordRows.parse(header)
        error = "" if isinstance(record.rows, list) else "`rows` is no list of [table, row]"
        sound: list[Any] = []
        for pair in record.rows if isinstance(record.rows, list) else ():
            if problem := _problem_of(pair):
                self.counts["rows_refused"] += 1
                error = error or problem
            else:
                sound.append(pair)
        if error:
            left = 0 if record.together else len(sound)
            log.warning("record-refused", sender=message.sender, error=printable(error, 500), stored=left)
            sound = sound[:left]
        if sound or not error:
            payload = replace(record, rows=sound).encode() if error else message.payload
            result.records.append(payload)
            result.is_urgent = True
        if record.request is not None:
            answer = Recorded(record.request, not error, error)
            result.notices.append(IntakeNotice(message.sender, answer.encode()))

    def _watermarks(self, recipient: str, rows: Sequence[list[Any]]) -> list[IntakeNotice]:
        # An empty one, too: a pair polls no gateway before its first WATERMARKS.
        return list(self._frames(WatermarksNotice, recipient, rows)) or [
            IntakeNotice(recipient, WatermarksNotice(self._incarnation, []).encode())
        ]

    def _frames(
        self, notice: type[WatermarksNotice | DurableNotice], recipient: str, rows: Sequence[list[Any]]
    ) -> Iterator[IntakeNotice]:
        for start in range(0, len(rows), HIGH_WATERS_A_FRAME):
            part = list(rows[start : start + HIGH_WATERS_A_FRAME])
            yield IntakeNotice(recipient, notice(self._incarnation, part).encode())


def _problem_of(pair: object) -> str:
    """Why one [table, row] of a RECORD cannot be stored; empty if it can."""
    if not isinstance(pair, list) or len(pair) != 2:
        return f"`rows` holds {excerpt(pair)}, expected [table, row]"
    try:
        check_row(pair[0], pair[1])
    except BadRecord as exc:
        return str(exc)
    except (LookupError, TypeError, ValueError, OverflowError) as exc:
        return f"a row of {excerpt(pair[0])} cannot be read ({type(exc).__name__})"
    return ""


def _kept_by(record: IngestRecord) -> Iterator[tuple[str, int, int]]:
    """(gateway_id, epoch, seq) that a record raises high waters to."""
    try:
        message = frame.decode_own(record.payload)
    except WireError:
        return  # the writer reports it
    if message.kind == Kind.CUTS:
        for raw in frame.split(message.blob):
            gateway_id, epoch, seq, _ = CutHeader.parse(raw)
            yield gateway_id, epoch, seq
    elif message.kind == Kind.GATEWAY:
        yield from spool_floors(message.header)


def _lost_event(report: GatewayReport, lost: int) -> dict[str, Any]:
    gateway_id, at_us, name = report.gateway_id, report.at_us, report.name or report.gateway_id
    text = (
        f"{lost} cuts of gateway {name} are lost: this server does not have them and the agent does not hold "
        "them any more. The database was restored from an older backup, or the ingest queue was lost"
    )
    details = {"gateway_id": gateway_id, "cuts": lost}
    event_id = str(uuid.uuid5(NAMESPACE, f"cuts-lost/{gateway_id}/{at_us}/{lost}"))
    return event_row("cuts-lost", "critical", "gateway", name, text, at_us, details, event_id)


def _check_times(header: CutsHeader, n: int) -> None:
    """Check what the writer needs of the columns of CUTS.

    Raises:
        TypeError: they do not fit the number of cuts, or hold no times.
    """
    if header.cuts != n:
        raise TypeError(f"CUTS says that it has {header.cuts} cuts, and has {n}")
    for name, values in (("recv_us", header.recv_us), ("offset_us", header.offset_us)):
        if not all(isinstance(value, int) and abs(value) < 1 << 62 for value in values):
            raise TypeError(f"key {name!r} holds something that is no time")
