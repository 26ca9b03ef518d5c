"""The results of jobs of single steps (table ``job_results``), with the right to replace them.

A run replaces what the one before it found in one transaction, so a run that fails leaves the last valid
result.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Engine, delete, insert

from pmdaemon.runtime.clock import Clock
from sla_server.db import schema
from sla_server.db.engine import begin
from sla_server.db.queries.job_results import ResultHead, ResultQueries

__all__ = ["JobResults", "ResultHead"]


class JobResults:
    """See the module. Thread: one at a time.

    Args:
        engine: with the right to insert and to delete.
        clock: says when a result was made.
        stored: reads what is stored.
    """

    def __init__(self, engine: Engine, clock: Clock, stored: ResultQueries) -> None:
        self._engine = engine
        self._clock = clock
        self.head = stored.head
        self.bodies = stored.bodies
        self.whole = stored.whole

    def replace(self, kind: str, end_us: int, basis: str, parts: Sequence[tuple[bytes, int]]) -> None:
        """Store what a run found instead of the one before.

        Args:
            kind: of the job.
            end_us: of the window.
            basis: of what else it depends.
            parts: bodies with their rows; one at least.

        Raises:
            DatabaseUnavailable: the former result is stored still.
        """
        head = {"kind": kind, "end_us": end_us, "made_us": self._clock.unix_us(), "basis": basis}
        table = schema.job_results
        with begin(self._engine) as connection:
            connection.execute(delete(table).where(table.c.kind == kind))
            for part, (body, rows) in enumerate(parts):
                connection.execute(insert(table), {**head, "part": part, "rows": rows, "body": body})
