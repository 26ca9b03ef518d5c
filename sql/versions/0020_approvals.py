"""Accounts of a provider of OpenID Connect, and changes that wait for a second person.

Revision: 0020.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), server_default=sa.text("''"), nullable=False)


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False)


def upgrade() -> None:
    op.add_column("accounts", _text("identity"))
    op.create_table(
        "approvals",
        sa.Column("approval_id", sa.Text(), autoincrement=False, nullable=False),
        *(_text(name) for name in ("op", "body", "basis", "digest", "text", "state")),
        *(_text(name) for name in ("requested_by", "requested_as", "decided_by", "answer")),
        *(_count(name) for name in ("requested_us", "expires_us", "changed_us")),
        sa.Column("decided_us", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("approval_id"),
    )
    op.create_index("approvals_requested", "approvals", ["requested_us", "approval_id"], unique=False)
