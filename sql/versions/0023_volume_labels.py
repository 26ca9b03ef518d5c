"""Labels of volumes, as agents announce them.

Revision: 0023.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    labels = sa.Column("labels", sa.Text(), server_default=sa.text("''"), nullable=False)
    op.add_column("volumes", labels)
