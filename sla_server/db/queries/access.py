"""Accounts, API tokens, sessions, approvals: who may do what; and the audit log in the order of its chain."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Executable, func, or_, select

from sla_server.db import schema
from sla_server.rows import Row


class AccessQueries:
    """The questions; ``read`` runs a statement (``SqlReader``). Thread: any."""

    def __init__(self, read: Callable[[Executable], list[Row]]) -> None:
        self._read = read

    def accounts(self) -> list[Row]:
        """All accounts, also deleted ones, by name."""
        return self._read(select(schema.accounts).order_by(schema.accounts.c.name))

    def tokens(self, now_us: int) -> list[Row]:
        """API tokens that have not expired, oldest first; also revoked ones."""
        table = schema.api_tokens
        statement = select(table).where(or_(table.c.expires_us == 0, table.c.expires_us > now_us))
        return self._read(statement.order_by(table.c.created_us, table.c.token_id))

    def sessions(self, now_us: int) -> list[Row]:
        """Sessions whose time is not up, oldest first; also those that were ended."""
        table = schema.sessions
        statement = select(table).where(table.c.expires_us > now_us)
        return self._read(statement.order_by(table.c.created_us, table.c.session_id))

    def sign_ins(self) -> list[Row]:
        """Accounts of a provider, and when the newest session of each began; also of sessions that ended."""
        table, accounts = schema.sessions, schema.accounts
        provided = select(accounts.c.name).where(accounts.c.identity != "")
        newest = select(table.c.account, func.max(table.c.created_us).label("begun_us"))
        return self._read(newest.where(table.c.account.in_(provided)).group_by(table.c.account))

    def approvals(self, now_us: int) -> list[Row]:
        """Changes that wait for a second person, oldest first, of those whose time is not up."""
        table = schema.approvals
        statement = select(table).where(table.c.state == "pending", table.c.expires_us > now_us)
        return self._read(statement.order_by(table.c.requested_us, table.c.approval_id))

    def approvals_newest(self, limit: int) -> list[Row]:
        """All that wait or waited, newest first."""
        table = schema.approvals
        newest = select(table).order_by(table.c.requested_us.desc(), table.c.approval_id.desc())
        return self._read(newest.limit(limit))

    def audit_chain(self, after_seq: int, limit: int) -> list[Row]:
        """Rows of the audit log behind that number, in the order of the chain, texts as they are stored."""
        table = schema.audit
        statement = select(table).where(table.c.seq > after_seq).order_by(table.c.seq)
        return self._read(statement.limit(limit))
