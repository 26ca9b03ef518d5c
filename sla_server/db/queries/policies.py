"""Policies and their caps: which is the newest, what it caps, and what differs between two.

A policy that was published never changes but for its state, so pages of it may be asked for at any time.
Pure: statements, and how they are asked one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

from sqlalchemy import ColumnElement, Integer, Select, and_, case, cast, func, select, tuple_

from sla_server.db import schema
from sla_server.rows import Row

CAPS_A_PAGE: Final = 10_000
"""A policy of a large fleet has millions."""


def listed(limit: int, before: int | None) -> Select[Any]:
    """Versions, newest first; ``before``: older than that one."""
    table = schema.policies
    statement = select(table).order_by(table.c.version.desc()).limit(limit)
    return statement if before is None else statement.where(table.c.version < before)


def newest(states: Collection[str], but: Collection[int] = ()) -> Select[Any]:
    """Version and state of the newest policy in one of these states, leaving some versions out."""
    table = schema.policies
    statement = select(table.c.version, table.c.state).where(table.c.state.in_(states))
    if but:
        statement = statement.where(table.c.version.not_in(but))
    return statement.order_by(table.c.version.desc()).limit(1)


def caps(
    version: int,
    hour_of_week: int | None = None,
    limit: int | None = None,
    after: str | None = None,
    volume: str | None = None,
    is_capped: bool = False,
) -> Select[Any]:
    """Caps of one policy version, of one hour (0 = Monday 00 UTC) or of all 168, by volume and hour.

    Args:
        version: of the policy.
        hour_of_week: only this one.
        limit: rows of a page.
        after: "VOLUME:HOUR" of the last row of the former page.
        volume: only this one.
        is_capped: only hours with a cap.
    """
    table = schema.policy_caps
    place = table.c.volume, table.c.hour_of_week
    statement = select(table).where(table.c.version == version).order_by(*place).limit(limit)
    if after:
        name, _, hour_text = after.rpartition(":")
        if not hour_text.isdigit():
            raise ValueError(f"{after!r} is no cursor; use the `next` of the page before")
        statement = statement.where(tuple_(*place) > (name, int(hour_text)))
    if hour_of_week is not None:
        statement = statement.where(table.c.hour_of_week == hour_of_week)
    if volume is not None:
        statement = statement.where(table.c.volume == volume)
    return statement.where(table.c.cost_per_s.is_not(None)) if is_capped else statement


def capped_hours(read: Callable[[Select[Any]], list[Row]], version: int) -> Iterator[Row]:
    """The hours of one policy version with a cap, by volume and hour, a page of them at a time."""
    after = ""
    while page := read(caps(version, limit=CAPS_A_PAGE, after=after, is_capped=True)):
        yield from page
        after = f"{page[-1]['volume']}:{page[-1]['hour_of_week']}"


def changes(before: int, after: int, limit: int, after_volume: str = "") -> Select[Any]:
    """Volumes whose caps differ between two versions, by name.

    Rows of volume, ``hours`` that differ, of which ``added`` have a cap in the second version only,
    ``removed`` in the first only, ``lowered`` and ``raised``; and the lowest cap in each version.
    """
    table = schema.policy_caps

    def cost(version: int) -> ColumnElement[Any]:  # 0: no cap, as a cap is above 0
        return func.max(case((table.c.version == version, func.coalesce(table.c.cost_per_s, 0.0)), else_=0.0))

    pairs = (
        select(table.c.volume, cost(before).label("was"), cost(after).label("now"))
        .where(table.c.version.in_((before, after)), table.c.volume > after_volume)
        .group_by(table.c.volume, table.c.hour_of_week)
        .subquery()
    )
    was, now = pairs.c.was, pairs.c.now

    def hours(condition: ColumnElement[bool]) -> ColumnElement[Any]:
        return cast(func.sum(case((condition, 1), else_=0)), Integer)

    return (
        select(
            pairs.c.volume,
            hours(was != now).label("hours"),
            hours(and_(was == 0, now > 0)).label("added"),
            hours(and_(was > 0, now == 0)).label("removed"),
            hours(and_(now > 0, now < was)).label("lowered"),
            hours(and_(was > 0, now > was)).label("raised"),
            func.min(case((was > 0, was))).label("lowest_before"),
            func.min(case((now > 0, now))).label("lowest_after"),
        )
        .group_by(pairs.c.volume)
        .having(hours(was != now) > 0)
        .order_by(pairs.c.volume)
        .limit(limit)
    )
