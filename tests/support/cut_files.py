"""Raw cuts in a file under the manifest, as the archive writer leaves them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from sqlalchemy import Engine

from sla_server.db.archive import manifest
from sla_server.db.archive.files import CUT_SCHEMA, FileWriter
from sla_server.db.archive.store import FileStore
from sla_server.db.engine import begin

SECOND_US = 1_000_000
MISSED = ("io", "threshold_us", "counted", "missed")


def cut_row(
    start_us: int,
    stream_id: int,
    ios: int,
    latency_us: int,
    missed: Sequence[tuple[int, int, int, int]] = (),
    duration_us: int = SECOND_US,
) -> dict[str, Any]:
    """A cut of a stream of reads that cost 1 each; ``missed``: (io, threshold_us, counted, missed)."""
    row = {field.name: None if pa.types.is_list(field.type) else 0 for field in CUT_SCHEMA}
    return {
        **row,
        "gateway_id": "g",
        "epoch": "1",
        "start": start_us,
        "duration_us": duration_us,
        "stream_id": stream_id,
        "arrived": ios,
        "reads": ios,
        "read_bytes": ios * 4096,
        "svc_sum_us": ios * latency_us,
        "cost_milli": ios * 1000,
        **{f"missed_{name}": [entry[place] for entry in missed] for place, name in enumerate(MISSED)},
    }


def cut_table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """As a file has them."""
    return pa.Table.from_pylist(list(rows), schema=CUT_SCHEMA)


def store_cuts(engine: Engine, files: FileStore, rows: Sequence[dict[str, Any]], name: str = "q-1") -> None:
    """Write a file of these rows, and make it count."""
    begins = [row["start"] for row in rows]
    last_us = max(row["start"] + row["duration_us"] for row in rows)
    with FileWriter(files, f"cuts/2026-01-01/{name}.parquet", CUT_SCHEMA) as writer:
        writer.write(cut_table(rows))
        row = writer.finish(manifest.CUTS, last_us, min(begins), last_us, len(rows))
    with begin(engine) as connection:
        manifest.add(connection, row)
