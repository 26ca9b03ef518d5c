"""What the views of the page ask of SQL: names to sort and page by, and everything about the few on a page.

Lists of names are short rows of all there are; whatever is longer is asked for by the names of one page.
A range of slices is one of their primary key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from sqlalchemy import ColumnElement, Executable, func, select

from sla_server.db import schema
from sla_server.db.queries import records, slices
from sla_server.db.queries.policy_reports import PolicyReports
from sla_server.db.queries.records import RecordList, Wanted
from sla_server.db.queries.rows import chunks, decode_json, total
from sla_server.db.schema import HOUR_US, STREAM_SUMS
from sla_server.rows import Row

NAMES_S: Final = 5.0
"""Names are kept for so long: many open pages ask for the same 64,000 each few seconds."""
NOT_ENDED_STATES: Final = ("requested", "sent", "confirmed", "seen", "refused")
"""Of throttles. What one gateway refused the others hold, and it is asked again when its exports change."""
SLICE_COLUMNS: Final = ("version", "state", "ours", "inexact", "length_us")


@dataclass(frozen=True, slots=True)
class _Names:
    """Names as they were read: when, and by which stamp it shows that they changed (None: read again)."""

    read_s: float
    stamp: Row | None
    names: Mapping[str, str]


class PageQueries:
    """The questions; ``read`` runs a statement (``SqlReader``). Thread: any.

    State: ``_names``, names that were read lately; an entry is replaced, never changed.
    """

    def __init__(self, read: Callable[[Executable], list[Row]]) -> None:
        self._read = read
        self._names: dict[str, _Names] = {}
        self.policy_reports = PolicyReports(read)

    def agreement_names(self) -> Mapping[str, str]:
        """Name to priority of each agreement in force, as of ``NAMES_S`` ago at most."""
        return self._kept("agreements", self._agreement_names, self._agreements_stamp)

    def _agreement_names(self) -> dict[str, str]:
        table = schema.agreements
        rows = self._read(select(table.c.name, table.c.priority).where(table.c.ended_us.is_(None)))
        return {row["name"]: row["priority"] for row in rows}

    def _agreements_stamp(self) -> Row:
        """What differs after any version began or ended: a fifth of the time that the names take."""
        table = schema.agreements
        counts = func.count().label("versions"), func.count(table.c.ended_us).label("ended")
        newest = (
            func.max(table.c.applied_us).label("applied_us"),
            func.max(table.c.ended_us).label("ended_us"),
        )
        return self._read(select(*counts, *newest).select_from(table))[0]

    def volume_names(self) -> Mapping[str, str]:
        """Name to backend of each volume, by name, as of ``NAMES_S`` ago at most."""
        return self._kept("volumes", self._volume_names)

    def _volume_names(self) -> dict[str, str]:
        table = schema.volumes
        rows = self._read(select(table.c.volume, table.c.backend).order_by(table.c.volume))
        return {row["volume"]: row["backend"] for row in rows}

    def label_rows(self) -> tuple[list[Row], list[Row]]:
        """What ``agreements.volume_labels.label_book`` is made of.

        Returns:
            ``labels`` of each volume as its agent announced them, and documents in force that give some.
        """
        table = schema.volumes
        announced = self._read(select(table.c.volume, table.c.labels))
        return decode_json(announced, ("labels",)), self.label_documents()

    def label_documents(self) -> list[Row]:
        """The second of ``label_rows``."""
        documents = schema.documents
        in_force = documents.c.kind == "VolumeLabels", documents.c.ended_us.is_(None)
        return decode_json(self._read(select(documents).where(*in_force)), ("spec",))

    def _kept(
        self, which: str, ask: Callable[[], dict[str, str]], stamp_of: Callable[[], Row] | None = None
    ) -> Mapping[str, str]:
        """What was read lately or has not changed since by its stamp, else what is read now.

        Two threads may both read. The stamp is read before the names: what changes between is seen next time.
        """
        known = self._names.get(which)
        if known is not None and time.monotonic() - known.read_s <= NAMES_S:
            return known.names
        stamp = stamp_of() if stamp_of is not None else None
        is_same = known is not None and stamp is not None and known.stamp == stamp
        names = known.names if known is not None and is_same else MappingProxyType(ask())
        self._names[which] = _Names(time.monotonic(), stamp, names)
        return names

    def agreements_named(self, names: Collection[str]) -> list[Row]:
        """The version in force of each of these agreements, ``spec`` decoded, without the document's text."""
        table = schema.agreements
        columns = [column for column in table.c if column.name != "document"]
        rows: list[Row] = []
        for chunk in chunks(sorted(names)):
            wanted = table.c.name.in_(chunk), table.c.ended_us.is_(None)
            rows += self._read(select(*columns).where(*wanted).order_by(table.c.name, table.c.version))
        return decode_json(rows, ("spec",))

    def open_episodes(self, names: Collection[str] | None = None) -> list[Row]:
        """Violations of these agreements, or of all, that go on, oldest first of some agreements each."""
        table = schema.episodes
        columns = [column for column in table.c if column.name != "slices_bad"]
        going_on = select(*columns).where(table.c.closed_us.is_(None)).order_by(table.c.opened_us)
        if names is None:
            return self._read(going_on)
        rows: list[Row] = []
        for chunk in chunks(sorted(names)):
            rows += self._read(going_on.where(table.c.name.in_(chunk)))
        return rows

    def throttles_not_ended(self) -> list[Row]:
        """Throttles that hold I/O back or are still to, however many, oldest first, ``members`` decoded."""
        table = schema.throttles
        going_on = select(table).where(table.c.state.in_(NOT_ENDED_STATES), table.c.released_us.is_(None))
        return decode_json(self._read(going_on.order_by(table.c.requested_us)), ("members",))

    def volumes_named(self, names: Collection[str]) -> list[Row]:
        """These volumes with exact sums over their streams, as ``SqlReader.volumes`` has them."""
        table, streams = schema.volumes, schema.streams
        rows: list[Row] = []
        for chunk in chunks(sorted(names)):
            sums = (
                select(
                    streams.c.volume,
                    *(total(streams.c[name]).label(name) for name in STREAM_SUMS),
                    func.max(streams.c.last_us).label("last_us"),
                    func.count().label("streams"),
                )
                .where(streams.c.volume.in_(chunk))
                .group_by(streams.c.volume)
                .subquery()
            )
            more = (func.coalesce(sums.c[name], 0).label(name) for name in (*STREAM_SUMS, "streams"))
            statement = (
                select(table, *more, sums.c.last_us)
                .select_from(table.outerjoin(sums, sums.c.volume == table.c.volume))
                .where(table.c.volume.in_(chunk))
                .order_by(table.c.volume)
            )
            rows += decode_json(self._read(statement), ("labels",))
        return rows

    def slice_hours(self, name: str, objective: str, from_us: int, to_us: int) -> list[Row]:
        """How many slices (newest revisions) start in each hour of [from_us, to_us), oldest first.

        Rows of ``hour_us``, the columns of ``SqlReader.slice_sums``, and ``newest_us``: the newest's start.
        """
        found = slices.newest(name, objective, from_us, to_us).order_by(None).subquery()
        hour = (found.c.start_us - found.c.start_us % HOUR_US).label("hour_us")
        group = [hour, *(found.c[column] for column in SLICE_COLUMNS)]
        counts = func.count().label("n"), func.max(found.c.start_us).label("newest_us")
        return self._read(select(*group, *counts).group_by(*group).order_by(hour))

    def records(self, listed: RecordList, wanted: Wanted) -> list[Row]:
        """A page of the audit log, of jobs or of policies, JSON decoded, with a ``cursor`` in each row.

        Columns that the list leaves out are None.

        Raises:
            ValueError: see ``records.listed``.
        """
        rows = self._read(records.listed(listed, wanted))
        for row in rows:
            row["cursor"] = records.cursor_of(listed, row)
        return decode_json(rows, schema.JSON_COLUMNS.get(listed.table.name, ()))

    def policy_volumes(self, version: int, part: str, after: str, limit: int) -> list[Row]:
        """Volumes of one policy version, by name, with the hours that have a cap, and the lowest of them."""
        table = schema.policy_caps
        wanted = [table.c.version == version, table.c.volume > after]
        wanted += [_has(table.c.volume, part)] if part else []
        return self._read(
            select(
                table.c.volume,
                func.count(table.c.cost_per_s).label("hours"),
                func.min(table.c.cost_per_s).label("lowest_cost_per_s"),
                func.max(table.c.demand_p95).label("highest_demand_p95"),
            )
            .where(*wanted)
            .group_by(table.c.volume)
            .order_by(table.c.volume)
            .limit(limit)
        )


def _has(column: Any, part: str) -> ColumnElement[bool]:
    """Whether a name has ``part`` in it, whatever the case: databases differ in what LIKE does."""
    found: ColumnElement[bool] = func.lower(column).contains(part.lower(), autoescape=True)
    return found
