"""The questions that services, the API and policy jobs ask of SQL.

Every answer is plain Python (dicts, lists, numbers, numpy arrays for histograms); no type of SQLAlchemy
leaves this package. Columns are those of docs/formats/sql.md, JSON columns decoded. All ranges are half-open,
[from_us, to_us), by the slot's or hour's start.

Long lists are paged by cursor: each row has a ``cursor`` text; pass the last one's as ``before`` for the next
page. Cursors name a row, not an offset, so rows that arrive meanwhile shift nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Engine, Executable, Select, Table, and_, func, or_, select, tuple_

from sla_server.db import schema
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import make_engine, translated
from sla_server.db.partitions import DECISIONS_KEY
from sla_server.db.queries import episodes, explanations, inbox, policies, records, reports, slices
from sla_server.db.queries.access import AccessQueries
from sla_server.db.queries.backend_load import LoadQueries
from sla_server.db.queries.history import read_history, read_hours
from sla_server.db.queries.job_results import ResultQueries
from sla_server.db.queries.pages import PageQueries
from sla_server.db.queries.rows import chunks, decode_json, fetched, total
from sla_server.db.queries.sizes import read_sizes
from sla_server.db.queries.slice_inputs import SliceInputs, read_slice_inputs
from sla_server.db.queries.space import SpaceQueries
from sla_server.db.schema import STREAM_SUMS
from sla_server.rows import Row

__all__ = ["STREAM_SUMS", "Row", "SliceInputs", "SqlReader", "open_reader"]

IN_FORCE_STATES: Final = ("requested", "sent", "confirmed", "seen")
"""States of a throttle that holds, or is about to hold, I/O back."""


class SqlReader:
    """All questions, over one pool of connections; each call takes a connection and gives it back.

    Raises (every method):
        DatabaseUnavailable: retryable; also while the dbmanager has not created the schema yet.

    Thread: any.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.space = SpaceQueries(self._rows)
        self.access = AccessQueries(self._rows)
        self.reports = reports.ReportQueries(self._rows)
        self.pages = PageQueries(self._rows)
        self.results = ResultQueries(self._rows)
        self.loads = LoadQueries(engine)

    def _rows(self, statement: Executable) -> list[Row]:
        """All rows of a statement.

        Raises:
            DatabaseUnavailable: not reachable, or the dbmanager has not created the schema yet.
        """
        with translated(self._engine), self._engine.connect() as connection:
            return fetched(connection, statement)

    def _one(self, statement: Executable) -> Row | None:
        return next(iter(self._rows(statement)), None)

    def meta(self, key: str) -> str | None:
        """A value of table ``meta``."""
        row = self._one(select(schema.meta.c.value).where(schema.meta.c.key == key))
        return None if row is None else str(row["value"])

    def close(self) -> None:
        """Close the pool's connections."""
        self._engine.dispose()

    # -- What exists: gateways, volumes, streams, backends, files, processes, and their lifetime sums.

    def gateways(self) -> list[Row]:
        """All gateways ever seen, by name."""
        table = schema.gateways
        return self._rows(select(table).order_by(table.c.name, table.c.gateway_id))

    def gateway_list(self, limit: int | None = None) -> list[Row]:
        """Gateways to dial, by address."""
        table = schema.gateway_list
        statement = select(table.c.address, table.c.name).where(table.c.is_enabled)
        return self._rows(statement.order_by(table.c.address).limit(limit))

    def backends(self) -> list[Row]:
        """All backends, by name."""
        return self._rows(select(schema.backends).order_by(schema.backends.c.backend))

    def streams(self, volume: str | None = None, limit: int | None = None) -> list[Row]:
        """Streams with their names and exact lifetime sums, of one volume or all; ``limit`` at most."""
        table = schema.streams
        statement = select(table).order_by(table.c.volume, table.c.client, table.c.stream_id).limit(limit)
        return self._rows(statement if volume is None else statement.where(table.c.volume == volume))

    def stream_count(self) -> int:
        """How many streams there are."""
        (row,) = self._rows(select(func.count().label("streams")).select_from(schema.streams))
        return int(row["streams"])

    def volumes(self) -> list[Row]:
        """Volumes with exact sums over their streams; ``last_us``: end of the newest cut with a row."""
        table, streams = schema.volumes, schema.streams
        sums = (
            select(
                streams.c.volume,
                *(total(streams.c[name]).label(name) for name in STREAM_SUMS),
                func.max(streams.c.last_us).label("last_us"),
                func.count().label("streams"),
            )
            .group_by(streams.c.volume)
            .subquery()
        )
        statement = (
            select(
                table,
                *(func.coalesce(sums.c[name], 0).label(name) for name in (*STREAM_SUMS, "streams")),
                sums.c.last_us,
            )
            .select_from(table.outerjoin(sums, sums.c.volume == table.c.volume))
            .order_by(table.c.volume)
        )
        return decode_json(self._rows(statement), ("labels",))

    def volume_owners(
        self,
        after_version: int = 0,
        *,
        state: str | None = None,
        after: Sequence[str] = (),
        limit: int | None = None,
    ) -> list[Row]:
        """Claims of gateways to volumes, by volume and gateway.

        Args:
            after_version: only those that changed since that one.
            state: only those in it; ``pending``: also those shown on a backend that is not approved.
            after: volume and gateway_id of the last one of the page before.
            limit: most rows.
        """
        table = schema.volume_owners
        statement = select(table).order_by(table.c.volume, table.c.gateway_id).limit(limit)
        if after_version:
            statement = statement.where(table.c.version > after_version)
        if state == "pending":
            has_moved = and_(
                table.c.state == "approved",
                table.c.backend != "",
                table.c.shown_backend != "",
                table.c.shown_backend != table.c.backend,
            )
            statement = statement.where(or_(table.c.state == state, has_moved))
        elif state is not None:
            statement = statement.where(table.c.state == state)
        if after:
            statement = statement.where(tuple_(table.c.volume, table.c.gateway_id) > tuple(after))
        return self._rows(statement)

    def volume_owner_names(self, volumes: Collection[str] | None = None) -> dict[str, list[str]]:
        """Volume to the names of the gateways it belongs to; of some, or of all that belong to any."""
        table = schema.volume_owners
        statement = select(table.c.volume, table.c.name).where(table.c.state == "approved")
        found: dict[str, list[str]] = {}
        for chunk in (None,) if volumes is None else chunks(sorted(volumes)):
            asked = statement if chunk is None else statement.where(table.c.volume.in_(chunk))
            for row in self._rows(asked.order_by(table.c.volume, table.c.name)):
                found.setdefault(row["volume"], []).append(row["name"])
        return found

    def totals(self) -> Row:
        """Lifetime sums over everything, and how many gateways, volumes and streams there are."""
        streams = schema.streams
        statement = select(
            *(func.coalesce(total(streams.c[name]), 0).label(name) for name in STREAM_SUMS),
            func.count().label("streams"),
            select(func.count()).select_from(schema.gateways).scalar_subquery().label("gateways"),
            select(func.count()).select_from(schema.volumes).scalar_subquery().label("volumes"),
            func.max(streams.c.last_us).label("last_us"),
        )
        return self._rows(statement)[0]  # an aggregate without GROUP BY has one row

    def progress(self) -> dict[str, int]:
        """gateway_id to the corrected end (us UTC) of the newest cut ingested."""
        return {row["gateway_id"]: row["corrected_us"] for row in self._rows(select(schema.progress))}

    def watermarks(self) -> list[tuple[str, int, int]]:
        """(gateway_id, epoch, highest seq ingested)."""
        table = schema.ingest_watermark
        return [(row["gateway_id"], int(row["epoch"]), row["seq"]) for row in self._rows(select(table))]

    def sizes(self) -> Row:
        """How large the database is, and each table (``sizes``)."""
        with translated(self._engine), self._engine.connect() as connection:
            return read_sizes(connection)

    def processes(self) -> list[Row]:
        """State of the server's own processes, by name."""
        return self._rows(select(schema.processes).order_by(schema.processes.c.name))

    def fences(self) -> list[Row]:
        """Which of several servers writes, and since when; no row for a server that is alone."""
        return self._rows(select(schema.fences).order_by(schema.fences.c.name))

    def manifest(self, kind: str | None = None, *, in_use: bool = True) -> list[Row]:
        """Parquet files, oldest data first; ``in_use``: without those that were replaced."""
        table = schema.manifest
        statement = select(table).order_by(table.c.min_us, table.c.path)
        if kind is not None:
            statement = statement.where(table.c.kind == kind)
        return self._rows(statement.where(table.c.replaced_us.is_(None)) if in_use else statement)

    # -- What was recorded: agreements, slices, episodes, throttles, events, policies, audit.

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

    def agreement_versions(self, name: str) -> list[Row]:
        """All versions of one agreement, oldest first, ``spec`` decoded, without the document's text."""
        table = schema.agreements
        columns = [column for column in table.c if column.name != "document"]
        statement = select(*columns).where(table.c.name == name).order_by(table.c.version)
        return decode_json(self._rows(statement), ("spec",))

    def documents(self, kind: str | None = None, in_force: bool = False) -> list[Row]:
        """Maintenance and calendars by kind, name and version, ``spec`` decoded; all, or those not ended."""
        table = schema.documents
        statement = select(table).order_by(table.c.kind, table.c.name, table.c.version)
        if kind is not None:
            statement = statement.where(table.c.kind == kind)
        return decode_json(
            self._rows(statement.where(table.c.ended_us.is_(None)) if in_force else statement), ("spec",)
        )

    def document_state(self) -> list[Row]:
        """Figures that change with each change of an agreement or a document: to read them only then."""
        found = []
        for of in (schema.agreements.c, schema.documents.c):
            figures = func.count(of.version), func.count(of.ended_us)
            found += self._rows(select(*figures, func.max(of.applied_us), func.max(of.ended_us)))
        return found

    @staticmethod
    def _newest_versions() -> Any:
        table = schema.agreements
        version = func.max(table.c.version).label("version")
        return select(table.c.name, version).group_by(table.c.name).subquery()

    def slices(
        self, name: str, objective: str, from_us: int, to_us: int, limit: int | None = None
    ) -> list[Row]:
        """Slices that start in [from_us, to_us), newest revision of each, oldest first; all, or a page."""
        return self._rows(slices.newest(name, objective, from_us, to_us).limit(limit))

    def slice_counts(self, name: str, objective: str, from_us: int, to_us: int) -> dict[str, int]:
        """State to number of slices (newest revisions) that start in [from_us, to_us)."""
        statement = slices.counted(("state",), name, objective, from_us, to_us)
        return {row["state"]: row["n"] for row in self._rows(statement)}

    def slice_sums(self, name: str, objective: str, from_us: int, to_us: int) -> list[Row]:
        """How many slices (newest revisions) start in [from_us, to_us).

        Rows of version, state, ours, inexact, length_us and n.
        """
        columns = ("version", "state", "ours", "inexact", "length_us")
        return self._rows(slices.counted(columns, name, objective, from_us, to_us))

    def episodes(
        self,
        open_only: bool = False,
        limit: int = 1000,
        *,
        name: str | None = None,
        objective: str | None = None,
        before: str | None = None,
        since_us: int | None = None,
    ) -> list[Row]:
        """Violation episodes, newest first, of all agreements or one, not ended before ``since_us``."""
        table = schema.episodes
        statement = self._page(table, "episode_id", limit, before, table.c.opened_us, episodes.counted())
        for column, wanted in ((table.c.name, name), (table.c.objective, objective)):
            statement = statement if wanted is None else statement.where(column == wanted)
        statement = statement.where(table.c.closed_us.is_(None)) if open_only else statement
        statement = statement.where(records.not_ended(table.c.closed_us, since_us))
        return self._with_cursor(self._rows(statement), "episode_id", "opened_us")

    def episode(self, episode_id: str) -> Row | None:
        """One episode, by its id or by a part from its beginning that no other one has; else None."""
        begins = schema.episodes.c.episode_id.startswith(episode_id, autoescape=True)
        found = self._rows(select(schema.episodes).where(begins).limit(2))
        return found[0] if len(found) == 1 else None

    def throttles(
        self, in_force: bool = False, limit: int = 100, before: str | None = None, since_us: int | None = None
    ) -> list[Row]:
        """Newest first, ``members`` decoded; in force: requested to seen; not ended before ``since_us``."""
        table = schema.throttles
        statement = self._page(table, "throttle_id", limit, before, table.c.requested_us)
        wanted = statement.where(table.c.state.in_(IN_FORCE_STATES)) if in_force else statement
        wanted = wanted.where(records.not_ended(table.c.released_us, since_us))
        return decode_json(self._with_cursor(self._rows(wanted), "throttle_id", "requested_us"), ("members",))

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

    def inbox(self, limit: int = 100, before: str | None = None, **wanted: Any) -> list[Row]:
        """Events that ``inbox.filtered`` wants, newest first; pages as in ``events``."""
        statement = inbox.filtered(self._page(schema.events, "event_id", limit, before), **wanted)
        return decode_json(self._with_cursor(self._rows(statement), "event_id"), ("details",))

    def event(self, event_id: str) -> Row | None:
        """One event, ``details`` decoded."""
        rows = self._rows(select(schema.events).where(schema.events.c.event_id == event_id))
        return decode_json(rows, ("details",))[0] if rows else None

    def events_of(self, beginning: str, limit: int) -> list[Row]:
        """See ``inbox``; ``details`` decoded."""
        return decode_json(self._rows(inbox.events_of(beginning, limit)), ("details",))

    def deliveries(self, event_id: str) -> list[Row]:
        """See ``inbox``."""
        return self._rows(inbox.deliveries(event_id))

    def dead_letters(self, recipient: str, delivery_ids: Collection[str]) -> list[Row]:
        """See ``inbox``."""
        return self._rows(inbox.dead_letters(recipient, delivery_ids))

    def acknowledgements(self, event_ids: Collection[str]) -> list[Row]:
        """See ``inbox``; ``after`` decoded."""
        return decode_json(self._rows(inbox.acknowledgements(event_ids)), ("after",)) if event_ids else []

    def audit(self, limit: int = 100, before: str | None = None) -> list[Row]:
        """The audit log, newest first, ``before`` and ``after`` decoded; pages as in ``events``."""
        return self.pages.records(records.AUDIT, records.Wanted(limit, before))

    @staticmethod
    def _page(
        table: Table, key: str, limit: int, before: str | None, time: Any = None, rows: Any = None
    ) -> Select[Any]:
        time = table.c.at_us if time is None else time
        every: Select[Any] = select(table) if rows is None else rows
        statement = every.order_by(time.desc(), table.c[key].desc()).limit(limit)
        if not before:
            return statement
        at_text, _, key_value = before.partition(":")
        if not at_text.isdigit() or not key_value:
            raise ValueError(f"{before!r} is no cursor; use the `cursor` of a row of the page before")
        # Compared as a pair, which is one range of the index; an OR would read every newer row, too.
        return statement.where(tuple_(time, table.c[key]) < (int(at_text), key_value))

    @staticmethod
    def _with_cursor(rows: list[Row], key: str, time: str = "at_us") -> list[Row]:
        for row in rows:
            row["cursor"] = f"{row[time]}:{row[key]}"
        return rows

    def policies(self, limit: int = 20, before: int | None = None) -> list[Row]:
        """Policy versions, newest first, ``job`` and ``report`` decoded; ``before``: older than that one."""
        return decode_json(self._rows(policies.listed(limit, before)), ("job", "report"))

    def policy(self, version: int) -> Row | None:
        """One policy version, ``job`` and ``report`` decoded; None if it was never stored."""
        return next((row for row in self.policies(1, version + 1) if row["version"] == version), None)

    def usable_policy(self, but: Collection[int] = ()) -> Row | None:
        """Version and state of the newest policy that may be in force, leaving some versions out."""
        return next(iter(self._rows(policies.newest(schema.POLICY_USABLE, but))), None)

    def policy_in_force(self) -> Row | None:
        """Version and state of the policy in force."""
        return next(iter(self._rows(policies.newest(schema.POLICY_IN_FORCE))), None)

    def policy_caps(self, version: int, *which: Any, **wanted: Any) -> list[Row]:
        """See ``policies.caps``."""
        return self._rows(policies.caps(version, *which, **wanted))

    def capped_hours(self, version: int) -> Iterator[Row]:
        """The hours of one policy version with a cap, by volume and hour, a page of them at a time."""
        return policies.capped_hours(self._rows, version)

    def policy_changes(self, before: int, after: int, limit: int, after_volume: str = "") -> list[Row]:
        """See ``policies.changes``."""
        return self.pages.policy_reports.changes(before, after, limit, after_volume)

    def jobs(self, limit: int = 100, before: str | None = None) -> list[Row]:
        """Runs of jobs, newest first; pages as in ``events``."""
        return self.pages.records(records.JOBS, records.Wanted(limit, before))

    # -- Around one moment: what ``sla why`` asks (``explanations``).

    def decisions(
        self,
        *,
        volume: str | None = None,
        victims: Collection[str] = (),
        backend: str | None = None,
        kinds: Collection[str] = (),
        from_us: int | None = None,
        until_us: int | None = None,
        before: str | None = None,
        newest_first: bool = True,
        limit: int = 100,
    ) -> list[Row]:
        """Decisions of the controller with from_us < at_us <= until_us, ``figures`` decoded.

        ``volume``, ``victims`` ("agreement/objective"), ``backend``, ``kinds``: all that are given must hold.
        ``before``: ``explanations.cursor_of`` the last one of the page before.
        """
        wanted = explanations.decisions_where(volume, victims, backend, kinds, from_us, until_us)
        wanted += explanations.behind(before) if before is not None else []
        statement = explanations.decisions(wanted, newest_first, limit)
        return decode_json(self._rows(statement), ("figures",))

    def decision_count(
        self, *, volume: str | None = None, victims: Collection[str] = (), from_us: int | None = None
    ) -> int:
        """How many decisions there are after a time."""
        wanted = explanations.decisions_where(volume, victims, None, (), from_us, None)
        statement = select(func.count().label("rows")).select_from(schema.decisions).where(*wanted)
        return int(self._rows(statement)[0]["rows"])

    def backend_of(self, volume: str) -> str | None:
        """Backend of a volume; None if it was never seen."""
        table = schema.volumes
        row = self._one(select(table.c.backend).where(table.c.volume == volume))
        return None if row is None else row["backend"]

    def backends_of(self, volumes: Collection[str]) -> set[str]:
        """Backends of these volumes, as far as they were ever seen."""
        return {row["backend"] for row in self._rows(explanations.backends_of(volumes))} if volumes else set()

    def throttles_at(
        self,
        at_us: int,
        volumes: Collection[str] = (),
        victims: Collection[str] = (),
        backends: Collection[str] = (),
        limit: int = 100,
    ) -> list[Row]:
        """Throttles in force then, newest first: of these volumes, for these victims or of these backends."""
        return self._rows(explanations.throttles_at(volumes, victims, backends, at_us, limit))

    def agreements_at(self, at_us: int, name: str | None = None, page: int = 2048) -> Iterator[Row]:
        """Agreements in force at that time, one or all, by name, ``spec`` decoded; read page by page."""
        after = ""
        while rows := self._rows(explanations.agreements_at(at_us, name, after, page)):
            yield from decode_json(rows, ("spec",))
            if name is not None:
                return
            after = rows[-1]["name"]

    def slice_at(self, name: str, objective: str, at_us: int) -> Row | None:
        """The judged slice that holds this time, newest revision; None if none is stored."""
        row = self._one(explanations.slice_at(name, objective, at_us))
        return row if row is not None and row["start_us"] + row["length_us"] > at_us else None

    def episodes_until(self, name: str, objective: str, at_us: int, limit: int = 2) -> list[Row]:
        """Violations of an objective that had begun by then, newest first."""
        return self._rows(explanations.episodes_until(name, objective, at_us, limit))

    def mode_at(self, at_us: int) -> str | None:
        """The mode that was switched to last by then; None if no switch is stored."""
        rows = decode_json(self._rows(explanations.mode_rows(at_us)), ("after",))
        return (rows[0]["after"] or {}).get("mode") if rows else None

    def backend_modes_at(self, at_us: int) -> dict[str, str]:
        """Backends that had a mode of their own then, and which."""
        rows = decode_json(self._rows(explanations.mode_rows(at_us, "backend-mode")), ("after",))
        return dict((rows[0]["after"] or {}).get("backends") or {}) if rows else {}

    def kinds_of(self, name: str) -> set[str]:
        """What has this name: "volume", "sla", both or neither."""
        return {row["kind"] for row in self._rows(explanations.kinds_of(name))}

    def known_names(self) -> list[tuple[str, str]]:
        """(name, "volume" or "sla") of everything that can be asked about."""
        return sorted((row["name"], row["kind"]) for row in self._rows(explanations.known_names()))

    def decisions_from_us(self) -> int | None:
        """Decisions are stored from here on; None: none ever was."""
        value = self.meta(DECISIONS_KEY)
        return None if value is None else int(value)

    # -- Statistics: what slices are judged from, history for charts, hours for policies.

    def slice_inputs(
        self, stream_ids: Collection[int], gateway_ids: Collection[str], from_us: int, to_us: int
    ) -> SliceInputs:
        """Rollups, missed counts and coverage, all as of one moment (one transaction).

        Args:
            stream_ids: streams in scope.
            gateway_ids: gateways in scope, for coverage.
            from_us: start of the first slot, us UTC.
            to_us: end of the last slot, us UTC.
        """
        with translated(self._engine), self._engine.connect() as connection:
            return read_slice_inputs(connection, stream_ids, gateway_ids, from_us, to_us)

    def outages(self, from_us: int, to_us: int) -> list[Row]:
        """Times in which the server was down, from_us and to_us, that overlap the range; oldest first."""
        table = schema.outages
        overlaps = table.c.from_us < to_us, table.c.to_us > from_us
        return self._rows(select(table).where(*overlaps).order_by(table.c.from_us))

    def late_cuts(self, after_us: int, from_us: int) -> list[Row]:
        """Slots from ``from_us`` on that got cuts late, noted after ``after_us``; the first noted first."""
        table = schema.late_cuts
        wanted = table.c.noted_us > after_us, table.c.slot_us >= from_us
        return self._rows(select(table).where(*wanted).order_by(table.c.noted_us))

    def missed(
        self, stream_ids: Collection[int], from_us: int, to_us: int
    ) -> dict[tuple[int, int], tuple[int, int]]:
        """(io, threshold_us) to (counted, missed), summed over streams and slots."""
        table = schema.rollup_missed
        sums: dict[tuple[int, int], tuple[int, int]] = {}
        for chunk in chunks(sorted(stream_ids)):
            statement = select(table).where(
                table.c.slot_us >= from_us, table.c.slot_us < to_us, table.c.stream_id.in_(chunk)
            )
            for row in self._rows(statement):
                key = (row["io"], row["threshold_us"])
                counted, missed = sums.get(key, (0, 0))
                sums[key] = (counted + row["counted"], missed + row["missed"])
        return sums

    def rollup_history(self, volume: str, from_us: int, to_us: int, client: str | None = None) -> list[Row]:
        """One row a slot, summed over the volume's streams or those of one client of it, oldest first.

        Long ranges, and those whose single rollups have moved to files, come by the hour (``history``). Each
        row has slot_us (its start), length_us, the counters, held_max, inflight_max, iops, bytes_per_s and
        p50_us, p95_us, p99_us (upper bucket edges of reads and writes together; None without I/O).
        """
        statement = select(schema.streams.c.stream_id).where(schema.streams.c.volume == volume)
        statement = statement if client is None else statement.where(schema.streams.c.client == client)
        with translated(self._engine), self._engine.connect() as connection:
            return read_history(connection, sorted(connection.execute(statement).scalars()), from_us, to_us)

    def hours(self, from_us: int, to_us: int) -> list[Row]:
        """Hourly rollups with their stream's names; ``hist`` is int64 of shape (50,)."""
        with translated(self._engine), self._engine.connect() as connection:
            return read_hours(connection, from_us, to_us)


def open_reader(config: DatabaseConfig, data_dir: Path) -> SqlReader:
    """A reader with a read-only pool of its own; connects at its first question."""
    return SqlReader(make_engine(config, data_dir, read_only=True))
