"""``make bench-demo``: three demonstrations of 60 s; the median of each figure against its target."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks import harness
from benchmarks.demonstration import measure as one_demonstration

RUNS = 3
KEYS = ("violation_ratio", "restore_s", "bad_seconds_ratio", "neighbour_kept_ratio")


def measure() -> harness.Sample:
    """Three demonstrations one after another; a promise never restored counts as the whole run."""
    summaries = []
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory(prefix="sla-bench-") as folder:
            summaries.append(one_demonstration(60, Path(folder) / "demo"))
    values = {
        key: statistics.median(60.0 if item[key] is None else float(item[key]) for item in summaries)
        for key in KEYS
    }
    return harness.Sample(values, raw={"summaries": summaries})


if __name__ == "__main__":
    harness.main("demo", measure)
