"""Throttles of one client of a volume.

Revision: 0010.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("throttles", sa.Column("client", sa.Text(), server_default=sa.text("''"), nullable=False))
