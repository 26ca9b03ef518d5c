"""Many small files of one day and owner into one, row by row the same.

The inputs' checksums are verified before a row is copied, so that a damaged file is told instead of
multiplied. Nothing counts before the caller swaps the rows in the manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from sla_server.db.archive.cut_file import SCHEMA
from sla_server.db.archive.file import FileWriter, fitted, opened, tables_of
from sla_server.db.archive.manifest import CUTS, FileRow
from sla_server.db.archive.store import FileStore
from sla_server.db.errors import FileDamaged


def merged_name(group: Sequence[FileRow]) -> str:
    """Name of the merged file: where the first part begins, where the last ends, and a digest of all names.

    No other file has it, and a repetition after a crash makes the same one.
    """
    digest = hashlib.blake2b("\0".join(row.path for row in group).encode(), digest_size=5).hexdigest()
    first, last = (row.name.removesuffix(".parquet").split("-") for row in (group[0], group[-1]))
    return f"{group[0].directory}/{first[0]}-{first[1]}-{last[2]}-m{digest}.parquet"


def merge(files: FileStore, group: Sequence[FileRow]) -> FileRow:
    """Write and publish the merged file; returns its row, not committed.

    Raises:
        FileDamaged: an input is not what its row says; nothing was published.
        ArchiveFailed: the output cannot be written; nothing was published.
    """
    kind = group[0].kind
    with opened(files, group[0]) as first:
        schema = SCHEMA if kind == CUTS else first.schema_arrow
    with FileWriter(files, merged_name(group), schema) as writer:
        for row in group:
            with opened(files, row) as file:
                for table in tables_of(file):
                    writer.write(fitted(table, kind))
        expected = sum(row.rows for row in group)
        if writer.rows != expected:  # cannot happen: `opened` has compared each
            raise FileDamaged(merged_name(group), f"merged {writer.rows} rows of {expected}")
        return writer.finish(
            kind,
            created_us=max(row.created_us for row in group),
            min_us=min(row.min_us for row in group),
            max_us=max(row.max_us for row in group),
            cuts=sum(row.cuts for row in group),
        )
