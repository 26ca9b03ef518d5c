"""Accounts, API tokens and sessions; the audit log is a chain of digests that takes no change.

A row of ``audit`` gets ``seq`` and ``digest`` once (``sla_server.db.audit_chain``); from then on it may be
changed no more, and deleted only once a row of the chain says so (action ``audit-pruned``, its subject the
last number that leaves). Triggers refuse everything else. Rows of older releases are chained by the next
transaction of the database manager.

Revision: 0018.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

SQLITE = (
    """CREATE TRIGGER audit_no_update BEFORE UPDATE ON audit WHEN OLD.seq IS NOT NULL
BEGIN SELECT RAISE(ABORT, 'the audit log takes no change'); END""",
    """CREATE TRIGGER audit_no_delete BEFORE DELETE ON audit WHEN NOT EXISTS (
    SELECT 1 FROM audit WHERE action = 'audit-pruned' AND CAST(subject AS INTEGER) >= OLD.seq)
BEGIN SELECT RAISE(ABORT, 'the audit log takes no deletion'); END""",
)
POSTGRESQL = (
    """CREATE FUNCTION audit_keep() RETURNS trigger LANGUAGE plpgsql AS $keep$
BEGIN
    IF TG_OP = 'UPDATE' AND OLD.seq IS NULL THEN
        RETURN NEW;
    END IF;
    IF TG_OP = 'DELETE' AND EXISTS (
        SELECT 1 FROM audit WHERE action = 'audit-pruned' AND subject ~ '^[0-9]{1,18}$'
        AND CASE WHEN subject ~ '^[0-9]{1,18}$' THEN subject::bigint ELSE 0 END >= OLD.seq) THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'the audit log takes no %', CASE TG_OP WHEN 'UPDATE' THEN 'change' ELSE 'deletion' END;
END
$keep$""",
    "CREATE TRIGGER audit_keep BEFORE UPDATE OR DELETE ON audit FOR EACH ROW EXECUTE FUNCTION audit_keep()",
    """CREATE FUNCTION audit_keep_all() RETURNS trigger LANGUAGE plpgsql AS $keep$
BEGIN
    RAISE EXCEPTION 'the audit log takes no deletion';
END
$keep$""",
    "CREATE TRIGGER audit_keep_all BEFORE TRUNCATE ON audit EXECUTE FUNCTION audit_keep_all()",
    # Default rights give each new table to all readers; hashes of secrets are not the policy job's business.
    """DO $revoke$
BEGIN
    IF to_regrole('sla_policy') IS NOT NULL THEN
        REVOKE ALL ON accounts, api_tokens, sessions FROM sla_policy;
    END IF;
END
$revoke$""",
)


def _key(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), autoincrement=False, nullable=False)


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), server_default=sa.text("''"), nullable=False)


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False)


def _big(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=True)


def upgrade() -> None:
    op.create_table(
        "accounts",
        _key("name"),
        *(_text(name) for name in ("role", "password", "labels", "state")),
        *(_count(name) for name in ("created_us", "changed_us", "sessions_from_us")),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "api_tokens",
        _key("token_id"),
        *(_text(name) for name in ("name", "digest", "role", "labels", "created_by")),
        *(_count(name) for name in ("created_us", "changed_us", "expires_us")),
        _big("revoked_us"),
        sa.PrimaryKeyConstraint("token_id"),
    )
    op.create_table(
        "sessions",
        _key("session_id"),
        *(_text(name) for name in ("account", "role", "labels", "made_by", "address", "browser")),
        *(_count(name) for name in ("created_us", "changed_us", "expires_us")),
        _big("ended_us"),
        sa.PrimaryKeyConstraint("session_id"),
    )
    op.add_column("audit", _big("seq"))
    op.add_column("audit", _text("digest"))
    op.create_index("audit_seq", "audit", ["seq"], unique=True)
    statements = POSTGRESQL if op.get_bind().dialect.name == "postgresql" else SQLITE
    for statement in statements:
        op.execute(statement)
