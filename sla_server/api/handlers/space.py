"""Handlers about pools of storage; all of it is in SQL."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Final

from flask import Request, Response

from sla_server.api import responses
from sla_server.api.context import AppContext
from sla_server.api.errors import BadInput, NotFound
from sla_server.api.handlers.read import paged
from sla_server.api.routes import POOL_DAYS_MAX

DAY_US: Final = 86_400_000_000
STALE_US: Final = 3 * 3_600_000_000
"""Longer than any interval of reading and storing: the source, or its gateway, is away."""
DAYS_DEFAULT: Final = 90
STALE: Final = "stale"
LEVELS: Final = ("ok", "warn", "critical")
Row = dict[str, Any]


def _soonest(row: Row) -> float:
    return float((row["forecast"] or {}).get("full_us") or inf)


ORDERS: Final[dict[str, Callable[[Row], float] | None]] = {
    "name": None,
    "fullest": lambda row: -row["full_ratio"],
    "soonest": _soonest,
}
"""As they come, by name; equal ones stay so."""


def pools(context: AppContext, request: Request) -> Response:
    """All pools, or a page of those asked for; ``full_ratio`` is by bytes, or by what ends before them."""
    part, level, now_us = request.args.get("match", "").lower(), _level(request), context.clock.unix_us()
    shown = (_shown(row, now_us) for row in context.source.space.pools())
    rows = [
        row
        for row in shown
        if part in str(row["name"]).lower() and level in ("", STALE if row["is_stale"] else row["level"])
    ]
    order = request.args.get("sort", "name")
    if order not in ORDERS:
        raise BadInput("sort", f"{order[:40]!r} is no order", f"Use {', '.join(ORDERS)}")
    if (key := ORDERS[order]) is not None:
        rows.sort(key=key)
    return paged(context, request, rows, list)


def _level(request: Request) -> str:
    level = request.args.get("level", "")
    if level not in ("", *LEVELS, STALE):
        raise BadInput("level", f"{level[:40]!r} is no level", f"Use {', '.join((*LEVELS, STALE))}")
    return level


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
