"""Outstanding I/O by kind, settled I/O that failed, cuts that cover several slots, data planes that stopped.

Revision: 0009.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_ADDED = (
    (
        "rollups",
        (
            "oldest_read_ms",
            "stalled_read_ms",
            "oldest_write_ms",
            "stalled_write_ms",
            "kindless_oldest_ms",
            "kindless_stalled_ms",
            "spread_us",
        ),
    ),
    ("rollup_missed", ("settled_failed", "settled_failed_sure")),
)


def upgrade() -> None:
    for table, names in _ADDED:
        for name in names:
            op.add_column(
                table, sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False)
            )
    op.add_column("streams", sa.Column("planes", sa.Text(), server_default=sa.text("''"), nullable=False))
    op.create_table(
        "plane_gaps",
        sa.Column("slot_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("gateway_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("plane", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("missing_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("slot_us", "gateway_id", "plane"),
    )
