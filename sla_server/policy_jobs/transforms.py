"""Pure DataFrame -> DataFrame steps. No session, no I/O, no action.

Rates are cost units a second (1 per I/O plus bytes / 65,536), over the whole of an interval. ``covered_us``
does not say how much of it was watched: an idle stream has no row in a cut, so that of a burst of ten seconds
is ten seconds, and rates over those of all volumes, added up, would be a load that the backend never had.

Sums over a shuffle are sums of integers: those of floating-point numbers would depend on the order in which
parts arrive, and a policy on the number of executors.

Source: SLA-MODEL.md 4, points 2 and 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sla_server.policy_jobs.cost_model import MIN_IOS, MOST_UNDER_WAY

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

COUNTED: Final = (
    *("arrived", "reads", "writes", "read_bytes", "write_bytes"),
    *("svc_sum_us", "cost_milli", "sequential", "placed", "caps_us"),
)
PLACED: Final = ("arrived", "sequential", "placed")
MICRO: Final = 1e6
MOST_INTERVALS: Final = (
    1000  # a promise and step; what is attributed depends on the kinds of them, not their number
)
MIXED: Final = "at_us div 1000000 * 1000003 % 16777213"
"""An order of intervals that follows no rhythm of the load, and that any engine can compute."""
LANES: Final = 8
"""Streams of a volume that are added up in one pass; most volumes have fewer, and each lane takes time."""
LEAST_HELD: Final = 20  # of so many intervals of an hour one that was held back: p95 is what was let through
LEAST_PART: Final = 0.01  # of a backend's cost; smaller volumes are told apart from the others by no model


def promised_streams(
    streams: DataFrame, promises: DataFrame, volumes: DataFrame, clients: DataFrame
) -> DataFrame:
    """Each stream in scope of each promise, from the tables of ``scope.Scope``.

    Returns:
        stream_id, volume, backend, sla, objective, step, io, threshold_us, allowed.
    """
    from pyspark.sql import functions as F

    is_asking = clients.withColumn("is_asking", F.lit(True))
    return (
        streams.join(F.broadcast(volumes), "volume")
        .join(F.broadcast(promises), "promise")
        .join(F.broadcast(is_asking), ["promise", "client"], "left")
        .where(F.col("any_client") | F.col("is_asking"))
        .select("stream_id", "volume", "backend", "sla", "objective", "step", "io", "threshold_us", "allowed")
    )


def volume_slots(
    samples: DataFrame, streams: DataFrame, time_column: str, length_us: int, widest: int
) -> DataFrame:
    """Each volume in each interval; rows of one key, from SQL and from files, are parts of one.

    Parts of a stream come one after the other, streams of a volume at the same time: of their covers the
    longest counts. Those of up to ``LANES`` streams are added up beside each other, in one pass over the
    rows; two passes, over streams and over volumes, take the step a quarter more processor time (1 M rows).

    Hours are stored without all counters; those that ``samples`` has not are 0.

    The cost of I/Os that arrived but did not complete is estimated with the mean cost of those that did.

    Args:
        samples: rollups.
        streams: of ``streams.streams_now``.
        time_column: of ``samples``.
        length_us: of its intervals.
        widest: of ``streams.widest``.

    Returns:
        backend, volume, at_us, ios (completed), reads, writes, bytes, svc_us, arrived, sequential, placed,
        cost_milli, held_us (in which a throttle held some back; of its streams, added up), covered_us (in
        which it was at work), demand (offered cost a second), used (completed, the same).
    """
    from pyspark.sql import functions as F

    def total(*names: str) -> Column:
        return F.sum(sum((F.coalesce(name, F.lit(0)) for name in names[1:]), F.coalesce(names[0], F.lit(0))))

    lane, bundle = F.expr(f"rank % {LANES}").alias("lane"), F.expr(f"rank div {LANES}").alias("bundle")
    of_volumes = streams.select("stream_id", "volume", "backend", lane, bundle)
    absent = [name for name in COUNTED if name not in samples.columns]
    samples = samples.select("*", *(F.lit(0).cast("bigint").alias(name) for name in absent))
    counted = ("ios", "reads", "writes", "bytes", "svc_us", *PLACED, "cost_milli", "held_us")
    key = ("backend", "volume", "at_us")
    covers = [F.sum(F.when(F.col("lane") == each, F.col("covered_us"))) for each in range(min(widest, LANES))]
    sums = (
        samples.join(F.broadcast(of_volumes), "stream_id")
        .withColumnRenamed(time_column, "at_us")
        .groupBy(*key, *(["bundle"] if widest > LANES else []))
        .agg(
            total("reads", "writes").alias("ios"),
            total("reads").alias("reads"),
            total("writes").alias("writes"),
            total("read_bytes", "write_bytes").alias("bytes"),
            total("svc_sum_us").alias("svc_us"),
            F.sum("arrived").alias("arrived"),
            total("sequential").alias("sequential"),
            total("placed").alias("placed"),
            F.sum("cost_milli").alias("cost_milli"),
            total("caps_us").alias("held_us"),
            (F.greatest(*covers) if len(covers) > 1 else covers[0]).alias("covered_us"),
        )
    )
    if widest > LANES:
        longest = F.max("covered_us").alias("covered_us")
        sums = sums.groupBy(*key).agg(*(F.sum(name).alias(name) for name in counted), longest)
    used = F.col("cost_milli") / 1000.0 / (length_us / US_A_SECOND)
    more = F.coalesce(F.greatest(F.lit(1.0), F.try_divide(F.col("arrived"), F.col("ios"))), F.lit(1.0))
    return sums.where("covered_us > 0").select(
        *key, *counted, "covered_us", (used * more).alias("demand"), used.alias("used")
    )


def nearest(value: Column) -> Column:
    """The nearest integer of what is not negative, below 2^52. Spark's ``round`` makes a decimal of each."""
    from pyspark.sql import functions as F

    return F.floor(value + 0.5)


def hourly_demand(rates: DataFrame, zones: DataFrame, learned: DataFrame) -> DataFrame:
    """Demand of each volume by hour of the week, as clocks at its backend show it.

    Args:
        rates: of ``volume_slots``, with ``times``: how many intervals a row represents.
        zones: backend, zone.
        learned: of ``demand.HourTables``.

    Returns:
        backend, volume, hour_of_week, p50, p95 (cost a second, recent intervals weighing more), samples,
        mean_cost (of an I/O; none without I/O).
    """
    from pyspark.sql import functions as F

    begin = (F.floor(F.col("at_us") / QUARTER_US) * QUARTER_US).cast("bigint").alias("begin_us")
    return (
        rates.select("backend", "volume", "demand", "ios", "cost_milli", "times", begin)
        .join(F.broadcast(zones), "backend")
        .join(F.broadcast(learned), ["zone", "begin_us"])
        .groupBy("backend", "volume", "hour_of_week")
        .agg(
            F.percentile("demand", F.array(F.lit(0.5), F.lit(0.95)), F.expr("weight * times")).alias("p"),
            F.sum("times").alias("samples"),
            (F.try_divide(F.sum("cost_milli"), F.sum("ios")) / 1000.0).alias("mean_cost"),
        )
        .select(
            "backend",
            "volume",
            "hour_of_week",
            F.get("p", F.lit(0)).alias("p50"),
            F.get("p", F.lit(1)).alias("p95"),
            "samples",
            "mean_cost",
        )
    )


def expected_demand(demand: DataFrame, zones: DataFrame, coming: DataFrame) -> DataFrame:
    """Demand in the hours of UTC of the coming week: that of the local hour which each is like.

    Args:
        demand: of ``hourly_demand``.
        zones: backend, zone.
        coming: of ``demand.HourTables``.

    Returns:
        columns of ``hourly_demand``.
    """
    from pyspark.sql import functions as F

    local = demand.withColumnRenamed("hour_of_week", "like_hour").join(F.broadcast(zones), "backend")
    return local.join(F.broadcast(coming), ["zone", "like_hour"]).select(*demand.columns)


def demand_when_held(demand: DataFrame, in_force: DataFrame, slots: DataFrame, from_us: int) -> DataFrame:
    """Demand, where a throttle held it back at least what it was when the policy in force was made.

    Under a cap a volume asks for what the cap lets through: that would fit, and the next policy would have no
    cap for it.

    Args:
        demand: of ``expected_demand``.
        in_force: volume, hour_of_week (UTC), was_p95: of the hours that the policy in force has caps for.
        slots: of ``volume_slots``.
        from_us: what was held back before does not count.

    Returns:
        columns of ``hourly_demand``.
    """
    from pyspark.sql import functions as F

    hour = F.expr(f"cast((at_us div {US_AN_HOUR} + {MONDAY_OFFSET_HOURS}) % {HOURS_A_WEEK} as int)")
    is_held = F.col("held_us") * 2 >= F.col("covered_us")
    held = (
        slots.where(F.col("at_us") >= from_us)
        .groupBy("volume", hour.alias("hour_of_week"))
        .agg(F.sum(F.when(is_held, LEAST_HELD).otherwise(0)).alias("held"), F.count("*").alias("all"))
        .where(F.col("held") >= F.col("all"))
        .select("volume", "hour_of_week")
    )
    known = in_force.join(held, ["volume", "hour_of_week"])
    p95 = F.greatest("p95", "was_p95").alias("p95")  # of those that are known
    return demand.join(known, ["volume", "hour_of_week"], "left").select(
        *(p95 if name == "p95" else name for name in demand.columns)
    )


def slots_and_hours(slots: DataFrame, hours: DataFrame, slots_an_hour: int) -> DataFrame:
    """Fine intervals, and hours where there are none, each with ``times``: how many intervals it represents.

    An hour of a steady load weighs what its fine intervals would weigh: the demand is the same.
    """
    from pyspark.sql import functions as F

    fine = slots.withColumn("times", F.lit(1).cast("bigint"))
    coarse = without_covered_hours(hours, slots).withColumn("times", F.lit(slots_an_hour).cast("bigint"))
    return fine.unionByName(coarse)


def without_covered_hours(hours: DataFrame, slots: DataFrame) -> DataFrame:
    """Hours of volumes (``volume_slots``) for which no finer rows are left, so that none counts twice."""
    from pyspark.sql import functions as F

    covered = slots.select(
        "backend", "volume", (F.floor(F.col("at_us") / US_AN_HOUR) * US_AN_HOUR).cast("bigint").alias("at_us")
    ).distinct()
    return hours.join(covered, ["backend", "volume", "at_us"], "left_anti")


def backend_slots(slots: DataFrame) -> DataFrame:
    """Each backend in each interval, of the rows of ``volume_slots``.

    Returns:
        backend, at_us, load (completed cost a second of all its volumes), reads, writes, bytes, svc_us,
        arrived, sequential, placed, covered_us.
    """
    from pyspark.sql import functions as F

    exact = F.sum(nearest(F.col("used") * MICRO))
    return slots.groupBy("backend", "at_us").agg(
        (exact / MICRO).alias("load"),
        *(F.sum(name).alias(name) for name in ("reads", "writes", "bytes", "svc_us", *PLACED)),
        F.max("covered_us").alias("covered_us"),
    )


def ended_slots(slots: DataFrame, slots_an_hour: int, end_us: int) -> DataFrame:
    """Those of the intervals that had ended then."""
    from pyspark.sql import functions as F

    return slots.where(F.col("at_us") <= end_us - US_AN_HOUR // slots_an_hour)


def promise_points(loads: DataFrame, missed: DataFrame, promised: DataFrame) -> DataFrame:
    """How well each promise was kept at each total load of its backend.

    Args:
        loads: of ``backend_slots``.
        missed: rows of SQL and files.
        promised: of ``promised_streams``.

    Returns:
        backend, sla, objective, step, allowed, at_us, load, counted, missed.
    """
    from pyspark.sql import functions as F

    kept = (
        missed.join(F.broadcast(promised), ["stream_id", "io", "threshold_us"])
        .groupBy("backend", "sla", "objective", "step", "allowed", F.col("slot_us").alias("at_us"))
        .agg(F.sum("counted").alias("counted"), F.sum("missed").alias("missed"))
    )
    return kept.join(loads.select("backend", "at_us", "load"), ["backend", "at_us"]).select(
        "backend", "sla", "objective", "step", "allowed", "at_us", "load", "counted", "missed"
    )


def intervals_to_attribute(points: DataFrame) -> DataFrame:
    """Of each promise that was ever broken, bad intervals and others, at most ``MOST_INTERVALS`` of each.

    Args:
        points: of ``promise_points``.

    Returns:
        columns of ``points``, times (how many intervals each represents).
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    keys = ["backend", "sla", "objective", "step"]
    is_bad = F.col("missed") > F.col("allowed") * F.col("counted")
    alike = Window.partitionBy(*keys, "is_bad")
    chosen = (
        points.where(F.col("counted") >= MIN_IOS)
        .withColumn("is_bad", is_bad)
        .withColumn("was_broken", F.max("is_bad").over(Window.partitionBy(*keys)))
        .where("was_broken")
        .withColumn("rank", F.row_number().over(alike.orderBy(F.expr(MIXED), "at_us")))
        .withColumn("all", F.count("*").over(alike))
        .where(F.col("rank") <= MOST_INTERVALS)
        .withColumn("times", F.col("all") / F.least("all", F.lit(MOST_INTERVALS)).cast("double"))
    )
    return chosen.select(*points.columns, "times")


def with_victims(intervals: DataFrame, promised: DataFrame) -> DataFrame:
    """Intervals of ``intervals_to_attribute``, and the names of each promise's volumes in a row of its own.

    They may be thousands: beside each of as many intervals they would not fit into the memory of a worker.

    Args:
        intervals: of broken promises.
        promised: of ``promised_streams``.

    Returns:
        columns of ``intervals``; and rows with backend, sla, objective and ``victims`` alone.
    """
    from pyspark.sql import functions as F

    victims = promised.groupBy("backend", "sla", "objective").agg(
        F.sort_array(F.collect_set("volume")).alias("victims")
    )
    return intervals.unionByName(victims, allowMissingColumns=True)


def uses_of_backends(slots: DataFrame, intervals: DataFrame) -> DataFrame:
    """What the larger volumes of each backend used in these intervals, a row a volume.

    A row a use takes Spark four times as long to hand over to a worker.

    Args:
        slots: of ``volume_slots``.
        intervals: of ``intervals_to_attribute``.

    Returns:
        backend, volume, used_at_us, used: lists in no order, but the same one.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    wanted = intervals.select("backend", "at_us").distinct()
    micro = F.sum(nearest(F.col("used") * MICRO)).alias("micro")
    of_backend = F.sum("micro").over(Window.partitionBy("backend"))
    lists = F.collect_list("at_us").alias("used_at_us"), F.collect_list("used").alias("used")
    return (
        slots.join(wanted, ["backend", "at_us"])
        .groupBy("backend", "volume")
        .agg(micro, *lists)
        .withColumn("all", of_backend)
        .where(F.col("micro") >= LEAST_PART * F.col("all"))
        .select("backend", "volume", "used_at_us", "used")
    )


def cost_slots(loads: DataFrame) -> DataFrame:
    """The intervals that say what an I/O costs: enough I/Os, and little of them under way at once.

    Returns:
        backend, at_us, reads, writes, bytes, svc_us, arrived, sequential, placed.
    """
    from pyspark.sql import functions as F

    return loads.where(
        (F.col("reads") + F.col("writes") >= MIN_IOS)
        & (F.col("svc_us") > 0)
        & (F.col("svc_us") < MOST_UNDER_WAY * F.col("covered_us"))
    ).select("backend", "at_us", "reads", "writes", "bytes", "svc_us", *PLACED)


def demand_under_limits(
    demand: DataFrame, classes: DataFrame, needs: DataFrame, peaks: DataFrame | None = None
) -> DataFrame:
    """Demand of all volumes with what decides on their caps.

    What promises need of a backend is a row of its own: they may name thousands of volumes, and with each
    hour of each of these a large backend would not fit into the memory of a worker.

    Args:
        demand: of ``expected_demand``.
        classes: of ``scope.Scope``.
        needs: backend, needs (``model.encode``); no row: no capacity is known.
        peaks: of ``cuts.peaks``.

    Returns:
        columns of ``hourly_demand`` and of ``classes``, peak of volumes that have one; and the rows of
        ``needs``, without a volume.
    """
    from pyspark.sql import functions as F

    found = demand.join(F.broadcast(classes), "volume")
    found = found if peaks is None else found.join(peaks, ["backend", "volume"], "left")
    return found.unionByName(needs, allowMissingColumns=True)


def period_sums(slices: DataFrame, spans: DataFrame) -> DataFrame:
    """How many slices of each kind start in each period: of every slice the newest revision.

    Args:
        slices: SLICE_COLUMNS, all revisions.
        spans: name (of the agreement), period, from_us, to_us.

    Returns:
        PERIOD_SUMS and n.
    """
    from pyspark.sql import functions as F

    rest = [name for name in SLICE_COLUMNS if name not in ("name", "objective", "start_us", "revision")]
    newest = slices.groupBy("name", "objective", "start_us").agg(
        F.max_by(F.struct(*rest), F.col("revision")).alias("of")
    )
    within = (F.col("start_us") >= F.col("from_us")) & (F.col("start_us") < F.col("to_us"))
    return (
        newest.join(F.broadcast(spans), "name")
        .where(within)
        .select(*PERIOD_KEYS, *(F.col(f"of.{name}").alias(name) for name in rest))
        .groupBy(*PERIOD_SUMS)
        .agg(F.count("*").alias("n"))
    )


# -- Columns that the job reads and writes, for pyarrow and Spark alike
#
# Of SQL (``sql_source``) and of Parquet files; only the columns named here are read.


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
    "sequential",
    "placed",
    "caps_us",
)
SLOT_DDL: Final = ", ".join(f"{name} bigint" for name in SLOT_COLUMNS)
HOUR_COLUMNS: Final = ("hour_us", "stream_id", "arrived", "reads", "writes", "cost_milli", "covered_us")
HOUR_DDL: Final = ", ".join(f"{name} bigint" for name in HOUR_COLUMNS)
MISSED_COLUMNS: Final = ("slot_us", "stream_id", "io", "threshold_us", "counted", "missed")
MISSED_DDL: Final = ", ".join(f"{name} {'int' if name == 'io' else 'bigint'}" for name in MISSED_COLUMNS)
SLICE_COLUMNS: Final = (
    *("start_us", "name", "objective", "revision"),
    *("version", "state", "ours", "inexact", "length_us"),
)
SLICE_DDL: Final = (
    "start_us bigint, name string, objective string, revision bigint, "
    "version bigint, state string, ours boolean, inexact boolean, length_us bigint"
)
PERIOD_KEYS: Final = ("name", "objective", "period")
PERIOD_SUMS: Final = (*PERIOD_KEYS, "version", "state", "ours", "inexact", "length_us")
"""Keys of ``period_sums``."""
STREAM_COLUMNS: Final = ("stream_id", "volume", "client", "backend")
HOURS_A_WEEK: Final = 168
US_A_SECOND: Final = 1_000_000
US_AN_HOUR: Final = 3600 * US_A_SECOND
US_A_DAY: Final = 24 * US_AN_HOUR
QUARTER_US: Final = US_AN_HOUR // 4
MONDAY_OFFSET_HOURS: Final = 72
"""1970-01-01 was a Thursday: hour 0 of the epoch is hour 72 of a week that starts on Monday 00 UTC."""


def hour_of_week(unix_us: int) -> int:
    """0 (Monday 00:00 UTC) to 167."""
    return (unix_us // US_AN_HOUR + MONDAY_OFFSET_HOURS) % HOURS_A_WEEK
