"""How large the database is: bytes and rows of each table, within a bounded time.

Rows are counted up to ``ROWS_MAX``, which takes a fraction of a second a table whatever its size; PostgreSQL
says the bytes of each table with its indexes and partitions, SQLite only those of its file.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, func, literal, select, text

from sla_server.db import schema

ROWS_MAX: Final = 100_000
_POSTGRESQL_BYTES: Final = text(
    "SELECT coalesce((SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree(to_regclass(:name))),"
    " pg_total_relation_size(to_regclass(:name)))::bigint"
)


def read_sizes(connection: Connection) -> dict[str, Any]:
    """``{kind, bytes, tables: [{table, rows, has_more, bytes}]}``.

    ``has_more``: there are more rows than were counted; ``bytes`` of a table is null where the database does
    not say it.
    """
    is_postgresql = connection.dialect.name == "postgresql"
    if is_postgresql:
        size = connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one()
    else:
        pages, page_bytes = (
            connection.execute(text(f"PRAGMA {name}")).scalar_one() for name in ("page_count", "page_size")
        )
        size = pages * page_bytes
    rows = []
    for table in schema.metadata.sorted_tables:
        some = select(literal(1).label("one")).select_from(table).limit(ROWS_MAX + 1).subquery()
        count = int(connection.execute(select(func.count()).select_from(some)).scalar_one())
        size_bytes = None
        if is_postgresql:
            size_bytes = connection.execute(_POSTGRESQL_BYTES, {"name": table.name}).scalar_one()
        row = {"table": table.name, "rows": min(count, ROWS_MAX), "has_more": count > ROWS_MAX}
        rows.append({**row, "bytes": size_bytes})
    return {"kind": connection.dialect.name, "bytes": int(size), "tables": rows}
