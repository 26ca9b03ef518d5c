"""Of each slot which I/Os followed one another, and for how long our throttle held some back.

Revision: 0021.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("caps_us", "sequential", "placed"):
        op.add_column(
            "rollups", sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False)
        )
