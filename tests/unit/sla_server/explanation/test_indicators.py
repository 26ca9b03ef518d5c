"""Promises of every indicator: what is promised, what slices and windows say, how an agreement is in all."""

from __future__ import annotations

from typing import Any

import pytest

from sla_server.explanation import evidence, explain
from sla_server.explanation.words import Times
from tests.support.api import NOW_US
from tests.support.explanations import PROMISE, agreement, said


def of_metric(metric: str, **changed: Any) -> dict[str, Any]:
    return {**PROMISE, "objective": "other", "metric": metric, "percentile": None, "curve": [], **changed}


@pytest.mark.parametrize(
    ("promise", "text"),
    [
        (of_metric("mean_latency", curve=[{"up_to_iops": 150.0, "value_ms": 5.0}]),
         "mean latency within 5.00 ms up to 150 IOPS."),
        (of_metric("iops", promised_iops=500.0), "500 IOPS, or as many as are asked for."),
        (of_metric("throughput", promised_mbps=20.0), "20 MB/s, or as much as is asked for."),
        (of_metric("availability", outage="10s"),
         "some I/O completes within 10s while any is outstanding, and at most 1 % fail."),
        (of_metric("latency", percentile=99.0, curve=[{"value_ms": 12.0}]),
         "p99 of latency within 12.0 ms at any demand."),
    ],
)  # fmt: skip
def test_every_indicator_is_a_promise_with_a_state(promise: dict[str, Any], text: str) -> None:
    found = explain(agreement(promises=[{**promise, "state": "violating"}]))
    assert found.status == "violated"
    assert found.headline == "erp-gold/other is violated. Nothing is throttled for it."
    assert said(found, "Promise") == f"erp-gold/other (gold): {text}"


@pytest.mark.parametrize(
    ("metric", "row", "text"),
    [
        ("mean_latency", {"measured": 6_100.0, "threshold_us": 5_000},
         "mean latency 6.10 ms of 5.00 ms allowed, 80 IOPS offered."),
        ("iops", {"measured": 410.0, "missed": 3}, "410 IOPS delivered, 3 of 4,820 I/Os failed, 80 IOPS"),
        ("iops", {"measured": 410.0, "failed": 9}, "410 IOPS delivered, 9 of 4,820 I/Os failed, 80 IOPS"),
        ("latency", {"missed": 410, "failed": 400, "threshold_us": 12_000},
         "is bad: 410 of 4,820 I/Os missed 12.0 ms, and 400 failed, 80 IOPS offered."),
        ("throughput", {"measured": 12.5e6}, "12 MB/s delivered, 80 IOPS offered."),
        ("availability", {"measured": 11e6, "why": "no I/O completed for seconds"},
         "is bad (no I/O completed for seconds): the longest time without completion was 11.0 s"),
        ("availability", {"measured": None, "offered_iops": None}, "08:00:00 is bad."),
    ],
)  # fmt: skip
def test_a_slice_is_explained_by_what_its_indicator_measures(
    metric: str, row: dict[str, Any], text: str
) -> None:
    judged = {"start_us": NOW_US - 60_000_000, "length_us": 60_000_000, "state": "bad", "n": 4820,
              "missed": 0, "offered_iops": 80.3, **row}  # fmt: skip
    promise = {**of_metric(metric), "state": "bad", "slice": judged}
    assert text in said(explain(agreement(promises=[promise])), "State")


def test_availability_now() -> None:
    live = {"metric": "availability", "state": "violating", "latency_us": None, "threshold_us": 5_000_000,
            "stall_us": 6_200_000, "failed_ratio": 0.02, "offered_iops": 80.0, "u": 3.0}  # fmt: skip
    episode = {"opened_us": NOW_US - 9_000_000, "closed_us": None, "worst_u": 3.1}
    promise = {**of_metric("availability"), "state": "violating", "live": live, "episode": episode}
    assert said(explain(agreement(promises=[promise])), "State") == (
        "other: in the last windows no I/O completed for 6.2 s of 5.0 s allowed, 2 % of the I/Os failed, "
        "80 IOPS offered. Violated since 07:59:51, at worst 3.10 times what is allowed."
    )
    calm = {**promise, "live": {**live, "stall_us": 0, "failed_ratio": 0.0}, "episode": None}
    assert "no outage, 0 % of the I/Os failed" in said(explain(agreement(promises=[calm])), "State")
    silent = {**promise, "live": {**live, "reason": "no client has used its volumes yet"}, "episode": None}
    assert (
        said(explain(agreement(promises=[silent])), "State") == "other: no client has used its volumes yet."
    )


@pytest.mark.parametrize(
    ("metric", "live", "text"),
    [
        ("iops", {"state": "violating", "u": 3.0},
         "in the last windows 6.0 % of what was asked for, as far as it was promised, was not delivered, "
         "2 % allowed, 420 IOPS offered."),
        ("throughput", {"state": "violating", "u": 99.0}, "windows 100.0 % of what was asked for, as far"),
        ("iops", {"state": "idle", "u": 0.0}, "there is no I/O to measure."),
        ("mean_latency", {"state": "violating", "u": 1.8, "latency_us": 9_000, "threshold_us": 5_000},
         "the last windows have mean latency 9.00 ms of 5.00 ms allowed, 420 IOPS offered."),
        ("latency", {"state": "out-of-curve", "u": 0.0, "threshold_us": 5_000, "percentile": 95.0},
         "420 IOPS offered are more than its curve covers."),
        ("latency", {"state": "idle", "u": 0.0}, "there is no I/O to measure."),
    ],
)  # fmt: skip
def test_what_the_windows_say_now_is_in_the_words_of_the_indicator(
    metric: str, live: dict[str, Any], text: str
) -> None:
    row = {"metric": metric, "latency_us": None, "threshold_us": None, "percentile": None,
           "offered_iops": 420.0, "stall_us": 0, "failed_ratio": 0.0, "reason": "", **live}  # fmt: skip
    promise = {**of_metric(metric), "state": live["state"], "live": row}
    assert text in said(explain(agreement(promises=[promise])), "State")


def test_what_the_windows_said_when_it_was_decided_is_in_the_words_of_the_indicator() -> None:
    seen = {"metric": "iops", "u": 1.5, "latency_us": 0, "threshold_us": 5_000_000, "percentile": 99.0,
            "windows": 3, "over": 2, "offered_iops": 300.0}  # fmt: skip
    row = {"kind": "decrease", "at_us": NOW_US, "figures": {"promise": seen}}
    assert evidence.windows_line(row["figures"], NOW_US, Times(NOW_US)) == (
        "08:00:00: 3.0 % of what was asked for, as far as it was promised, was not delivered, 2 % allowed; "
        "2 of 3 windows over the promise; 300 IOPS offered."
    )


def test_one_that_is_judged_in_slices_only_says_when_there_is_none_yet() -> None:
    found = explain(agreement(promises=[{**of_metric("iops"), "state": None}]))
    assert said(found, "State") == "other: no slice of it has been judged yet."


def test_the_worst_of_all_promises_is_the_headline() -> None:
    up = {**of_metric("availability"), "state": "violating"}
    assert explain(agreement(promises=[PROMISE, up])).headline.startswith("erp-gold/other is violated.")


@pytest.mark.parametrize("state", [None, "of-a-later-release"])
def test_an_agreement_is_not_called_kept_while_the_state_of_one_promise_is_not_known(state) -> None:
    other = {**of_metric("availability"), "state": state}
    found = explain(agreement(promises=[{**PROMISE, "state": "ok"}, other]))
    assert found.status == "unknown"
    assert found.headline == "erp-gold/other is in a state that is not known here."
    idle = {**of_metric("availability"), "state": "idle"}
    assert explain(agreement(promises=[{**PROMISE, "state": "ok"}, idle])).status == "kept"
