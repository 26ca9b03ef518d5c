"""Events by what they are about: the inbox looks for the end of each condition that a page shows.

Revision: 0017.
"""

from __future__ import annotations

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("events_subject", "events", ["subject", "at_us"], unique=False)
