"""``make bench-spark``: the policy job on Spark beside the same computation in DuckDB and in Polars.

Rows are generated once for each size (``spark_world``) and read from Parquet files. Every run is a cold
process, from the start of Python to its end, Spark's own start included; engines take turns, and the median
of three counts. The results of the three must be equal, attribution and burst pairs among them, or the
benchmark ends with an error; but for the points of curves, which are rounded for people. ``spark_large`` does
the same with more rows, ``spark_fleet`` is Spark alone on 86 million hours. Each stores a result of its own,
with its options.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import harness, spark_world

ENGINES = ("spark", "duckdb", "polars")
NAMES = {1_000_000: "1m", 10_000_000: "10m", 50_000_000: "50m"}


def once(engine: str, place: Path) -> dict[str, Any]:
    """One cold process; ``wall_s`` is all of it."""
    started_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.spark_engines", engine, str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{engine} failed:\n{done.stderr[-4000:]}")
    return {**json.loads(done.stdout.splitlines()[-1]), "wall_s": time.monotonic() - started_s}


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two results differ; numbers may by a billionth, which is how engines interpolate."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [text for key in one for text in differences(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [text for place, pair in pairs for text in differences(*pair, f"{where}[{place}]")]
    if isinstance(one, float) and isinstance(other, float) and math.isclose(one, other, rel_tol=1e-8):
        return []
    return [] if one == other else [f"{where}: {one!r} and {other!r}"]


def compared(place: Path, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """All runs on one world, engines in turn, of equal results."""
    runs: dict[str, list[dict[str, Any]]] = {engine: [] for engine in ENGINES}
    for _ in range(rounds):
        for engine in ENGINES:
            runs[engine].append(once(engine, place))
            last = runs[engine][-1]
            print(f"  {engine}: {last['wall_s']:.1f} s, {last['memory_mib']}", flush=True)
    results = ("capacity", "costs", "caps", "capped", "sums", "harms", "bursts")
    first = {key: runs["spark"][0][key] for key in results}
    for engine, made in runs.items():
        for run in made:
            if found := differences(first, {key: run[key] for key in results}):
                raise SystemExit(f"spark and {engine} differ: {'; '.join(found[:5])}")
    return runs


def measure(rows: list[int], rounds: int) -> harness.Sample:
    """Every size."""
    values: dict[str, float] = {}
    raw: dict[str, Any] = {}
    place = Path(tempfile.mkdtemp(prefix="bench-spark-"))
    try:
        for size in rows:
            name = NAMES.get(size, str(size))
            world = place / name
            print(f"{spark_world.write(world, size)} rollups", flush=True)
            runs = compared(world, rounds)
            shutil.rmtree(world)
            raw[name] = {
                engine: [{key: run[key] for key in ("wall_s", "start_s", "memory_mib")} for run in made]
                for engine, made in runs.items()
            }
            wall = {engine: statistics.median(run["wall_s"] for run in made) for engine, made in runs.items()}
            values[f"spark_{name}_s"] = wall["spark"]
            values[f"duckdb_{name}_ratio"] = wall["spark"] / wall["duckdb"]
            values[f"polars_{name}_ratio"] = wall["spark"] / wall["polars"]
            values["spark_start_s"] = statistics.median(run["start_s"] for run in runs["spark"])
            values["driver_mib"] = max(
                [values.get("driver_mib", 0), *(run["memory_mib"]["the driver"] for run in runs["spark"])]
            )
            values[f"harms_{name}"] = len(runs["spark"][0]["harms"])
            values[f"bursts_{name}"] = len(runs["spark"][0]["bursts"])
        if {"10m", "50m"} <= raw.keys():
            values["growth"] = values["spark_50m_s"] / 5 / values["spark_10m_s"]
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return harness.Sample(values, raw, {name: version(name) for name in ("pyspark", "duckdb", "polars")})


def main(name: str = "spark", sizes: tuple[int, ...] = (1_000_000,)) -> None:
    """Measure these sizes, or what was asked for.

    Args:
        name: of the record.
        sizes: of the run that is recorded, in rollups.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=list(sizes), help="sizes, in rollups")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each engine")
    chosen = parser.parse_args()
    options = harness.Options.of(parser, chosen)
    harness.adopt_orphans()  # Java outlives the process that started it
    harness.main(name, lambda: measure(chosen.rows, chosen.rounds), most_runs=1, options=options)


if __name__ == "__main__":
    main()
