"""Pure DataFrame -> DataFrame steps. No session, no I/O, no action.

Rates are cost units a second (1 per I/O plus bytes / 65,536). ``covered_us`` is the time the cuts of a stream
cover; a rate is cost over the longest cover in its group, because streams of one volume run at the same time.

Source: SLA-MODEL.md 4, points 2 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
from typing import Final

from pmdaemon.wire.rates import COST_BYTES
from sla_server.policy_jobs.cost_model import MIN_IOS, MOST_UNDER_WAY


def added_up(rows: DataFrame, keys: Sequence[str]) -> DataFrame:
    """One row a key: rows of one key, from SQL and from files, are parts of one."""
    from pyspark.sql import functions as F

    others = [name for name in rows.columns if name not in keys]
    return rows.groupBy(*keys).agg(*(F.sum(name).alias(name) for name in others))


def volume_rates(samples: DataFrame, streams: DataFrame, time_column: str) -> DataFrame:
    """Demand of each volume in each interval.

    The cost of I/Os that arrived but did not complete is estimated with the mean cost of those that did.

    Returns:
        backend, volume, at_us, ios (completed), demand (offered cost a second), used (completed, the same).
    """
    from pyspark.sql import functions as F

    done = F.col("reads") + F.col("writes")
    sums = (
        samples.join(streams, "stream_id")
        .groupBy("backend", "volume", F.col(time_column).alias("at_us"))
        .agg(
            F.sum(done).alias("ios"),
            F.sum("arrived").alias("arrived"),
            F.sum("cost_milli").alias("cost_milli"),
            F.max("covered_us").alias("covered_us"),
        )
        .where("covered_us > 0")
    )
    used = F.col("cost_milli") / 1000.0 / (F.col("covered_us") / float(US_A_SECOND))
    more = F.greatest(F.lit(1.0), F.try_divide(F.col("arrived"), F.col("ios")))
    return sums.select(
        "backend",
        "volume",
        "at_us",
        "ios",
        (used * F.coalesce(more, F.lit(1.0))).alias("demand"),
        used.alias("used"),
    )


def hourly_demand(rates: DataFrame) -> DataFrame:
    """Demand of each volume by hour of the week.

    Returns:
        backend, volume, hour_of_week, p50, p95 (cost a second), samples.
    """
    from pyspark.sql import functions as F

    hour = (F.floor(F.col("at_us") / US_AN_HOUR) + MONDAY_OFFSET_HOURS) % HOURS_A_WEEK
    return rates.groupBy("backend", "volume", hour.cast("int").alias("hour_of_week")).agg(
        F.percentile("demand", F.lit(0.5)).alias("p50"),
        F.percentile("demand", F.lit(0.95)).alias("p95"),
        F.count("*").alias("samples"),
    )


def without_covered_hours(hours: DataFrame, slots: DataFrame) -> DataFrame:
    """Hourly rollups of hours for which no finer rollups are left, so that none is counted twice."""
    from pyspark.sql import functions as F

    covered = slots.select(
        "stream_id", (F.floor(F.col("slot_us") / US_AN_HOUR) * US_AN_HOUR).cast("bigint").alias("hour_us")
    ).distinct()
    return hours.join(covered, ["stream_id", "hour_us"], "left_anti")


def promise_points(rates: DataFrame, missed: DataFrame, promises: DataFrame, streams: DataFrame) -> DataFrame:
    """How well each promise was kept at each total load of its backend.

    Returns:
        backend, sla, objective, allowed, at_us, load (completed cost a second of all volumes of the backend),
        counted, missed.
    """
    from pyspark.sql import functions as F

    load = rates.groupBy("backend", "at_us").agg(F.sum("used").alias("load"))
    kept = (
        missed.join(promises, ["stream_id", "io", "threshold_us"])
        .join(streams.select("stream_id", "backend"), "stream_id")
        .groupBy("backend", "sla", "objective", "allowed", F.col("slot_us").alias("at_us"))
        .agg(F.sum("counted").alias("counted"), F.sum("missed").alias("missed"))
    )
    return kept.join(load, ["backend", "at_us"]).select(
        "backend", "sla", "objective", "allowed", "at_us", "load", "counted", "missed"
    )


def cost_moments(slots: DataFrame, streams: DataFrame) -> DataFrame:
    """Sums for ``cost_model.fit``, one row a backend: over slots in which little was under way.

    x is (reads, writes, bytes / 65,536) an I/O of the backend in a slot, y the time at the storage an I/O in
    us; a slot counts as often as it has I/Os.

    Returns:
        backend, n, w, y, yy, x2, and x0x0 ... x2x2, x0y, x1y, x2y.
    """
    from pyspark.sql import functions as F

    ios = F.col("reads") + F.col("writes")
    sums = (
        slots.join(streams, "stream_id")
        .groupBy("backend", "slot_us")
        .agg(
            F.sum("reads").alias("reads"),
            F.sum("writes").alias("writes"),
            F.sum(F.coalesce("read_bytes", F.lit(0)) + F.coalesce("write_bytes", F.lit(0))).alias("bytes"),
            F.sum(F.coalesce("svc_sum_us", F.lit(0))).alias("svc_us"),
            F.max("covered_us").alias("covered_us"),
        )
        .where(
            (ios >= MIN_IOS)
            & (F.col("svc_us") > 0)
            & (F.col("svc_us") < MOST_UNDER_WAY * F.col("covered_us"))
        )
    )
    parts = {
        "x0": F.col("reads") / ios,
        "x1": F.col("writes") / ios,
        "x2": F.col("bytes") / float(COST_BYTES) / ios,
        "y": F.col("svc_us") / ios,
    }
    each = sums.select(
        "backend", ios.cast("double").alias("w"), *(part.alias(name) for name, part in parts.items())
    )
    products = [(a, b) for i, a in enumerate(("x0", "x1", "x2")) for b in ("x0", "x1", "x2")[i:]]
    products += [("x0", "y"), ("x1", "y"), ("x2", "y"), ("y", "y")]
    return each.groupBy("backend").agg(
        F.count("*").alias("n"),
        F.sum("w").alias("w"),
        F.sum(F.col("w") * F.col("y")).alias("y"),
        F.sum(F.col("w") * F.col("x2")).alias("x2"),
        *(F.sum(F.col("w") * F.col(a) * F.col(b)).alias(f"{a}{b}") for a, b in products),
    )


# -- Columns that the job reads and writes, for pyarrow and Spark alike
#
# Input tables come from ``sla_server.db.policies`` as Arrow, and older rows as Parquet files that Spark reads
# itself; only the columns named here are used.


SLOT_COLUMNS: Final = (
    "slot_us",
    "stream_id",
    "arrived",
    "reads",
    "writes",
    "read_bytes",
    "write_bytes",
    "svc_sum_us",
    "cost_milli",
    "covered_us",
)
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
