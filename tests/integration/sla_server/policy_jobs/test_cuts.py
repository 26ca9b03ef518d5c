"""Raw cuts in the job: bins of a poll, and capacity and caps of a backend whose minutes blur its bursts."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from sqlalchemy import insert

from sla_server.db import migrate, schema
from sla_server.db.archive.store import open_files
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import begin, make_engine
from sla_server.db.statistics import StatisticsSnapshot
from sla_server.policy_jobs import cuts, inputs
from sla_server.policy_jobs.compute import Frames, capacity_of, compute
from sla_server.policy_jobs.cuts import backend_bins, chosen_cuts, in_bins, promise_bins, volume_bins
from tests.support.cut_files import SECOND_US, cut_row, cut_table, store_cuts
from tests.support.histories import BATCH, ERP, SLOT_US, known_history

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MINUTES = 60
BURST_S = 10
KNEE = 400
ERP_IOPS = 80
LIMIT_US = 12_000
HOUR_US = 3600 * SECOND_US


def burst_of(minute: int) -> int:
    """I/Os a second of batch in the first seconds of a minute: all heights, in no order."""
    return 20 + minute * 37 % MINUTES * 8


def seconds() -> list[dict[str, Any]]:
    """An hour of cuts; those of batch's gateway begin a third of a second later."""
    rows = []
    for second in range(MINUTES * 60):
        burst = burst_of(second // 60) if second % 60 < BURST_S else 0
        late = ERP_IOPS * 3 // 4 if ERP_IOPS + burst > KNEE else second % 2
        latency_us = 20_000 if late > 1 else 3_000
        at_us = second * SECOND_US
        entry = (0, LIMIT_US, ERP_IOPS, late)
        rows.append(cut_row(at_us, ERP, ERP_IOPS, latency_us, [entry, (4, LIMIT_US, 9, 9)]))
        if burst:
            rows.append(cut_row(at_us + SECOND_US // 3, BATCH, burst, latency_us))
    return rows


def minutes(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The same as rollups of minutes, and misses."""
    slots: dict[tuple[int, int], dict[str, Any]] = {}
    missed: dict[int, dict[str, Any]] = {}
    for row in rows:
        at_us = row["start"] // SLOT_US * SLOT_US
        slot = slots.setdefault(
            (at_us, row["stream_id"]),
            {
                "slot_us": at_us,
                "stream_id": row["stream_id"],
                "writes": 0,
                "write_bytes": 0,
                "covered_us": 0,
            }
            | dict.fromkeys(("arrived", "reads", "read_bytes", "svc_sum_us", "cost_milli"), 0)
            | dict.fromkeys(("sequential", "placed"), 0),
        )
        for name in ("arrived", "reads", "read_bytes", "svc_sum_us", "cost_milli"):
            slot[name] += row[name]
        slot["covered_us"] += SECOND_US  # of cuts with a row of the stream, as ingest counts
        if row["stream_id"] == ERP:
            entry = missed.setdefault(
                at_us,
                {
                    "slot_us": at_us,
                    "stream_id": ERP,
                    "io": 0,
                    "threshold_us": LIMIT_US,
                    "counted": 0,
                    "missed": 0,
                },
            )
            entry["counted"] += row["missed_counted"][0]
            entry["missed"] += row["missed_missed"][0]
    return list(slots.values()), list(missed.values())


@dataclass(frozen=True)
class Bursty:
    """An hour, as cuts and as minutes."""

    cuts: list[dict[str, Any]]
    slots: list[dict[str, Any]]
    missed: list[dict[str, Any]]

    def history(self, spark: SparkSession) -> tuple[inputs.Statistics, inputs.JobInputs]:
        known = known_history()
        kind = known.missed.schema
        known = replace(
            known,
            slots=pa.Table.from_pylist(self.slots),
            missed=pa.Table.from_pylist(self.missed, schema=kind),
        )
        rows = replace(known.statistics(spark), cuts=spark.createDataFrame(cut_table(self.cuts)))
        hours = replace(known.inputs.hours, end_us=MINUTES * SLOT_US)
        return rows, replace(known.inputs, bin_us=SECOND_US, hours=hours)


def capacities(spark: SparkSession, rows: inputs.Statistics, read: inputs.JobInputs) -> list[dict[str, Any]]:
    """What the step capacity finds, and nothing else is computed."""
    frames = Frames(spark, rows, read)
    try:
        return capacity_of(frames).to_pylist()
    finally:
        frames.release()


@pytest.fixture(scope="module")
def bursty() -> Bursty:
    rows = seconds()
    return Bursty(rows, *minutes(rows))


def test_cuts_are_spread_over_the_bins_they_overlap(spark: SparkSession) -> None:
    """A third of a second off, one as long as two bins, one that says nothing, one too long."""
    rows = [
        cut_row(
            SECOND_US // 3, ERP, 90, 1_000, [(0, LIMIT_US, 90, 30), (0, 5_000, 90, 60), (4, LIMIT_US, 5, 5)]
        ),
        cut_row(2 * SECOND_US, BATCH, 200, 2_000, duration_us=2 * SECOND_US),
        cut_row(4 * SECOND_US, BATCH, 100, 2_000, duration_us=3 * SECOND_US),
        {**cut_row(0, 0, 0, 0), "stream_id": None},
    ]
    read = known_history().inputs
    frames = Frames(spark, None, read)  # type: ignore[arg-type]
    binned = in_bins(spark.createDataFrame(cut_table(rows)), SECOND_US)
    volumes = volume_bins(binned, frames.streams)
    found = {(row.volume, row.at_us): (row.cost, row.ios, row.svc_us) for row in volumes.toLocalIterator()}
    assert found == {
        ("erp", 0): (60_000_030, 60_000, 60_000),
        ("erp", SECOND_US): (29_999_970, 30_000, 30_000),
        ("batch", 2 * SECOND_US): (100_000_000, 100_000, 200_000),
        ("batch", 3 * SECOND_US): (100_000_000, 100_000, 200_000),
    }
    kept = promise_bins(binned, frames.promised, backend_bins(volumes), SECOND_US).orderBy("at_us")
    assert [(row.at_us, row.load, row.counted, row.missed, row.bin_us) for row in kept.toLocalIterator()] == [
        (0, 60.00003, 60.0, 20.0, SECOND_US),
        (SECOND_US, 29.99997, 30.0, 10.0, SECOND_US),
    ]
    assert kept.first().threshold_us == LIMIT_US
    (peak,) = cuts.peaks(volumes.where("volume = 'batch'"), SECOND_US).toLocalIterator()
    assert (peak.backend, peak.volume, peak.peak) == ("disk", "batch", 100.0)


def test_what_bursts_within_minutes_show_is_learnt_and_capped(spark: SparkSession, bursty: Bursty) -> None:
    """The knee is at 400: of minutes it would be a third of that, and batch's demand fits in each of them."""
    rows, read = bursty.history(spark)
    (of_minutes,) = capacities(spark, replace(rows, cuts=None), read)
    assert of_minutes["cost_per_s"] < 0.4 * KNEE
    found = compute(spark, rows, read)
    (capacity,) = found.capacity
    assert 0.85 * KNEE <= capacity["cost_per_s"] <= KNEE, capacity
    assert capacity["minutes"] == of_minutes["cost_per_s"]
    assert capacity["points"] > MINUTES
    (cap,) = found.capped_rows()
    assert cap["volume"] == "batch"
    assert cap["demand_p95"] < 0.25 * cap["cost_per_s"], "minutes ask for far less than the cap"
    assert cap["cost_per_s"] == pytest.approx(capacity["cost_per_s"] - ERP_IOPS, rel=0.02)


def test_minutes_that_lack_cuts_say_nothing_of_bursts(spark: SparkSession, bursty: Bursty) -> None:
    """Without batch's cuts the backend seems to break its promise at any load."""
    only_erp = replace(bursty, cuts=[row for row in bursty.cuts if row["stream_id"] == ERP])
    rows, read = only_erp.history(spark)
    (capacity,) = capacities(spark, rows, read)
    assert capacity["cost_per_s"] == capacity["minutes"]


def test_the_files_of_cuts_are_read_from_the_manifest(
    spark: SparkSession, bursty: Bursty, tmp_path: Path
) -> None:
    """Also when one has gone meanwhile: that minutes lack cuts is not counted as less load."""
    config = DatabaseConfig()
    engine = make_engine(config, tmp_path)
    migrate.upgrade(engine)
    files = open_files(config, tmp_path)
    middle_us = MINUTES // 2 * SLOT_US
    store_cuts(engine, files, [row for row in bursty.cuts if row["start"] < middle_us], "q-1")
    store_cuts(engine, files, [row for row in bursty.cuts if row["start"] >= middle_us], "q-2")
    with begin(engine) as connection:
        connection.execute(insert(schema.rollups), [{**row, "hist": b""} for row in bursty.slots])
        connection.execute(insert(schema.rollup_missed), bursty.missed)
    engine.dispose()
    read = replace(known_history().inputs, bin_us=SECOND_US)
    with closing(StatisticsSnapshot(config, tmp_path, (0, HOUR_US), inputs.COLUMNS, tmp_path)) as snapshot:
        assert sum(row.rows for row in snapshot.cut_files) == len(bursty.cuts)
        assert inputs.statistics(spark, snapshot).cuts is None, "unless it is asked for"
        rows = inputs.statistics(spark, snapshot, 1_000_000)
        assert rows.cuts is not None
        assert rows.cuts.count() == len(bursty.cuts)
        (whole,) = capacities(spark, rows, read)
        assert 0.85 * KNEE <= whole["cost_per_s"] <= KNEE
        some = inputs.statistics(spark, snapshot, len(bursty.cuts) // 3).cuts
        assert some is not None
        assert 0 < some.count() < len(bursty.cuts) * 0.6
        Path(snapshot.cut_path(snapshot.cut_files[1])).unlink()
        (half,) = capacities(spark, inputs.statistics(spark, snapshot, 1_000_000), read)
        assert 0.7 * KNEE <= half["cost_per_s"] <= KNEE


@dataclass(frozen=True)
class File:
    min_us: int
    max_us: int
    rows: int


def test_of_many_cuts_a_part_of_each_hour_is_read() -> None:
    """The same times of all files; those that lie outside are not opened."""
    files = [File(hour * HOUR_US, hour * HOUR_US + HOUR_US - 1, 1000) for hour in range(4)]
    assert chosen_cuts(files, 4000) == ([0, 1, 2, 3], [])
    assert chosen_cuts(files, 0) == ([], [])
    assert chosen_cuts([], 10) == ([], [])
    numbers, spans = chosen_cuts(files, 1000)
    assert numbers == [0, 1, 2, 3]
    assert [end - begin for begin, end in spans] == [14 * SLOT_US + 2 * SECOND_US] * 4
    assert len({begin % HOUR_US for begin, _ in spans}) > 1, "not always the same part"
    short = [
        File(each.min_us + part * HOUR_US // 8, each.min_us + (part + 1) * HOUR_US // 8 - 1, 125)
        for each in files
        for part in range(8)
    ]
    numbers, spans = chosen_cuts(short, 1000)
    assert 8 <= len(numbers) <= 12
    assert all(
        any(begin < short[n].max_us and short[n].min_us < end for begin, end in spans) for n in numbers
    )


@pytest.mark.parametrize(("streams", "minutes"), [(1000, 2880), (4000, 900), (16000, 240), (64000, 50)])
@pytest.mark.parametrize("bin_s", [1, 10])
def test_of_large_fleets_whole_minutes_are_read(streams: int, minutes: int, bin_s: int) -> None:
    """A part of a minute shows no bin that counts; and no more is read than may be."""
    begin_us = 17 * SLOT_US + SECOND_US // 3
    rows = streams * 60 // bin_s
    files = [
        File(begin_us + number * SLOT_US, begin_us + (number + 1) * SLOT_US, rows)
        for number in range(minutes)
    ]
    most = 4_000_000 // bin_s
    numbers, spans = chosen_cuts(files, most, SLOT_US, bin_s * SECOND_US)
    whole = [(end - begin) // SLOT_US for begin, end in spans]
    assert 0.5 * most <= sum(whole) * rows <= most
    for first_us, end_us in spans:
        assert end_us % SLOT_US == 0
        assert first_us % SLOT_US == SLOT_US - 2 * bin_s * SECOND_US, "with cuts that reach into it"
        assert files[0].min_us - SLOT_US < first_us < end_us <= files[-1].max_us
    assert all(later[0] >= former[1] - 2 * bin_s * SECOND_US for former, later in pairwise(spans))
    assert numbers == [
        number
        for number, each in enumerate(files)
        if any(first_us <= each.max_us and each.min_us < end_us for first_us, end_us in spans)
    ]
    assert chosen_cuts(files, rows // 2, SLOT_US, bin_s * SECOND_US) == ([], [])
