"""What jobs of single steps found (table ``job_results``): of each kind the newest, in parts.

Bodies are Parquet or JSON; what is in them is the affair of the jobs and of those who take it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import Executable, select

from sla_server.db import schema
from sla_server.rows import Row

if TYPE_CHECKING:
    import pyarrow as pa


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


class ResultQueries:
    """The questions; ``read`` runs a statement (``SqlReader``). Thread: any."""

    def __init__(self, read: Callable[[Executable], list[Row]]) -> None:
        self._read = read

    def head(self, kind: str) -> ResultHead | None:
        """Of the stored result; None: there is none."""
        table = schema.job_results
        columns = table.c.end_us, table.c.made_us, table.c.basis, table.c.rows
        return _head(kind, self._read(select(*columns).where(table.c.kind == kind)))

    def bodies(self, kind: str) -> list[bytes]:
        """All parts, in order."""
        found = self.whole(kind)
        return [] if found is None else found[1]

    def whole(self, kind: str) -> tuple[ResultHead, list[bytes]] | None:
        """Both, of one moment; None: there is none."""
        table = schema.job_results
        rows = self._read(select(table).where(table.c.kind == kind).order_by(table.c.part))
        head = _head(kind, rows)
        return None if head is None else (head, [bytes(row["body"]) for row in rows])


def _head(kind: str, rows: Sequence[Row]) -> ResultHead | None:
    if not rows:
        return None
    first = rows[0]
    rows_of_all = sum(row["rows"] for row in rows)
    return ResultHead(kind, first["end_us"], first["made_us"], first["basis"], rows_of_all)


def table_of(bodies: Sequence[bytes]) -> pa.Table:
    """The table whose parts these are, as Parquet; one at least."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    return pa.concat_tables(pq.read_table(io.BytesIO(body)) for body in bodies)
