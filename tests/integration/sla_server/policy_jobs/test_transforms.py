"""The DataFrame steps on tables small enough to check by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sla_server.policy_jobs import transforms
from sla_server.policy_jobs.transforms import PROMISE_DDL, US_AN_HOUR

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SLOT = 10_000_000
SLOT_DDL = (
    "slot_us bigint, stream_id bigint, arrived bigint, reads bigint, writes bigint, cost_milli bigint, "
    "covered_us bigint"
)


@pytest.fixture(scope="module")
def streams(spark: SparkSession) -> DataFrame:
    rows = [(1, "erp", "a", "disk"), (2, "batch", "b", "disk"), (3, "batch", "c", "disk")]
    return spark.createDataFrame(rows, "stream_id bigint, volume string, client string, backend string")


def test_rates_add_the_streams_of_a_volume(spark: SparkSession, streams: DataFrame) -> None:
    slots = spark.createDataFrame(
        [
            (0, 2, 100, 60, 40, 106_250, SLOT),
            (0, 3, 50, 50, 0, 53_125, SLOT),
            (0, 1, 80, 80, 0, 85_000, SLOT),
        ],
        SLOT_DDL,
    )
    rates = {row.volume: row for row in transforms.volume_rates(slots, streams, "slot_us").collect()}
    assert rates["batch"].ios == 150
    assert rates["batch"].used == pytest.approx(15.9375)
    assert rates["batch"].demand == pytest.approx(15.9375)
    assert rates["erp"].used == pytest.approx(8.5)


def test_demand_counts_what_was_held_back(spark: SparkSession, streams: DataFrame) -> None:
    slots = spark.createDataFrame([(0, 2, 200, 100, 0, 100_000, SLOT)], SLOT_DDL)
    row = transforms.volume_rates(slots, streams, "slot_us").collect()[0]
    assert row.used == pytest.approx(10.0)
    assert row.demand == pytest.approx(20.0)


def test_an_interval_without_io_is_a_rate_of_zero_and_one_without_cover_is_none(
    spark: SparkSession, streams: DataFrame
) -> None:
    slots = spark.createDataFrame([(0, 1, 0, 0, 0, 0, SLOT), (0, 2, 0, 0, 0, 0, 0)], SLOT_DDL)
    rows = transforms.volume_rates(slots, streams, "slot_us").collect()
    assert [(row.volume, row.demand) for row in rows] == [("erp", 0.0)]


def test_hours_that_slots_cover_are_left_out(spark: SparkSession) -> None:
    hours = spark.createDataFrame([(0, 1), (US_AN_HOUR, 1), (0, 2)], "hour_us bigint, stream_id bigint")
    slots = spark.createDataFrame([(SLOT, 1)], "slot_us bigint, stream_id bigint")
    left = transforms.without_covered_hours(hours, slots).collect()
    assert sorted((row.stream_id, row.hour_us) for row in left) == [(1, US_AN_HOUR), (2, 0)]


def test_demand_by_hour_of_week(spark: SparkSession) -> None:
    rows = [
        ("disk", "erp", hour * US_AN_HOUR, 10, float(value), 0.0)
        for hour, value in ((0, 10), (168, 30), (1, 5))
    ]
    rates = spark.createDataFrame(
        rows, "backend string, volume string, at_us bigint, ios bigint, demand double, used double"
    )
    found = {row.hour_of_week: row for row in transforms.hourly_demand(rates).collect()}
    assert found[72].p50 == pytest.approx(20.0)
    assert found[72].p95 == pytest.approx(29.0)
    assert found[72].samples == 2
    assert found[73].p95 == pytest.approx(5.0)


def test_points_join_the_misses_of_a_promise_to_the_load_of_its_backend(
    spark: SparkSession, streams: DataFrame
) -> None:
    rates = spark.createDataFrame(
        [("disk", "erp", 0, 100, 8.0, 8.0), ("disk", "batch", 0, 300, 40.0, 32.0)],
        "backend string, volume string, at_us bigint, ios bigint, demand double, used double",
    )
    missed = spark.createDataFrame(
        [(0, 1, 0, 12_000, 80, 8), (0, 1, 0, 5_000, 80, 70), (0, 2, 0, 12_000, 300, 200)],
        "slot_us bigint, stream_id bigint, io int, threshold_us bigint, counted bigint, missed bigint",
    )
    promises = spark.createDataFrame([(1, "erp-gold", "latency", 0, 12_000, 0.05)], PROMISE_DDL)
    points = transforms.promise_points(rates, missed, promises, streams).collect()
    assert [(p.sla, p.load, p.counted, p.missed, p.allowed) for p in points] == [
        ("erp-gold", 40.0, 80, 8, 0.05)
    ]
