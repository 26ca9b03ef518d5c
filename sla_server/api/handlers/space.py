"""Handlers about pools of storage; all of it is in SQL."""

from __future__ import annotations

from typing import Any, Final

from flask import Request, Response

from sla_server.api import responses
from sla_server.api.context import AppContext
from sla_server.api.errors import NotFound
from sla_server.api.routes import POOL_DAYS_MAX

DAY_US: Final = 86_400_000_000
STALE_US: Final = 3 * 3_600_000_000
"""Longer than any interval of reading and storing: the source, or its gateway, is away."""
DAYS_DEFAULT: Final = 90
Row = dict[str, Any]


def pools(context: AppContext, _request: Request) -> Response:
    """All pools; ``full_ratio`` is by bytes, or by what runs out before them."""
    now_us = context.clock.unix_us()
    return responses.as_list([_shown(row, now_us) for row in context.source.space.pools()])


def pool(context: AppContext, request: Request, owner: str, pool: str) -> Response:
    """One pool with its volumes, its days and what was done about it."""
    days = responses.number(request, "days", DAYS_DEFAULT, least=1, most=POOL_DAYS_MAX)
    now_us, space = context.clock.unix_us(), context.source.space
    row = next(
        (row for row in space.pools() if row["pool"] == pool and owner in (row["owner"], row["owner_name"])),
        None,
    )
    if row is None:
        raise NotFound(f"no pool {f'{owner}/{pool}'!r}", "'sla get pools' lists them")
    key = (row["owner"], row["pool"])
    return responses.as_json(
        {
            **_shown(row, now_us),
            "volumes": space.pool_volumes(*key),
            "days": space.pool_days(now_us - days * DAY_US, *key),
            "actions": space.pool_actions(*key),
        }
    )


def _shown(row: Row, now_us: int) -> Row:
    size = row["size_bytes"]
    used_ratio = row["used_bytes"] / size if size else 1.0
    return {
        "name": f"{row['owner_name'] or row['owner']}/{row['pool']}",
        **row,
        "used_ratio": used_ratio,
        "full_ratio": max(used_ratio, row["other_ratio"] or 0.0),
        "provisioned_ratio": row["provisioned_bytes"] / size if size else None,
        "is_stale": now_us - row["read_us"] > STALE_US,
    }
