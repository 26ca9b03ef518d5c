"""Pools of storage: how full they are, what lies in them, and their history by day.

Revision: 0016.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def _key(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), autoincrement=False, nullable=False)


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), server_default=sa.text("''"), nullable=False)


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False)


def _big(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=True)


def _float(name: str) -> sa.Column[float]:
    return sa.Column(name, sa.Float(precision=53), nullable=True)


def upgrade() -> None:
    op.create_table(
        "pools",
        _key("owner"),
        _key("pool"),
        *(_text(name) for name in ("owner_name", "kind", "backend")),
        *(
            _count(name)
            for name in ("size_bytes", "used_bytes", "provisioned_bytes", "volume_count", "read_us")
        ),
        _float("other_ratio"),
        _text("level"),
        _count("level_us"),
        *(_text(name) for name in ("conditions", "forecast")),
        _count("first_seen_us"),
        sa.PrimaryKeyConstraint("owner", "pool"),
    )
    op.create_table(
        "pool_volumes",
        _key("owner"),
        _key("pool"),
        _key("name"),
        _count("size_bytes"),
        _big("used_bytes"),
        _text("volume"),
        sa.Column("in_use", sa.Boolean(), nullable=True),
        _count("first_seen_us"),
        *(_big(name) for name in ("unused_since_us", "gone_us")),
        sa.PrimaryKeyConstraint("owner", "pool", "name"),
    )
    op.create_table(
        "pool_days",
        _key("owner"),
        _key("pool"),
        sa.Column("day_us", sa.BigInteger(), autoincrement=False, nullable=False),
        *(_count(name) for name in ("size_bytes", "used_bytes", "least_bytes", "most_bytes", "readings")),
        sa.PrimaryKeyConstraint("owner", "pool", "day_us"),
    )
    op.create_table(
        "pool_actions",
        _key("action_id"),
        _count("at_us"),
        *(_text(name) for name in ("owner", "pool", "action", "state", "text")),
        sa.PrimaryKeyConstraint("action_id"),
    )
    op.create_index("pool_actions_pool", "pool_actions", ["owner", "pool", "at_us"], unique=False)
