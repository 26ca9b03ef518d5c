"""What a promise at risk says of itself, in the words of its indicator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sla_server.agreements.promise import Priority
from sla_server.services.control.verdicts import Signal
from sla_server.services.control.victims import Need, Victim, figures_of

SIGNAL = Signal(
    windows=3,
    offered_iops=420.0,
    threshold_us=5_000_000,
    u=1.5,
    r=0.0,
    latency_us=0.0,
    risky=2,
    over=2,
    inexact=False,
    stall_us=2_500_000.0,
    failed_ratio=0.02,
)


def victim(metric: str, signal: Signal = SIGNAL) -> Victim:
    return Victim(
        ("erp", "one"), Priority.GOLD, 0.0, Need.AT_RISK, signal, frozenset(("erp-db",)), metric=metric
    )


SHORT = "at 3.0% of what was asked for, as far as it was promised, not delivered, 2% allowed"


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        ("iops", SHORT),
        ("throughput", SHORT),
        ("availability", "at 2.5 s without completion of 5 s allowed, 2.0% of the I/Os failed"),
    ],
)
def test_a_rate_and_an_outage_have_no_latency(metric: str, text: str) -> None:
    assert figures_of(victim(metric)) == f"erp/one {text}"


def test_a_mean_has_no_misses() -> None:
    signal = replace(SIGNAL, latency_us=9_000.0, threshold_us=5_000, excused_ratio=0.2)
    assert figures_of(victim("mean_latency", signal)) == (
        "erp/one at a mean latency of 9.0 ms of 5 ms allowed, 20% of the I/Os left out: "
        "the gateway's own host was busy"
    )
    assert figures_of(victim("latency", signal)) == (
        "erp/one at 9.0 ms of 5 ms allowed (1.50 times the misses allowed, 20% of the I/Os left out: "
        "the gateway's own host was busy)"
    )
