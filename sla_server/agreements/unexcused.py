"""Announced work that excuses nothing yet, as its notice is shorter than an agreement asks for; for people.

Rows of tables ``agreements`` and ``documents`` in, rows out. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final

from pydantic import ValidationError

from sla_server.agreements.document import Agreement
from sla_server.agreements.maintenance import AnnouncedWork, MaintenanceDocument
from sla_server.agreements.periods import SECOND_US, unannounced_spans
from sla_server.rows import Row

AHEAD_US: Final = 86_400 * SECOND_US
"""Work that begins within a day is of interest, too."""


def asks_for_notice(agreement: Row) -> bool:
    """Whether there can be such work for it."""
    spec: dict[str, Any] = (agreement.get("spec") or {}).get("spec") or {}
    return (spec.get("maintenance") or {}).get("notice") is not None


def unexcused_work(
    agreement: Row, documents: Iterable[Row], volumes: Collection[str], at_us: int
) -> list[Row]:
    """Work under way at that time, or due within a day, all or part of which is not excused.

    Args:
        agreement: a row, ``spec`` decoded.
        documents: of kind Maintenance, in any version, ``spec`` decoded; those that cannot be read are left
            out, as everywhere.
        volumes: that the agreement promises something of.
        at_us: as it was known then.

    Returns:
        In order of time: {sla, maintenance, reason, from_us, to_us, announced_us, notice_s, excused_from_us}.
    """
    try:
        agreed = Agreement.from_spec(agreement["spec"])
    except ValidationError:
        return []
    notice_s, works = agreed.spec.maintenance.notice, list[AnnouncedWork]()
    for row in documents if notice_s is not None else ():
        if row["applied_us"] > at_us:
            continue
        ended_us = row["ended_us"]
        try:
            document = MaintenanceDocument.from_json(row["spec"])
        except ValidationError:
            continue
        is_over = ended_us is not None and ended_us <= at_us
        work = AnnouncedWork(
            document, row["version"], row["applied_us"], ended_us if is_over else None, row["applied_by"]
        )
        if work.covers(agreed, volumes):
            works.append(work)
    found: list[Row] = []
    for work, span in unannounced_spans(agreed, works, at_us, at_us + AHEAD_US):
        begin_us, end_us = next(iter(work.spans(span[0], span[1])), span)
        announced_us = work.announced_us(works)
        found.append(
            {
                "sla": agreed.name,
                "maintenance": work.name,
                "reason": work.document.spec.reason,
                "from_us": begin_us,
                "to_us": end_us,
                "announced_us": announced_us,
                "notice_s": notice_s,
                "excused_from_us": announced_us + (notice_s or 0) * SECOND_US,
            }
        )
    return sorted(found, key=lambda row: (row["from_us"], row["maintenance"]))
