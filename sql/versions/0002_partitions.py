"""Time-series tables are partitioned on PostgreSQL; slices have an index for their retention.

The rows of 0001 stay where they are: their table becomes the oldest partition, up to the end of the span
that its newest row lies in. It leaves as a whole when that end is old enough.

Revision: 0002, after 0001.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

DAY_US = 86_400_000_000
TABLES = (
    ("rollups", "slot_us, stream_id", DAY_US),
    ("rollup_missed", "slot_us, stream_id, io, threshold_us", DAY_US),
    ("coverage", "slot_us, gateway_id", DAY_US),
    ("rollup_hours", "hour_us, stream_id", 7 * DAY_US),
)


def upgrade() -> None:
    op.create_index("slices_start", "slices", ["start_us"], unique=False)
    if op.get_bind().dialect.name == "postgresql":
        for table, key, span_us in TABLES:
            _partition(table, key, span_us)


def _partition(table: str, key: str, span_us: int) -> None:
    old, time_column = f"{table}_0001", key.split(",")[0]
    op.execute(f"ALTER TABLE {table} RENAME TO {old}")
    op.execute(f"ALTER TABLE {old} RENAME CONSTRAINT {table}_pkey TO {old}_pkey")
    op.execute(f"CREATE TABLE {table} (LIKE {old} INCLUDING DEFAULTS) PARTITION BY RANGE ({time_column})")
    op.execute(f"ALTER TABLE {table} ADD PRIMARY KEY ({key})")
    newest = sa.select(sa.func.max(sa.column(time_column))).select_from(sa.table(old))
    newest_us = op.get_bind().execute(newest).scalar()
    if newest_us is None:
        op.execute(f"DROP TABLE {old}")
        return
    to_us = (newest_us // span_us + 1) * span_us
    op.execute(f"ALTER TABLE {table} ATTACH PARTITION {old} FOR VALUES FROM (MINVALUE) TO ({to_us})")
