"""Reading what was recorded: agreements, slices, episodes, throttles, events, policies, audit.

Long lists are paged by cursor: each row has a ``cursor`` text; pass the last one's as ``before`` for the next
page. Cursors name a row, not an offset, so rows that arrive meanwhile shift nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import ColumnElement, Select, Table, and_, exists, func, select, tuple_

from sla_server.db import schema
from sla_server.db.queries.query import Queries, Row, decode_json

IN_FORCE_STATES = ("requested", "sent", "confirmed", "seen")
"""States of a throttle that holds, or is about to hold, I/O back."""


class RecordReads(Queries):
    """Questions about recorded facts."""

    def agreements(self, in_force: bool = True) -> list[Row]:
        """By name and version, ``spec`` decoded; in force: the newest version of each, unless ended."""
        table = schema.agreements
        statement = select(table).order_by(table.c.name, table.c.version)
        if in_force:
            newest = self._newest_versions()
            statement = statement.join(
                newest, and_(newest.c.name == table.c.name, newest.c.version == table.c.version)
            ).where(table.c.ended_us.is_(None))
        return decode_json(self._rows(statement), ("spec",))

    def all_agreements(self, page: int = 2048) -> Iterator[Row]:
        """Every version of every agreement, by name and version, without its document; read page by page.

        Tens of thousands at once would take several times the memory of what is kept of them.
        """
        table = schema.agreements
        columns = [column for column in table.c if column.name != "document"]
        statement = select(*columns).order_by(table.c.name, table.c.version).limit(page)
        following = statement
        while rows := decode_json(self._rows(following), ("spec",)):
            yield from rows
            last = rows[-1]["name"], rows[-1]["version"]
            following = statement.where(tuple_(table.c.name, table.c.version) > last)

    def agreement(self, name: str, version: int | None = None) -> Row | None:
        """One agreement, newest version unless one is named; None if there is none."""
        table = schema.agreements
        statement = select(table).where(table.c.name == name).order_by(table.c.version.desc()).limit(1)
        if version is not None:
            statement = statement.where(table.c.version == version)
        rows = decode_json(self._rows(statement), ("spec",))
        return rows[0] if rows else None

    @staticmethod
    def _newest_versions() -> Any:
        table = schema.agreements
        return (
            select(table.c.name, func.max(table.c.version).label("version")).group_by(table.c.name).subquery()
        )

    def slices(
        self, name: str, objective: str, from_us: int, to_us: int, limit: int | None = None
    ) -> list[Row]:
        """Slices that start in [from_us, to_us), newest revision of each, oldest first; all, or a page."""
        return self._rows(self._newest_slices(name, objective, from_us, to_us).limit(limit))

    def slice_counts(self, name: str, objective: str, from_us: int, to_us: int) -> dict[str, int]:
        """State to number of slices (newest revisions) that start in [from_us, to_us)."""
        newest = self._newest_slices(name, objective, from_us, to_us).order_by(None).subquery()
        statement = select(newest.c.state, func.count().label("n")).group_by(newest.c.state)
        return {row["state"]: row["n"] for row in self._rows(statement)}

    @staticmethod
    def _newest_slices(name: str, objective: str, from_us: int, to_us: int) -> Select[Any]:
        def wanted(some: Any) -> list[ColumnElement[bool]]:
            # As one range of the primary key: with start_us alone PostgreSQL prefers the index of all slices
            # by time (there for retention) and reads everybody's slices of the range.
            place = tuple_(some.c.name, some.c.objective, some.c.start_us)
            bounds = place >= (name, objective, from_us), place < (name, objective, to_us)
            return [some.c.name == name, some.c.objective == objective, *bounds]

        table = schema.slices
        newer = table.alias("newer")
        is_newer = newer.c.start_us == table.c.start_us, newer.c.revision > table.c.revision
        # What is wanted stands in both: PostgreSQL does not conclude a range from the equality of start_us.
        is_old = exists().where(*wanted(newer), *is_newer)
        return select(table).where(*wanted(table), ~is_old).order_by(table.c.start_us)

    def episodes(self, open_only: bool = False, limit: int = 1000) -> list[Row]:
        """Violation episodes, newest first."""
        table = schema.episodes
        statement = select(table).order_by(table.c.opened_us.desc(), table.c.episode_id).limit(limit)
        return self._rows(statement.where(table.c.closed_us.is_(None)) if open_only else statement)

    def throttles(self, in_force: bool = False, limit: int = 100) -> list[Row]:
        """Throttles, newest first; in force: requested, sent, confirmed or seen."""
        table = schema.throttles
        statement = select(table).order_by(table.c.requested_us.desc(), table.c.throttle_id).limit(limit)
        return self._rows(statement.where(table.c.state.in_(IN_FORCE_STATES)) if in_force else statement)

    def events(
        self,
        limit: int = 100,
        before: str | None = None,
        since_us: int | None = None,
        until_us: int | None = None,
    ) -> list[Row]:
        """Newest first, ``details`` decoded; ``before``: the cursor of the last row of the former page."""
        statement = self._page(schema.events, "event_id", limit, before)
        if since_us is not None:
            statement = statement.where(schema.events.c.at_us >= since_us)
        if until_us is not None:
            statement = statement.where(schema.events.c.at_us <= until_us)
        return decode_json(self._with_cursor(self._rows(statement), "event_id"), ("details",))

    def audit(self, limit: int = 100, before: str | None = None) -> list[Row]:
        """The audit log, newest first, ``before`` and ``after`` decoded; pages as in ``events``."""
        statement = self._page(schema.audit, "audit_id", limit, before)
        return decode_json(self._with_cursor(self._rows(statement), "audit_id"), ("before", "after"))

    @staticmethod
    def _page(table: Table, key: str, limit: int, before: str | None) -> Select[Any]:
        statement = select(table).order_by(table.c.at_us.desc(), table.c[key].desc()).limit(limit)
        if not before:
            return statement
        at_text, _, key_value = before.partition(":")
        if not at_text.isdigit() or not key_value:
            raise ValueError(f"{before!r} is no cursor; use the `cursor` of a row of the page before")
        # Compared as a pair, which is one range of the index; an OR would read every newer row, too.
        return statement.where(tuple_(table.c.at_us, table.c[key]) < (int(at_text), key_value))

    @staticmethod
    def _with_cursor(rows: list[Row], key: str) -> list[Row]:
        for row in rows:
            row["cursor"] = f"{row['at_us']}:{row[key]}"
        return rows

    def policies(self, limit: int = 20) -> list[Row]:
        """Policy versions, newest first, ``job`` and ``report`` decoded."""
        table = schema.policies
        rows = self._rows(select(table).order_by(table.c.version.desc()).limit(limit))
        return decode_json(rows, ("job", "report"))

    def policy_caps(
        self,
        version: int,
        hour_of_week: int | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[Row]:
        """Caps of one policy version, of one hour (0 = Monday 00 UTC) or of all 168, by volume and hour.

        ``after``: "VOLUME:HOUR" of the last row of the former page.
        """
        table = schema.policy_caps
        place = table.c.volume, table.c.hour_of_week
        statement = select(table).where(table.c.version == version).order_by(*place).limit(limit)
        if after:
            volume, _, hour_text = after.rpartition(":")
            if not hour_text.isdigit():
                raise ValueError(f"{after!r} is no cursor; use the `next` of the page before")
            statement = statement.where(tuple_(*place) > (volume, int(hour_text)))
        if hour_of_week is not None:
            statement = statement.where(table.c.hour_of_week == hour_of_week)
        return self._rows(statement)
