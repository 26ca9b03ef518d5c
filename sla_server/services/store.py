"""What the services process reads from SQL, as a protocol, so that its logic is tested without a database.

Rows are plain dicts with the columns of docs/formats/sql.md, JSON columns decoded. Every method may raise a
retryable ``SlaError`` while the database is away; the callers try again.

Thread: any; calls block, so the main loop makes none (``looker`` does).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Protocol

Row = dict[str, Any]


class JudgeInputs(Protocol):
    """What slices are judged from (``sla_server.db.queries.reader.SliceInputs``)."""

    @property
    def rows(self) -> list[Row]:
        """One a (slot, stream): counters, hist_read, hist_write."""

    @property
    def missed(self) -> list[Row]:
        """One a (slot, stream, io, threshold_us): counted, missed."""

    @property
    def coverage(self) -> list[Row]:
        """One a (slot, gateway): covered_us, cuts, gap_cuts."""


class SqlReads(Protocol):
    """The questions."""

    def rollup_s(self) -> int:
        """Length of a rollup slot in seconds."""

    def agreements(self) -> Iterable[Row]:
        """Every version of every agreement, by name and version; read as it is consumed."""

    def volumes(self) -> list[Row]:
        """volume, backend, size_bytes, read_only of the volumes ever seen."""

    def gateways(self) -> list[Row]:
        """gateway_id, name, state of the gateways ever seen."""

    def streams(self) -> list[Row]:
        """stream_id, gateway_id, volume, client, backend, first_seen_us of all streams."""

    def stream_count(self) -> int:
        """How many streams there are; rows of ``streams`` are never removed."""

    def progress(self) -> dict[str, int]:
        """gateway_id to corrected end of its newest cut ingested."""

    def throttles_in_force(self) -> list[Row]:
        """Throttles requested, sent, confirmed or seen."""

    def open_episodes(self) -> list[Row]:
        """Violation episodes that are not closed."""

    def slices(self, name: str, objective: str, from_us: int, to_us: int) -> list[Row]:
        """Slices that start in the range, newest revisions, oldest first."""

    def slice_inputs(
        self, stream_ids: Collection[int], gateway_ids: Collection[str], from_us: int, to_us: int
    ) -> JudgeInputs:
        """Rollups, missed counts and coverage of the slots in the range."""

    def has_event(self, event_id: str, at_us: int) -> bool:
        """Whether an event that happened at ``at_us`` is in SQL."""

    def newest_events(self, limit: int, until_us: int) -> list[Row]:
        """Events up to that time, newest first."""

    def processes(self) -> list[Row]:
        """The server's own processes."""

    def last_audit(self, action: str) -> Row | None:
        """The newest audit row of one action."""

    def policies(self) -> list[Row]:
        """Newest policy versions first: version, state, created_us."""

    def policy_caps(self, version: int, hour_of_week: int) -> dict[str, float | None]:
        """Volume to cost rate, None for no cap."""

    def close(self) -> None:
        """Let go of connections."""
