"""What reports ask of SQL: slices as of a time, and what throttles did in a span.

``ReportQueries`` is ``SqlReader.reports``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import itemgetter
from typing import Any, Final

import numpy as np
from sqlalchemy import (
    ColumnElement,
    Executable,
    Select,
    Text,
    and_,
    case,
    cast,
    exists,
    func,
    literal,
    or_,
    select,
    tuple_,
)

from sla_server.db import schema
from sla_server.db.archive.manifest import MOVED_KEY
from sla_server.db.queries.rows import chunks, decode_json, total
from sla_server.db.queries.slices import is_newer_revision
from sla_server.rows import Row

ISSUED: Final = "report-issued"
"""Action of the audit log, and kind of event."""
BODIES: Final = 100
"""Bodies of one statement: some 2 MB."""
RUN_COLUMNS: Final = ("start_us", "version", "length_us", "state", "inexact", "ours", "reason")
"""Columns of a slice that is neither bad nor excluded, as far as a report says anything of it."""
SINGLE: Final = ("bad", "excluded")
"""States of slices that a report has the figures of."""
SLICE_COLUMNS: Final = (
    "start_us",
    "revision",
    "version",
    "length_us",
    "state",
    "n",
    "missed",
    "offered_iops",
    "threshold_us",
    "coverage_ratio",
    "inexact",
    "ours",
    "judged_us",
    "reason",
    "measured",
)


def _slices_within(table: Any, name: str, objective: str, from_us: int, to_us: int) -> list[Any]:
    """As one range of the primary key: see ``slices.newest``."""
    place = tuple_(table.c.name, table.c.objective, table.c.start_us)
    bounds = place >= (name, objective, from_us), place < (name, objective, to_us)
    return [table.c.name == name, table.c.objective == objective, *bounds]


def slices_as_of(
    name: str, objective: str, from_us: int, to_us: int, as_of_us: int, limit: int
) -> Select[Any]:
    """Of each slice that starts in [from_us, to_us) the newest revision judged by then, in no order.

    Where there are more than ``limit``, which of them come is not said.
    """
    table = schema.slices
    newer = table.alias("newer")
    is_newer = exists().where(
        *_slices_within(newer, name, objective, from_us, to_us),
        *is_newer_revision(newer, table),
        newer.c.judged_us <= as_of_us,
    )
    wanted = *_slices_within(table, name, objective, from_us, to_us), table.c.judged_us <= as_of_us
    columns = (table.c[column] for column in SLICE_COLUMNS)
    return select(*columns, literal(1).label("slices")).where(*wanted, ~is_newer).limit(limit)


def slice_kinds_as_of(
    name: str, objective: str, from_us: int, to_us: int, as_of_us: int, limit: int
) -> Select[Any]:
    """The same slices, those alike in one row with their ``starts``, in no order.

    Each bad or excluded one is a row of its own, whole; in the others only ``RUN_COLUMNS`` mean something. A
    month has 43,200 slices of a minute, nearly all alike: a few rows. Windows in the database, to find where
    runs begin, would take it longer than reading the slices.
    """
    found = slices_as_of(name, objective, from_us, to_us, as_of_us, limit).limit(None).subquery()
    alike = [found.c[column] for column in RUN_COLUMNS if column != "start_us"]
    single_us = case((found.c.state.in_(SINGLE), found.c.start_us))
    figures = (column for column in SLICE_COLUMNS if column not in RUN_COLUMNS)
    return (
        select(
            *alike,
            func.aggregate_strings(cast(found.c.start_us, Text), ",").label("starts"),
            *(func.max(found.c[column]).label(column) for column in figures),
        )
        .group_by(*alike, single_us)
        .limit(limit)
    )


def runs_of_kinds(kinds: Sequence[Row]) -> list[Row]:
    """Rows of ``slice_kinds_as_of`` as runs of slices, oldest first: alike, each where the former one ends.

    A run is the row of its first slice, and says how many ``slices`` it has.
    """
    if not kinds:
        return []
    texts = [kind.pop("starts") for kind in kinds]
    all_us = np.array(",".join(texts).split(","), dtype=np.int64)
    of_kind = np.repeat(np.arange(len(kinds)), [text.count(",") + 1 for text in texts])
    order = np.argsort(all_us)
    start_us, of_kind = all_us[order], of_kind[order]
    end_us = start_us + np.array([kind["length_us"] for kind in kinds], dtype=np.int64)[of_kind]
    begins = np.flatnonzero((of_kind[1:] != of_kind[:-1]) | (start_us[1:] != end_us[:-1])) + 1
    heads = np.concatenate(([0], begins))
    lengths = np.diff(heads, append=len(start_us))
    found: list[Row] = []
    for number, us, slices in zip(
        of_kind[heads].tolist(), start_us[heads].tolist(), lengths.tolist(), strict=True
    ):
        kind = kinds[number]
        if kind["state"] in SINGLE:
            kind["start_us"], kind["slices"] = us, slices
        else:
            kind = dict(zip(RUN_COLUMNS, (us, *map(kind.__getitem__, RUN_COLUMNS[1:])), strict=True))
            kind["slices"] = slices
        found.append(kind)
    return found


def revised_after(name: str, objective: str, from_us: int, to_us: int, as_of_us: int) -> Select[Any]:
    """``n``: of how many of those slices a revision was judged later."""
    table = schema.slices
    wanted = *_slices_within(table, name, objective, from_us, to_us), table.c.judged_us > as_of_us
    return select(func.count(table.c.start_us.distinct()).label("n")).where(*wanted)


def newest_judged(as_of_us: int, of: tuple[str, str] | None = None) -> Select[Any]:
    """The slice with the latest start that was judged by then: of an objective, or of all."""
    table = schema.slices
    wanted = [table.c.judged_us <= as_of_us]
    order = [table.c.start_us.desc()]
    if of is not None:
        wanted += [table.c.name == of[0], table.c.objective == of[1]]
        order = [table.c.name.desc(), table.c.objective.desc(), *order]  # along the primary key
    return select(table.c.start_us, table.c.length_us).where(*wanted).order_by(*order).limit(1)


def judged_objective(name: str, after: str) -> Select[Any]:
    """The first objective of an agreement, by name after this one, that has slices: one look into the key."""
    table = schema.slices
    place = tuple_(table.c.name, table.c.objective) > (name, after)
    statement = select(table.c.objective).where(table.c.name == name, place)
    return statement.order_by(table.c.name, table.c.objective).limit(1)


def any_slice(name: str, objective: str, from_us: int, to_us: int) -> Select[Any]:
    """A slice of an objective that starts in [from_us, to_us), if there is one."""
    return (
        select(schema.slices.c.start_us)
        .where(*_slices_within(schema.slices, name, objective, from_us, to_us))
        .limit(1)
    )


def episodes_between(name: str, from_us: int, to_us: int, limit: int) -> Select[Any]:
    """Violations that overlap [from_us, to_us), oldest first."""
    table = schema.episodes
    lasting = or_(table.c.closed_us.is_(None), table.c.closed_us > from_us)
    statement = select(table).where(table.c.name == name, table.c.opened_us < to_us, lasting)
    return statement.order_by(table.c.opened_us, table.c.episode_id).limit(limit)


def throttles_between(
    from_us: int, to_us: int, limit: int, *, victims: Collection[str] = (), volumes: Collection[str] = ()
) -> Select[Any]:
    """Throttles that held I/O back in [from_us, to_us), oldest first: for these victims, of these volumes."""
    table = schema.throttles
    lasting = or_(table.c.released_us.is_(None), table.c.released_us > from_us)
    is_real = table.c.state.not_in(("observed", "refused"))
    about: list[ColumnElement[bool]] = []
    if victims:
        about.append(table.c.victim.in_(sorted(victims)))
    if volumes:
        about.append(table.c.volume.in_(sorted(volumes)))
    statement = select(table).where(table.c.requested_us < to_us, lasting, is_real, or_(*about))
    return statement.order_by(table.c.requested_us, table.c.throttle_id).limit(limit)


class ReportQueries:
    """The questions. ``rows`` runs a statement. Thread: any."""

    def __init__(self, rows: Callable[[Executable], list[Row]]) -> None:
        self._rows = rows

    def report_objectives(self, name: str, from_us: int, to_us: int) -> list[str]:
        """Objectives of an agreement of which a slice starts in [from_us, to_us), by name.

        One look-up finds the next: a DISTINCT would read every slice of the range.
        """
        found: list[str] = []
        objective = ""
        while rows := self._rows(judged_objective(name, objective)):
            objective = rows[0]["objective"]
            found += [objective] if self._rows(any_slice(name, objective, from_us, to_us)) else []
        return found

    def slices_as_of(
        self,
        name: str,
        objective: str,
        from_us: int,
        to_us: int,
        as_of_us: int,
        limit: int,
        *,
        whole: bool = True,
    ) -> list[Row]:
        """See the function; oldest first, which costs less here than in the database.

        A row has ``slices`` of them: one. Not ``whole``: those that are alike and follow each other are one
        row, with ``RUN_COLUMNS`` alone, but for bad and excluded ones. More than ``limit`` slices may come
        then.
        """
        statement = slices_as_of if whole else slice_kinds_as_of
        rows = self._rows(statement(name, objective, from_us, to_us, as_of_us, limit))
        return sorted(rows, key=itemgetter("start_us")) if whole else runs_of_kinds(rows)

    def revised_after(self, name: str, objective: str, from_us: int, to_us: int, as_of_us: int) -> int:
        """See the function."""
        return int(self._rows(revised_after(name, objective, from_us, to_us, as_of_us))[0]["n"])

    def judged_until(self, as_of_us: int, of: tuple[str, str] | None = None) -> int:
        """Until when slices were judged by then, of one objective or of any; 0: none was."""
        rows = self._rows(newest_judged(as_of_us, of))
        return rows[0]["start_us"] + rows[0]["length_us"] if rows else 0

    def alive_until(self) -> int:
        """When the server last noted that it was up, by its own clock; 0: it never did."""
        rows = self._rows(select(schema.meta.c.value).where(schema.meta.c.key == schema.ALIVE_KEY))
        return int(rows[0]["value"]) if rows else 0

    def episodes_between(self, name: str, from_us: int, to_us: int, limit: int) -> list[Row]:
        """See the function."""
        return self._rows(episodes_between(name, from_us, to_us, limit))

    def throttles_between(
        self,
        from_us: int,
        to_us: int,
        limit: int,
        *,
        victims: Collection[str] = (),
        volumes: Collection[str] = (),
    ) -> list[Row]:
        """See the function; ``members`` decoded."""
        found: dict[str, Row] = {}
        for victim_part in chunks(sorted(victims)):
            statement = throttles_between(from_us, to_us, limit, victims=victim_part)
            found |= {row["throttle_id"]: row for row in self._rows(statement)}
        for volume_part in chunks(sorted(volumes)):
            statement = throttles_between(from_us, to_us, limit, volumes=volume_part)
            found |= {row["throttle_id"]: row for row in self._rows(statement)}
        ordered = sorted(found.values(), key=lambda row: (row["requested_us"], row["throttle_id"]))
        return decode_json(ordered[:limit], ("members",))

    def rollups_from_us(self) -> int | None:
        """Since when every slot's rollups are in SQL; older ones moved to files. None: there are none."""
        meta, rollups = schema.meta, schema.rollups
        moved = self._rows(select(meta.c.value).where(meta.c.key == MOVED_KEY))
        oldest = self._rows(select(func.min(rollups.c.slot_us).label("us")))[0]["us"]
        return None if oldest is None else max(int(oldest), int(moved[0]["value"]) if moved else 0)

    # -- Issued reports

    def issued(
        self,
        limit: int = 100,
        before: int | None = None,
        name: str | None = None,
        names: Collection[str] | None = None,
        *,
        match: str = "",
        period: str = "",
    ) -> list[Row]:
        """Issued reports without their bodies, newest first; ``before``: numbers below this one.

        ``names``: only those of these agreements, 500 at most. ``match``: with this in the agreement's name,
        whatever the case. ``period``: of this one, or of one that begins so (2026: all of that year).
        """
        table = schema.reports
        columns = [column for column in table.c if column.name != "body"]
        statement = select(*columns).order_by(table.c.number.desc()).limit(limit)
        if before is not None:
            statement = statement.where(table.c.number < before)
        if name is not None:
            statement = statement.where(table.c.name == name)
        if names is not None:
            statement = statement.where(table.c.name.in_(sorted(names)))
        if match:
            statement = statement.where(table.c.name.icontains(match, autoescape=True))
        if period:
            statement = statement.where(table.c.period.startswith(period, autoescape=True))
        return decode_json(self._rows(statement), ("summary",))

    def report_bodies(self, numbers: Collection[int]) -> dict[int, str]:
        """By number the bodies of some reports, as they were issued."""
        table = schema.reports
        found: dict[int, str] = {}
        for some in chunks(sorted(numbers), BODIES):
            statement = select(table.c.number, table.c.body).where(table.c.number.in_(some))
            found |= {row["number"]: row["body"] for row in self._rows(statement)}
        return found

    def ended_agreements(self) -> list[Row]:
        """Name and ``spec``, decoded, of the last version of each agreement that has ended."""
        table = schema.agreements
        version = func.max(table.c.version).label("version")
        newest = select(table.c.name, version).group_by(table.c.name).subquery()
        is_newest = and_(newest.c.name == table.c.name, newest.c.version == table.c.version)
        statement = select(table.c.name, table.c.spec).join(newest, is_newest)
        return decode_json(self._rows(statement.where(table.c.ended_us.is_not(None))), ("spec",))

    def issued_report(self, report_id: str) -> Row | None:
        """One of them, with its body; by its id, or by its number in digits."""
        table = schema.reports
        wanted = table.c.report_id == report_id
        if report_id.isdecimal() and len(report_id) < 10:
            wanted = or_(wanted, table.c.number == int(report_id))
        rows = self._rows(select(table).where(wanted).order_by(table.c.report_id == report_id).limit(2))
        return decode_json(rows[-1:], ("summary",))[0] if rows else None

    def issued_after(self, number: int, limit: int) -> list[Row]:
        """With their bodies, oldest first: for a walk along the chain."""
        table = schema.reports
        statement = select(table).where(table.c.number > number).order_by(table.c.number).limit(limit)
        return decode_json(self._rows(statement), ("summary",))

    def issued_periods(self, name: str) -> set[str]:
        """Periods of an agreement that have a final report."""
        table = schema.reports
        wanted = table.c.name == name, table.c.is_preliminary.is_(False)
        statement = select(table.c.period).where(*wanted).distinct()
        return {row["period"] for row in self._rows(statement)}

    def unannounced(self, after: int, since_us: int, limit: int) -> list[Row]:
        """Issued since then, with a higher number, and not in the audit log yet; oldest first."""
        table, audit = schema.reports, schema.audit
        is_known = exists().where(audit.c.action == ISSUED, audit.c.subject == table.c.report_id)
        columns = [column for column in table.c if column.name != "body"]
        wanted = table.c.number > after, table.c.issued_us >= since_us, ~is_known
        statement = select(*columns).where(*wanted).order_by(table.c.number).limit(limit)
        return decode_json(self._rows(statement), ("summary",))

    def audit_of(self, report_id: str) -> Row | None:
        """What the audit log says of the issue of a report, ``after`` decoded."""
        table = schema.audit
        statement = select(table).where(table.c.action == ISSUED, table.c.subject == report_id).limit(1)
        rows = decode_json(self._rows(statement), ("before", "after"))
        return rows[0] if rows else None

    def taken_away(self, limit: int) -> list[Row]:
        """What the audit log says was issued and is no report now, the oldest first: id and number."""
        table, reports = schema.audit, schema.reports
        is_there = exists().where(reports.c.report_id == table.c.subject)
        wanted = table.c.action == ISSUED, ~is_there
        statement = select(table.c.subject, table.c.after).where(*wanted).order_by(table.c.at_us).limit(limit)
        return decode_json(self._rows(statement), ("after",))

    def volume_names(self) -> list[str]:
        """All volumes ever seen, by name."""
        table = schema.volumes
        return [row["volume"] for row in self._rows(select(table.c.volume).order_by(table.c.volume))]

    def held_back(self, volume: str, hours_us: Collection[int]) -> Row | None:
        """``ios`` of some hours, and ``delay_us``: how long throttles held them back; None: not stored."""
        streams, table = schema.streams, schema.rollup_hours
        of_volume = select(streams.c.stream_id).where(streams.c.volume == volume)
        stream_ids = [row["stream_id"] for row in self._rows(of_volume)]
        ios = delay_us = found = 0
        for some in chunks(stream_ids) if hours_us else ():
            for hours in chunks(sorted(hours_us)):
                sums = (
                    func.coalesce(total(table.c.reads + table.c.writes), 0).label("ios"),
                    func.coalesce(total(table.c.delay_sum_us), 0).label("delay_us"),
                    func.count().label("rows"),
                )
                # The bounds show PostgreSQL which partitions to leave out.
                bounds = table.c.hour_us >= hours[0], table.c.hour_us <= hours[-1]
                wanted = table.c.hour_us.in_(hours), table.c.stream_id.in_(some)
                (row,) = self._rows(select(*sums).where(*bounds, *wanted))
                ios, delay_us, found = ios + row["ios"], delay_us + row["delay_us"], found + row["rows"]
        return {"ios": ios, "delay_us": delay_us} if found else None
