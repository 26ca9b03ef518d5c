"""Figures that rows lacked: failed I/Os of a slice, and the peak of a cap's bursts.

Revision: 0022.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    failed = sa.Column("failed", sa.BigInteger(), server_default=sa.text("0"), nullable=False)
    op.add_column("slices", failed)
    op.add_column("throttles", sa.Column("peak_ops_per_s", sa.Float(precision=53), nullable=True))
