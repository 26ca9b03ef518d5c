"""What the API reads from SQL, as a protocol of plain rows; ``queries.reader.Reader`` fulfils it.

Rows are dicts as in docs/formats/sql.md, JSON columns decoded. Every method may raise an error of
``sla_server.db.errors``; the app turns a retryable one into a 503 that says which database does not answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from sla_server.db.config import DatabaseConfig
from sla_server.db.queries.reader import open_reader

Row = dict[str, Any]


class SqlSource(Protocol):
    """Read-only questions. Thread: any."""

    def gateways(self) -> list[Row]:
        """All gateways ever seen."""

    def gateway_list(self) -> list[Row]:
        """Address and name of the gateways to dial."""

    def volumes(self) -> list[Row]:
        """Volumes with exact lifetime sums."""

    def streams(self, volume: str | None = None) -> list[Row]:
        """Streams of one volume with exact lifetime sums."""

    def backends(self) -> list[Row]:
        """All backends."""

    def agreements(self, in_force: bool = True) -> list[Row]:
        """Agreements in force."""

    def agreement(self, name: str, version: int | None = None) -> Row | None:
        """One agreement, newest version unless one is named."""

    def slices(
        self, name: str, objective: str, from_us: int, to_us: int, limit: int | None = None
    ) -> list[Row]:
        """Judged slices, newest revision of each, oldest first."""

    def slice_counts(self, name: str, objective: str, from_us: int, to_us: int) -> dict[str, int]:
        """State to number of slices."""

    def throttles(self, in_force: bool = False, limit: int = 100) -> list[Row]:
        """Throttles, newest first."""

    def events(self, limit: int = 100, before: str | None = None, since_us: int | None = None) -> list[Row]:
        """Events, newest first, each with its ``cursor``."""

    def processes(self) -> list[Row]:
        """The server's own processes."""

    def policies(self, limit: int = 20) -> list[Row]:
        """Policy versions, newest first."""

    def policy_caps(
        self,
        version: int,
        hour_of_week: int | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[Row]:
        """Caps of one policy version, by volume and hour; ``after``: "VOLUME:HOUR"."""

    def audit(self, limit: int = 100, before: str | None = None) -> list[Row]:
        """The audit log, newest first, each with its ``cursor``."""

    def rollup_history(self, volume: str, from_us: int, to_us: int) -> list[Row]:
        """One row a rollup slot."""

    def totals(self) -> Row:
        """Lifetime sums over everything."""


def open_source(config: DatabaseConfig, data_dir: Path) -> SqlSource:
    """The SQL database, through a read-only pool of our own; connects at the first question."""
    return open_reader(config, data_dir)
