"""Columns that the job reads and writes: one source for pyarrow and Spark.

Input tables come from ``sla_server.db.policies`` as Arrow, and older rows as Parquet files that Spark reads
itself; only the columns named here are used.
"""

from __future__ import annotations

from typing import Final

SLOT_COLUMNS: Final = ("slot_us", "stream_id", "arrived", "reads", "writes", "cost_milli", "covered_us")
SLOT_DDL: Final = ", ".join(f"{name} bigint" for name in SLOT_COLUMNS)
HOUR_COLUMNS: Final = ("hour_us", "stream_id", "arrived", "reads", "writes", "cost_milli", "covered_us")
MISSED_COLUMNS: Final = ("slot_us", "stream_id", "io", "threshold_us", "counted", "missed")
MISSED_DDL: Final = ", ".join(f"{name} {'int' if name == 'io' else 'bigint'}" for name in MISSED_COLUMNS)
STREAM_COLUMNS: Final = ("stream_id", "volume", "client", "backend")
PROMISE_DDL: Final = (
    "stream_id bigint, sla string, objective string, io int, threshold_us bigint, allowed double"
)
"""One row a (stream, objective): which missed rows belong to a promise, and the miss ratio it allows."""

HOURS_A_WEEK: Final = 168
US_A_SECOND: Final = 1_000_000
US_AN_HOUR: Final = 3600 * US_A_SECOND
MONDAY_OFFSET_HOURS: Final = 72
"""1970-01-01 was a Thursday: hour 0 of the epoch is hour 72 of a week that starts on Monday 00 UTC."""


def hour_of_week(unix_us: int) -> int:
    """0 (Monday 00:00 UTC) to 167."""
    return (unix_us // US_AN_HOUR + MONDAY_OFFSET_HOURS) % HOURS_A_WEEK
