"""``make bench-forecast``: how often a pool is full within the interval of its forecast, on 200 histories.

The histories are generated and their day is known (``tests.support.pool_histories``): straight lines with
noise, with a rhythm of a week, with noise that lasts, with outliers, and walks. Nothing is timed, so other
work on the machine does not matter; the numbers are the same wherever it runs.
"""

from __future__ import annotations

from typing import Final

from benchmarks import harness
from tests.support.pool_histories import covered

HISTORIES: Final = 200


def measure() -> harness.Sample:
    """Forecast all of them."""
    found = covered(HISTORIES)
    values = {
        "histories": found.histories,
        "named_percent": 100 * found.named / found.histories,
        "within_percent": 100 * found.within / found.named,
    }
    return harness.Sample(values, {"named": found.named, "within": found.within})


def main() -> None:
    """Measure."""
    harness.main("forecast", measure, most_runs=1, is_timed=False)


if __name__ == "__main__":
    main()
