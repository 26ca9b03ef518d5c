"""SQL rows as Arrow, in bounded pieces: one door for the policy job's tables and the files of rollups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
from sqlalchemy import BigInteger, Boolean, Connection, Float, Integer, LargeBinary, Select, Table

FETCH_ROWS: Final = 20_000  # rows held as Python objects at a time
_KINDS: Final = {
    BigInteger: pa.int64(),
    Integer: pa.int32(),
    Float: pa.float64(),
    Boolean: pa.bool_(),
    LargeBinary: pa.binary(),
}


def arrow_schema(table: Table) -> pa.Schema:
    """A table's columns, in order."""
    return pa.schema([(column.name, _KINDS.get(type(column.type), pa.string())) for column in table.columns])


def batches(connection: Connection, statement: Select[Any], kind: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a statement whose columns are those of ``kind``, some thousand at a time."""
    result = connection.execution_options(yield_per=FETCH_ROWS).execute(statement)
    for rows in result.partitions():
        columns = zip(*rows, strict=True)
        arrays = [pa.array(column, type=field.type) for column, field in zip(columns, kind, strict=True)]
        yield pa.record_batch(arrays, schema=kind)
