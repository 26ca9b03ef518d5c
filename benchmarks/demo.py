"""``make bench-demo``: three demonstrations of 60 s; the median of each figure against its target.

With ``--runs N`` instead: N demonstrations and a table of whether each closed its cycle (``demo_table``).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

import click

from benchmarks import demo_table, harness
from benchmarks.demonstration import SHORTEST_S
from benchmarks.demonstration import measure as one_demonstration

RUNS = 3
SECONDS = 60
KEYS = ("violation_ratio", "restore_s", "bad_seconds_ratio", "neighbour_kept_ratio")
POLICY_KEYS = ("policy_s", "spark_start_s")


def measure() -> harness.Sample:
    """Three demonstrations one after another; a promise never restored counts as the whole run."""
    summaries = []
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory(prefix="sla-bench-") as folder:
            summaries.append(one_demonstration(SECONDS, Path(folder) / "demo"))
    values = {
        key: statistics.median(60.0 if item[key] is None else float(item[key]) for item in summaries)
        for key in (*KEYS, *POLICY_KEYS)
    }
    return harness.Sample(values, raw={"summaries": summaries})


@click.command()
@click.option("--runs", type=click.IntRange(min=1), help="Print a table of N runs; nothing is stored.")
@click.option(
    "--busy", type=click.IntRange(min=0), default=0, help="With --runs: so many busy loops beside each."
)
@click.option(
    "--for",
    "seconds",
    type=click.IntRange(min=SHORTEST_S),
    default=SECONDS,
    show_default=True,
    help="With --runs: length of each.",
)
def main(runs: int | None, busy: int, seconds: int) -> None:
    """The demonstration's figures against their goals, or whether many runs close the cycle."""
    if runs is not None:
        sys.exit(demo_table.run(runs, busy, seconds))
    if busy or seconds != SECONDS:
        raise click.UsageError("--busy and --for go with --runs; goals are judged on a quiet machine")
    harness.main("demo", measure)


if __name__ == "__main__":
    main()
