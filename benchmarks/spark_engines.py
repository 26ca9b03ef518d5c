"""The computation of the policy job in Spark, DuckDB and Polars, each a cold process of its own.

``python -m benchmarks.spark_engines ENGINE DIR`` prints one line of JSON: seconds of start and of work, the
most memory, and the results. Reading, joining and summing is the engine's; the models are the same functions
of ``policy_jobs.grouped`` in all three, in Spark inside its workers.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks import spark_world
from sla_server.policy_jobs import grouped
from sla_server.policy_jobs.cost_model import MIN_IOS, MOST_UNDER_WAY
from sla_server.policy_jobs.inputs import JobInputs, Statistics
from sla_server.policy_jobs.job import Found, compute, limits_of
from sla_server.policy_jobs.transforms import (
    HOUR_DDL,
    HOURS_A_WEEK,
    MISSED_DDL,
    MONDAY_OFFSET_HOURS,
    SLOT_DDL,
    US_A_SECOND,
    US_AN_HOUR,
)

SETUP = f"""
CREATE VIEW streams_now AS
    SELECT stream_id, volume, client, coalesce(v.backend, s.backend) AS backend
    FROM streams s LEFT JOIN volumes v USING (volume);
CREATE VIEW promised AS
    SELECT stream_id, s.volume, backend, sla, objective, io, threshold_us, allowed
    FROM streams_now s JOIN volume_scope USING (volume) JOIN promises USING (promise)
    LEFT JOIN client_scope c ON c.promise = promises.promise AND c.client = s.client
    WHERE any_client OR c.client IS NOT NULL;
CREATE TABLE volume_slots AS
    SELECT backend, volume, at_us, sum(reads + writes) AS ios, sum(arrived) AS arrived, sum(reads) AS reads,
        sum(writes) AS writes, sum(bytes) AS bytes, sum(svc_us) AS svc_us, max(covered_us) AS covered_us,
        sum(cost_milli) / 1000.0::DOUBLE / (max(covered_us) / {US_A_SECOND}.0::DOUBLE) AS used,
        used * greatest(1.0::DOUBLE, coalesce(sum(arrived)::DOUBLE / nullif(ios, 0)::DOUBLE, 1.0)) AS demand
    FROM (
        SELECT backend, volume, slot_us AS at_us, stream_id, sum(arrived)::BIGINT AS arrived,
            sum(reads)::BIGINT AS reads, sum(writes)::BIGINT AS writes,
            sum(read_bytes + write_bytes)::BIGINT AS bytes, sum(svc_sum_us)::BIGINT AS svc_us,
            sum(cost_milli)::BIGINT AS cost_milli, sum(covered_us)::BIGINT AS covered_us
        FROM rollups JOIN streams_now USING (stream_id) GROUP BY ALL)
    GROUP BY backend, volume, at_us HAVING max(covered_us) > 0;
CREATE TABLE loads AS
    SELECT backend, at_us, sum(round(used * 1e6)::BIGINT)::BIGINT / 1e6 AS load, sum(reads)::BIGINT AS reads,
        sum(writes)::BIGINT AS writes, sum(bytes)::BIGINT AS bytes, sum(svc_us)::BIGINT AS svc_us,
        max(covered_us) AS covered_us
    FROM volume_slots GROUP BY ALL;
"""  # noqa: S608 - numbers of ours
POINTS = """
SELECT k.*, load FROM (
    SELECT p.backend, sla, objective, allowed, slot_us AS at_us, sum(counted)::BIGINT AS counted,
        sum(missed)::BIGINT AS missed
    FROM missed JOIN promised p USING (stream_id, io, threshold_us) GROUP BY ALL) k
JOIN loads USING (backend, at_us)
"""
COSTS = f"""
SELECT backend, at_us, reads, writes, bytes, svc_us FROM loads
WHERE reads + writes >= {MIN_IOS} AND svc_us > 0 AND svc_us < {MOST_UNDER_WAY} * covered_us
"""  # noqa: S608 - numbers of ours
DEMAND = f"""
SELECT backend, volume,
    ((at_us // {US_AN_HOUR} + {MONDAY_OFFSET_HOURS}) % {HOURS_A_WEEK})::INTEGER AS hour_of_week,
    quantile_cont(demand, 0.5) AS p50, quantile_cont(demand, 0.95) AS p95
FROM volume_slots GROUP BY ALL
"""  # noqa: S608 - numbers of ours


def groups(table: pa.Table, keys: list[str], function: Callable[[pa.Table], pa.Table]) -> pa.Table:
    """What Spark's ``applyInArrow`` does, in this process: one call a group."""
    ordered = table.sort_by([(key, "ascending") for key in keys])
    found, start = [], 0
    values = list(zip(*(ordered[key].to_pylist() for key in keys), strict=True))
    for end in range(1, len(values) + 1):
        if end == len(values) or values[end] != values[start]:
            found.append(function(ordered.slice(start, end - start)))
            start = end
    return pa.concat_tables(found)


def models(points: pa.Table, slots: pa.Table, demand: pa.Table, read: JobInputs) -> Found:
    """The part that all engines but Spark have in this process."""
    capacity = groups(points, ["backend", "sla", "objective"], grouped.capacity_of).to_pylist()
    costs = groups(slots, ["backend"], grouped.cost_of).to_pylist()
    limits = limits_of(capacity)
    classes = {row["volume"]: row for row in read.scope.classes.to_pylist()}
    protected = set(read.scope.volumes["volume"].to_pylist())
    names, backends = demand["volume"].to_pylist(), demand["backend"].to_pylist()
    known = (
        demand.append_column("weight", pa.array([classes[name]["weight"] for name in names]))
        .append_column("floor", pa.array([classes[name]["floor"] for name in names]))
        .append_column("is_protected", pa.array([name in protected for name in names]))
        .append_column("capacity", pa.array([limits.get(name) for name in backends], pa.float64()))
    )
    caps = groups(known, ["backend"], grouped.caps_of)
    return Found(caps.sort_by([("volume", "ascending"), ("hour_of_week", "ascending")]), capacity, costs)


def in_duckdb(place: Path, read: JobInputs) -> Found:
    """DuckDB over the files."""
    import duckdb

    connection = duckdb.connect()
    small = {
        "streams": read.streams,
        "volumes": read.volumes,
        "promises": read.scope.promises,
        "volume_scope": read.scope.volumes,
        "client_scope": read.scope.clients,
    }
    for name, table in small.items():
        connection.register(name, table)
    for kind in ("rollups", "missed"):
        connection.read_parquet(f"{place}/{kind}/*.parquet").create_view(kind)
    connection.execute(SETUP)
    points, slots, demand = (connection.execute(query).to_arrow_table() for query in (POINTS, COSTS, DEMAND))
    return models(points, slots, demand, read)


def in_polars(place: Path, read: JobInputs) -> Found:
    """Polars, streaming over the files."""
    import polars as pl

    def small(table: pa.Table) -> Any:
        return pl.from_arrow(table).lazy()

    def sums(*names: str) -> list[Any]:
        return [pl.col(name).sum() for name in names]

    now = small(read.volumes).rename({"backend": "now"})
    streams = (
        small(read.streams)
        .join(now, "volume", "left")
        .select("stream_id", "volume", "client", pl.coalesce("now", "backend").alias("backend"))
    )
    asking = small(read.scope.clients).with_columns(pl.lit(True).alias("is_asking"))
    promised = (
        streams.join(small(read.scope.volumes), "volume")
        .join(small(read.scope.promises), "promise")
        .join(asking, ["promise", "client"], "left")
        .filter(pl.col("any_client") | pl.col("is_asking"))
    )
    used = pl.col("cost_milli") / 1000.0 / (pl.col("covered_us") / float(US_A_SECOND))
    more = pl.max_horizontal(pl.lit(1.0), (pl.col("arrived") / pl.col("ios")).fill_nan(1.0))
    volume_slots = (
        pl.scan_parquet(f"{place}/rollups/*.parquet")
        .join(streams.select("stream_id", "volume", "backend"), "stream_id")
        .group_by("backend", "volume", pl.col("slot_us").alias("at_us"), "stream_id")
        .agg(
            *sums("arrived", "reads", "writes", "cost_milli", "covered_us"),
            (pl.col("read_bytes") + pl.col("write_bytes")).sum().alias("bytes"),
            pl.col("svc_sum_us").sum().alias("svc_us"),
        )
        .group_by("backend", "volume", "at_us")
        .agg(
            *sums("arrived", "reads", "writes", "cost_milli", "bytes", "svc_us"),
            pl.col("covered_us").max(),
            (pl.col("reads") + pl.col("writes")).sum().alias("ios"),
        )
        .filter(pl.col("covered_us") > 0)
        .with_columns(used.alias("used"))
        .with_columns((pl.col("used") * more).alias("demand"))
        .collect(engine="streaming")
        .lazy()
    )
    loads = volume_slots.group_by("backend", "at_us").agg(
        ((pl.col("used") * 1e6).round().cast(pl.Int64).sum() / 1e6).alias("load"),
        *sums("reads", "writes", "bytes", "svc_us"),
        pl.col("covered_us").max(),
    )
    keys = ["stream_id", "io", "threshold_us"]
    points = (
        pl.scan_parquet(f"{place}/missed/*.parquet")
        .join(promised.select(*keys, "backend", "sla", "objective", "allowed"), keys)
        .group_by("backend", "sla", "objective", "allowed", pl.col("slot_us").alias("at_us"))
        .agg(*sums("counted", "missed"))
        .join(loads.select("backend", "at_us", "load"), ["backend", "at_us"])
    )
    costs = loads.filter(
        (pl.col("reads") + pl.col("writes") >= MIN_IOS)
        & (pl.col("svc_us") > 0)
        & (pl.col("svc_us") < MOST_UNDER_WAY * pl.col("covered_us"))
    ).select("backend", "at_us", "reads", "writes", "bytes", "svc_us")
    hour = ((pl.col("at_us") // US_AN_HOUR + MONDAY_OFFSET_HOURS) % HOURS_A_WEEK).cast(pl.Int32)
    demand = volume_slots.group_by("backend", "volume", hour.alias("hour_of_week")).agg(
        pl.col("demand").quantile(0.5, "linear").alias("p50"),
        pl.col("demand").quantile(0.95, "linear").alias("p95"),
    )
    results = pl.collect_all([points, costs, demand], engine="streaming")
    return models(*(_plain(each.to_arrow()) for each in results), read)


def _plain(table: pa.Table) -> pa.Table:
    """Strings as Spark and DuckDB have them."""
    fields = [
        field.with_type(pa.string()) if field.type in (pa.large_string(), pa.string_view()) else field
        for field in table.schema
    ]
    return table.cast(pa.schema(fields))


def in_spark(place: Path, read: JobInputs) -> tuple[Found, float, dict[str, int]]:
    """The product's own job, without SQL."""
    from sla_server.policy_jobs.session import build_session, peak_mib

    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-spark-") as work:
        spark = build_session("local[*]", Path(work), "2g")
        start_s = time.monotonic() - started_s
        rows = Statistics(
            spark.read.schema(SLOT_DDL).parquet(f"{place}/rollups"),
            spark.read.schema(MISSED_DDL).parquet(f"{place}/missed"),
            spark.createDataFrame([], HOUR_DDL),
        )
        found = compute(spark, rows, read)
        memory = peak_mib()
        spark.stop()
    return found, start_s, memory


def main() -> None:
    """Compute with one engine, and print what came of it."""
    engine, place = sys.argv[1], Path(sys.argv[2])
    started_s = time.monotonic()
    read = spark_world.fleet()
    start_s, memory = 0.0, {}
    if engine == "spark":
        found, start_s, memory = in_spark(place, read)
    else:
        found = {"duckdb": in_duckdb, "polars": in_polars}[engine](place, read)
    own_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    result = {
        "seconds": time.monotonic() - started_s,
        "start_s": start_s,
        "memory_mib": memory or {"the process": own_mib},
        "capacity": found.capacity,
        "costs": found.costs,
        "caps": found.caps.num_rows,
        "sums": {
            name: float(f"{sum(value for value in found.caps[name].to_pylist() if value is not None):.9g}")
            for name in ("cost_per_s", "demand_p50", "demand_p95")
        },
        "capped": len(found.capped),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
