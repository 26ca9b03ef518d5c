"""Raw cuts for the jobs: which are read, and what a backend did in bins of a poll's length.

Minutes blur bursts (``steady``); cuts do not, and are stored for two days or so, for the back-test and for
export. They are many: at most ``[policy] cut_rows`` rows are read, of all that time where it has no more,
else of some of each hour's minutes (``chosen_cuts``). A file that is gone or damaged takes its cuts
away and ends no job: minutes say which bins are complete.

A cut is spread evenly over the bins that it overlaps. Longer ones than two bins, such as those of a gateway
that was away, say nothing of a bin, and are left out.

Steps are pure DataFrame -> DataFrame; sums over a shuffle are sums of integers (``transforms``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from sla_server.policy_jobs.transforms import MICRO, US_A_SECOND, US_AN_HOUR, nearest

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

CUT_DDL: Final = (
    "start timestamp, duration_us bigint, stream_id bigint, reads bigint, writes bigint, svc_sum_us bigint, "
    "cost_milli bigint, missed_io array<bigint>, missed_threshold_us array<bigint>, "
    "missed_counted array<bigint>, missed_missed array<bigint>"
)
LEAST_BIN_US: Final = US_A_SECOND
MOST_BIN_US: Final = 20 * US_A_SECOND  # polls that are rarer show no more than minutes
LONG_CUT: Final = 2  # bins
IO_KINDS: Final = 3  # entries of missed_io above are of what completions do not show (``wire.cut``)
MILLI: Final = 1000
PEAK: Final = 0.95
MIX: Final = 7919  # a prime: which minutes of an hour are read moves from hour to hour
Span = tuple[int, int]


class CutFile(Protocol):
    """A row of the manifest."""

    @property
    def min_us(self) -> int:
        """Start of the oldest cut."""

    @property
    def max_us(self) -> int:
        """End of the newest."""

    @property
    def rows(self) -> int:
        """A stream and cut each."""


def bin_length_us(interval_s: float) -> int:
    """Of bins, where gateways are polled that often; 0: cuts show no more than minutes."""
    length_us = max(round(interval_s * US_A_SECOND), LEAST_BIN_US)
    return length_us if length_us <= MOST_BIN_US else 0


def chosen_cuts(
    files: Sequence[CutFile],
    most_rows: int,
    slot_us: int = 60 * US_A_SECOND,
    bin_us: int = LEAST_BIN_US,
) -> tuple[list[int], list[Span]]:
    """Which files are read, by number, and which times of them; no times: all.

    All files are read in the same times: a bin without some of its backend's streams would say nothing. Times
    are of whole slots, and begin as much earlier as a cut may reach into them: bins of a part of a slot are
    left out (``steady.is_complete``).

    Args:
        files: all that there are.
        most_rows: read at most so many, about.
        slot_us: length of a rollup.
        bin_us: of a bin.
    """
    rows = sum(each.rows for each in files)
    if rows <= most_rows or not files:
        return list(range(len(files))), []
    begin_us, end_us = min(each.min_us for each in files), max(each.max_us for each in files)
    first, last = -(-begin_us // slot_us), end_us // slot_us
    wanted = min((end_us - begin_us) * most_rows // (rows * slot_us), last - first)
    if wanted < 1:
        return [], []
    hours = -((begin_us - end_us) // US_AN_HOUR)
    length = max(wanted // hours, 1)
    count = wanted // length
    room = (last - first) // count - length
    starts = (first + (last - first) * i // count + i * MIX % (room + 1) for i in range(count))
    spans = [(start * slot_us - LONG_CUT * bin_us, (start + length) * slot_us) for start in starts]
    wanted_files = [
        number
        for number, each in enumerate(files)
        if any(begin <= each.max_us and each.min_us < end for begin, end in spans)
    ]
    return wanted_files, spans


def read_cuts(spark: SparkSession, paths: Sequence[str], spans: Sequence[Span]) -> DataFrame:
    """Rows of these files that start in these times; nothing is read yet."""
    from pyspark.sql import functions as F

    tolerant = {"ignoreMissingFiles": "true", "ignoreCorruptFiles": "true"}
    rows = spark.read.schema(CUT_DDL).options(**tolerant).parquet(*paths)
    if not spans:
        return rows

    def within(span: Span) -> Column:
        begin, end = (F.timestamp_micros(F.lit(each)) for each in span)
        return (F.col("start") >= begin) & (F.col("start") < end)

    chosen = within(spans[0])
    for span in spans[1:]:
        chosen = chosen | within(span)
    return rows.where(chosen)


def in_bins(cuts: DataFrame, bin_us: int) -> DataFrame:
    """Rows of cuts, one for each bin that they overlap, with the ``share`` of them that lies in it.

    Returns:
        columns of CUT_DDL but start and duration_us, at_us (begin of the bin), share.
    """
    from pyspark.sql import functions as F

    rest = [name for name in cuts.columns if name not in ("start", "duration_us")]
    begin, end = F.col("begin_us"), F.col("begin_us") + F.col("duration_us")
    first, last = (
        F.expr(f"({each}) div {bin_us} * {bin_us}") for each in ("begin_us", "begin_us + duration_us - 1")
    )
    step = F.lit(bin_us).cast("bigint")
    return (
        cuts.where(F.col("stream_id").isNotNull() & F.col("duration_us").between(1, LONG_CUT * bin_us))
        .select(*rest, "duration_us", F.unix_micros("start").alias("begin_us"))
        .withColumn("at_us", F.explode(F.sequence(first, last, step)))
        .withColumn(
            "share",
            (F.least(end, F.col("at_us") + step) - F.greatest(begin, F.col("at_us"))) / F.col("duration_us"),
        )
        .select(*rest, "at_us", "share")
    )


def _part(name: str, times: int) -> Column:
    """The sum of a column's shares, in so many parts of it."""
    from pyspark.sql import functions as F

    return F.sum(nearest(F.col(name) * F.col("share") * times))


def volume_bins(binned: DataFrame, streams: DataFrame) -> DataFrame:
    """What each volume did in each bin.

    Args:
        binned: of ``in_bins``.
        streams: of ``streams.streams_now``.

    Returns:
        backend, volume, at_us, cost (1 / 1,000,000 of a unit), ios (1 / 1,000), svc_us.
    """
    from pyspark.sql import functions as F

    of_volumes = streams.select("stream_id", "volume", "backend")
    return (
        binned.withColumn("done", F.col("reads") + F.col("writes"))
        .join(F.broadcast(of_volumes), "stream_id")
        .groupBy("backend", "volume", "at_us")
        .agg(
            _part("cost_milli", MILLI).alias("cost"),
            _part("done", MILLI).alias("ios"),
            _part("svc_sum_us", 1).alias("svc_us"),
        )
    )


def backend_bins(of_volumes: DataFrame) -> DataFrame:
    """The same of backends."""
    from pyspark.sql import functions as F

    return of_volumes.groupBy("backend", "at_us").agg(
        *(F.sum(name).alias(name) for name in ("cost", "ios", "svc_us"))
    )


def promise_bins(binned: DataFrame, promised: DataFrame, of_backends: DataFrame, bin_us: int) -> DataFrame:
    """How well each promise was kept in each bin.

    Args:
        binned: of ``in_bins``.
        promised: of ``transforms.promised_streams``.
        of_backends: of ``backend_bins``.
        bin_us: length of bins.

    Returns:
        columns of ``transforms.promise_points``, threshold_us, bin_us, ios, svc_us.
    """
    from pyspark.sql import functions as F

    names = ("io", "threshold_us", "counted", "missed")
    entries = F.arrays_zip(*(F.col(f"missed_{name}").alias(name) for name in names))
    keys = ("backend", "sla", "objective", "step", "allowed", "threshold_us", "at_us")
    kept = (
        binned.select("stream_id", "at_us", "share", F.explode(entries).alias("of"))
        .select("stream_id", "at_us", "share", *(F.col(f"of.{name}").alias(name) for name in names))
        .where(F.col("io") < IO_KINDS)
        .withColumn("io", F.col("io").cast("int"))
        .join(F.broadcast(promised), ["stream_id", "io", "threshold_us"])
        .groupBy(*keys)
        .agg(_part("counted", MILLI).alias("counted"), _part("missed", MILLI).alias("missed"))
    )
    seconds = bin_us / US_A_SECOND
    return kept.join(of_backends, ["backend", "at_us"]).select(
        *("backend", "sla", "objective", "step", "allowed", "at_us"),
        (F.col("cost") / MICRO / seconds).alias("load"),
        *((F.col(name) / float(MILLI)).alias(name) for name in ("counted", "missed")),
        "threshold_us",
        F.lit(bin_us).cast("bigint").alias("bin_us"),
        (F.col("ios") / float(MILLI)).alias("ios"),
        F.col("svc_us").cast("double").alias("svc_us"),
    )


def peaks(of_volumes: DataFrame, bin_us: int) -> DataFrame:
    """The rate at which each volume is at work: nearly all of its cost comes at this rate or a lower one.

    Returns:
        backend, volume, peak (cost a second).
    """
    from pyspark.sql import functions as F

    return (
        of_volumes.where("cost > 0")
        .groupBy("backend", "volume")
        .agg(
            F.percentile("cost", F.lit(PEAK), F.expr(f"cast(ceil(cost / {MICRO:.0f}) as bigint)")).alias(
                "cost"
            )
        )
        .select("backend", "volume", (F.col("cost") / MICRO / (bin_us / US_A_SECOND)).alias("peak"))
    )
