"""Arrivals by kind: what completed, what was given up, and who waits; and what slices say by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pmdaemon.wire.cut import IO_ANY, IO_READ, IO_WRITE
from pmdaemon.wire.histogram import BUCKETS
from sla_server.agreements.document import Applicability
from sla_server.agreements.slices import LimitCounts, SliceVerdict, StreamSlot, judge_slice, table_of
from tests.support.agreements import in_force, simple

MINUTE_US = 60_000_000
RATES = ("{metric: iops}\n    promised_iops: 50", "{metric: throughput}\n    promised_mbps: 0.2")


def slot(
    reads: int = 0, writes: int = 0, *, more: int = 0, gone: tuple[int, int] = (0, 0), **keys: Any
) -> StreamSlot:
    """``more``: arrived and neither completed nor were given up; ``gone``: reads and writes given up."""
    hist_read, hist_write = np.zeros((2, BUCKETS), dtype=np.int64)
    hist_read[30], hist_write[30] = reads, writes
    every = {IO_ANY: sum(gone), IO_READ: gone[0], IO_WRITE: gone[1]}
    counts = {
        (io, 0): LimitCounts(overdue=count, settled=2000 * count) for io, count in every.items() if count
    }
    counts |= {(IO_WRITE, 12_000): LimitCounts(writes, writes), (IO_READ, 12_000): LimitCounts(reads, reads)}
    arrived = reads + writes + sum(gone) + more
    values: dict[str, Any] = {
        "arrived": arrived, "reads": reads, "writes": writes, "read_bytes": reads * 4096, "missed": counts,
        "write_bytes": writes * 4096, "hist_read": hist_read, "hist_write": hist_write, "lat_sum_us": 0,
        "covered_us": MINUTE_US, "told_us": MINUTE_US,
    }  # fmt: skip
    return StreamSlot(**{**values, **keys})


def arrivals(one: StreamSlot) -> tuple[float, float, float]:
    """Of all, of reads, of writes."""
    found = table_of([one]).arrivals(np.zeros(3, dtype=np.int64), np.array([IO_ANY, IO_READ, IO_WRITE]))
    return found[0], found[1], found[2]


@pytest.mark.parametrize(
    ("one", "by_kind"),
    [
        # What waits is of the kind that waits, and of both by how long they do.
        (slot(300, 100, more=40, oldest_read_ms=2), (440, 340, 100)),
        (slot(300, 100, more=40, oldest_write_ms=2), (440, 300, 140)),
        (slot(300, 100, more=40, oldest_read_ms=900, oldest_write_ms=100), (440, 336, 104)),
        (slot(0, 0, more=40, stalled_read_ms=30_000, stalled_write_ms=30_000), (40, 20, 20)),
        # What was given up is of its own kind, whoever waits at the end.
        (slot(0, 1500, gone=(1800, 0), oldest_write_ms=2), (3300, 1800, 1500)),
        (slot(0, 1500, gone=(1800, 7), oldest_read_ms=2), (3307, 1800, 1507)),
        # More ended than arrived: they had come before.
        (slot(300, 0, gone=(0, 100), more=-200, oldest_read_ms=2), (200, 150, 50)),
        # Of an agent that does not tell kinds.
        (slot(300, 100, more=40, oldest_ms=2, kindless_oldest_ms=2), (440, 330, 110)),
        (slot(0, 0, more=40), (40, 0, 0)),
    ],
)
def test_arrivals_of_a_kind(one: StreamSlot, by_kind: tuple[float, float, float]) -> None:
    assert arrivals(one) == pytest.approx(by_kind)


def judge(indicator: str, one: StreamSlot) -> SliceVerdict:
    text = simple().replace("clients:", "io: write, clients:")
    text = text.replace("up_to_iops: 500", "up_to_iops: 50")
    if "latency" not in indicator:
        text = text.replace("    demand_curve: [{up_to_iops: 50, value_ms: 12.0}]\n", "")
    text = text.replace("{metric: latency, percentile: 95.0}", indicator)
    (promise,) = in_force(text).all_promises
    clauses = Applicability(min_ios_per_slice=10)
    return judge_slice(promise, clauses, [one], {"gw": MINUTE_US}, length_us=MINUTE_US, excluded=False)


def test_reads_that_hang_and_are_given_up_are_no_demand_for_writes() -> None:
    """25 slow writes a second; 30 reads a second hang for 2 s each: the curve ends at 50."""
    one = slot(0, 1500, gone=(1800, 0), more=60, oldest_read_ms=2000, oldest_write_ms=2)
    found = judge("{metric: latency, percentile: 95.0}", one)
    assert (found.state, found.reason, round(found.offered_iops)) == ("bad", "slow", 25)


@pytest.mark.parametrize("indicator", RATES, ids=["iops", "throughput"])
def test_a_rate_of_writes_is_kept_while_reads_hang(indicator: str) -> None:
    """A write that is under way at the end of a cut says nothing of the reads that hang."""
    for gone, more in ((120, 8), (0, 40)):
        one = slot(0, 1500, gone=(gone, 0), more=more, oldest_read_ms=4000, oldest_write_ms=2, outstanding=40)
        assert judge(indicator, one).state == "good"
    given_up = slot(0, 1500, gone=(0, 60), more=8, oldest_read_ms=4000, oldest_write_ms=2)
    assert judge(indicator, given_up).reason == "below"
