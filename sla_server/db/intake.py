"""What to keep of arriving messages, and what to answer once it is on disk. Pure: no queue, no mailbox.

``absorb`` turns messages into queue records and notices. The caller appends the records, and only when
their sync is confirmed sends the notices: that order is the promise of DURABLE and RECORDED.

A CUTS message is stored as it came if all its cuts are new, else again with the new ones only, so the queue
holds every cut once. DURABLE names the high water of *every* gateway in a CUTS message, also when all of it
was known already: a pair that sends a cut again has not heard, so lost notices repair themselves.

Invariant: ``high_water`` runs ahead of the disk only between ``absorb`` and the sync; if the sync fails,
the process ends and reads back what is really there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import structlog

from pmdaemon.errors import WireError
from pmdaemon.excerpt import excerpt, printable
from pmdaemon.wire import cut as cuts
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from sla_server.db.errors import BadRecord
from sla_server.db.ingest_queue import Record
from sla_server.db.records import check_row
from sla_server.db.watermarks import Admission, HighWater, spool_floors

log = structlog.get_logger("db-intake")
HIGH_WATERS_A_FRAME: Final = 900  # at most 64 bytes each, within the 64 KiB header


class Incoming(Protocol):
    """A mailbox message."""

    @property
    def sender(self) -> str:
        """Who posted it."""

    @property
    def payload(self) -> bytes:
        """One frame."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A frame to post once the records are on disk."""

    recipient: str
    payload: bytes


@dataclass(slots=True)
class Absorbed:
    """What a batch of messages comes to.

    Attributes:
        records: payloads for the ingest queue, in order.
        notices: to be sent after the sync.
        is_urgent: holds a RECORD: the writer should not wait for its interval.
    """

    records: list[bytes] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    is_urgent: bool = False


class Intake:
    """Keeps the high waters. Thread: ``db-intake`` alone.

    Args:
        incarnation: of this dbmanager process; a new number makes every pair rewind.
        high_water: from SQL.

    Attributes:
        counts: cuts kept, duplicate, hole; messages malformed; rows refused; since the start.
    """

    def __init__(self, incarnation: int, high_water: HighWater) -> None:
        self._incarnation = incarnation
        self._high_water = high_water
        self.counts: Counter[str] = Counter()

    def recover(self, records: Iterable[Record]) -> None:
        """Count what lies in the queue and is not in SQL yet. Call before anything is absorbed."""
        for record in records:
            try:
                message = frame.decode(record.payload)
            except WireError:
                continue  # the writer reports it
            if message.kind == Kind.CUTS:
                for raw in frame.split(message.blob):
                    gateway_id, epoch, seq = cuts.identity(frame.decode(raw).header)
                    self._high_water.raise_to(gateway_id, epoch, seq)
            elif message.kind == Kind.GATEWAY:
                self._raise_floors(message.header)

    def greetings(self, pairs: Iterable[str]) -> list[Notice]:
        """WATERMARKS of everything, for every pair, at start."""
        return [notice for pair in pairs for notice in self._watermarks(pair, self._high_water.rows())]

    def absorb(self, messages: Iterable[Incoming]) -> Absorbed:
        """Decide on messages, in order. What is malformed is counted and logged, never stored."""
        result = Absorbed()
        durable: dict[str, set[tuple[str, int]]] = {}
        for message in messages:
            try:
                parsed = frame.decode(message.payload)
                if parsed.kind == Kind.CUTS:
                    keys = self._absorb_cuts(parsed, message.payload, result)
                    durable.setdefault(message.sender, set()).update(keys)
                elif parsed.kind == Kind.GATEWAY:
                    result.records.append(message.payload)
                    self._absorb_gateway(parsed.header, message.sender, result)
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
            result.notices += self._frames(Kind.DURABLE, sender, [row for row in rows if row[2]])
        return result

    def _absorb_cuts(self, parsed: frame.Frame, payload: bytes, result: Absorbed) -> set[tuple[str, int]]:
        header = parsed.header
        raws = list(frame.split(parsed.blob))
        times = _times(header, len(raws))
        headers = [frame.decode(raw).header for raw in raws]
        identities = [cuts.identity(item) for item in headers]  # all, before the first is admitted
        fresh: list[int] = []
        holes = 0
        for position, ((gateway_id, epoch, seq), item) in enumerate(zip(identities, headers, strict=True)):
            gap = item.get("gap", 0)
            gap = gap if type(gap) is int and gap > 0 else 0
            verdict = self._high_water.admit(gateway_id, epoch, seq, gap)
            self.counts[verdict.name.lower()] += 1
            if verdict is Admission.NEW:
                fresh.append(position)
            elif verdict is Admission.HOLE and not holes:
                high = self._high_water.of(gateway_id, epoch)
                log.info("hole", gateway=gateway_id, epoch=epoch, seq=seq, high_water=high)
            holes += verdict is Admission.HOLE  # one line a message is enough
        if len(fresh) == len(raws):
            result.records.append(payload)
        elif fresh:
            kept = {name: [values[position] for position in fresh] for name, values in times.items()}
            blob = b"".join(raws[position] for position in fresh)
            result.records.append(frame.encode(Kind.CUTS, {**header, **kept, "n": len(fresh)}, blob))
        return {(gateway_id, epoch) for gateway_id, epoch, _ in identities}

    def _absorb_gateway(self, header: dict[str, Any], sender: str, result: Absorbed) -> None:
        self._raise_floors(header)
        gateway_id = header.get("gw")
        if header.get("state") == "up" and isinstance(gateway_id, str):
            result.notices += self._watermarks(sender, self._high_water.rows(gateway_id))

    def _raise_floors(self, header: dict[str, Any]) -> None:
        for gateway_id, epoch, seq in spool_floors(header):
            before = self._high_water.of(gateway_id, epoch)
            if self._high_water.raise_to(gateway_id, epoch, seq):
                log.warning(
                    "agent-lacks-cuts", gateway=gateway_id, epoch=epoch, first_lost=before + 1, last_lost=seq
                )

    def _absorb_record(self, header: dict[str, Any], message: Incoming, result: Absorbed) -> None:
        """A row that cannot be stored is left out; with ``together`` none is stored without the others."""
        request = header.get("req")
        rows = header.get("rows")
        error = "" if isinstance(rows, list) else "`rows` is no list of [table, row]"
        sound: list[Any] = []
        for pair in rows if isinstance(rows, list) else ():
            if problem := _problem_of(pair):
                self.counts["rows_refused"] += 1
                error = error or problem
            else:
                sound.append(pair)
        if error:
            left = 0 if header.get("together") is True else len(sound)
            log.warning("record-refused", sender=message.sender, error=printable(error, 500), stored=left)
            sound = sound[:left]
        if sound or not error:
            payload = frame.encode(Kind.RECORD, {**header, "rows": sound}) if error else message.payload
            result.records.append(payload)
            result.is_urgent = True
        if isinstance(request, str):
            answer = {"req": request, "ok": not error, "error": error}
            result.notices.append(Notice(message.sender, frame.encode(Kind.RECORDED, answer)))

    def _watermarks(self, recipient: str, rows: Sequence[list[Any]]) -> list[Notice]:
        # An empty one, too: a pair polls nobody before its first WATERMARKS.
        return list(self._frames(Kind.WATERMARKS, recipient, rows)) or [
            Notice(recipient, frame.encode(Kind.WATERMARKS, {"inc": self._incarnation, "hw": []}))
        ]

    def _frames(self, kind: Kind, recipient: str, rows: Sequence[list[Any]]) -> Iterator[Notice]:
        for start in range(0, len(rows), HIGH_WATERS_A_FRAME):
            header = {"inc": self._incarnation, "hw": list(rows[start : start + HIGH_WATERS_A_FRAME])}
            yield Notice(recipient, frame.encode(kind, header))


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


def _times(header: dict[str, Any], n: int) -> dict[str, list[int]]:
    """The per-cut columns of a CUTS header; those the writer needs are checked.

    Raises:
        LookupError, TypeError: they do not fit the number of cuts.
    """
    columns: dict[str, list[int]] = {}
    for name in ("recv_us", "offset_us", "live"):
        values = header[name] if name != "live" else header.get(name, [False] * n)
        if not isinstance(values, list) or len(values) != n:
            raise TypeError(f"key {name!r} does not have one value for each of the {n} cuts")
        if not all(isinstance(value, int) and abs(value) < 1 << 62 for value in values):
            raise TypeError(f"key {name!r} holds something that is no time")
        columns[name] = values
    return columns
