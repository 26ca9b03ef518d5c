"""What completions hide: failed, overdue and outstanding I/Os; outages of the server; reasons of slices.

Revision: 0006.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_ADDED = (
    ("rollups", ("failed", "failed_reads", "failed_writes", "oldest_ms", "stalled_ms")),
    ("rollup_missed", ("overdue", "settled", "failed", "failed_missed")),
    ("coverage", ("gap_ios",)),
)


def upgrade() -> None:
    for table, names in _ADDED:
        for name in names:
            op.add_column(
                table, sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False)
            )
    op.add_column("slices", sa.Column("reason", sa.Text(), server_default=sa.text("''"), nullable=False))
    op.add_column("slices", sa.Column("measured", sa.Float(precision=53), nullable=True))
    op.create_table(
        "outages",
        sa.Column("from_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("to_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("from_us"),
    )
