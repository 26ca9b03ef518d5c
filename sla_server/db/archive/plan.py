"""What to merge, what to give up, what to delete. Pure: rows of the manifest and the time in, rows out.

Merging. Files are closed by size or age, so a small server makes one a minute. When the hour in which they
were written is over, the small ones of that hour become files of up to ``merge_to_bytes``; when the day is
over, the same is done with what is still small of that day. So a row is written at most three times, and the
files left are one a day at least and 64 MB at most. A merged file keeps the creation time of its newest
part, which keeps it in its hour.

Giving up. By age of the newest cut, then, oldest first, until all files of raw cuts fit their limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from sla_server.db.archive.config import FilesConfig
from sla_server.db.archive.manifest import CUTS, FileRow

HOUR_US: Final = 3_600_000_000
DAY_US: Final = 24 * HOUR_US
SETTLE_US: Final = (
    300_000_000  # a file of an hour is committed minutes after its end when the database was away
)


def merges(
    rows: Iterable[FileRow], owner: str, now_us: int, config: FilesConfig, *, at_once: bool = False
) -> list[list[FileRow]]:
    """Groups of at least two files, each to become one.

    Args:
        rows: files in use.
        owner: only files of this queue id: every server merges its own.
        now_us: us UTC.
        config: sizes.
        at_once: do not wait until hour and day are over.
    """
    by_place: dict[tuple[str, int], list[FileRow]] = {}
    for row in sorted(rows, key=lambda row: (row.created_us, row.path)):
        if row.owner != owner or row.bytes >= config.merge_below_bytes:
            continue
        day, hour = row.created_us // DAY_US, row.created_us // HOUR_US
        if at_once or now_us >= (day + 1) * DAY_US + SETTLE_US:
            place = -1
        elif now_us >= (hour + 1) * HOUR_US + SETTLE_US:
            place = hour
        else:
            continue
        by_place.setdefault((row.directory, place), []).append(row)
    return [group for rows in by_place.values() for group in _packed(rows, config.merge_to_bytes)]


def _packed(rows: Sequence[FileRow], limit_bytes: int) -> list[list[FileRow]]:
    """Consecutive rows whose sizes stay within the limit together; single ones are left out."""
    groups: list[list[FileRow]] = [[]]
    size_bytes = 0
    for row in rows:
        if groups[-1] and size_bytes + row.bytes > limit_bytes:
            groups.append([])
            size_bytes = 0
        groups[-1].append(row)
        size_bytes += row.bytes
    return [group for group in groups if len(group) > 1]


def given_up(rows: Iterable[FileRow], now_us: int, config: FilesConfig) -> list[FileRow]:
    """Files in use that are too old, or too many."""
    cuts_before_us = now_us - round(config.cuts_max_age_h * HOUR_US)
    rollups_before_us = now_us - round(config.rollups_max_age_days * DAY_US)
    out: list[FileRow] = []
    kept_cuts: list[FileRow] = []
    for row in rows:
        if row.max_us < (cuts_before_us if row.kind == CUTS else rollups_before_us):
            out.append(row)
        elif row.kind == CUTS:
            kept_cuts.append(row)
    excess_bytes = sum(row.bytes for row in kept_cuts) - config.cuts_max_bytes
    for row in sorted(kept_cuts, key=lambda row: (row.max_us, row.path)):
        if excess_bytes <= 0:
            break
        out.append(row)
        excess_bytes -= row.bytes
    return out


def deletable(rows: Sequence[FileRow], now_us: int, config: FilesConfig) -> list[FileRow]:
    """Replaced files whose grace time is over; sooner, oldest first, where raw cuts exceed their limit."""
    grace_us = round(config.grace_s * 1e6)
    replaced = [(row.replaced_us, row) for row in rows if row.replaced_us is not None]
    out = [row for at_us, row in replaced if now_us - at_us >= grace_us]
    excess_bytes = sum(row.bytes for row in rows if row.kind == CUTS) - config.cuts_max_bytes
    excess_bytes -= sum(row.bytes for row in out if row.kind == CUTS)
    waiting = [(at_us, row) for at_us, row in replaced if row.kind == CUTS and now_us - at_us < grace_us]
    for _at_us, row in sorted(waiting, key=lambda pair: (pair[0], pair[1].path)):
        if excess_bytes <= 0:
            break
        out.append(row)
        excess_bytes -= row.bytes
    return out
