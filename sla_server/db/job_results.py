"""What the jobs of single steps found (table ``job_results``): of each kind the newest, in parts.

A run replaces what the one before it found in one transaction, so a run that fails leaves the last valid
result. Bodies are Parquet; what is in them is the affair of the jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Engine, delete, insert, select

from pmdaemon.runtime.clock import Clock
from sla_server.db import schema
from sla_server.db.engine import begin, translated


@dataclass(frozen=True, slots=True)
class ResultHead:
    """What is known of a stored result without reading it.

    Attributes:
        end_us: of the window it was computed from.
        made_us: when.
        basis: of what else it depends, as its job has it.
        rows: of all its parts.
    """

    kind: str
    end_us: int
    made_us: int
    basis: str
    rows: int


class JobResults:
    """See the module. Thread: one at a time."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

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

    def head(self, kind: str) -> ResultHead | None:
        """Of the stored result; None: there is none."""
        table = schema.job_results
        columns = table.c.end_us, table.c.made_us, table.c.basis, table.c.rows
        with translated(self._engine), self._engine.connect() as connection:
            found = connection.execute(select(*columns).where(table.c.kind == kind)).all()
        if not found:
            return None
        end_us, made_us, basis, _ = found[0]
        return ResultHead(kind, end_us, made_us, basis, sum(row.rows for row in found))

    def bodies(self, kind: str) -> list[bytes]:
        """All parts, in order."""
        table = schema.job_results
        statement = select(table.c.body).where(table.c.kind == kind).order_by(table.c.part)
        with translated(self._engine), self._engine.connect() as connection:
            return [bytes(body) for body in connection.execute(statement).scalars()]
