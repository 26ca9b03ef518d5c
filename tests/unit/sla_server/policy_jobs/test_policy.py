"""From capacities and demands to what promises need and caps."""

from __future__ import annotations

from typing import Any

import pytest

from sla_server.agreements.promise import CurveStep, Priority, Promise
from sla_server.policy_jobs.bursts import room_of
from sla_server.policy_jobs.model import (
    PromiseNeed,
    caps_of_week,
    decode,
    encode,
    needs_of,
    rooms_of,
    with_former,
)


def promise(sla: str, priority: Priority, volume: str, *ends: float) -> Promise:
    curve = tuple(CurveStep(end, 5_000 * (n + 1)) for n, end in enumerate(ends))
    return Promise(sla, 1, "latency", priority, (volume,), ("*",), "any", 95.0, curve, 0.95, 60, 0, 0)


GOLD = PromiseNeed(8.0, ("erp",), ((150.0, 370.0),))


def capacity(cost: float | None, *, step: int = 0, sla: str = "gold", **more: Any) -> dict[str, Any]:
    row = {"backend": "disk", "sla": sla, "objective": "latency", "step": step, "cost_per_s": cost}
    return {**row, "reason": "said", "unlimited": False, "highest_kept": 0.0, **more}


def demand(volume: str, p95: float, hour: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "volume": volume,
        "hour_of_week": hour,
        "p50": p95 / 2,
        "p95": p95,
        "mean_cost": None,
        "weight": 8.0 if volume == "erp" else 1.0,
        "floor_iops": 50.0,
        "floor_bytes_per_s": 0.0,
        "promised_iops": 150.0 if volume == "erp" else 0.0,
        **more,
    }


# -- Capacities


def test_the_last_valid_capacity_is_kept_and_said() -> None:
    kept = with_former(capacity(None), {"disk": 300.0})
    assert (kept["cost_per_s"], kept["reason"]) == (300.0, "said; the last valid value is kept")
    assert with_former(capacity(7.0), {"disk": 300.0})["cost_per_s"] == 7.0
    assert with_former(capacity(None), {"tape": 300.0})["cost_per_s"] is None


def test_what_was_kept_at_more_than_the_last_valid_capacity_replaces_it() -> None:
    """The disk was replaced: it now does easily what it never did before."""
    quick = with_former(capacity(None, unlimited=True, highest_kept=500.0), {"disk": 300.0})
    assert quick["cost_per_s"] == 500
    assert "above the 300 weighted IOPS known" in quick["reason"]
    quiet = with_former(capacity(None, unlimited=True, highest_kept=50.0), {"disk": 300.0})
    assert quiet["cost_per_s"] == 300
    broken = with_former(capacity(None, highest_kept=500.0), {"disk": 300.0})
    assert broken["cost_per_s"] == 300, "it was also broken: that shows no limit"


def test_a_step_keeps_its_own_last_value_and_not_the_lowest_of_its_backend() -> None:
    """A policy that works keeps the load where every promise is kept: none of them shows a limit any more."""
    own = {("disk", "gold", "latency", 0): 100.0, ("disk", "gold", "latency", 1): 400.0}
    kept = with_former(capacity(None, step=1, unlimited=True, highest_kept=350.0), {"disk": 100.0}, own)
    assert (kept["cost_per_s"], kept["reason"]) == (400.0, "said; the last valid value is kept")
    more = with_former(capacity(None, step=1, unlimited=True, highest_kept=450.0), {"disk": 100.0}, own)
    assert more["cost_per_s"] == 450.0
    other = with_former(capacity(None, sla="silver"), {"disk": 100.0}, own)
    assert other["cost_per_s"] == 100.0, "of this one nothing was ever known"


def test_minutes_count_where_bursts_were_not_seen_and_nothing_else_is_known() -> None:
    blurred = capacity(None, unlimited=True, highest_kept=50.0, minutes=120.0)
    first = with_former(blurred, {})
    assert (first["cost_per_s"], first["reason"]) == (120.0, "said; by minutes")
    assert with_former(blurred, {"disk": 380.0})["cost_per_s"] == 380.0, "an earlier run saw bursts"
    seen = with_former(capacity(None, unlimited=True, highest_kept=200.0, minutes=120.0), {})
    assert seen["cost_per_s"] == 200.0, "it was kept at more than minutes say"


# -- Needs


def test_what_may_come_at_once_is_worked_off_within_the_limit_of_each_promise() -> None:
    """5 ms of 200 weighted IOPS, of the first step, are least; but never more than a quarter of a second."""
    promises = [promise("gold", Priority.GOLD, "erp", 100, 200), promise("other", Priority.BRONZE, "b*", 50)]
    rows = [capacity(370.0, step=1), capacity(200.0), capacity(None, sla="other")]
    limit_s = promises[0].curve[0].threshold_us / 1e6
    assert rooms_of(rows, promises) == {"disk": pytest.approx(200 * limit_s)}
    assert rooms_of(rows[2:], promises) == {}
    assert room_of(200.0, 60e6) == 50.0


def test_needs_are_those_of_the_steps_whose_capacity_is_known() -> None:
    promises = [promise("gold", Priority.GOLD, "erp", 100, 200), promise("other", Priority.BRONZE, "b*", 50)]
    rows = [capacity(370.0, step=1), capacity(200.0), capacity(None, sla="other")]
    found = needs_of(rows, promises)
    assert found == {"disk": [PromiseNeed(8.0, ("erp",), ((100, 200.0), (200, 370.0)))]}
    assert decode(encode(found["disk"])) == found["disk"]
    assert decode(None) == []
    last = PromiseNeed(2.0, ("b*",), ((float("inf"), 1.0),))
    assert decode(encode([last])) == [last]


STEPPED = PromiseNeed(8.0, ("erp",), ((100.0, 200.0), (200.0, 370.0)))


@pytest.mark.parametrize(
    ("p50", "p95", "left"),
    [(20, 90, 200), (120, 180, 370), (90, 150, 200), (250, 300, 370), (110, 120, 370), (80, 100, 200)],
)
def test_the_hour_decides_which_steps_of_the_curve_count(p50: float, p95: float, left: float) -> None:
    """Up to 100 I/Os a second the 5 ms hold, for which the backend can do 200; above, it can do 370."""
    erp = {**demand("erp", p95 / 10), "p50": p50 / 10, "mean_cost": 0.1}
    caps = caps_of_week([erp, demand("batch", 420)], [STEPPED])
    assert caps["batch"][0] == pytest.approx(left - p95 / 10)


def test_where_it_is_not_known_how_much_is_asked_for_all_steps_count() -> None:
    caps = caps_of_week([demand("erp", 15), demand("batch", 420)], [STEPPED])
    assert caps["batch"][0] == pytest.approx(185)


# -- Caps


def test_the_greedy_volume_gets_what_is_left() -> None:
    caps = caps_of_week([demand("erp", 80), demand("batch", 420)], [GOLD])
    assert caps == {"batch": {0: pytest.approx(290)}}


def test_an_hour_in_which_all_fits_has_no_cap() -> None:
    caps = caps_of_week([demand("erp", 80), demand("batch", 420), demand("batch", 100, hour=5)], [GOLD])
    assert caps["batch"][5] is None
    assert caps["batch"][0] is not None


def test_the_strictest_promise_of_a_backend_counts() -> None:
    other = PromiseNeed(4.0, ("shop",), ((150.0, 150.0),))
    assert caps_of_week([demand("batch", 420)], [GOLD, other])["batch"][0] == pytest.approx(150)


def test_nothing_is_capped_where_no_limit_is_known() -> None:
    assert caps_of_week([demand("batch", 420)], []) == {}


def test_a_volume_with_a_lower_promise_is_capped_and_gets_what_that_needs() -> None:
    rows = [
        demand("erp", 80, mean_cost=1.0),
        demand("shop", 300, mean_cost=1.0, weight=2.0, promised_iops=210.0),
        demand("batch", 400, mean_cost=1.0),
    ]
    caps = caps_of_week(rows, [GOLD])
    assert caps["shop"][0] == pytest.approx(210), "by weight alone it would have 193"
    assert caps["batch"][0] == pytest.approx(80)


def test_a_floor_is_one_of_ios_of_their_size_and_of_bytes() -> None:
    """Of I/Os of 128 KiB, which cost 3, 50 a second cost 150; 65,536,000 bytes a second are 500 of them."""
    rows = [demand("erp", 360), demand("batch", 2000, mean_cost=3.0)]
    assert caps_of_week(rows, [GOLD])["batch"][0] == pytest.approx(150)
    rows[1]["floor_bytes_per_s"] = 65_536_000.0
    assert caps_of_week(rows, [GOLD])["batch"][0] == pytest.approx(1500)
