"""What agents tell of I/O that waits or failed, and slots whose cuts came late.

Revision: 0011.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "rollups", sa.Column("told_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False)
    )
    op.create_table(
        "late_cuts",
        sa.Column("slot_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("gateway_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("noted_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("slot_us", "gateway_id"),
    )
