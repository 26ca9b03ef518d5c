"""GATEWAY and STREAMS_SEEN messages to rows of gateways, volumes, backends, streams and events.

New data access (P3) is an event, too: ``volume-new`` when a volume is exported for the first time,
``client-new`` when a client is first seen to use a volume through a gateway; one event a gateway and batch. A
volume that is announced on another backend than is stored is ``volume-moved`` or ``volume-conflict``.

A session that the server itself ended is ``detached``: stored, but no event, and none when it is back with
the same epoch (``services`` says so if it is not). One that did not answer then stays ``stalled``: people
were notified of that, and need to hear that it is back. One whose agent said goodbye is stored as ``lost``
with the event ``gateway-stopped``. Else an event is written when a gateway's stored state or epoch changes,
so a message that is posted again (a pair that restarted, a new incarnation of the dbmanager) makes none.
Event ids are uuid5 of what happened.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import Column, Connection, select

from pmdaemon.wire.messages.stored import StoredGateway, StoredStreams
from sla_server.db import schema
from sla_server.db.ingest.batch import DecodedBatch, IngestedCut, RefusedRecord
from sla_server.db.ingest.records import add_events, event_row
from sla_server.db.queries.rows import chunks
from sla_server.db.schema import HOUR_US
from sla_server.db.upsert import upsert
from sla_server.gateway_states import GatewayStateEvent
from sla_server.rows import Row

SKEW_LIMIT_US: Final = 2_000_000  # DESIGN.md 4, "Time"
_PRESENT: Final = ("up", "stalled", "detached")
SHOWN: Final = 5  # names in the text of an event
OVERTAKEN_US: Final = 60_000_000  # longer, and the clock has gone back: then the newest message is believed
REFUSED_SHOWN: Final = 3  # of one gateway in one batch
SHOWN_DETAILS: Final = 100  # and in its details


def has_inventory(batch: DecodedBatch) -> bool:
    """Whether ``store_inventory`` has anything to write."""
    if batch.gateways or batch.streams_seen or batch.refused:
        return True
    return any(abs(item.offset_us) > SKEW_LIMIT_US for item in batch.cuts)


def store_inventory(connection: Connection, batch: DecodedBatch, now_us: int) -> None:
    """Write the batch's gateways, exports and streams, and the events that follow."""
    events = _store_gateways(connection, [each for each in batch.gateways if each.gateway_id], now_us)
    events += _store_exports(connection, batch.gateways, now_us)
    events += _store_streams(connection, batch.streams_seen, now_us)
    events += _skew_events(connection, batch.cuts)
    names = _gateway_names(connection, {item.element for item in batch.refused})
    events += [
        event_row(
            (item.queue_seq, item.position, item.reason),
            now_us,
            "data-refused",
            "warning",
            element="dbmanager",
            subject=names.get(item.element) or item.element,
            text=item.reason,
        )
        for item in _fewest(batch.refused)
    ]
    unique = {row["event_id"]: row for row in reversed(events)}
    add_events(connection, list(unique.values()))


def _fewest(refused: Sequence[RefusedRecord]) -> Iterator[RefusedRecord]:
    """The first few of each element, and how many more there are: an event is a row for months."""
    by_element: dict[str, list[RefusedRecord]] = {}
    for item in refused:
        by_element.setdefault(item.element, []).append(item)
    for items in by_element.values():
        yield from items[:REFUSED_SHOWN]
        if len(items) > REFUSED_SHOWN:
            next_one, more = items[REFUSED_SHOWN], len(items) - REFUSED_SHOWN - 1
            yield replace(next_one, reason=f"{next_one.reason}; {more} more in the same batch")


def _store_gateways(connection: Connection, gateways: Sequence[StoredGateway], now_us: int) -> list[Row]:
    table = schema.gateways
    known: dict[str, tuple[str, str]] = {}
    seen_us: dict[str, int] = {}
    for names in chunks(sorted({gateway.gateway_id for gateway in gateways})):
        statement = select(table.c.gateway_id, table.c.state, table.c.epoch, table.c.last_seen_us).where(
            table.c.gateway_id.in_(names)
        )
        for row in connection.execute(statement):
            known[row.gateway_id] = (row.state, row.epoch)
            seen_us[row.gateway_id] = row.last_seen_us
    rows: dict[str, Row] = {}
    events: list[Row] = []
    for gateway in gateways:
        gateway_id, state = gateway.gateway_id, gateway.state
        at_us = gateway.at_us if gateway.at_us is not None else now_us
        epoch = gateway.epoch or known.get(gateway_id, ("", ""))[1]
        if state == "refused":
            # The refused peer may have used a living gateway's name: its row is left alone. One event an
            # hour and reason, because the refused try again every few seconds.
            identity = (gateway_id, gateway.reason, at_us // HOUR_US)
            events.append(_state_event(gateway, state, epoch, at_us, identity))
            continue
        if state != "up" and 0 < seen_us.get(gateway_id, 0) - at_us < OVERTAKEN_US:
            continue  # of the session before, and the pair it has moved to was taken first
        seen_us[gateway_id] = at_us
        before, said = known.get(gateway_id), "up" if state == "recovered" else state
        is_still_stalled = said == "detached" and before is not None and before[0] == "stalled"
        stored = "stalled" if is_still_stalled else said
        if before != (stored, epoch) and not _is_server_action(before, said, epoch):
            events.append(_state_event(gateway, state, epoch, at_us))
        known[gateway_id] = (stored, epoch)
        rows[gateway_id] = {
            "gateway_id": gateway_id,
            "name": gateway.shown_name,
            "state": stored,
            "reason": gateway.reason,
            "address": gateway.address,
            "software": gateway.software,
            "epoch": epoch,
            "first_seen_us": rows[gateway_id]["first_seen_us"] if gateway_id in rows else at_us,
            "last_seen_us": at_us,
            "clock_offset_us": gateway.offset_us,
            "dropped_cuts": gateway.lost_cuts,
        }
    kept = ("name", "state", "reason", "address", "software", "epoch", "clock_offset_us")
    upsert(connection, table, list(rows.values()), set_=kept, maximum=("last_seen_us", "dropped_cuts"))
    return events


def _is_server_action(before: tuple[str, str] | None, state: str, epoch: str) -> bool:
    """Whether a change of state is the server's own doing: its process ended, or is back."""
    return state == "detached" or (state == "up" and before == ("detached", epoch))


def _state_event(
    gateway: StoredGateway, state: str, epoch: str, at_us: int, identity: Sequence[object] = ()
) -> Row:
    said = GatewayStateEvent(gateway, state, epoch, at_us)
    return event_row(
        identity or said.identity,
        at_us,
        said.kind,
        said.severity,
        element="gateway",
        subject=gateway.shown_name,
        text=said.text,
        details=said.details,
    )


def _store_exports(connection: Connection, gateways: Sequence[StoredGateway], now_us: int) -> list[Row]:
    volumes: dict[str, Row] = {}
    exporters: dict[str, str] = {}
    for gateway in gateways:
        for export in gateway.exports or ():
            exporters[export.volume] = gateway.shown_name
            if export.volume:
                volumes[export.volume] = {
                    "volume": export.volume,
                    "backend": export.backend,
                    "size_bytes": export.size_bytes,
                    "read_only": export.read_only,
                    "labels": json.dumps(dict(export.labels)) if export.labels else "",
                    "first_seen_us": now_us,
                }
    known = _stored_backends(connection, volumes)
    events = _resolve_backends(connection, gateways, volumes, known, now_us)
    announced = ("backend", "size_bytes", "read_only", "labels")
    upsert(connection, schema.volumes, list(volumes.values()), set_=announced)
    _store_backends(connection, {row["backend"] for row in volumes.values()}, now_us)
    fresh: dict[str, list[str]] = {}
    for volume in volumes.keys() - known.keys():
        fresh.setdefault(exporters[volume], []).append(volume)
    found = [_new_access("volume-new", name, "volumes", names, now_us) for name, names in fresh.items()]
    return events + found


def _stored_backends(connection: Connection, volumes: Iterable[str]) -> dict[str, str]:
    table = schema.volumes
    stored: dict[str, str] = {}
    for chunk in chunks(sorted(volumes)):
        rows = connection.execute(select(table.c.volume, table.c.backend).where(table.c.volume.in_(chunk)))
        stored |= {row.volume: row.backend for row in rows}
    return stored


def _resolve_backends(
    connection: Connection,
    gateways: Sequence[StoredGateway],
    volumes: dict[str, Row],
    stored: dict[str, str],
    now_us: int,
) -> list[Row]:
    """One backend for each volume that is announced with another one than is stored, and an event.

    The stored one stays (``volume-conflict``) while another gateway that is not lost uses the volume there;
    else the volume has moved (``volume-moved``).
    """
    events: list[Row] = []
    in_force = dict(stored)
    for gateway in gateways:
        for export in gateway.exports or ():
            volume, new = export.volume, export.backend
            old = in_force.get(volume, "")
            if old and new and old != new:
                others = _users_on(connection, volume, old, gateway.gateway_id)
                if not others:
                    in_force[volume] = new
                events.append(_backend_event(gateway, volume, (old, new), others, now_us))
            elif volume:
                in_force[volume] = old or new
            if volume in volumes:
                volumes[volume]["backend"] = in_force[volume]
    return events


def _users_on(connection: Connection, volume: str, backend: str, besides: str) -> list[str]:
    """Names of the other gateways that have streams of the volume on this backend and are not lost."""
    streams, gateways = schema.streams, schema.gateways
    statement = (
        select(gateways.c.name)
        .join(streams, streams.c.gateway_id == gateways.c.gateway_id)
        .where(streams.c.volume == volume, streams.c.backend == backend)
        .where(gateways.c.gateway_id != besides, gateways.c.state.in_(_PRESENT))
    )
    return sorted(set(connection.scalars(statement)))


def _backend_event(
    gateway: StoredGateway, volume: str, backends: tuple[str, str], others: Sequence[str], now_us: int
) -> Row:
    name, (old, new) = gateway.shown_name, backends
    text = f"volume {volume} has moved from backend {old} to {new}, says gateway {name}"
    if others:
        text = (
            f"gateway {name} exports volume {volume} on backend {new}, but {', '.join(others[:SHOWN])} uses "
            f"it on {old}, which is kept. Give both agents one backend for it, or the volumes different names"
        )
    return event_row(
        (volume, gateway.gateway_id, gateway.epoch, old, new),
        now_us,
        "volume-conflict" if others else "volume-moved",
        "warning",
        element="gateway",
        subject=volume,
        text=text,
        details={"gateway_id": gateway.gateway_id, "stored": old, "announced": new},
    )


def _store_backends(connection: Connection, names: set[str], now_us: int) -> None:
    rows = [{"backend": name, "first_seen_us": now_us} for name in sorted(names) if name]
    upsert(connection, schema.backends, rows)


def _known(connection: Connection, column: Column[Any], values: Iterable[Any]) -> set[Any]:
    """Which of these keys are stored already."""
    found: set[Any] = set()
    for chunk in chunks(sorted(values)):
        found |= set(connection.scalars(select(column).where(column.in_(chunk))))
    return found


def _new_access(kind: str, gateway: str, what: str, names: Sequence[str], now_us: int) -> Row:
    """One event a gateway for everything new on it, so that a fleet's first start is no flood."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:SHOWN]) + (f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else "")
    return event_row(
        (gateway, *ordered, now_us),
        now_us,
        kind,
        "info",
        element="gateway",
        subject=gateway,
        text=f"gateway {gateway}: new {what}: {shown}",
        details={"new": ordered[:SHOWN_DETAILS], "count": len(ordered)},
    )


def _gateway_names(connection: Connection, gateway_ids: Iterable[str]) -> dict[str, str]:
    table = schema.gateways
    names: dict[str, str] = {}
    for chunk in chunks(sorted(gateway_ids)):
        rows = connection.execute(
            select(table.c.gateway_id, table.c.name).where(table.c.gateway_id.in_(chunk))
        )
        names |= {row.gateway_id: row.name for row in rows}
    return names


def _store_streams(connection: Connection, announced: Sequence[StoredStreams], now_us: int) -> list[Row]:
    streams: dict[int, Row] = {}
    for each in announced:
        for stream in each.streams:
            streams[stream.stream_id] = {
                "stream_id": stream.stream_id,
                "gateway_id": each.gateway_id,
                "volume": stream.volume,
                "client": stream.client,
                "backend": stream.backend,
                "first_seen_us": now_us,
            }
    rows = list(streams.values())
    known = _known(connection, schema.streams.c.stream_id, streams)
    upsert(connection, schema.streams, rows, set_=("gateway_id", "volume", "client", "backend"))
    volumes = {row["volume"]: row["backend"] for row in rows if row["volume"]}
    upsert(
        connection,
        schema.volumes,
        [{"volume": name, "backend": backend, "first_seen_us": now_us} for name, backend in volumes.items()],
    )
    _store_backends(connection, set(volumes.values()), now_us)
    fresh: dict[str, list[str]] = {}
    for row in rows:
        if row["stream_id"] not in known:
            fresh.setdefault(row["gateway_id"], []).append(f"{row['client']} on {row['volume']}")
    names = _gateway_names(connection, fresh)
    return [
        _new_access("client-new", names.get(gateway) or gateway, "clients", uses, now_us)
        for gateway, uses in fresh.items()
    ]


def _skew_events(connection: Connection, cuts: Sequence[IngestedCut]) -> list[Row]:
    """One event an agent start (epoch) whose clock is more than 2 s off; stored once, the first is kept."""
    off: dict[tuple[str, int], IngestedCut] = {}
    for item in cuts:
        if abs(item.offset_us) > SKEW_LIMIT_US:
            off.setdefault((item.cut.gateway_id, item.cut.epoch), item)
    names = _gateway_names(connection, {gateway_id for gateway_id, _epoch in off})
    events = []
    for (gateway_id, epoch), item in off.items():
        name = names.get(gateway_id) or gateway_id
        found = f"{-item.offset_us / 1e6:+.1f} s off this server's"
        text = f"the clock of gateway {name} is {found}; its times are corrected"
        events.append(
            event_row(
                (gateway_id, epoch),
                item.recv_us,
                "clock-skew",
                "warning",
                element="gateway",
                subject=name,
                text=f"{text}. Let NTP set both",
                details={"gateway_id": gateway_id, "offset_us": item.offset_us, "epoch": str(epoch)},
            )
        )
    return events
