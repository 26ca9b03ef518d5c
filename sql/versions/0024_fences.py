"""Which of several servers writes, and the number of its term.

Revision: 0024.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False)


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), server_default=sa.text("''"), nullable=False)


def upgrade() -> None:
    op.add_column("ingest_watermark", _count("fence"))
    op.create_table(
        "fences",
        sa.Column("name", sa.Text(), autoincrement=False, nullable=False),
        _count("fence"),
        _text("server"),
        _text("queue"),
        _count("since_us"),
        sa.PrimaryKeyConstraint("name"),
    )
