"""Functions that run in Spark's workers: the same answer in whatever order the rows come."""

from __future__ import annotations

import json
import random
from typing import Any

import pyarrow as pa
import pytest

from sla_server.policy_jobs import attribution, grouped, model

SLOT = 60_000_000
GOLD = model.PromiseNeed(8.0, ("erp",), ((150.0, 300.0),))


def shuffled(rows: list[dict[str, Any]], seed: int) -> pa.Table:
    rows = list(rows)
    random.Random(seed).shuffle(rows)
    return pa.Table.from_pylist(rows)


def points() -> list[dict[str, Any]]:
    """A promise that is kept up to a load of 300.1, with figures whose sums depend on their order."""
    return [
        {
            "backend": "disk",
            "sla": "gold",
            "objective": "latency",
            "step": 0,
            "allowed": 0.05,
            "at_us": n * SLOT,
            "load": 10.1 * n if n % 3 else 10.1,
            "counted": 1000 + n,
            "missed": 900 if n > 30 and n % 3 else n % 7,
        }
        for n in range(1, 50)
    ]


def slots() -> list[dict[str, Any]]:
    rows = []
    for n in range(60):
        reads, writes, size = 40 + n % 11, 20 + n % 7, (n % 5 + 1) * 333_333
        svc_us = 100 * reads + 150 * writes + size // 500
        rows.append(
            {
                "backend": "disk",
                "at_us": n * SLOT,
                "reads": reads,
                "writes": writes,
                "bytes": size,
                "svc_us": svc_us,
                "arrived": reads + writes,
                "sequential": 0,
                "placed": 0,
            }
        )
    return rows


def demand(needs: str | None = model.encode([GOLD])) -> list[dict[str, Any]]:
    """Hours of volumes, and what promises need in a row of its own."""
    return with_needs(hours_of_volumes(), needs)


def with_needs(rows: list[dict[str, Any]], needs: str | None = model.encode([GOLD])) -> list[dict[str, Any]]:
    return [*rows, *([{**dict.fromkeys(rows[0]), "backend": "disk", "needs": needs}] if needs else [])]


def hours_of_volumes() -> list[dict[str, Any]]:
    volumes = [("erp", 100.0, 8.0), ("batch", 400.0, 1.0), ("web", 33.3, 1.0)]
    return [
        {
            "backend": "disk",
            "volume": volume,
            "hour_of_week": hour,
            "p50": p95 / 2,
            "p95": p95 * (1 + hour / 7) if volume == "batch" else p95,
            "mean_cost": 1.0,
            "weight": weight,
            "floor_iops": 50.0,
            "floor_bytes_per_s": 0.0,
            "promised_iops": 150.0 if volume == "erp" else 0.0,
            "needs": None,
        }
        for volume, p95, weight in volumes
        for hour in (0, 1, 2, 167)
    ]


@pytest.mark.parametrize(
    ("function", "rows"),
    [(grouped.capacity_of, points()), (grouped.cost_of, slots()), (grouped.caps_of, demand())],
)
def test_the_order_of_rows_makes_no_difference(function: Any, rows: list[dict[str, Any]]) -> None:
    expected = function(pa.Table.from_pylist(rows))
    for seed in range(5):
        assert function(shuffled(rows, seed)).equals(expected)


def test_capacity_is_the_load_up_to_which_the_promise_was_kept() -> None:
    (row,) = grouped.capacity_of(shuffled(points(), 1)).to_pylist()
    assert row["cost_per_s"] == pytest.approx(10.1 * 29)
    assert (row["backend"], row["sla"], row["objective"], row["points"]) == ("disk", "gold", "latency", 49)
    curve = json.loads(row["curve"])
    assert [len(point) for point in curve["points"]] == [3] * len(curve["points"])
    assert 10 <= len(curve["points"]) <= 40
    assert set(curve) == {"points", "queueing"}


def test_bins_of_cuts_stand_for_minutes_in_whatever_order() -> None:
    """Twenty seconds of each minute at thrice its load: broken above 900, of which a minute has a third."""
    bins = []
    for minute, point in enumerate(points()):
        burst = 3 * point["load"]
        for second in range(60):
            is_on = second < 20
            bins.append(
                {**point, "at_us": point["at_us"] + second * 1_000_000, "load": burst if is_on else 0.01,
                 "counted": 100, "missed": 90 if is_on and burst > 600 else 0, "threshold_us": 5_000,
                 "bin_us": 1_000_000, "ios": 100.0 + minute, "svc_us": 1e5}
            )  # fmt: skip
    nothing = dict.fromkeys(("threshold_us", "bin_us", "ios", "svc_us"))
    rows = [{**point, **nothing} for point in points()] + bins
    (row,) = grouped.capacity_of(shuffled(rows, 1)).to_pylist()
    assert row["minutes"] == pytest.approx(10.1 * 29)
    assert 500 < row["cost_per_s"] <= 600
    for seed in range(2, 5):
        assert grouped.capacity_of(shuffled(rows, seed)).to_pylist() == [row]
    some = [each for each in rows if each["bin_us"] is None or each["at_us"] // 1_000_000 % 3]
    (row,) = grouped.capacity_of(shuffled(some, 1)).to_pylist()
    assert row["cost_per_s"] == row["minutes"], "a third of the cuts is missing"


def test_costs_are_those_the_slots_were_made_with() -> None:
    (row,) = grouped.cost_of(shuffled(slots(), 1)).to_pylist()
    assert (row["backend"], row["cost_write"], row["slots"]) == ("disk", 1.5, 60)
    assert row["cost_bytes"] == pytest.approx(50_000, rel=0.01)
    assert (row["random_us"], row["sequential"]) == (None, None)


def test_a_backend_that_its_promises_fill_has_caps_that_can_be_published() -> None:
    """``PolicyStore.publish`` refuses a cap of 0, and with it the whole policy."""
    rows = [{**row, "floor_iops": 0.0, "p95": max(row["p95"], 400.0)} for row in hours_of_volumes()]
    found = grouped.caps_of(shuffled(with_needs(rows), 1)).to_pylist()
    caps = [row["cost_per_s"] for row in found if row["volume"] != "erp"]
    assert caps == pytest.approx([7.5] * 8), "a twentieth of 300, for two"


def test_where_most_slots_say_what_is_sequential_those_are_fitted() -> None:
    rows = slots()
    for n, row in enumerate(rows):
        if n % 6:  # the others are of gateways that do not count it
            row |= {"placed": row["arrived"], "sequential": row["arrived"] * (n % 4) // 4}
            row["svc_us"] += 300 * (row["arrived"] - row["sequential"])
    (row,) = grouped.cost_of(shuffled(rows, 1)).to_pylist()
    assert (row["slots"], row["random_us"]) == (50, pytest.approx(300, rel=0.01))
    assert row["sequential"] == pytest.approx(0.38, abs=0.05)
    for few in rows[:40]:
        few |= {"placed": 0, "sequential": 0}
    (row,) = grouped.cost_of(shuffled(rows, 1)).to_pylist()
    assert (row["slots"], row["random_us"], row["sequential"]) == (60, None, None)


def test_the_greedy_volume_gets_what_the_protected_one_leaves() -> None:
    caps = {
        (row["volume"], row["hour_of_week"]): row["cost_per_s"]
        for row in grouped.caps_of(pa.Table.from_pylist(demand())).to_pylist()
    }
    assert len(caps) == 12
    assert {caps["erp", hour] for hour in (0, 1, 2, 167)} == {None}
    assert caps["web", 0] is None
    assert caps["batch", 0] == pytest.approx(300 - 100 - 33.3)


def test_caps_of_a_backend_are_those_of_its_rows_hour_by_hour() -> None:
    """Which come in any order; an hour at a time they are Python objects."""
    rows = hours_of_volumes()
    found = model.caps_of_week(sorted(rows, key=lambda row: (row["hour_of_week"], row["volume"])), [GOLD])
    table = grouped.caps_of(shuffled(with_needs(rows), 3))
    assert table.schema == grouped.CAPS
    assert [
        (row["volume"], row["hour_of_week"], row["cost_per_s"], row["demand_p50"], row["demand_p95"])
        for row in table.to_pylist()
    ] == sorted(
        (
            (
                row["volume"],
                row["hour_of_week"],
                found.get(row["volume"], {}).get(row["hour_of_week"]),
                row["p50"],
                row["p95"],
            )
            for row in rows
        ),
        key=lambda row: (row[1], row[0]),
    )


def test_without_a_capacity_nothing_is_capped() -> None:
    found = grouped.caps_of(pa.Table.from_pylist(demand(None), schema=None))
    assert found["cost_per_s"].null_count == found.num_rows == 12


def test_a_backend_with_promises_alone_has_no_caps() -> None:
    """None of its volumes did any I/O in the window."""
    found = grouped.caps_of(pa.Table.from_pylist(demand()).slice(12))
    assert (found.schema, found.num_rows) == (grouped.CAPS, 0)


def harm_tables(seed: int) -> tuple[pa.Table, pa.Table]:
    """Every fifth minute of an hour and a half batch brings the load over 400, and gold misses."""
    intervals, uses = [], []
    for n in range(90):
        batch = 350.0 + n % 7 if n % 5 == 0 else 20.0 + n % 11
        load = 80.0 + n % 3 + batch
        head = {"backend": "disk", "sla": "gold", "objective": "latency", "step": 0, "allowed": 0.05}
        missed = 300 if load > 400 else 2
        intervals.append(
            {
                **head,
                "at_us": n * SLOT,
                "load": load,
                "counted": 1000,
                "missed": missed,
                "times": 1.0,
                "victims": ["erp"],
            }
        )
        uses.append({"backend": "disk", "volume": "erp", "at_us": n * SLOT, "used": 80.0 + n % 3})
        uses.append({"backend": "disk", "volume": "batch", "at_us": n * SLOT, "used": batch})
    return shuffled(intervals, seed), shuffled(uses, seed + 1)


def test_the_culprit_is_named_in_whatever_order_rows_come() -> None:
    found = grouped.harms_of(*harm_tables(0))
    (row,) = found.to_pylist()
    assert (row["sla"], row["volume"], row["likely_cause"]) == ("gold", "batch", True)
    assert (row["bad"], row["avoided_bad"]) == (18, 18)
    assert row["share"] > 0.95
    for seed in range(1, 4):
        assert grouped.harms_of(*harm_tables(seed)).equals(found)
    intervals, uses = harm_tables(0)
    assert grouped.harms_of(intervals.slice(0, 0), uses).num_rows == 0
    assert attribution.describe(row)[0].startswith("  batch hurt gold/latency on disk (likely cause): ")


def test_a_burst_pair_of_a_volume() -> None:
    rows = [
        {"backend": "disk", "volume": "batch", "at_us": n * SLOT, "demand": 500.0 if n % 1440 == 7 else 100.0}
        for n in range(2880)
    ]
    (row,) = grouped.burst_of(shuffled(rows, 1), 14.0, 2880 * SLOT).to_pylist()
    assert row == {
        "backend": "disk",
        "volume": "batch",
        "cost_per_s": 100.0,
        "burst_cost": 24_000.0,
        "days": 2,
    }
    assert grouped.burst_of(shuffled(rows[:20], 1), 14.0, 0).num_rows == 0
