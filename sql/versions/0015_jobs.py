"""Runs of jobs: when, how long, of how many rows, and how they ended.

Revision: 0015.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), server_default=sa.text("''"), nullable=False)


def _big(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=True)


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("job_id", sa.Text(), autoincrement=False, nullable=False),
        *(_text(name) for name in ("kind", "state", "who", "text")),
        sa.Column("started_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        *(_big(name) for name in ("ended_us", "exit_status", "rows", "version")),
        sa.PrimaryKeyConstraint("job_id"),
    )
    op.create_index("jobs_started", "jobs", ["started_us", "job_id"], unique=False)
