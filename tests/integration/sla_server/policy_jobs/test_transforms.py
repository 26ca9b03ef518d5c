"""The DataFrame steps on tables small enough to check by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from pyspark.sql import functions as F

from sla_server.policy_jobs import transforms
from sla_server.policy_jobs.demand import hour_tables, recency_weights, weighted_percentile
from sla_server.policy_jobs.scope import scope_of
from sla_server.policy_jobs.transforms import US_AN_HOUR
from tests.support.histories import promise, utc_hours

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SLOT = 10_000_000
SLOT_DDL = (
    "slot_us bigint, stream_id bigint, arrived bigint, reads bigint, writes bigint, cost_milli bigint, "
    "covered_us bigint"
)


@pytest.fixture(scope="module")
def streams(spark: SparkSession) -> DataFrame:
    rows = [(1, "erp", "a", "disk", 0), (2, "batch", "b", "disk", 0), (3, "batch", "c", "disk", 1)]
    ddl = "stream_id bigint, volume string, client string, backend string, rank int"
    return spark.createDataFrame(rows, ddl)


def test_rates_add_the_streams_of_a_volume(spark: SparkSession, streams: DataFrame) -> None:
    slots = spark.createDataFrame(
        [
            (0, 2, 100, 60, 40, 106_250, SLOT),
            (0, 3, 50, 50, 0, 53_125, SLOT),
            (0, 1, 80, 80, 0, 85_000, SLOT),
        ],
        SLOT_DDL,
    )
    rates = {row.volume: row for row in transforms.volume_slots(slots, streams, "slot_us", SLOT, 2).collect()}
    assert rates["batch"].ios == 150
    assert rates["batch"].used == pytest.approx(15.9375)
    assert rates["batch"].demand == pytest.approx(15.9375)
    assert rates["erp"].used == pytest.approx(8.5)


def test_demand_counts_what_was_held_back(spark: SparkSession, streams: DataFrame) -> None:
    slots = spark.createDataFrame([(0, 2, 200, 100, 0, 100_000, SLOT)], SLOT_DDL)
    row = transforms.volume_slots(slots, streams, "slot_us", SLOT, 2).collect()[0]
    assert row.used == pytest.approx(10.0)
    assert row.demand == pytest.approx(20.0)


def test_an_interval_without_io_is_a_rate_of_zero_and_one_without_cover_is_none(
    spark: SparkSession, streams: DataFrame
) -> None:
    slots = spark.createDataFrame([(0, 1, 0, 0, 0, 0, SLOT), (0, 2, 0, 0, 0, 0, 0)], SLOT_DDL)
    rows = transforms.volume_slots(slots, streams, "slot_us", SLOT, 2).collect()
    assert [(row.volume, row.demand) for row in rows] == [("erp", 0.0)]


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_a_key_in_several_rows_is_one_interval(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, lanes: int
) -> None:
    """Of SQL and files; streams of a volume run at the same time, parts of a stream one after the other.

    Also where a volume has more streams than there are lanes.
    """
    monkeypatch.setattr(transforms, "LANES", lanes)
    streams = spark.createDataFrame(
        [(1, "erp", "disk", 0), (2, "batch", "disk", 1), (3, "batch", "disk", 0), (4, "batch", "disk", 2)],
        "stream_id bigint, volume string, backend string, rank int",
    )
    half = SLOT // 2
    slots = spark.createDataFrame(
        [
            (0, 2, 50, 50, 0, 50_000, half),
            (0, 2, 70, 70, 0, 70_000, half),
            (0, 3, 30, 30, 0, 30_000, half + 1),
            (0, 4, 20, 20, 0, 20_000, half),
            (0, 1, 10, 10, None, 10_000, half),
        ],
        SLOT_DDL,
    )
    rows = transforms.volume_slots(slots, streams, "slot_us", SLOT, 3).orderBy("volume").collect()
    assert [(row.volume, row.ios, row.reads, row.covered_us, row.bytes) for row in rows] == [
        ("batch", 170, 170, SLOT, 0),
        ("erp", 10, 10, half, 0),
    ]
    assert [row.used for row in rows] == [pytest.approx(17.0), pytest.approx(1.0)]


def test_a_volume_that_was_at_work_for_a_part_of_an_interval_has_its_mean_rate_in_all_of_it(
    spark: SparkSession, streams: DataFrame
) -> None:
    """It has no row in cuts in which it did nothing: two that follow one another are no load of both."""
    slots = spark.createDataFrame(
        [(0, 1, 100, 100, 0, 100_000, SLOT // 10), (0, 2, 200, 200, 0, 200_000, SLOT // 5)], SLOT_DDL
    )
    rates = transforms.volume_slots(slots, streams, "slot_us", SLOT, 2)
    assert {row.volume: (row.used, row.demand) for row in rates.collect()} == {
        "erp": (10.0, 10.0),
        "batch": (20.0, 20.0),
    }
    (row,) = transforms.backend_slots(rates).collect()
    assert (row.load, row.covered_us) == (30.0, SLOT // 5)


def test_the_nearest_integer(spark: SparkSession) -> None:
    values = [0.0, 0.25, 0.5, 1.4999, 1.5, 2.5, 1e9 + 0.5, 2.0**52 - 0.5]
    rows = spark.createDataFrame([(value,) for value in values], "x double")
    found = rows.select(
        transforms.nearest(rows.x).alias("n"), F.round("x").cast("bigint").alias("r")
    ).collect()
    assert [row.n for row in found] == [row.r for row in found]


def test_what_was_held_back_asks_for_at_least_what_it_did_before(spark: SparkSession) -> None:
    """Of an hour of which a twentieth was held back, and lately; a volume may ask for more by now."""
    ddl = "backend string, volume string, at_us bigint, held_us bigint, covered_us bigint"
    hour_us, minute_us = 10 * US_AN_HOUR, US_AN_HOUR // 60
    rows = []
    for volume, held in (("capped", 3), ("eager", 3), ("hardly", 2), ("free", 0), ("unknown", 60)):
        for minute in range(60):
            at_us, held_us = hour_us + minute * minute_us, 15 if minute < held else 14
            rows.append(("disk", volume, at_us, held_us, 30))
    rows.append(("disk", "long ago", 0, 30, 30))
    demand = spark.createDataFrame(
        [("disk", name, 82, 1.0, 100.0 if name != "eager" else 500.0, 60, 1.0) for name in
         ("capped", "eager", "hardly", "free", "unknown")]
        + [("disk", "long ago", 72, 1.0, 100.0, 60, 1.0), ("disk", "capped", 83, 1.0, 100.0, 60, 1.0)],
        "backend string, volume string, hour_of_week int, p50 double, p95 double, samples bigint, "
        "mean_cost double",
    )  # fmt: skip
    in_force = spark.createDataFrame(
        [(name, hour, 400.0) for name in ("capped", "eager", "hardly", "free", "long ago", "gone")
         for hour in range(168)],
        "volume string, hour_of_week int, was_p95 double",
    )  # fmt: skip
    found = transforms.demand_when_held(demand, in_force, spark.createDataFrame(rows, ddl), US_AN_HOUR)
    assert found.columns == demand.columns
    assert {(row.volume, row.hour_of_week): row.p95 for row in found.collect()} == {
        ("capped", 82): 400.0,
        ("eager", 82): 500.0,
        ("hardly", 82): 100.0,
        ("free", 82): 100.0,
        ("unknown", 82): 100.0,
        ("long ago", 72): 100.0,
        ("capped", 83): 100.0,
    }


def test_hours_that_slots_cover_are_left_out(spark: SparkSession) -> None:
    ddl = "backend string, volume string, at_us bigint"
    hours = spark.createDataFrame(
        [("disk", "a", 0), ("disk", "a", US_AN_HOUR), ("disk", "b", 0), ("tape", "a", 0)], ddl
    )
    slots = spark.createDataFrame([("disk", "a", SLOT), ("disk", "a", 2 * SLOT)], ddl)
    left = transforms.without_covered_hours(hours, slots).collect()
    assert sorted(tuple(row) for row in left) == [
        ("disk", "a", US_AN_HOUR),
        ("disk", "b", 0),
        ("tape", "a", 0),
    ]


def test_promises_meet_their_streams(spark: SparkSession, streams: DataFrame) -> None:
    found = scope_of(
        [promise("erp"), promise("*", ("b", "d")), promise("none-such")],
        [],
        ["erp", "batch"],
        ["a", "b", "c"],
    )
    tables = (spark.createDataFrame(table) for table in (found.promises, found.volumes, found.clients))
    rows = transforms.promised_streams(streams, *tables).collect()
    assert sorted((row.stream_id, row.volume, row.backend, row.allowed) for row in rows) == [
        (1, "erp", "disk", pytest.approx(0.05)),
        (2, "batch", "disk", pytest.approx(0.05)),
    ]


RATES_DDL = (
    "backend string, volume string, at_us bigint, ios bigint, cost_milli bigint, demand double, used double, "
    "times bigint"
)


def test_demand_by_hour_of_week(spark: SparkSession) -> None:
    rows = [
        ("disk", "erp", hour * US_AN_HOUR, 10, 20_000, float(value), 0.0, 1)
        for hour, value in ((0, 10), (168, 30), (1, 5))
    ]
    tables = utc_hours("disk", window_us=(0, 200 * US_AN_HOUR))
    zones, learned = spark.createDataFrame(tables.zones), spark.createDataFrame(tables.learned)
    rates = spark.createDataFrame(rows, RATES_DDL)
    found = {row.hour_of_week: row for row in transforms.hourly_demand(rates, zones, learned).collect()}
    assert found[72].p50 == pytest.approx(20.0, abs=10.001), "of two values that weigh nearly the same"
    assert found[72].samples == 2
    assert found[72].mean_cost == 2.0
    assert found[73].p95 == pytest.approx(5.0)


def test_percentiles_are_those_of_the_weighted_values_and_hours_are_local(spark: SparkSession) -> None:
    """24 weeks of one hour, in Berlin; the same by numpy."""
    week = 168 * US_AN_HOUR
    window = (0, 24 * week)
    tables = hour_tables({"disk": "Europe/Berlin"}, window, half_life_days=14)
    at_us = np.arange(24, dtype=np.int64) * week + 8 * US_AN_HOUR
    values = np.random.default_rng(3).uniform(1, 100, 24).round(3)
    rates = spark.createDataFrame(
        [
            ("disk", "erp", int(at), 10, 10_000, float(value), 0.0, 1)
            for at, value in zip(at_us, values, strict=True)
        ],
        RATES_DDL,
    )
    zones, learned, coming = (
        spark.createDataFrame(table) for table in (tables.zones, tables.learned, tables.coming)
    )
    demand = transforms.hourly_demand(rates, zones, learned)
    (row,) = demand.collect()
    weights = recency_weights(at_us, window[1], 14)
    assert row.hour_of_week == 72 + 9, "an hour before UTC, all of the winter of 1970"
    for share, found in ((0.5, row.p50), (0.95, row.p95)):
        assert found == pytest.approx(weighted_percentile(values, weights, share), rel=1e-9)
    (expected,) = transforms.expected_demand(demand, zones, coming).collect()
    assert (expected.hour_of_week, expected.p95) == (72 + 8, row.p95), "caps are stored by hours of UTC"


LOADS_DDL = (
    "backend string, volume string, at_us bigint, reads bigint, writes bigint, bytes bigint, svc_us bigint, "
    "arrived bigint, sequential bigint, placed bigint, covered_us bigint, used double"
)


def test_points_join_the_misses_of_a_promise_to_the_load_of_its_backend(
    spark: SparkSession, streams: DataFrame
) -> None:
    slots = spark.createDataFrame(
        [
            ("disk", "erp", 0, 80, 0, 0, 0, 80, 0, 0, SLOT, 8.0),
            ("disk", "batch", 0, 300, 0, 0, 0, 300, 0, 0, SLOT, 32.1),
        ],
        LOADS_DDL,
    )
    missed = spark.createDataFrame(
        [
            (0, 1, 0, 12_000, 40, 3),
            (0, 1, 0, 12_000, 40, 5),
            (0, 1, 0, 5_000, 80, 70),
            (0, 2, 0, 12_000, 9, 9),
        ],
        "slot_us bigint, stream_id bigint, io int, threshold_us bigint, counted bigint, missed bigint",
    )
    promised = spark.createDataFrame(
        [(1, "erp", "disk", "erp-gold", "latency", 0, 0, 12_000, 0.05)],
        "stream_id bigint, volume string, backend string, sla string, objective string, step int, io int, "
        "threshold_us bigint, allowed double",
    )
    points = transforms.promise_points(transforms.backend_slots(slots), missed, promised).collect()
    assert [(p.sla, p.load, p.counted, p.missed, p.allowed) for p in points] == [
        ("erp-gold", 40.1, 80, 8, 0.05)
    ]


def test_intervals_to_attribute_are_those_of_broken_promises_and_some_of_the_others(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transforms, "MOST_INTERVALS", 4)
    points = spark.createDataFrame(
        [
            ("disk", sla, "l", 0, 0.05, at, 40.0, 100, 50 if sla == "gold" and at < 2 else 1)
            for sla in ("gold", "kept")
            for at in range(12)
        ]
        + [("disk", "gold", "l", 0, 0.05, 99, 40.0, 5, 5)],
        "backend string, sla string, objective string, step int, allowed double, at_us bigint, load double, "
        "counted bigint, missed bigint",
    )
    promised = spark.createDataFrame(
        [(1, "erp", "disk", "gold", "l"), (2, "erp", "disk", "gold", "l"), (3, "crm", "disk", "gold", "l")],
        "stream_id bigint, volume string, backend string, sla string, objective string",
    )
    found = transforms.intervals_to_attribute(points)
    both = transforms.with_victims(found, promised).collect()
    rows = [row for row in both if row.victims is None]
    bad = [row for row in rows if row.missed == 50]
    assert {row.sla for row in rows} == {"gold"}
    assert sorted((row.at_us, row.times) for row in bad) == [(0, 1.0), (1, 1.0)]
    assert [row.times for row in rows if row.missed == 1] == [2.5] * 4, "four stand for ten"
    assert [(row.sla, row.objective, row.at_us, row.victims) for row in both if row.victims is not None] == [
        ("gold", "l", None, ["crm", "erp"])
    ], "once a promise: beside each interval they would fill a worker's memory"
    at_us = bad[0].at_us
    slots = spark.createDataFrame(
        [
            ("disk", "erp", at_us, 30.0),
            ("disk", "small", at_us, 0.1),
            ("disk", "erp", 98, 1.0),
            ("tape", "x", at_us, 1.0),
        ],
        "backend string, volume string, at_us bigint, used double",
    )
    assert [tuple(row) for row in transforms.uses_of_backends(slots, found).collect()] == [
        ("disk", "erp", [at_us], [30.0])
    ]


def test_costs_are_learnt_where_little_is_under_way(spark: SparkSession) -> None:
    rows = [
        ("disk", "erp", 0, 30, 0, 4096, 3000, 31, 20, 31, SLOT, 1.0),
        ("disk", "batch", 0, 10, 5, 4096, 2000, 15, 0, 0, SLOT, 1.0),
        ("disk", "erp", SLOT, 10, 5, 0, 3000, 15, 0, 0, SLOT, 1.0),  # too few
        ("disk", "erp", 2 * SLOT, 30, 0, 0, SLOT, 30, 0, 0, SLOT, 1.0),  # one under way, all the time
        ("disk", "erp", 3 * SLOT, 30, 0, 0, 0, 30, 0, 0, SLOT, 1.0),  # not measured
    ]
    slots = spark.createDataFrame(rows, LOADS_DDL)
    found = transforms.cost_slots(transforms.backend_slots(slots)).collect()
    assert [tuple(row) for row in found] == [("disk", 0, 40, 5, 8192, 5000, 46, 20, 31)]


def test_demand_comes_with_what_decides_on_caps(spark: SparkSession) -> None:
    demand = spark.createDataFrame(
        [("disk", "erp", 7, 1.0, 2.0), ("disk", "batch", 7, 3.0, 4.0), ("tape", "old", 7, 5.0, 6.0)],
        "backend string, volume string, hour_of_week int, p50 double, p95 double",
    )
    classes = spark.createDataFrame(scope_of([promise("erp")], [], ["erp", "batch", "old"], []).classes)
    needs = spark.createDataFrame([("disk", "[]")], "backend string, needs string")
    rows = transforms.demand_under_limits(demand, classes, needs).collect()
    assert sorted(
        (r.backend, r.volume, r.p95, r.weight, r.floor_iops, r.promised_iops) for r in rows if r.needs is None
    ) == [
        ("disk", "batch", 4.0, 1.0, 50.0, 0.0),
        ("disk", "erp", 2.0, 8.0, 50.0, 150.0),
        ("tape", "old", 6.0, 1.0, 50.0, 0.0),
    ]
    assert [(r.backend, r.volume, r.needs) for r in rows if r.needs is not None] == [("disk", None, "[]")], (
        "once a backend: with each hour of each volume it would fill a worker's memory"
    )
