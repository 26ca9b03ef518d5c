"""Pools of storage, what lies in them, and their history by day."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sqlalchemy import Executable, select

from sla_server.db import schema
from sla_server.db.queries.rows import decode_json
from sla_server.rows import Row

MOST_ACTIONS: Final = 200


class SpaceQueries:
    """The questions; ``read`` runs a statement (``SqlReader``). Thread: any."""

    def __init__(self, read: Callable[[Executable], list[Row]]) -> None:
        self._read = read

    def pools(self) -> list[Row]:
        """All pools, by owner's name and name."""
        table = schema.pools
        rows = self._read(select(table).order_by(table.c.owner_name, table.c.pool, table.c.owner))
        return decode_json(rows, schema.JSON_COLUMNS["pools"])

    def pool_volumes(self, owner: str = "", pool: str = "") -> list[Row]:
        """Volumes that are still there, the largest first; of one pool, or of all."""
        table = schema.pool_volumes
        statement = select(table).where(table.c.gone_us.is_(None))
        if owner:
            statement = statement.where(table.c.owner == owner, table.c.pool == pool)
        return self._read(statement.order_by(table.c.size_bytes.desc(), table.c.name))

    def pool_days(self, from_us: int, owner: str = "", pool: str = "") -> list[Row]:
        """Days from that time on, oldest first; of one pool, or of all."""
        table = schema.pool_days
        statement = select(table).where(table.c.day_us >= from_us)
        if owner:
            statement = statement.where(table.c.owner == owner, table.c.pool == pool)
        return self._read(statement.order_by(table.c.owner, table.c.pool, table.c.day_us))

    def pool_actions(self, owner: str, pool: str, limit: int = MOST_ACTIONS) -> list[Row]:
        """What was done about a pool, newest first."""
        table = schema.pool_actions
        statement = select(table).where(table.c.owner == owner, table.c.pool == pool)
        return self._read(statement.order_by(table.c.at_us.desc(), table.c.action_id).limit(limit))

    def recent_actions(self, from_us: int) -> list[Row]:
        """What was done about all pools from that time on, oldest first."""
        table = schema.pool_actions
        return self._read(select(table).where(table.c.at_us >= from_us).order_by(table.c.at_us))
