"""Decisions of the controller; throttles are found by volume and by victim, audit rows by action.

Revision: 0008.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "decisions",
        sa.Column("decision_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("at_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        *(
            sa.Column(name, sa.Text(), server_default=sa.text("''"), nullable=False)
            for name in ("kind", "reason", "mode", "backend", "volume", "victim", "text", "figures")
        ),
        sa.Column("confirmed_us", sa.BigInteger(), nullable=True),
        sa.Column("seen_us", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("decision_id"),
    )
    op.create_index("decisions_at", "decisions", ["at_us"], unique=False)
    for name in ("backend", "volume", "victim"):
        op.create_index(f"decisions_{name}", "decisions", [name, "at_us"], unique=False)
    op.create_index("audit_action", "audit", ["action", "at_us"], unique=False)
    for name in ("volume", "victim"):
        op.create_index(f"throttles_{name}", "throttles", [name, "requested_us"], unique=False)
