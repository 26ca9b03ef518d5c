"""``Store`` over ``sla_server.db.queries``: the only file of this package that knows the database package."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from sla_server.db.config import DatabaseConfig
from sla_server.db.queries.reader import SqlReader, open_reader
from sla_server.services.store import JudgeInputs, Row

_STREAM_KEYS: Final = ("stream_id", "gateway_id", "volume", "client", "backend", "first_seen_us")
_AUDIT_PAGE: Final = 500
_THROTTLES: Final = 10_000  # far above the volumes of one server


class SqlReadsFromDb:
    """See ``Store``; every answer is read anew."""

    def __init__(self, reader: SqlReader) -> None:
        self._reader = reader

    def rollup_s(self) -> int:
        """See ``Store``."""
        return int(self._reader.meta("rollup_s") or 60)

    def agreements(self) -> Iterator[Row]:
        """See ``Store``."""
        return self._reader.all_agreements()

    def volumes(self) -> list[Row]:
        """See ``Store``."""
        return self._reader.volumes()

    def gateways(self) -> list[Row]:
        """See ``Store``."""
        return self._reader.gateways()

    def streams(self) -> list[Row]:
        """See ``Store``."""
        return [{key: row[key] for key in _STREAM_KEYS} for row in self._reader.streams()]

    def stream_count(self) -> int:
        """See ``Store``."""
        return self._reader.stream_count()

    def progress(self) -> dict[str, int]:
        """See ``Store``."""
        return self._reader.progress()

    def throttles_in_force(self) -> list[Row]:
        """See ``Store``."""
        return self._reader.throttles(in_force=True, limit=_THROTTLES)

    def open_episodes(self) -> list[Row]:
        """See ``Store``."""
        return self._reader.episodes(open_only=True)

    def slices(self, name: str, objective: str, from_us: int, to_us: int) -> list[Row]:
        """See ``Store``."""
        return self._reader.slices(name, objective, from_us, to_us)

    def slice_inputs(
        self, stream_ids: Collection[int], gateway_ids: Collection[str], from_us: int, to_us: int
    ) -> JudgeInputs:
        """See ``Store``."""
        return self._reader.slice_inputs(stream_ids, gateway_ids, from_us, to_us)

    def has_event(self, event_id: str, at_us: int) -> bool:
        """See ``Store``."""
        cursor: str | None = None
        while rows := self._reader.events(limit=_AUDIT_PAGE, before=cursor, since_us=at_us):
            if any(row["event_id"] == event_id for row in rows):
                return True
            cursor = rows[-1]["cursor"]
        return False

    def newest_events(self, limit: int, until_us: int) -> list[Row]:
        """See ``Store``."""
        rows = self._reader.events(limit=limit, until_us=until_us)
        return [{key: value for key, value in row.items() if key != "cursor"} for row in rows]

    def processes(self) -> list[Row]:
        """See ``Store``."""
        return self._reader.processes()

    def last_audit(self, action: str) -> Row | None:
        """See ``Store``; walks back through the log, which grows only by what people and policies change."""
        cursor: str | None = None
        while rows := self._reader.audit(limit=_AUDIT_PAGE, before=cursor):
            for row in rows:
                if row["action"] == action:
                    return row
            cursor = rows[-1]["cursor"]
        return None

    def policies(self) -> list[Row]:
        """See ``Store``."""
        return self._reader.policies(limit=20)

    def policy_caps(self, version: int, hour_of_week: int) -> dict[str, float | None]:
        """See ``Store``."""
        return {row["volume"]: row["cost_per_s"] for row in self._reader.policy_caps(version, hour_of_week)}

    def close(self) -> None:
        """See ``Store``."""
        self._reader.close()


def open_store(config: DatabaseConfig, data_dir: Path) -> SqlReadsFromDb:
    """A store with a pool of its own; connects at its first question."""
    return SqlReadsFromDb(open_reader(config, data_dir))
