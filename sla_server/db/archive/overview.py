"""What ``sla storage status`` tells: files by kind, what waits for deletion, the cursors. Reads no file."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, select

from sla_server.db import schema
from sla_server.db.archive import manifest
from sla_server.db.archive.store import FileStore
from sla_server.db.engine import translated
from sla_server.db.engine import where as address_of


def owners(engine: Engine) -> list[str]:
    """Ids of the ingest queues whose records went into this database.

    Raises:
        DatabaseUnavailable: retryable; also while there is no schema yet.
    """
    with translated(engine), engine.connect() as connection:
        names = connection.execute(select(schema.consumed.c.queue)).scalars()
        return sorted({name.rpartition("/")[0] for name in names})


def overview(engine: Engine, files: FileStore) -> dict[str, Any]:
    """Figures, and names of files that are missing or without a row.

    Raises:
        DatabaseUnavailable, FilesUnavailable: retryable.
    """
    there = files.listing()
    with translated(engine), engine.connect() as connection:
        rows = manifest.rows(connection)
        complete_from_us = manifest.boundary_us(connection, manifest.COMPLETE_FROM_KEY)
        moved_until_us = manifest.boundary_us(connection, manifest.MOVED_KEY)
        cursors = {row.queue: row.queue_seq for row in connection.execute(select(schema.consumed))}
    used = [row for row in rows if row.replaced_us is None]
    replaced = [row for row in rows if row.replaced_us is not None]
    kinds = []
    for kind in (manifest.CUTS, manifest.ROLLUPS, manifest.MISSED):
        mine = [row for row in used if row.kind == kind]
        kinds.append(
            {
                "kind": kind,
                "files": len(mine),
                "bytes": sum(row.bytes for row in mine),
                "rows": sum(row.rows for row in mine),
                "cuts": sum(row.cuts for row in mine),
                "min_us": min((row.min_us for row in mine), default=None),
                "max_us": max((row.max_us for row in mine), default=None),
            }
        )
    known = {row.path for row in rows}
    return {
        "files_at": files.address,
        "database": address_of(engine),
        "kinds": kinds,
        "replaced": {"files": len(replaced), "bytes": sum(row.bytes for row in replaced)},
        "missing": sorted(row.path for row in used if row.path not in there),
        "orphans": sorted(name for name in there if name not in known),
        "cuts_complete_from_us": complete_from_us,
        "rollups_moved_until_us": moved_until_us,
        "cursors": cursors,
    }
