"""JSON Schema of rows as the readers return them, made from the tables' columns: nothing is written twice.

Pure. Columns that hold JSON are decoded by the readers, so their values are of any kind. A reader may add
keys to a row and leave columns out, but for those of the primary key.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Column

from sla_server.db import schema

_TYPES: Final[dict[type, str]] = {int: "integer", float: "number", str: "string", bool: "boolean"}
_DECODED: Final = {**schema.JSON_COLUMNS, "throttles": ("members",), "volumes": ("labels",)}


def row_schema(table: str) -> dict[str, Any]:
    """The schema of one row.

    Raises:
        KeyError: there is no such table.
    """
    found = schema.metadata.tables[table]
    decoded = _DECODED.get(table, ())
    columns = {column.name: {} if column.name in decoded else _value(column) for column in found.columns}
    return {
        "type": "object",
        "description": f"A row of {table}, see docs/formats/sql.md; more keys may come with it.",
        "required": [column.name for column in found.primary_key],
        "properties": columns,
    }


def _value(column: Column[Any]) -> dict[str, Any]:
    kind = _TYPES.get(column.type.python_type)
    if kind is None:  # bytes: no reader of the API returns them
        return {}
    return {"type": [kind, "null"] if column.nullable else kind}
