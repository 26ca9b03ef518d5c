"""Throttles of groups of volumes, and the burst of a throttle.

Revision: 0013.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("group_name", "members"):
        op.add_column("throttles", sa.Column(name, sa.Text(), server_default=sa.text("''"), nullable=False))
    op.add_column("throttles", sa.Column("burst_s", sa.Float(precision=53), nullable=True))
