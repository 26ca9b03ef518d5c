"""What became of events: their delivery to each recipient.

Revision: 0014.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def _key(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), autoincrement=False, nullable=False)


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), server_default=sa.text("''"), nullable=False)


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False)


def upgrade() -> None:
    op.create_table(
        "deliveries",
        _key("recipient"),
        _key("delivery_id"),
        _text("event_id"),
        _count("number"),
        _text("state"),
        _count("attempts"),
        _text("answer"),
        _count("at_us"),
        sa.PrimaryKeyConstraint("recipient", "delivery_id"),
    )
    op.create_index("deliveries_event", "deliveries", ["event_id"], unique=False)
    op.create_index("deliveries_at", "deliveries", ["at_us"], unique=False)
