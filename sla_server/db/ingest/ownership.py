"""Volume ownership in the ingest: decides claims in the queue's order, and leaves out what does not count.

``take`` goes through what a batch of records announces, in the transaction that stores it: claims
(``sla_server.ownership``) are made and changed, events say which need a person, and the batch comes back with
the exports and streams that count. The others wait in memory, and are stored when their claim is approved (a
RECORD row of ``volume_owners``). After a restart the pairs announce everything again, so that nothing of it
needs to be durable; rows of cuts that were in the queue before that are left out.

``screened`` leaves rows out of cuts: those of streams that wait, those that carry the number of another
gateway's stream (it follows from names that anyone may know), and those under a number that was announced by
no gateway: else they would count for the volume that is announced under it one day. An agent announces all
its streams at the start of a session, also those of cuts in its spool. ``screened`` looks at a gateway's
stream column as bytes and only again when that changes, or some claim does: of the usual cut it is one
comparison.

Invariants: memory is what the records up to the last commit make of the table; ``finish`` keeps or drops what
``take`` did, with the transaction. Values inside its dicts are replaced, never changed. If the answer to a
commit was lost, ``load`` reads what SQL has of it, and ``recall`` brings back the rest.

With ``volume_ownership = "open"`` only people's decisions are stored; nothing is left out. What is stored
then belongs to its gateways when the mode is another one again.

Thread: the writer's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, case, exists, func, select, update

from pmdaemon.wire.cut import COL, SEQUENTIAL, Cut
from pmdaemon.wire.messages.stored import StoredExport, StoredGateway, StoredStream, StoredStreams
from pmdaemon.wire.plane_marks import rows_by_plane
from sla_server.db import schema
from sla_server.db.histogram_codec import Int64s
from sla_server.db.ingest.batch import DecodedBatch
from sla_server.db.ingest.records import add_events, event_row
from sla_server.db.schema import DAY_US, HOUR_US
from sla_server.db.upsert import upsert
from sla_server.ownership import (
    APPROVED,
    CERTIFICATE,
    FIRST_SIGHT_VOLUMES,
    PENDING,
    REVOKED,
    UPDATE,
    Key,
    Ownership,
    VolumeClaim,
    VolumeOwners,
    enumerated,
    pending_text,
)
from sla_server.rows import Row

TABLE: Final = "volume_owners"
MOST_WAITING: Final = 16_384
"""Streams of one gateway that wait and are not stored; a pair announces as many at once. The oldest go. Those
that are stored always wait: their rows would count at once if they were forgotten."""
FOREIGN: Final = ""
UNANNOUNCED: Final = "?"
"""Instead of a volume: rows under numbers of another gateway's streams, or of none. Neither is a name."""
_STREAM_ID: Final = COL["stream_id"]
_CHANGED: Final = (
    "name", "state", "backend", "shown_backend", "decided_by", "changed_us", "version",
)  # fmt: skip
Bools = npt.NDArray[np.bool_]
_State = tuple[
    VolumeOwners, dict[str, dict[int, StoredStream]], dict[str, dict[str, StoredExport]], dict[str, str], int
]


class StreamHolders:
    """Which gateway a stream's number belongs to: arrays as of the start, and a dict of those since."""

    def __init__(self, rows: Iterable[tuple[int, str]] = ()) -> None:
        found = sorted(rows)
        self._ids: Int64s = np.array([stream_id for stream_id, _ in found], dtype=np.int64)
        self._gateways: list[str] = [gateway_id for _, gateway_id in found]
        self._newer: dict[int, str] = {}

    def add(self, stream_id: int, gateway_id: str) -> None:
        """A stream was announced."""
        self._newer[stream_id] = gateway_id

    def of(self, ids: list[int]) -> list[str | None]:
        """The gateway of each; None for one that was never announced."""
        found: list[str | None] = [None] * len(ids)
        if len(self._ids):
            wanted = np.array(ids, dtype=np.int64)
            place = np.minimum(np.searchsorted(self._ids, wanted), len(self._ids) - 1)
            for index in np.flatnonzero(self._ids[place] == wanted).tolist():
                found[index] = self._gateways[int(place[index])]
        return [self._newer.get(stream_id, known) for stream_id, known in zip(ids, found, strict=True)]


class IngestOwnership:
    """See the module. ``mode``: the setting ``volume_ownership``; ``first_sight_volumes`` likewise."""

    def __init__(self, mode: Ownership, first_sight_volumes: int = FIRST_SIGHT_VOLUMES) -> None:
        self._owners = VolumeOwners(mode, first_sight_volumes=first_sight_volumes)
        self._streams: dict[str, dict[int, StoredStream]] = {}  # of a gateway, announced and waiting
        self._exports: dict[str, dict[str, StoredExport]] = {}  # likewise, by volume
        self._names: dict[str, str] = {}
        self._version = 0
        self._holders = StreamHolders()
        self._before: _State | None = None
        self._kept: dict[str, tuple[bytes, Bools | None, Counter[Key]]] = {}

    @property
    def is_open(self) -> bool:
        """Whether everything counts."""
        return self._owners.mode == "open"

    def load(self, connection: Connection) -> None:
        """Read the table again; what waits stays."""
        table, streams = schema.volume_owners, schema.streams
        if not self.is_open:
            _take_over(connection)
        rows = connection.execute(select(table)).mappings().all()
        claims = [VolumeClaim.of_row(dict(row)) for row in rows]
        self._owners = self._owners.with_claims(claims)
        self._version = max((claim.version for claim in claims), default=0)
        if not self.is_open:
            named = select(streams.c.stream_id, streams.c.gateway_id).where(streams.c.volume != "")
            self._holders = StreamHolders((row[0], row[1]) for row in connection.execute(named))
        self._block(connection)
        self._forget_stored()
        self._kept = {}

    def recall(self, batch: DecodedBatch) -> None:
        """A batch was stored, though ``finish`` dropped what it said: the answer to the commit was lost.

        After ``load``, which read what is in SQL. Here is the rest: lists of certificates, and what waits.
        """
        if self.is_open:
            return
        for gateway in batch.gateways:
            if gateway.exports is not None:
                self._take_list(gateway, 0)  # the claims that it takes back are in SQL
        self._admitted(batch, set())
        self._kept = {}

    def _forget_stored(self) -> None:
        """What was approved waits no more: the transaction that approved it has stored it, too."""
        for gateway_id, rows in self._streams.items():
            holders = self._holders.of(list(rows))
            self._streams[gateway_id] = {
                stream_id: row
                for (stream_id, row), holder in zip(rows.items(), holders, strict=True)
                if holder != gateway_id or self._backend_of(gateway_id, row) is None
            }
        for gateway_id, exports in self._exports.items():
            self._exports[gateway_id] = {
                volume: row
                for volume, row in exports.items()
                if self._backend_of(gateway_id, row) != row.backend
            }

    def _backend_of(self, gateway_id: str, row: StoredExport | StoredStream) -> str | None:
        """The backend on which an export or a stream counts; None: it does not."""
        return self._owners.admitted(gateway_id, row.volume, row.backend)

    def _block(self, connection: Connection, keys: Iterable[Key] | None = None) -> None:
        """Let the stored streams of claims that were approved once wait; of ``keys``, or of all claims."""
        table, streams = schema.volume_owners, schema.streams
        is_of = (table.c.gateway_id == streams.c.gateway_id) & (table.c.volume == streams.c.volume)
        columns = (streams.c.stream_id, streams.c.gateway_id, streams.c.volume, streams.c.client)
        every = select(*columns, streams.c.backend).join(table, is_of).where(table.c.state != APPROVED)
        asked: Iterable[Key | None] = keys if keys is not None else (None,)
        for key in asked:
            wanted = every
            if key is not None:
                wanted = every.where(table.c.volume == key[0], table.c.gateway_id == key[1])
            for stream_id, gateway_id, volume, client, backend in connection.execute(wanted):
                row = StoredStream(stream_id, volume, client, backend)
                self._streams[gateway_id] = {**self._streams.get(gateway_id, {}), stream_id: row}

    # -- What is announced

    def decides(self, batch: DecodedBatch) -> bool:
        """Whether ``take`` may change which rows of the cuts that follow count.

        It does not where gateways only say again what is theirs already, as all of them do after a restart.
        """
        if any(table == TABLE for table, _row in batch.rows):
            return True
        if self.is_open:
            return False
        return not all(map(self._are_known_exports, batch.gateways)) or not all(
            map(self._are_known_streams, batch.streams_seen)
        )

    def _are_known_exports(self, gateway: StoredGateway) -> bool:
        gateway_id = gateway.gateway_id
        if gateway.exports is None:
            return True
        if gateway.volumes is not None or self._streams.get(gateway_id) or self._exports.get(gateway_id):
            return False
        for row in gateway.exports:
            claim = self._owners.of(row.volume).get(gateway_id)
            if claim is None or claim.name != gateway.name or claim.needs_approval:
                return False
            if not claim.backend == claim.shown_backend == row.backend != "":
                return False
        return True

    def _are_known_streams(self, announced: StoredStreams) -> bool:
        gateway_id, rows = announced.gateway_id, announced.streams
        if self._streams.get(gateway_id):
            return False
        if any(holder != gateway_id for holder in self._holders.of([row.stream_id for row in rows])):
            return False
        return all(self._backend_of(gateway_id, row) == row.backend for row in rows)

    def take(self, connection: Connection, batch: DecodedBatch, now_us: int) -> DecodedBatch:
        """Decide on what a batch shows; returns it with what counts of it. ``finish`` follows.

        Raises:
            SQLAlchemyError: translated by the caller's ``engine.begin``.
        """
        decided = [row for table, row in batch.rows if table == TABLE]
        shows = batch.streams_seen or any(gateway.exports is not None for gateway in batch.gateways)
        if (self.is_open or not shows) and not decided:
            return batch
        self._begin()
        changed: dict[Key, VolumeClaim] = {}
        for gateway in batch.gateways:
            self._add_claims(changed, self._show_exports(gateway, now_us))
        for announced in batch.streams_seen:
            shown = {row.volume: row.backend for row in announced.streams}
            self._add_claims(changed, self._show(announced.gateway_id, shown, now_us, exports=False))
        # Before what people decide: that is no event of ours.
        events = list(_events(self._owners, changed.values(), now_us))
        for row in decided:
            self._add_claims(changed, [self._decide(row)])
        self._store(connection, changed)
        self._move(connection, changed)
        self._block(connection, [key for key, claim in changed.items() if self._may_be_stored(key, claim)])
        add_events(connection, events)
        return self._admitted(batch, {(c.volume, c.gateway_id) for c in changed.values()})

    def _may_be_stored(self, key: Key, claim: VolumeClaim) -> bool:
        """Whether a claim does not count whose streams may be in SQL."""
        known = self._before[0].of(key[0]).get(key[1]) if self._before is not None else None
        was_approved = known is not None and known.state == APPROVED
        return claim.state == REVOKED or (claim.state == PENDING and was_approved)

    def finish(self, *, is_stored: bool) -> None:
        """The transaction of ``take`` was committed, or not."""
        if self._before is None:
            return
        if not is_stored:
            self._owners, self._streams, self._exports, self._names, self._version = self._before
        self._before, self._kept = None, {}

    def _begin(self) -> None:
        self._before = (self._owners, self._streams, self._exports, self._names, self._version)
        self._owners = self._owners.copy()
        self._streams, self._exports, self._names = (
            dict(self._streams), dict(self._exports), dict(self._names),
        )  # fmt: skip

    @staticmethod
    def _add_claims(changed: dict[Key, VolumeClaim], claims: Iterable[VolumeClaim]) -> None:
        changed.update(((claim.volume, claim.gateway_id), claim) for claim in claims)

    def _show_exports(self, gateway: StoredGateway, now_us: int) -> list[VolumeClaim]:
        gateway_id = gateway.gateway_id
        if gateway.exports is None:
            return []
        had_list = self._owners.has_list(gateway_id)
        changed = self._take_list(gateway, now_us)
        shown = {row.volume: row.backend for row in gateway.exports}
        changed += self._show(gateway_id, shown, now_us, exports=True)
        if not had_list:  # nor claims for streams that came before
            rows = self._streams.get(gateway_id, {}).values()
            streams = {row.volume: row.backend for row in rows}
            changed += self._show(gateway_id, streams, now_us, exports=False)
        return changed

    def _take_list(self, gateway: StoredGateway, now_us: int) -> list[VolumeClaim]:
        """A gateway's name, and what its certificate lists; returns the claims that it takes back."""
        self._names[gateway.gateway_id] = gateway.name
        listed = list(gateway.volumes) if gateway.volumes else None
        return self._owners.set_list(gateway.gateway_id, listed, now_us)

    def _show(
        self, gateway_id: str, shown: dict[str, str], now_us: int, *, exports: bool
    ) -> list[VolumeClaim]:
        shown.pop("", None)
        return self._owners.show(gateway_id, self._names.get(gateway_id, ""), shown, now_us, exports=exports)

    def _decide(self, row: Row) -> VolumeClaim:
        """A row that services asked to keep: what it does not say stays."""
        known = self._owners.of(row["volume"]).get(row["gateway_id"])
        claim = VolumeClaim.of_row({**(known.row() if known is not None else _NEW), **row})
        self._owners.put(claim)
        return claim

    def _store(self, connection: Connection, changed: dict[Key, VolumeClaim]) -> None:
        if not changed:
            return
        self._version += 1
        rows = []
        for claim in changed.values():
            stored = replace(claim, version=self._version)
            self._owners.put(stored)
            rows.append(stored.row())
        upsert(connection, schema.volume_owners, rows, set_=_CHANGED)

    def _move(self, connection: Connection, changed: Mapping[Key, VolumeClaim]) -> None:
        """Streams that are stored follow their claim to the backend it is approved for now."""
        table, before = schema.streams, self._before[0] if self._before is not None else self._owners
        for (volume, gateway_id), claim in changed.items():
            known = before.of(volume).get(gateway_id)
            if claim.state == APPROVED and known is not None and known.backend not in ("", claim.backend):
                is_of = (table.c.gateway_id == gateway_id) & (table.c.volume == volume)
                connection.execute(update(table).where(is_of).values(backend=claim.backend))

    # -- What counts of it

    def _admitted(self, batch: DecodedBatch, changed: set[Key]) -> DecodedBatch:
        """The batch with what counts of its announcements, and of those before that were approved in it."""
        gateways = list(map(self._admit_exports, batch.gateways))
        streams_seen = list(map(self._admit_streams, batch.streams_seen))
        for gateway_id in sorted({gateway_id for _volume, gateway_id in changed}):
            # No gw: it is about its exports alone, not about the gateway's state.
            waiting = tuple(self._exports.pop(gateway_id, {}).values())
            released = self._admit_exports(StoredGateway(gateway_id, exports=waiting))
            if released.exports:
                name = self._names.get(gateway_id, gateway_id)
                gateways.append(replace(released, gateway_id="", name=name))
            streams = tuple(self._streams.pop(gateway_id, {}).values())
            streams_seen.append(self._admit_streams(StoredStreams(gateway_id, streams)))
        return replace(batch, gateways=gateways, streams_seen=[each for each in streams_seen if each.streams])

    def _admit_exports(self, gateway: StoredGateway) -> StoredGateway:
        if gateway.exports is None or self.is_open:
            return gateway
        gateway_id, found, waiting = gateway.gateway_id, list[StoredExport](), dict[str, StoredExport]()
        for row in gateway.exports:
            backend = self._backend_of(gateway_id, row)
            if backend != row.backend:  # or it moved, and counts where it was
                waiting[row.volume] = row
            if backend is not None:
                found.append(replace(row, backend=backend))
        self._exports[gateway_id] = waiting
        return replace(gateway, exports=tuple(found))

    def _admit_streams(self, announced: StoredStreams) -> StoredStreams:
        if self.is_open:
            return announced
        gateway_id, found = announced.gateway_id, list[StoredStream]()
        waiting = dict(self._streams.get(gateway_id, {}))
        for row in announced.streams:
            backend = self._backend_of(gateway_id, row)
            waiting.pop(row.stream_id, None)
            if backend is None:
                waiting[row.stream_id] = row
            else:
                found.append(replace(row, backend=backend))
                self._holders.add(row.stream_id, gateway_id)
        if len(waiting) > MOST_WAITING:
            ids = list(waiting)
            of = self._holders.of(ids)
            new = [stream_id for stream_id, holder in zip(ids, of, strict=True) if holder != gateway_id]
            for stream_id in new[: max(0, len(new) - MOST_WAITING)]:
                del waiting[stream_id]
        self._streams[gateway_id] = waiting
        return StoredStreams(gateway_id, tuple(found))

    # -- Rows of cuts

    def screened(self, batch: DecodedBatch) -> DecodedBatch:
        """The batch without the rows of cuts that do not count; the same one if all of them do."""
        if self.is_open or not batch.cuts:
            return batch
        masks = [self._mask(item.cut, batch.left_out) for item in batch.cuts]
        if all(mask is None for mask in masks):
            return batch
        cuts = [
            item if mask is None else replace(item, cut=without_rows(item.cut, mask))
            for item, mask in zip(batch.cuts, masks, strict=True)
        ]
        return replace(batch, cuts=cuts, _columns=None)

    def _mask(self, cut: Cut, left_out: Counter[Key]) -> Bools | None:
        """Which rows of a cut count; None for all of them."""
        ids = cut.counters[_STREAM_ID].tobytes()
        known = self._kept.get(cut.gateway_id)
        if known is None or known[0] != ids:
            known = self._kept[cut.gateway_id] = ids, *self._mask_of(cut)
        if known[2]:
            left_out.update(known[2])
        return known[1]

    def _mask_of(self, cut: Cut) -> tuple[Bools | None, Counter[Key]]:
        """The mask of a cut's streams, and how many rows are left out, by volume, FOREIGN and UNANNOUNCED."""
        gateway_id, waiting = cut.gateway_id, self._streams.get(cut.gateway_id, {})
        ids: list[int] = cut.counters[_STREAM_ID].tolist()
        mask, counts = np.ones(len(ids), dtype=np.bool_), Counter[Key]()
        for row, (stream_id, holder) in enumerate(zip(ids, self._holders.of(ids), strict=True)):
            stream = waiting.get(stream_id)
            if stream is not None:
                counts[stream.volume, gateway_id] += 1
            elif holder != gateway_id:
                counts[UNANNOUNCED if holder is None else FOREIGN, gateway_id] += 1
            mask[row] = stream is None and holder == gateway_id
        return (None if mask.all() else mask), counts


_NEW: Final[Mapping[str, Any]] = {"name": "", "state": APPROVED, "backend": "", "shown_backend": ""}


def _take_over(connection: Connection) -> None:
    """Claims for what was stored in mode ``open``: stored streams without any. As migration 0012 did."""
    table, streams, volumes, gateways = (
        schema.volume_owners, schema.streams, schema.volumes, schema.gateways,
    )  # fmt: skip
    is_of = (table.c.gateway_id == streams.c.gateway_id) & (table.c.volume == streams.c.volume)
    same = case((streams.c.backend == volumes.c.backend, streams.c.backend))
    found = connection.execute(
        select(
            streams.c.volume,
            streams.c.gateway_id,
            func.coalesce(func.max(gateways.c.name), streams.c.gateway_id),
            func.coalesce(func.max(same), func.max(streams.c.backend)),
            func.min(streams.c.first_seen_us),
        )
        .outerjoin(gateways, gateways.c.gateway_id == streams.c.gateway_id)
        .outerjoin(volumes, volumes.c.volume == streams.c.volume)
        .where(streams.c.volume != "", ~exists().where(is_of))
        .group_by(streams.c.volume, streams.c.gateway_id)
    ).all()
    if not found:
        return
    version = connection.execute(select(func.max(table.c.version))).scalar() or 0
    claims = [
        VolumeClaim(
            volume, gateway_id, name, APPROVED, backend, backend, UPDATE, seen_us, seen_us, version + 1
        )
        for volume, gateway_id, name, backend, seen_us in found
    ]
    upsert(connection, table, [claim.row() for claim in claims], set_=_CHANGED)


def store_left_out(connection: Connection, left_out: Mapping[Key, int], now_us: int) -> None:
    """Add rows that were left out of cuts to their claims; of those without one an event a day."""
    table = schema.volume_owners
    for (volume, gateway_id), count in left_out.items():
        if volume in (FOREIGN, UNANNOUNCED):
            add_events(connection, [_stray_event(volume, gateway_id, now_us)])
            continue
        is_claim = (table.c.volume == volume) & (table.c.gateway_id == gateway_id)
        connection.execute(update(table).where(is_claim).values(left_out=table.c.left_out + count))


def without_rows(cut: Cut, mask: Bools) -> Cut:
    """A cut with those of its rows alone that ``mask`` has, shape (rows,)."""
    place = np.cumsum(mask) - 1
    kept = []
    for entries in (cut.hist, cut.missed):
        chosen = entries[mask[entries["row"]]].copy()
        chosen["row"] = place[chosen["row"]]
        kept.append(chosen)
    extra = cut.extra
    if isinstance(said := extra.get("of"), dict):
        planes = {name: _bitmap(mask, rows) for name, rows in rows_by_plane(said, len(mask)).items()}
        extra = {**extra, "of": planes}
    if cut.sequential:
        counts = np.frombuffer(cut.sequential, "<u4")
        extra = {**extra, SEQUENTIAL: counts[mask].tobytes()}
    counters = np.ascontiguousarray(cut.counters[:, mask])
    return replace(cut, counters=counters, hist=kept[0], missed=kept[1], extra=extra)


def _bitmap(mask: Bools, rows: Int64s) -> bytes:
    """Key ``of`` of a cut (``plane_marks``) for the rows that are left."""
    bits = np.zeros(len(mask), dtype=np.uint8)
    bits[rows] = 1
    return np.packbits(bits[mask], bitorder="little").tobytes()


def _events(owners: VolumeOwners, claims: Iterable[VolumeClaim], now_us: int) -> Iterable[Row]:
    """One event a gateway for claims that need approval, one for those that a certificate lets it share."""
    asking: dict[str, list[VolumeClaim]] = {}
    shared: dict[str, list[VolumeClaim]] = {}
    for claim in claims:
        if claim.needs_approval:
            asking.setdefault(claim.gateway_id, []).append(claim)
        elif claim.decided_by == CERTIFICATE and len(owners.owners(claim.volume)) > 1:
            shared.setdefault(claim.gateway_id, []).append(claim)
    for found in asking.values():
        yield _event("volume-pending", "warning", pending_text(owners, found), found, now_us)
    for found in shared.values():
        volumes = enumerated([claim.volume for claim in found])
        text = f"gateway {found[0].name} shows {volumes} beside other gateways: its certificate lists it"
        yield _event("volume-shared", "info", text, found, now_us)


def _event(kind: str, severity: str, text: str, claims: list[VolumeClaim], now_us: int) -> Row:
    first = claims[0]
    volumes = [claim.volume for claim in claims]
    details = {"gateway_id": first.gateway_id, "volumes": volumes[:100], "count": len(volumes)}
    shown = [f"{claim.volume}/{claim.shown_backend}/{claim.state}" for claim in claims]
    return event_row(
        (first.gateway_id, now_us // HOUR_US, *shown), now_us, kind, severity,
        element="gateway", subject=first.name, text=text, details=details,
    )  # fmt: skip


def _stray_event(whose: str, gateway_id: str, now_us: int) -> Row:
    kind, under = "streams-foreign", "the numbers of another gateway's streams"
    if whose == UNANNOUNCED:
        kind, under = "streams-unannounced", "numbers of streams that were not announced"
    text = f"gateway {gateway_id} sends statistics under {under}. They are left out; look at its agent"
    return event_row(
        (gateway_id, now_us // DAY_US), now_us, kind, "warning",
        element="gateway", subject=gateway_id, text=text, details={"gateway_id": gateway_id},
    )  # fmt: skip
