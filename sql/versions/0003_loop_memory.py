"""What the loop of a backend has learned, kept with its throttles.

Revision: 0003.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("throttles", sa.Column("loop_start", sa.Float(precision=53), nullable=True))
    op.add_column("throttles", sa.Column("loop_ceiling", sa.Float(precision=53), nullable=True))
