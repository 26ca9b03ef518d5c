"""Issued reports, which never change.

Revision: 0019.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None
REFUSAL = "an issued report never changes: issue a revision"


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), server_default=sa.text("''"), nullable=False)


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False)


def upgrade() -> None:
    op.create_table(
        "reports",
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        *(_text(name) for name in ("report_id", "name", "period", "revises")),
        sa.Column("revision", sa.Integer(), server_default=sa.text("0"), nullable=False),
        *(_count(name) for name in ("from_us", "to_us", "issued_us")),
        _text("issued_by"),
        sa.Column("is_preliminary", sa.Boolean(), server_default=sa.false(), nullable=False),
        *(_text(name) for name in ("digest", "previous", "summary", "body")),
        sa.PrimaryKeyConstraint("number"),
    )
    op.create_index("reports_id", "reports", ["report_id"], unique=True)
    op.create_index("reports_name", "reports", ["name", "from_us"], unique=False)
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "CREATE OR REPLACE FUNCTION refuse_change_of_report() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION '{REFUSAL}'; END $$"
        )
        op.execute(
            "CREATE TRIGGER reports_never_change BEFORE UPDATE OR DELETE OR TRUNCATE ON reports "
            "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change_of_report()"
        )
        return
    for what in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER reports_never_{what.lower()} BEFORE {what} ON reports "
            f"BEGIN SELECT RAISE(ABORT, '{REFUSAL}'); END"
        )
