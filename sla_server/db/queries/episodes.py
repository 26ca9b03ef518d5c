"""Statements about violation episodes: each with how many bad slices it reaches into, as they are judged now.

That is counted when it is asked, not when a slice is judged: the last slice of an episode is judged after it
has closed, and any slice may be judged again when data come late.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import ColumnElement, Select, exists, func, select, tuple_

from sla_server.db import schema
from sla_server.db.queries.slices import is_newer_revision

DAY_US: Final = 86_400_000_000
"""No slice is longer."""
_NEVER_US: Final = 1 << 62


def counted() -> Select[Any]:
    """All episodes; ``slices_bad``: how many slices, newest revision of each, are bad and overlap them.

    No time of an objective is judged twice, so the first slice that may overlap is the last one that began by
    then. It is looked up by itself: without that a day of slices would be read for each episode.
    """
    episodes, slices = schema.episodes, schema.slices
    newer, first = slices.alias("newer"), slices.alias("first")
    end_us = func.coalesce(episodes.c.closed_us, _NEVER_US)

    def of_objective(table: Any) -> tuple[ColumnElement[bool], ...]:
        # Equal names, not a comparison of rows alone: of that PostgreSQL cannot tell that it is of few rows.
        return table.c.name == episodes.c.name, table.c.objective == episodes.c.objective

    began = first.c.start_us > episodes.c.opened_us - DAY_US, first.c.start_us <= episodes.c.opened_us
    last_begun = select(first.c.start_us).where(*of_objective(first), *began)
    last_begun = last_begun.order_by(first.c.start_us.desc()).limit(1).correlate(episodes)
    first_us = func.coalesce(last_begun.scalar_subquery(), episodes.c.opened_us)

    def within(table: Any) -> list[ColumnElement[bool]]:
        # As rows, too: else PostgreSQL may choose the index of all slices by time, as in ``slices.newest``.
        place = tuple_(table.c.name, table.c.objective, table.c.start_us)
        begin = tuple_(episodes.c.name, episodes.c.objective, episodes.c.opened_us - DAY_US)
        bounds = table.c.start_us >= first_us, table.c.start_us < end_us, place > begin
        return [*of_objective(table), *bounds]

    is_old = exists().where(*within(newer), *is_newer_revision(newer, slices)).correlate(episodes, slices)
    overlaps = slices.c.start_us + slices.c.length_us > episodes.c.opened_us
    bad = (
        select(func.count())
        .select_from(slices)
        .where(*within(slices), overlaps, slices.c.state == "bad", ~is_old)
        .correlate(episodes)
        .scalar_subquery()
    )
    columns = [column for column in episodes.c if column.name != "slices_bad"]
    return select(*columns, bad.label("slices_bad"))
