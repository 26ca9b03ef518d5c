"""Which gateways a volume belongs to; what was shown before this belongs to the gateways that showed it.

Revision: 0012.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_TAKEN_OVER = """
INSERT INTO volume_owners (volume, gateway_id, name, state, backend, shown_backend, decided_by,
                           first_seen_us, changed_us, version)
SELECT s.volume, s.gateway_id, COALESCE(MAX(g.name), s.gateway_id), 'approved',
       COALESCE(MAX(CASE WHEN s.backend = v.backend THEN s.backend END), MAX(s.backend)),
       COALESCE(MAX(CASE WHEN s.backend = v.backend THEN s.backend END), MAX(s.backend)),
       'update', MIN(s.first_seen_us), MIN(s.first_seen_us), 1
FROM streams s
LEFT JOIN gateways g ON g.gateway_id = s.gateway_id
LEFT JOIN volumes v ON v.volume = s.volume
WHERE s.volume <> ''
GROUP BY s.volume, s.gateway_id
"""


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), server_default=sa.text("''"), nullable=False)


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False)


def upgrade() -> None:
    op.create_table(
        "volume_owners",
        sa.Column("volume", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("gateway_id", sa.Text(), autoincrement=False, nullable=False),
        *(_text(name) for name in ("name", "state", "backend", "shown_backend", "decided_by")),
        *(_count(name) for name in ("first_seen_us", "changed_us", "left_out", "version")),
        sa.PrimaryKeyConstraint("volume", "gateway_id"),
    )
    op.create_index("volume_owners_version", "volume_owners", ["version"], unique=False)
    op.execute(_TAKEN_OVER)
