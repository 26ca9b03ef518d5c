"""What the services process reads from SQL: the only file of this package that knows ``db.queries``.

Rows are plain dicts with the columns of docs/formats/sql.md, JSON columns decoded. Every method may raise a
retryable ``SlaError`` while the database is away; the callers try again.

Thread: any; calls block, so the main loop makes none (``sql_worker`` does).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from pmdaemon.wire.rates import LEAST_BURST_S, MOST_BURST_S
from sla_server.db.config import DatabaseConfig
from sla_server.db.queries.reader import SliceInputs, SqlReader, open_reader
from sla_server.rows import Row
from sla_server.storage_resources.pools import DAY_US, SPACE_JOB, StoredPools

__all__ = ["SliceInputs", "SqlReads", "open_store"]

_STREAM_KEYS: Final = ("stream_id", "gateway_id", "volume", "client", "backend", "first_seen_us")
_AUDIT_PAGE: Final = 500
_MOST_FAULTS: Final = 1000


class SqlReads:
    """The questions; every answer is read again. Tests and benchmarks have others of the same methods."""

    def __init__(self, reader: SqlReader) -> None:
        self._reader = reader

    def rollup_s(self) -> int:
        """Length of a rollup slot in seconds."""
        return int(self._reader.meta("rollup_s") or 60)

    def agreements(self) -> Iterator[Row]:
        """Every version of every agreement, by name and version; read as it is consumed."""
        return self._reader.all_agreements()

    def agreement_versions(self, name: str) -> list[Row]:
        """Every version of one agreement, without its document."""
        return self._reader.agreement_versions(name)

    def documents(self) -> list[Row]:
        """Every version of maintenance and calendars."""
        return self._reader.documents()

    def volumes(self) -> list[Row]:
        """volume, backend, size_bytes, read_only of the volumes ever seen."""
        return self._reader.volumes()

    def volume_owners(self, after_version: int = 0) -> list[Row]:
        """Claims of gateways to volumes that changed since that version."""
        return self._reader.volume_owners(after_version)

    def gateways(self) -> list[Row]:
        """gateway_id, name, state of the gateways ever seen."""
        return self._reader.gateways()

    def streams(self) -> list[Row]:
        """stream_id, gateway_id, volume, client, backend, first_seen_us of all streams."""
        return [{key: row[key] for key in _STREAM_KEYS} for row in self._reader.streams()]

    def stream_count(self) -> int:
        """How many streams there are; rows of ``streams`` are never removed."""
        return self._reader.stream_count()

    def progress(self) -> dict[str, int]:
        """gateway_id to corrected end of its newest cut ingested."""
        return self._reader.progress()

    def throttles_in_force(self) -> list[Row]:
        """Throttles that have not ended, however many; refused ones, too, which other gateways may hold."""
        return self._reader.pages.throttles_not_ended()

    def open_episodes(self) -> list[Row]:
        """Violation episodes that are not closed."""
        return self._reader.pages.open_episodes()

    def slices(self, name: str, objective: str, from_us: int, to_us: int) -> list[Row]:
        """Slices that start in the range, newest revisions, oldest first."""
        return self._reader.slices(name, objective, from_us, to_us)

    def slice_inputs(
        self, stream_ids: Collection[int], gateway_ids: Collection[str], from_us: int, to_us: int
    ) -> SliceInputs:
        """Rollups, missed counts and coverage of the slots in the range."""
        return self._reader.slice_inputs(stream_ids, gateway_ids, from_us, to_us)

    def outages(self, from_us: int, to_us: int) -> list[Row]:
        """from_us and to_us of the times in which the server was down, of those that overlap the range."""
        return self._reader.outages(from_us, to_us)

    def late_cuts(self, after_us: int, from_us: int) -> list[Row]:
        """slot_us, gateway_id, noted_us of slots that got cuts after they may have been judged."""
        return self._reader.late_cuts(after_us, from_us)

    def has_event(self, event_id: str, at_us: int) -> bool:
        """Whether an event that happened at ``at_us`` is in SQL."""
        cursor: str | None = None
        while rows := self._reader.events(limit=_AUDIT_PAGE, before=cursor, since_us=at_us):
            if any(row["event_id"] == event_id for row in rows):
                return True
            cursor = rows[-1]["cursor"]
        return False

    def newest_events(self, limit: int, until_us: int) -> list[Row]:
        """Events up to that time, newest first."""
        rows = self._reader.events(limit=limit, until_us=until_us)
        return [{key: value for key, value in row.items() if key != "cursor"} for row in rows]

    def storage_faults(self, since_us: int) -> dict[str, str]:
        """Backends whose newest event about a fault says that it began: to the kind of fault."""
        began, kinds = "storage-fault", {"storage-fault", "storage-recovered"}
        newest: dict[str, Row] = {}
        for row in self._reader.inbox(_MOST_FAULTS, kinds=kinds, since_us=since_us):
            newest.setdefault(row["subject"], row)
        begun = (row for row in newest.values() if row["kind"] == began)
        return {row["subject"]: str(row["details"].get("fault", "")) for row in begun}

    def processes(self) -> list[Row]:
        """The server's own processes."""
        return self._reader.processes()

    def last_audit(self, action: str) -> Row | None:
        """The newest audit row of one action; walks back through the log, which grows slowly."""
        cursor: str | None = None
        while rows := self._reader.audit(limit=_AUDIT_PAGE, before=cursor):
            for row in rows:
                if row["action"] == action:
                    return row
            cursor = rows[-1]["cursor"]
        return None

    def policies(self, before: int | None = None) -> list[Row]:
        """20 policy versions with their reports, the newest first; only those before a version, if given."""
        return self._reader.policies(limit=20, before=before)

    def policy(self, version: int) -> Row | None:
        """One policy version."""
        return self._reader.policy(version)

    def usable_policy(self, but: Collection[int] = ()) -> Row | None:
        """Version and state of the newest policy that may be in force, but for some versions."""
        return self._reader.usable_policy(but)

    def policy_in_force(self) -> Row | None:
        """Version and state of the policy in force."""
        return self._reader.policy_in_force()

    def policy_caps(
        self, version: int, hour_of_week: int
    ) -> tuple[dict[str, float | None], dict[str, float]]:
        """Volume to cost rate, None for no cap; and to its burst, seconds of the rate, where it has one.

        What is no rate, by another hand than the job's, is none; so is what no gateway takes as a burst.
        """
        caps, bursts = dict[str, float | None](), dict[str, float]()
        for row in self._reader.policy_caps(version, hour_of_week):
            rate, burst_s = row["cost_per_s"], row["burst_s"]
            caps[row["volume"]] = rate if rate is not None and 0 < rate < math.inf else None
            if burst_s is not None and LEAST_BURST_S <= burst_s <= MOST_BURST_S:
                bursts[row["volume"]] = burst_s
        return caps, bursts

    def unannounced_reports(self, after: int, since_us: int, limit: int) -> list[Row]:
        """Reports that were issued since then and are not in the audit log yet, oldest first."""
        return self._reader.reports.unannounced(after, since_us, limit)

    def stored_pools(self, days_from_us: int) -> StoredPools:
        """Pools of storage, their volumes, their days from that time on, and actions of a month before it."""
        space = self._reader.space
        days, actions = space.pool_days(days_from_us), space.recent_actions(days_from_us - 30 * DAY_US)
        return StoredPools(space.pools(), days, space.pool_volumes(), actions)

    def pool_keys(self) -> list[tuple[str, str]]:
        """Owner and name of all pools of storage."""
        return [(row["owner"], row["pool"]) for row in self._reader.space.pools()]

    def pool_days(self, from_us: int, owner: str, pool: str) -> list[Row]:
        """Days of a pool of storage from that time on, oldest first."""
        return self._reader.space.pool_days(from_us, owner, pool)

    def space_results(self) -> tuple[int, list[Row]] | None:
        """When the space job ran last, us, and what it has found, a row a pool; None: it never ran."""
        found = self._reader.results.whole(SPACE_JOB)
        return found and (found[0].end_us, json.loads(b"".join(found[1])))

    def close(self) -> None:
        """Let go of connections."""
        self._reader.close()


def open_store(config: DatabaseConfig, data_dir: Path) -> SqlReads:
    """A store with a pool of its own; connects at its first question."""
    return SqlReads(open_reader(config, data_dir))
