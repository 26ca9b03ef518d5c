"""Statements about violation episodes: each with how many bad slices it reaches into, as they are judged now.

That is counted when it is asked, not when a slice is judged: the last slice of an episode is judged after it
has closed, and any slice may be judged again when data come late.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import ColumnElement, Select, exists, func, select, tuple_

from sla_server.db import schema

DAY_US: Final = 86_400_000_000
"""No slice is longer."""
_NEVER_US: Final = 1 << 62


def counted() -> Select[Any]:
    """All episodes; ``slices_bad``: how many slices, newest revision of each, are bad and overlap them."""
    episodes, slices = schema.episodes, schema.slices
    newer = slices.alias("newer")
    first_us = episodes.c.opened_us - DAY_US
    end_us = func.coalesce(episodes.c.closed_us, _NEVER_US)

    def within(table: Any) -> list[ColumnElement[bool]]:
        # One range of the primary key, as in ``slices.newest``.
        place = tuple_(table.c.name, table.c.objective, table.c.start_us)
        return [
            place > tuple_(episodes.c.name, episodes.c.objective, first_us),
            place < tuple_(episodes.c.name, episodes.c.objective, end_us),
        ]

    is_newer = newer.c.start_us == slices.c.start_us, newer.c.revision > slices.c.revision
    is_old = exists().where(*within(newer), *is_newer).correlate(episodes, slices)
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
