"""The public reading side: ``SqlReader`` answers the questions of services, API and policy jobs.

Every answer is plain Python (dicts, lists, numbers, numpy arrays for histograms); no SQLAlchemy type leaks.
The methods stand in ``reads_inventory``, ``reads_records`` and ``reads_statistics``.
"""

from __future__ import annotations

from pathlib import Path

from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import make_engine
from sla_server.db.queries.inventory import InventoryReads
from sla_server.db.queries.query import Row
from sla_server.db.queries.records import RecordReads
from sla_server.db.queries.statistics import SliceInputs, StatisticsReads

__all__ = ["Row", "SliceInputs", "SqlReader", "open_reader"]


class SqlReader(InventoryReads, RecordReads, StatisticsReads):
    """All questions, over one read-only pool.

    Raises (every method):
        DatabaseUnavailable: retryable; also while the dbmanager has not created the schema yet.

    Thread: any.
    """

    def close(self) -> None:
        """Close the pool's connections."""
        self._engine.dispose()


def open_reader(config: DatabaseConfig, data_dir: Path) -> SqlReader:
    """A reader with a pool of its own; connects at its first question."""
    return SqlReader(make_engine(config, data_dir, read_only=True))
