"""What the jobs of single steps have stored, and whether the policy job may take it instead of computing it.

It may if the result is of the same promises, volumes, time zones, holidays, settings and releases
(``basis_of``), and its window ends at most ``[policy] results_max_age_s`` before the policy's. One that is
older still says the last valid capacities (``inputs``).
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.parquet as pq

from sla_server.db.queries.job_results import table_of

if TYPE_CHECKING:
    from sla_server.config import PolicyJobConfig
    from sla_server.db.job_results import JobResults, ResultHead
    from sla_server.policy_jobs.inputs import JobInputs

ROWS_A_PART: Final = 200_000  # some 4 MB
MOST_ROWS: Final = 4_000_000
"""Of a result that the policy job takes: its driver holds it as a whole. More are computed in Spark."""


def basis_of(read: JobInputs, settings: PolicyJobConfig) -> str:
    """What a result depends on besides the statistics, as a digest."""
    said = hashlib.sha256()
    releases = [version(name) for name in ("storage-sla-server", "pyspark")]
    cuts = settings.cut_rows, read.bin_us
    holidays = [day.isoformat() for day in read.hours.holidays]
    small = [settings.window_days, settings.half_life_days, read.slots_an_hour, *cuts, *releases, holidays]
    said.update(json.dumps(small).encode())
    scope = read.scope
    tables = (scope.promises, scope.volumes, scope.clients, scope.classes, read.volumes, read.hours.zones)
    for table in tables:  # they come in the order of sets
        said.update(_body(table.sort_by([(name, "ascending") for name in table.column_names]))[0])
    return said.hexdigest()


def fresh(
    results: JobResults, kinds: Iterable[str], read: JobInputs, settings: PolicyJobConfig, end_us: int
) -> dict[str, pa.Table]:
    """The stored results of these kinds that need not be computed again.

    Raises:
        DatabaseUnavailable: retryable.
    """
    found: dict[str, pa.Table] = {}
    basis = ""
    for kind in kinds:
        head = results.head(kind)
        if head is None or head.rows > MOST_ROWS:
            continue
        basis = basis or basis_of(read, settings)
        if not _is_fresh(head, basis, settings, end_us):
            continue
        whole = results.whole(kind)  # another run may have replaced it since
        if whole is not None and _is_fresh(whole[0], basis, settings, end_us):
            found[kind] = table_of(whole[1])
    return found


def _is_fresh(head: ResultHead, basis: str, settings: PolicyJobConfig, end_us: int) -> bool:
    return head.basis == basis and 0 <= end_us - head.end_us <= settings.results_max_age_s * 1_000_000


def encoded(table: pa.Table) -> list[tuple[bytes, int]]:
    """A table as parts, each with its rows, for ``table_of``; an empty one is one part."""
    starts = range(0, max(table.num_rows, 1), ROWS_A_PART)
    return [_body(table.slice(start, ROWS_A_PART)) for start in starts]


def _body(table: pa.Table) -> tuple[bytes, int]:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue(), table.num_rows
