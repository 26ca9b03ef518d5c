"""Days that leave SQL become hours and days in files, late data included, and the policy job reads them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sla_server import config as configuration
from sla_server.db import histogram_codec, migrate, rollups, schema
from sla_server.db.archive.manifest import DAY_MISSED, DAYS, HOUR_MISSED, HOURS
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import begin, make_engine
from sla_server.db.rollups import RollupStore
from sla_server.db.schema import DAY_US
from sla_server.db.statistics import StatisticsSnapshot
from sla_server.jobs import JobRun
from sla_server.policy_jobs import inputs, rollup_job, transforms
from sla_server.policy_jobs.transforms import HOUR_COLUMNS, US_AN_HOUR
from tests.support.archive import FilesRig, later
from tests.support.histories import utc_hours
from tests.support.samples import T0, cuts_message, gateway_message, make_cut, streams_message

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MINUTE_US = 60_000_000
DAY0_US = T0 // DAY_US * DAY_US


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[FilesRig]:
    database = SimpleNamespace(config=DatabaseConfig(queue_bytes=16 << 20), data_dir=tmp_path)
    engine = make_engine(database.config, tmp_path)
    migrate.upgrade(engine)
    engine.dispose()
    opened = FilesRig(database, clock=later(72), rollups_after_h=3)
    yield opened
    opened.close()


def in_files(rig: FilesRig, kind: str) -> pa.Table:
    paths = [rig.files.path_for_readers(row.path) for row in rig.rows() if row.kind == kind]
    return pa.concat_tables(pq.read_table(path) for path in paths)


def hours_in_sql(rig: FilesRig, columns: tuple[str, ...]) -> set[tuple[int, ...]]:
    with begin(rig.engine) as connection:
        rows = connection.execute(schema.rollup_hours.select()).mappings()
        return {tuple(row[name] for name in columns) for row in rows}


def read_hours(spark: SparkSession, rig: FilesRig, tmp_path: Path) -> list[tuple[int, ...]]:
    """As the policy job reads them."""
    window_us = (DAY0_US - DAY_US, DAY0_US + 3 * DAY_US)
    copies = tmp_path / f"copies-{rig.clock.unix_us()}"
    copies.mkdir()
    config = DatabaseConfig(queue_bytes=16 << 20)
    taken = StatisticsSnapshot(config, tmp_path, window_us, inputs.COLUMNS, copies)
    with contextlib.closing(taken) as snapshot:
        assert snapshot.hour_days == [DAY0_US]
        return [tuple(row) for row in inputs.statistics(spark, snapshot).hours.collect()]


def test_a_day_is_rolled_up_and_again_when_late_data_came(
    spark: SparkSession, rig: FilesRig, tmp_path: Path
) -> None:
    config = DatabaseConfig(queue_bytes=16 << 20, files=rig.settings)
    store = RollupStore(rig.engine, config, tmp_path, rig.clock)
    notes: list[str] = []
    noted = JobRun(lambda text, rows=None: notes.append(f"{text}, {rows} rows"))
    starts = [T0 + minute * MINUTE_US for minute in (0, 1, 59, 61)] + [T0 + DAY_US, T0 + DAY_US + MINUTE_US]
    items = [make_cut(number + 1, start_us=start_us) for number, start_us in enumerate(starts)]
    rig.feed(gateway_message(), streams_message(), *(cuts_message([item]) for item in items))
    assert store.due() == [], "nothing has left SQL"
    rig.step()
    (day,) = store.due()
    assert (day.day_us, day.former) == (DAY0_US, ()), (
        "nothing after the second day's hours says that it is whole"
    )
    done = rollup_job.roll_up(spark, store, [day], noted)
    assert (done["days"], done["rows"]) == ([day.name], day.rows)
    assert notes == [f"1 of 1 days are rolled up, {day.rows} rows"]
    assert store.due() == []

    rig.feed(cuts_message([make_cut(7, start_us=T0 + 30 * MINUTE_US)]))
    assert store.due() == [], "it is in SQL"
    rig.clock.advance(60)
    rig.step()
    (again,) = store.due()
    assert (again.day_us, again.rows > day.rows, len(again.former)) == (DAY0_US, True, 4)
    rollup_job.roll_up(spark, store, [again], noted)
    assert store.due() == []
    kinds = Counter(row.kind for row in rig.rows() if row.owner == rollups.OWNER)
    assert kinds == {HOURS: 1, HOUR_MISSED: 1, DAYS: 1, DAY_MISSED: 1}, "the former ones were replaced"

    # What ingest has summed from the same cuts, but for what it does not sum.
    columns = tuple(name for name in rollups.SUMS if name in schema.rollup_hours.c)
    columns = ("hour_us", "stream_id", *columns, "held_max", "inflight_max")
    made = in_files(rig, HOURS).to_pylist()
    assert {tuple(row[name] for name in columns) for row in made} == {
        row for row in hours_in_sql(rig, columns) if row[0] < DAY0_US + DAY_US
    }
    days = {row["stream_id"]: row for row in in_files(rig, DAYS).to_pylist()}
    for stream_id, of_day in days.items():
        of_stream = [row for row in made if row["stream_id"] == stream_id]
        assert of_day["day_us"] == DAY0_US
        assert of_day["reads"] == sum(row["reads"] for row in of_stream)
        counted = histogram_codec.decode_many([of_day["hist"]]).sum()
        assert counted == histogram_codec.decode_many([row["hist"] for row in of_stream]).sum()
        assert counted == of_day["reads"] + of_day["writes"]
    for kind in (HOUR_MISSED, DAY_MISSED):
        table = in_files(rig, kind)
        expected = sum(
            entry[3] for item in (*items[:4], make_cut(7, start_us=0)) for entry in item.missed.tolist()
        )
        assert sum(table["counted"].to_pylist()) == expected

    # The policy job: each hour once, of the first day from files, of the second from SQL.
    rows = read_hours(spark, rig, tmp_path)
    assert len(rows) == len(set(rows)) == len({row[:2] for row in rows})
    assert set(rows) == hours_in_sql(rig, HOUR_COLUMNS)


def test_a_steady_hour_gives_the_same_demand_as_its_minutes(spark: SparkSession) -> None:
    """Hours, minutes, and some of each; two weeks of one hour of the week, and its neighbour."""
    ddl = "stream_id bigint, volume string, backend string, rank int"
    streams = spark.createDataFrame([(1, "erp", "disk", 0)], ddl)
    hours = ((0, 10), (1, 3), (168, 30), (336, 20), (504, 12))
    ddl = (
        "{} bigint, stream_id bigint, arrived bigint, reads bigint, writes bigint, cost_milli bigint, "
        "covered_us bigint"
    )

    def row(at_us: int, ios: int, covered_us: int) -> tuple[int, ...]:
        return (at_us, 1, ios, ios, 0, ios * 1000, covered_us)

    def minutes(some: Any) -> Any:
        rows = [
            row(hour * US_AN_HOUR + minute * MINUTE_US, rate * 60, MINUTE_US)
            for hour, rate in some
            for minute in range(60)
        ]
        slots = spark.createDataFrame(rows, ddl.format("slot_us"))
        return transforms.volume_slots(slots, streams, "slot_us", MINUTE_US, 1)

    def whole(some: Any) -> Any:
        rows = [row(hour * US_AN_HOUR, rate * 3600, US_AN_HOUR) for hour, rate in some]
        slots = spark.createDataFrame(rows, ddl.format("hour_us"))
        return transforms.volume_slots(slots, streams, "hour_us", US_AN_HOUR, 1)

    tables = utc_hours("disk", window_us=(0, 600 * US_AN_HOUR))
    zones, learned = spark.createDataFrame(tables.zones), spark.createDataFrame(tables.learned)

    def demand(slots: Any, coarse: Any) -> list[tuple[Any, ...]]:
        rates = transforms.slots_and_hours(slots, coarse, 60)
        return sorted(tuple(row) for row in transforms.hourly_demand(rates, zones, learned).collect())

    fine = demand(minutes(hours), whole(()))
    assert [(row[2], row[5]) for row in fine] == [(72, 240), (73, 60)]
    assert fine[0][4] == pytest.approx(30.0)
    assert demand(minutes(()), whole(hours)) == fine
    assert demand(minutes(hours[3:]), whole(hours)) == fine, (
        "hours of which there are minutes do not count twice"
    )


def test_without_a_due_day_spark_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLA__DATA_DIR", str(tmp_path))
    config = configuration.load(None)
    engine = make_engine(config.database, tmp_path)
    migrate.upgrade(engine)
    monkeypatch.delattr(rollup_job, "on_spark")
    assert rollup_job.summary(rollup_job.run(config, "me")).startswith("no day is due")
    with contextlib.closing(rollups.open_rollups(config.database, tmp_path)) as store:
        (row,) = store.jobs.reader.jobs()
    engine.dispose()
    assert (row["kind"], row["state"], row["who"], row["rows"]) == ("rollup", "done", "me", 0)
    assert row["text"] == "no day is due: every day that has left SQL is rolled up"
