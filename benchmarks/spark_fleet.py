"""``make bench-spark_fleet``: the policy job on eight weeks of hours of 4,000 gateways, 86 million rows.

Rows are generated first (``spark_world``, some minutes, 0.7 GB of temporary disk), then the job runs once, in
a cold process: it computes, stores the policy in SQLite as it is published, and reads it back as the next
run's back-test does. Spark writes up to 15 GB beside the rows (``TMPDIR`` says where). What counts is memory:
of the driver, and of all its processes together, Spark's Java (which is the executor here) and the Python
workers among them.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Final

from benchmarks import harness, spark, spark_world

ROWS: Final = 86_016_000  # 64,000 streams, 1,344 hours


def measure(rows: int) -> harness.Sample:
    """Generate, and run once.

    Raises:
        SystemExit: it has failed.
    """
    place = Path(tempfile.mkdtemp(prefix="bench-spark-"))
    try:
        spark.check_room(place, rows)
        started_s = time.monotonic()
        hours, fine = spark_world.write_hours(place / "world", rows)
        made_s = time.monotonic() - started_s
        size_mib = sum(path.stat().st_size for path in place.rglob("*.parquet")) >> 20
        print(f"{hours} hours and {fine} rollups in {made_s:.0f} s, {size_mib} MiB", flush=True)
        run = spark.once("fleet", place / "world")
    except spark.EngineFailed as exc:
        raise SystemExit(str(exc)) from exc
    finally:
        shutil.rmtree(place, ignore_errors=True)
    memory = run["memory_mib"]
    values = {
        "hours": hours,
        "world_mib": size_mib,
        "fleet_s": run["wall_s"],
        "driver_mib": memory["the driver"],
        "all_mib": max(run["all_mib"], sum(memory.values())),
        "caps": run["caps"],
        "capped": run["capped"],
    }
    raw = {
        key: run[key] for key in ("wall_s", "seconds", "start_s", "memory_mib", "all_mib", "sums", "stored")
    }
    return harness.Sample(values, {**raw, "made_s": made_s}, {"pyspark": version("pyspark")})


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=ROWS, help="hourly rollups; at least 64,000")
    chosen = parser.parse_args()
    options = harness.Options.of(parser, chosen)
    harness.adopt_orphans()
    harness.main("spark_fleet", lambda: measure(chosen.rows), most_runs=1, options=options)


if __name__ == "__main__":
    main()
