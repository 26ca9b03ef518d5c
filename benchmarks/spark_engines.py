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
from sla_server.policy_jobs import grouped, model
from sla_server.policy_jobs.cost_model import MIN_IOS, MOST_UNDER_WAY
from sla_server.policy_jobs.inputs import JobInputs, Statistics
from sla_server.policy_jobs.job import Found, compute
from sla_server.policy_jobs.transforms import (
    HOUR_DDL,
    MISSED_DDL,
    QUARTER_US,
    SLOT_DDL,
    US_A_SECOND,
)

SETUP = f"""
CREATE VIEW streams_now AS
    SELECT stream_id, volume, client, coalesce(v.backend, s.backend) AS backend
    FROM streams s LEFT JOIN volumes v USING (volume);
CREATE VIEW promised AS
    SELECT stream_id, s.volume, backend, sla, objective, step, io, threshold_us, allowed
    FROM streams_now s JOIN volume_scope USING (volume) JOIN promises USING (promise)
    LEFT JOIN client_scope c ON c.promise = promises.promise AND c.client = s.client
    WHERE any_client OR c.client IS NOT NULL;
CREATE TABLE volume_slots AS
    SELECT backend, volume, at_us, sum(reads + writes) AS ios, sum(arrived) AS arrived, sum(reads) AS reads,
        sum(writes) AS writes, sum(bytes) AS bytes, sum(svc_us) AS svc_us, max(covered_us) AS covered_us,
        sum(cost_milli)::BIGINT AS cost_milli, sum(cost_milli) / 1000.0::DOUBLE / (max(covered_us) / {US_A_SECOND}.0::DOUBLE) AS used,
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
    SELECT p.backend, sla, objective, step, allowed, slot_us AS at_us, sum(counted)::BIGINT AS counted,
        sum(missed)::BIGINT AS missed
    FROM missed JOIN promised p USING (stream_id, io, threshold_us) GROUP BY ALL) k
JOIN loads USING (backend, at_us)
"""
COSTS = f"""
SELECT backend, at_us, reads, writes, bytes, svc_us FROM loads
WHERE reads + writes >= {MIN_IOS} AND svc_us > 0 AND svc_us < {MOST_UNDER_WAY} * covered_us
"""  # noqa: S608 - numbers of ours
DEMAND = f"""
WITH ranked AS (
    SELECT backend, volume, hour_of_week, demand, ios, cost_milli,
        sum(weight) OVER (PARTITION BY backend, volume, hour_of_week ORDER BY demand, at_us)::BIGINT AS reached,
        sum(weight) OVER (PARTITION BY backend, volume, hour_of_week)::BIGINT - 1 AS last
    FROM volume_slots JOIN zones USING (backend)
    JOIN learned ON learned.zone = zones.zone AND begin_us = at_us // {QUARTER_US} * {QUARTER_US}),
percentiles AS (
    SELECT backend, volume, hour_of_week, sum(cost_milli)::BIGINT / sum(ios)::BIGINT / 1000.0::DOUBLE AS mean_cost,
        min(demand) FILTER (reached > floor(0.5::DOUBLE * last)) AS low50,
        min(demand) FILTER (reached > least(floor(0.5::DOUBLE * last) + 1, last)) AS high50,
        min(demand) FILTER (reached > floor(0.95::DOUBLE * last)) AS low95,
        min(demand) FILTER (reached > least(floor(0.95::DOUBLE * last) + 1, last)) AS high95,
        any_value(0.5::DOUBLE * last - floor(0.5::DOUBLE * last)) AS part50,
        any_value(0.95::DOUBLE * last - floor(0.95::DOUBLE * last)) AS part95
    FROM ranked GROUP BY backend, volume, hour_of_week)
SELECT backend, volume, hour_of_week, low50 + (high50 - low50) * part50 AS p50,
    low95 + (high95 - low95) * part95 AS p95, mean_cost
FROM percentiles
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
    found = groups(points, ["backend", "sla", "objective", "step"], grouped.capacity_of).to_pylist()
    capacity = [model.with_former(row, read.former_capacity) for row in found]
    costs = groups(slots, ["backend"], grouped.cost_of).to_pylist()
    needs = {name: model.encode(each) for name, each in model.needs_of(capacity, read.promises).items()}
    classes = {row["volume"]: row for row in read.scope.classes.to_pylist()}
    known, backends = demand, demand["backend"].to_pylist()
    for field in read.scope.classes.schema:
        if field.name != "volume":
            column = [classes[name][field.name] for name in demand["volume"].to_pylist()]
            known = known.append_column(field.name, pa.array(column, field.type))
    known = known.append_column("needs", pa.array([needs.get(name) for name in backends], pa.string()))
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
        "zones": read.hours.zones,
        "learned": read.hours.learned,
    }
    for name, table in small.items():
        connection.register(name, table)
    for kind in ("rollups", "missed"):
        connection.read_parquet(f"{place}/{kind}/*.parquet").create_view(kind)
    connection.execute(SETUP)
    points, slots, demand = (connection.sql(query).to_arrow_table() for query in (POINTS, COSTS, DEMAND))
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
        .join(promised.select(*keys, "backend", "sla", "objective", "step", "allowed"), keys)
        .group_by("backend", "sla", "objective", "step", "allowed", pl.col("slot_us").alias("at_us"))
        .agg(*sums("counted", "missed"))
        .join(loads.select("backend", "at_us", "load"), ["backend", "at_us"])
    )
    costs = loads.filter(
        (pl.col("reads") + pl.col("writes") >= MIN_IOS)
        & (pl.col("svc_us") > 0)
        & (pl.col("svc_us") < MOST_UNDER_WAY * pl.col("covered_us"))
    ).select("backend", "at_us", "reads", "writes", "bytes", "svc_us")
    group = ("backend", "volume", "hour_of_week")
    last = pl.col("weight").sum().over(group) - 1
    ranked = (
        volume_slots.join(small(read.hours.zones), "backend")
        .with_columns((pl.col("at_us") // QUARTER_US * QUARTER_US).alias("begin_us"))
        .join(small(read.hours.learned), ["zone", "begin_us"])
        .sort(*group, "demand", "at_us")
        .with_columns(pl.col("weight").cum_sum().over(group).alias("reached"), last.alias("last"))
    )

    def percentile(share: float) -> Any:
        position = share * pl.col("last")
        lower = position.floor()
        low, high = (
            pl.col("demand").filter(pl.col("reached") > rank).min()
            for rank in (lower, pl.min_horizontal(lower + 1, "last"))
        )
        return low + (high - low) * (position - lower).first()

    mean_cost = pl.col("cost_milli").sum() / pl.col("ios").sum() / 1000.0
    demand = ranked.group_by(group).agg(
        percentile(0.5).alias("p50"), percentile(0.95).alias("p95"), mean_cost.alias("mean_cost")
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
