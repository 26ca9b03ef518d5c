"""What jobs of single steps found, for the policy job; how long a burst of a policy's cap may be.

Revision: 0025.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False)


def upgrade() -> None:
    op.add_column("policy_caps", sa.Column("burst_s", sa.Float(), nullable=True))
    op.create_table(
        "job_results",
        sa.Column("kind", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("part", sa.Integer(), autoincrement=False, nullable=False),
        *(_count(name) for name in ("end_us", "made_us", "rows")),
        sa.Column("basis", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "part"),
    )
