"""``make bench-capacity``: capacities found on published latency-load curves, and the knees measured there.

``tests.support.public_curves`` has the curves and says where they come from: random reads of five sizes from
a Ceph cluster. For each, and for promises of 1.5 to 5 times its idle latency, five histories of a thousand
minutes are drawn from the curve. Nothing is timed.
"""

from __future__ import annotations

from typing import Any, Final

from benchmarks import harness
from tests.support.public_curves import CURVES, TIMES, found_knee

SEEDS: Final = range(5)


def measure() -> harness.Sample:
    """Fit all of them; prints a row for each curve and promise."""
    rows: list[dict[str, Any]] = []
    for name in CURVES:
        for times in TIMES:
            found = [found_knee(name, times, seed) for seed in SEEDS]
            above, below = max(each.above_ratio for each in found), max(each.below_ratio for each in found)
            rows.append({"curve": name, "times": times, "above": above, "below": below})
            print(f"{name:>8} {times:>4} x idle: above the knee {above:+.1%}, below it {below:+.1%}")
    values = {
        "curves": len(rows),
        "above_percent": 100 * max(row["above"] for row in rows),
        "below_percent": 100 * max(row["below"] for row in rows),
    }
    return harness.Sample(values, {"rows": rows})


def main() -> None:
    """Measure."""
    harness.main("capacity", measure, most_runs=1, is_timed=False)


if __name__ == "__main__":
    main()
