"""Threshold sets follow from the agreements and a gateway's volumes; nothing is recorded of them any more.

Revision: 0005.
"""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_table("threshold_sets")
