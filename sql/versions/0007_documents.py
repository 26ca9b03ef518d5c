"""Maintenance and calendars as documents of their own.

Revision: 0007.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "documents",
        sa.Column("kind", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        *(
            sa.Column(name, sa.Text(), server_default=sa.text("''"), nullable=False)
            for name in ("document", "spec")
        ),
        sa.Column("applied_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("applied_by", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("ended_us", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("kind", "name", "version"),
    )
