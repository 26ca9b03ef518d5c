"""The computation of the policy job in Spark, DuckDB and Polars, each a cold process of its own.

``python -m benchmarks.spark_engines ENGINE DIR`` prints one line of JSON: seconds of start and of work, the
most memory, and the results. ENGINE is spark, duckdb or polars; fleet is Spark on ``spark_world.LARGE``.
Reading, joining and summing is the engine's; the models are the same functions of ``policy_jobs.grouped`` in
all three, in Spark inside its workers.
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks import spark_world
from sla_server.policy_jobs import grouped, model
from sla_server.policy_jobs.bursts import HORIZON_S
from sla_server.policy_jobs.compute import BURST_DAYS, Found, compute, split_curves
from sla_server.policy_jobs.cost_model import MIN_IOS, MOST_UNDER_WAY
from sla_server.policy_jobs.inputs import JobInputs, Statistics
from sla_server.policy_jobs.transforms import (
    HOUR_DDL,
    LEAST_PART,
    MISSED_DDL,
    MIXED,
    MOST_INTERVALS,
    PLACED,
    QUARTER_US,
    SLOT_DDL,
    US_A_SECOND,
)

SLOT_S = spark_world.SLOT_US / US_A_SECOND
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
        sum(sequential) AS sequential, sum(placed) AS placed, sum(cost_milli)::BIGINT AS all_milli,
        all_milli / 1000.0::DOUBLE / {SLOT_S}::DOUBLE AS used,
        used * greatest(1.0::DOUBLE, coalesce(sum(arrived)::DOUBLE / nullif(ios, 0)::DOUBLE, 1.0)) AS demand
    FROM (
        SELECT backend, volume, slot_us AS at_us, stream_id, sum(arrived)::BIGINT AS arrived,
            sum(reads)::BIGINT AS reads, sum(writes)::BIGINT AS writes,
            sum(read_bytes + write_bytes)::BIGINT AS bytes, sum(svc_sum_us)::BIGINT AS svc_us,
            sum(sequential)::BIGINT AS sequential, sum(placed)::BIGINT AS placed,
            sum(cost_milli)::BIGINT AS cost_milli, sum(covered_us)::BIGINT AS covered_us
        FROM rollups JOIN streams_now USING (stream_id) GROUP BY ALL)
    GROUP BY backend, volume, at_us HAVING max(covered_us) > 0;
CREATE TABLE loads AS
    SELECT backend, at_us, sum(round(used * 1e6)::BIGINT)::BIGINT / 1e6 AS load, sum(reads)::BIGINT AS reads,
        sum(writes)::BIGINT AS writes, sum(bytes)::BIGINT AS bytes, sum(svc_us)::BIGINT AS svc_us,
        sum(arrived)::BIGINT AS arrived, sum(sequential)::BIGINT AS sequential, sum(placed)::BIGINT AS placed,
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
SELECT backend, at_us, reads, writes, bytes, svc_us, {", ".join(PLACED)} FROM loads
WHERE reads + writes >= {MIN_IOS} AND svc_us > 0 AND svc_us < {MOST_UNDER_WAY} * covered_us
"""  # noqa: S608 - numbers of ours
DEMAND = f"""
WITH weighted AS (
    SELECT backend, volume, zone, l.hour_of_week AS like_hour, demand, ios, all_milli, weight
    FROM volume_slots JOIN zones USING (backend) JOIN learned l USING (zone)
    WHERE l.begin_us = at_us // {QUARTER_US} * {QUARTER_US}),
ranked AS (
    SELECT *, sum(weight) OVER (wide ORDER BY demand ROWS UNBOUNDED PRECEDING)::BIGINT AS reached,
        sum(weight) OVER wide::BIGINT - 1 AS top
    FROM weighted WINDOW wide AS (PARTITION BY backend, volume, zone, like_hour)),
ends AS (
    SELECT backend, volume, zone, like_hour, any_value(top) * 0.5::DOUBLE AS at50,
        any_value(top) * 0.95::DOUBLE AS at95, sum(all_milli)::BIGINT AS milli, sum(ios)::BIGINT AS total_ios,
        min(demand) FILTER (reached > floor(0.5::DOUBLE * top)) AS low50,
        min(demand) FILTER (reached > least(floor(0.5::DOUBLE * top) + 1, top)) AS high50,
        min(demand) FILTER (reached > floor(0.95::DOUBLE * top)) AS low95,
        min(demand) FILTER (reached > least(floor(0.95::DOUBLE * top) + 1, top)) AS high95
    FROM ranked GROUP BY ALL)
SELECT backend, volume, c.hour_of_week, milli / nullif(total_ios, 0) / 1000 AS mean_cost,
    low50 + (high50 - low50) * (at50 - floor(at50)) AS p50,
    low95 + (high95 - low95) * (at95 - floor(at95)) AS p95
FROM ends JOIN coming c USING (zone, like_hour)
"""  # noqa: S608 - numbers of ours


INTERVALS = f"""
CREATE TABLE intervals AS
WITH wanted AS (
    SELECT *, missed > allowed * counted AS is_bad, {MIXED.replace("div", "//")} AS mixed
    FROM points WHERE counted >= {MIN_IOS}),
broken AS (
    SELECT *, bool_or(is_bad) OVER (PARTITION BY backend, sla, objective, step) AS was_broken FROM wanted),
ranked AS (
    SELECT *, row_number() OVER (alike ORDER BY mixed, at_us) AS place, count(*) OVER alike AS total
    FROM broken WHERE was_broken WINDOW alike AS (PARTITION BY backend, sla, objective, step, is_bad)),
covered AS (
    SELECT backend, sla, objective, list_sort(list(DISTINCT volume)) AS victims FROM promised GROUP BY ALL)
SELECT ranked.* EXCLUDE (is_bad, mixed, was_broken, place, total), victims,
    total / least(total, {MOST_INTERVALS})::DOUBLE AS times
FROM ranked JOIN covered USING (backend, sla, objective) WHERE place <= {MOST_INTERVALS}
"""  # noqa: S608 - numbers of ours
USES = f"""
WITH uses AS (
    SELECT backend, volume, at_us, used
    FROM volume_slots JOIN (SELECT DISTINCT backend, at_us FROM intervals) USING (backend, at_us)),
sums AS (
    SELECT backend, volume, sum(round(used * 1e6)::BIGINT)::BIGINT AS micro FROM uses GROUP BY ALL),
large AS (
    SELECT backend, volume
    FROM (SELECT *, sum(micro) OVER (PARTITION BY backend)::BIGINT AS total FROM sums)
    WHERE micro >= {LEAST_PART}::DOUBLE * total)
SELECT backend, volume, at_us, used FROM uses JOIN large USING (backend, volume)
"""  # noqa: S608 - numbers of ours
RECENT = "SELECT backend, volume, at_us, demand FROM volume_slots JOIN capped USING (volume) WHERE at_us >= ?"


def groups(table: pa.Table, keys: list[str], function: Callable[[pa.Table], pa.Table]) -> pa.Table:
    """What Spark's ``applyInArrow`` does, in this process: one call a group."""
    ordered = table.sort_by([(key, "ascending") for key in keys])
    if not ordered.num_rows:
        return function(ordered)
    is_next = np.zeros(ordered.num_rows - 1, dtype=np.bool_)
    for key in keys:  # no Python object a row, or the peers' time would be that of this loop
        column = ordered[key].combine_chunks()
        is_next |= pc.not_equal(column[1:], column[:-1]).to_numpy(zero_copy_only=False)
    ends = [*(np.flatnonzero(is_next) + 1).tolist(), ordered.num_rows]
    return pa.concat_tables(
        function(ordered.slice(start, end - start)) for start, end in itertools.pairwise([0, *ends])
    )


def harms_of(intervals: pa.Table, uses: pa.Table) -> list[dict[str, Any]]:
    """Who hurt whom, in the order of ``compute.compute``."""

    def of_backend(rows: pa.Table) -> pa.Table:
        name = rows["backend"][0] if rows.num_rows else None
        return grouped.harms_of(rows, uses.filter(pc.equal(uses["backend"], name)))

    found: list[dict[str, Any]] = groups(intervals, ["backend"], of_backend).to_pylist()
    return _in_order(found, 5)


def bursts_of(recent: pa.Table, read: JobInputs) -> list[dict[str, Any]]:
    """Burst pairs of the volumes with a cap, in the order of ``compute.compute``."""
    if not recent.num_rows:
        return []

    def of_volume(rows: pa.Table) -> pa.Table:
        return grouped.burst_of(rows, read.hours.half_life_days, read.hours.end_us)

    return _in_order(groups(recent, ["backend", "volume"], of_volume).to_pylist(), 2)


def _in_order(rows: list[dict[str, Any]], columns: int) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: [str(value) for value in list(row.values())[:columns]])


def compared_burst(row: dict[str, Any]) -> dict[str, Any]:
    """A burst pair as it is compared: by what it lets pass, which pairs of equal merit have in common."""
    least = row["cost_per_s"] * HORIZON_S + row["burst_cost"]
    return {"backend": row["backend"], "volume": row["volume"], "days": row["days"], "least": least}


def recent_from_us(read: JobInputs) -> int:
    """Where the slots begin from which burst pairs are learnt."""
    return read.hours.end_us - BURST_DAYS * 86_400 * US_A_SECOND


def models(points: pa.Table, slots: pa.Table, demand: pa.Table, read: JobInputs) -> Found:
    """The part that all engines but Spark have in this process, but for harms and bursts."""
    keys = ["backend", "sla", "objective", "step"]
    seen, curves = split_curves(groups(points, keys, grouped.capacity_of).to_pylist())
    capacity = [model.with_former(row, {}) for row in seen]
    costs = groups(slots, ["backend"], grouped.cost_of).to_pylist()
    needs = {name: model.encode(each) for name, each in model.needs_of(capacity, read.promises).items()}
    place = {name: number for number, name in enumerate(read.scope.classes["volume"].to_pylist())}
    classes = read.scope.classes.drop_columns(["volume"])
    classes = classes.take([place[name] for name in demand["volume"].to_pylist()])
    for field, column in zip(classes.schema, classes.columns, strict=True):
        demand = demand.append_column(field, column)
    apart = pa.table({"backend": list(needs), "needs": list(needs.values())})
    caps = groups(pa.concat_tables([demand, apart], promote_options="default"), ["backend"], grouped.caps_of)
    caps = caps.sort_by([("volume", "ascending"), ("hour_of_week", "ascending")])
    return Found(caps, capacity, costs, curves=curves)


def in_duckdb(place: Path, read: JobInputs) -> Found:
    """DuckDB over the files."""
    import duckdb

    # Else it would write what does not fit into the working directory, and take four fifths of the memory.
    spill, most = str(place.parent / "duckdb"), f"{psutil.virtual_memory().total * 6 // 10 >> 20}MiB"
    connection = duckdb.connect(config={"temp_directory": spill, "memory_limit": most})
    small = {
        "streams": read.streams,
        "volumes": read.volumes,
        "promises": read.scope.promises,
        "volume_scope": read.scope.volumes,
        "client_scope": read.scope.clients,
        "zones": read.hours.zones,
        "learned": read.hours.learned,
        "coming": read.hours.coming,
    }
    for name, table in small.items():
        connection.register(name, table)
    for kind in ("rollups", "missed"):
        connection.read_parquet(f"{place}/{kind}/*.parquet").create_view(kind)
    connection.execute(SETUP)
    connection.execute(f"CREATE TABLE points AS {POINTS}")
    connection.execute(INTERVALS)
    points, slots, demand, intervals, uses = (
        connection.sql(query).to_arrow_table()
        for query in ("FROM points", COSTS, DEMAND, "FROM intervals", USES)
    )
    found = models(points, slots, demand, read)
    connection.register("capped", pa.table({"volume": capped_names(found)}))
    recent = connection.sql(RECENT, params=[recent_from_us(read)]).to_arrow_table()
    return replace(found, harms=harms_of(intervals, uses), bursts=bursts_of(recent, read))


def capped_names(found: Found) -> pa.Array:
    """The volumes with a cap."""
    return pa.array(found.capped_volumes, pa.string())


def in_polars(place: Path, read: JobInputs) -> Found:
    """Polars, streaming over the files."""
    import polars as pl

    def small(table: pa.Table) -> Any:
        return pl.DataFrame(pl.from_arrow(table)).lazy()

    def sums(*names: str) -> list[Any]:
        return [pl.col(name).sum() for name in names]

    def percentile(share: float) -> Any:
        """Of ``demand``, each value as often as its weight says."""
        reached = pl.col("weight").sort_by("demand").cum_sum()
        top = pl.col("weight").sum() - 1
        position = top * share
        below = position.floor()
        low, high = (
            pl.col("demand").sort().filter(reached > rank).first()
            for rank in (below, pl.min_horizontal(below + 1, top))
        )
        return low + (high - low) * (position - below)

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
    used = pl.col("cost_milli") / 1000.0 / SLOT_S
    more = pl.max_horizontal(pl.lit(1.0), (pl.col("arrived") / pl.col("ios")).fill_nan(1.0))
    volume_slots = (
        pl.scan_parquet(f"{place}/rollups/*.parquet")
        .join(streams.select("stream_id", "volume", "backend"), "stream_id")
        .group_by("backend", "volume", pl.col("slot_us").alias("at_us"), "stream_id")
        .agg(
            *sums(*PLACED, "reads", "writes", "cost_milli", "covered_us"),
            (pl.col("read_bytes") + pl.col("write_bytes")).sum().alias("bytes"),
            pl.col("svc_sum_us").sum().alias("svc_us"),
        )
        .group_by("backend", "volume", "at_us")
        .agg(
            *sums(*PLACED, "reads", "writes", "cost_milli", "bytes", "svc_us"),
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
        *sums("reads", "writes", "bytes", "svc_us", *PLACED),
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
    ).select("backend", "at_us", "reads", "writes", "bytes", "svc_us", *PLACED)
    zones, learned, coming = (
        small(each) for each in (read.hours.zones, read.hours.learned, read.hours.coming)
    )
    demand = (
        volume_slots.with_columns((pl.col("at_us") // QUARTER_US * QUARTER_US).alias("begin_us"))
        .join(zones, "backend")
        .join(learned, ["zone", "begin_us"])
        .group_by("backend", "volume", "zone", pl.col("hour_of_week").alias("like_hour"))
        .agg(
            percentile(0.5).alias("p50"),
            percentile(0.95).alias("p95"),
            (pl.col("cost_milli").sum() / pl.col("ios").sum() / 1000).alias("mean_cost"),
        )
        .join(coming, ["zone", "like_hour"])
        .select("backend", "volume", "hour_of_week", "p50", "p95", "mean_cost")
    )
    victims = promised.group_by("backend", "sla", "objective").agg(
        pl.col("volume").unique().sort().alias("victims")
    )
    results = pl.collect_all([points, costs, demand, victims], engine="streaming")
    intervals = _intervals_in_polars(results[0].lazy(), results[3].lazy()).collect()
    uses = _uses_in_polars(volume_slots, intervals.lazy()).collect()
    found = models(_plain(results[0]), _plain(results[1]), _plain(results[2]), read)
    capped = small(pa.table({"volume": capped_names(found)}))
    slots = volume_slots.filter(pl.col("at_us") >= recent_from_us(read)).join(capped, "volume")
    recent = slots.select("backend", "volume", "at_us", "demand").collect()
    return replace(
        found, harms=harms_of(_plain(intervals), _plain(uses)), bursts=bursts_of(_plain(recent), read)
    )


def _intervals_in_polars(points: Any, victims: Any) -> Any:
    """``transforms.intervals_to_attribute``."""
    import polars as pl

    keys = ["backend", "sla", "objective", "step"]
    alike = [*keys, "is_bad"]
    mixed = pl.col("at_us") // US_A_SECOND * 1_000_003 % 16_777_213
    return (
        points.filter(pl.col("counted") >= MIN_IOS)
        .with_columns((pl.col("missed") > pl.col("allowed") * pl.col("counted")).alias("is_bad"))
        .filter(pl.col("is_bad").any().over(keys))
        .with_columns(mixed.alias("mixed"))
        .sort(*alike, "mixed", "at_us")
        .with_columns(
            pl.int_range(1, pl.len() + 1).over(alike).alias("place"), pl.len().over(alike).alias("total")
        )
        .filter(pl.col("place") <= MOST_INTERVALS)
        .with_columns((pl.col("total") / pl.min_horizontal("total", MOST_INTERVALS)).alias("times"))
        .drop("is_bad", "mixed", "place", "total")
        .join(victims, ["backend", "sla", "objective"])
    )


def _uses_in_polars(volume_slots: Any, intervals: Any) -> Any:
    """``transforms.uses_of_backends``."""
    import polars as pl

    wanted = intervals.select("backend", "at_us").unique()
    uses = volume_slots.join(wanted, ["backend", "at_us"]).select("backend", "volume", "at_us", "used")
    micro = (pl.col("used") * 1e6).round().cast(pl.Int64).sum().alias("micro")
    sums = uses.group_by("backend", "volume").agg(micro)
    is_large = pl.col("micro") >= LEAST_PART * pl.col("micro").sum().over("backend")
    return uses.join(sums.filter(is_large).select("backend", "volume"), ["backend", "volume"])


def _plain(frame: Any) -> pa.Table:
    """A Polars table with strings as Spark and DuckDB have them."""
    import polars as pl

    table = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
    fields = [
        field.with_type(pa.string()) if field.type == pa.large_string() else field for field in table.schema
    ]
    return table.cast(pa.schema(fields))


def in_spark(
    place: Path, read: JobInputs, after: Callable[[Path, Found], object] = lambda _work, _found: None
) -> tuple[Found, float, dict[str, int]]:
    """The product's own job, without what is read of SQL.

    Args:
        place: of the files; Spark's own go beside them, so that who made them removes both.
        read: what the driver knows.
        after: is called with a directory and what was found, before memory is looked at.
    """
    from sla_server.policy_jobs.session import build_session, peak_mib
    from sla_server.policy_jobs.sql_source import no_rows

    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="spark-", dir=place.parent) as work:
        rollups = sum(
            pq.read_metadata(path).num_rows
            for kind in ("rollups", "hours")
            for path in (place / kind).glob("*.parquet")
        )
        spark = build_session("local[*]", Path(work), "2g", rows=rollups)
        start_s = time.monotonic() - started_s
        hours = no_rows(spark, HOUR_DDL)
        if (place / "hours").exists():
            hours = spark.read.schema(HOUR_DDL).parquet(f"{place}/hours")
        rows = Statistics(
            spark.read.schema(SLOT_DDL).parquet(f"{place}/rollups"),
            spark.read.schema(MISSED_DDL).parquet(f"{place}/missed"),
            hours,
        )
        found = compute(spark, rows, read)
        after(Path(work), found)
        memory = peak_mib()
        spark.stop()
    return found, start_s, memory


def stored(work: Path, found: Found) -> dict[str, float]:
    """Store the policy as the job does, and read it as the next back-test does; seconds of each."""
    from contextlib import closing

    from sla_server.db import migrate
    from sla_server.db.config import DatabaseConfig
    from sla_server.db.engine import make_engine
    from sla_server.db.policies import open_policies

    config, started_s = DatabaseConfig(), time.monotonic()
    engine = make_engine(config, work)
    migrate.upgrade(engine)
    engine.dispose()
    names = {"capacity": "capacity", "costs": "cost_model", "harms": "harms", "bursts": "bursts"}
    report = {name: getattr(found, each) for each, name in names.items()}
    with closing(open_policies(config, work)) as store:
        version = store.publish(found.cap_rows(), job={}, report=report, published_by="benchmark")
        published_s = time.monotonic()
        capped = sum(1 for _ in store.reader.capped_hours(version))
    assert capped == found.capped_hours, "what is read is what was found"
    return {"publish_s": published_s - started_s, "read_s": time.monotonic() - published_s}


def main() -> None:
    """Compute with one engine, and print what came of it."""
    engine, place = sys.argv[1], Path(sys.argv[2])
    started_s = time.monotonic()
    read = spark_world.fleet(spark_world.LARGE if engine == "fleet" else spark_world.SMALL)
    start_s = 0.0
    memory: dict[str, int] = {}
    times: dict[str, float] = {}
    if engine == "fleet":
        found, start_s, memory = in_spark(place, read, lambda work, found: times.update(stored(work, found)))
    elif engine == "spark":
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
        "capped": found.capped_hours,
        "harms": found.harms,
        "bursts": [compared_burst(row) for row in found.bursts],
        "stored": times,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
