"""``make bench-spark``: the policy job on Spark beside the same computation in DuckDB and in Polars.

Rows are generated once for each size (``spark_world``) and read from Parquet files. Every run is a cold
process, from the start of Python to its end, Spark's own start included; engines take turns, and the median
of three counts. The results of the three must be equal, attribution and burst pairs among them, but for the
points of curves, which are rounded for people. ``spark_large`` does the same with more rows, ``spark_fleet``
is Spark alone on 86 million hours. Each stores a result of its own, with its options.

Sizes are parts: each is stored when it has ended, and ``--rows`` with one of them replaces its rows alone.
What was measured of a size that is not whole is in ``NAME.json.tmp``: an engine that fails, is killed for
want of memory, or finds another result is named there, and the others go on. The kernel takes an engine
first when memory is short, and files of one that was killed go with the world.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks import harness, spark_world
from pmdaemon.runtime.stop import end_with_parent

ENGINES = ("spark", "duckdb", "polars")
NAMES = {1_000_000: "1m", 10_000_000: "10m", 50_000_000: "50m"}
RESULTS: Final = ("capacity", "costs", "caps", "capped", "sums", "harms", "bursts")
KEPT: Final = ("wall_s", "start_s", "memory_mib", "all_mib")
"""Of a run, in the record."""
SAMPLED_S: Final = 1.0
DISK_BYTES_A_ROW: Final = 200
"""Of the world, and of what Spark and DuckDB write beside it; 10 GB for 50 million."""
MEMORY_BYTES: Final = 4 << 30
"""That must be free: Spark's 2 GB of heap, its Python, and something to spare."""
GROWTH: Final = ("10m", "50m")
FIRST_TO_KILL: Final = 1000  # the most of oom_score_adj


class EngineFailed(Exception):
    """A run that came to no result."""


def once(engine: str, place: Path) -> dict[str, Any]:
    """One cold process; ``wall_s`` is all of it, ``all_mib`` what it and its children had together at most.

    Raises:
        EngineFailed: it ended without a result.
    """
    said, problem = place.parent / "said", place.parent / "problem"
    command = [sys.executable, "-m", "benchmarks.spark_engines", engine, str(place)]
    started_s = time.monotonic()
    with said.open("wb") as out, problem.open("wb") as err:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=err,
            cwd=harness.HERE.parent,
            preexec_fn=_begun,  # noqa: PLW1509 - one thread
        )
    most = 0
    while True:
        try:
            status = process.wait(SAMPLED_S)
            break
        except subprocess.TimeoutExpired:
            most = max(most, _family_bytes(process.pid))
    wall_s = time.monotonic() - started_s
    if status:
        how = f"killed by signal {-status}" if status < 0 else f"status {status}"
        raise EngineFailed(f"{engine} failed ({how}): {problem.read_text(errors='replace')[-2000:].strip()}")
    return {**json.loads(said.read_text().splitlines()[-1]), "wall_s": wall_s, "all_mib": most >> 20}


def _begun() -> None:
    """In the child: it ends with us, and is taken first when memory is short."""
    end_with_parent()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(FIRST_TO_KILL))


def _family_bytes(pid: int) -> int:
    """Memory of a process and its descendants; what they share counts once."""
    total = 0
    with suppress(psutil.Error):
        for each in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with suppress(psutil.Error, OSError):
                total += each.memory_full_info().pss
    return total


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


@dataclass
class Runs:
    """All runs on one world.

    Attributes:
        made: of each engine those that came to the same result as Spark's first.
        problems: why an engine has fewer.
    """

    made: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {name: [] for name in ENGINES})
    problems: dict[str, str] = field(default_factory=dict)

    def add(self, engine: str, run: dict[str, Any]) -> None:
        """One run; another result than that of Spark's first is a problem."""
        first = self.made["spark"][0] if self.made["spark"] else run
        of_first, of_run = ({key: each[key] for key in RESULTS} for each in (first, run))
        found = differences(of_first, of_run)
        if found:
            self.problems[engine] = f"{engine} found another result than spark: {'; '.join(found[:5])}"
        else:
            self.made[engine].append(run)

    @property
    def kept(self) -> dict[str, list[dict[str, Any]]]:
        """What the record has of them."""
        return {name: [{key: run[key] for key in KEPT} for run in runs] for name, runs in self.made.items()}


def compared(place: Path, rounds: int, done: Progress) -> Runs:
    """All runs on one world, engines in turn; one that has failed is not tried again."""
    runs = Runs()
    for _ in range(rounds):
        for engine in (name for name in ENGINES if name not in runs.problems):
            try:
                run = once(engine, place)
            except EngineFailed as exc:
                runs.problems[engine] = str(exc)
            else:
                print(f"  {engine}: {run['wall_s']:.1f} s, {run['memory_mib']}", flush=True)
                runs.add(engine, run)
            if engine in runs.problems:
                print(f"  {runs.problems[engine]}", flush=True)
            done.add(place.name, runs.kept)
        if not runs.made["spark"]:
            break  # nothing can be compared
    return runs


@dataclass
class Progress:
    """What a benchmark has so far, also while it runs: a killed one leaves that in ``NAME.json.tmp``.

    Attributes:
        raw: by size, engine and run.
        values: by goal.
        recorded: raw of the record, if that is of this machine.
    """

    name: str
    raw: dict[str, Any] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    recorded: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str) -> Progress:
        """Of this benchmark, which begins."""
        path = harness.HERE / "results" / f"{name}.json"
        if not path.exists():
            return cls(name)
        record = json.loads(path.read_text())
        machine, here = record["machine"], harness.machine_facts()
        is_here = all(machine.get(key) == here[key] for key in harness.SAME_MACHINE)
        return cls(name, recorded=record["raw"] if is_here else {})

    def add(self, size: str, runs: dict[str, list[dict[str, Any]]]) -> None:
        """The runs of a size up to now."""
        self.raw[size] = runs
        path = harness.HERE / "results" / f"{self.name}.json.tmp"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"benchmark": self.name, "raw": self.raw}, indent=1) + "\n")

    @property
    def known(self) -> dict[str, Any]:
        """Runs of this time, and of the record those of other sizes."""
        return {**self.recorded, **self.raw}

    def joint(self) -> dict[str, float]:
        """Goals of several sizes together, as far as these are known."""
        found: dict[str, float] = {}
        walls = {
            size: statistics.median(run["wall_s"] for run in self.known[size]["spark"])
            for size in GROWTH
            if self.known.get(size, {}).get("spark")
        }
        if len(walls) == len(GROWTH):
            found["growth"] = walls["50m"] / 5 / walls["10m"]
        drivers = [
            run["memory_mib"]["the driver"] for of in self.known.values() for run in of.get("spark", ())
        ]
        return {**found, **({"driver_mib": max(drivers)} if drivers else {})}


def check_room(place: Path, rows: int) -> None:
    """See that this machine has room for a run, before rows are generated for minutes.

    Raises:
        SystemExit: it has not; says what is needed.
    """
    free, needed = shutil.disk_usage(place).free, rows * DISK_BYTES_A_ROW
    if free < needed:
        raise SystemExit(f"{place} has {free >> 20} MiB free, {needed >> 20} MiB are needed; set TMPDIR")
    available = psutil.virtual_memory().available
    if available < MEMORY_BYTES:
        raise SystemExit(f"{available >> 20} MiB of memory are free, {MEMORY_BYTES >> 20} MiB are needed")


def measure(size: int, rounds: int, done: Progress) -> harness.Sample:
    """One size; the sample has those before it, too."""
    name = NAMES.get(size, str(size))
    place = Path(tempfile.mkdtemp(prefix="bench-spark-"))
    try:
        check_room(place, size)
        print(f"{spark_world.write(place / name, size)} rollups", flush=True)
        runs = compared(place / name, rounds, done)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    whole = {engine: made for engine, made in runs.made.items() if len(made) == rounds}
    wall = {engine: statistics.median(run["wall_s"] for run in made) for engine, made in whole.items()}
    if "spark" in whole:
        done.values[f"spark_{name}_s"] = wall["spark"]
        done.values["spark_start_s"] = statistics.median(run["start_s"] for run in whole["spark"])
        done.values[f"harms_{name}"] = len(whole["spark"][0]["harms"])
        done.values[f"bursts_{name}"] = len(whole["spark"][0]["bursts"])
        for peer in whole.keys() - {"spark"}:
            done.values[f"{peer}_{name}_ratio"] = wall["spark"] / wall[peer]
    peers = {each: version(each) for each in ("pyspark", "duckdb", "polars")}
    lacks = "; ".join(text.partition("\n")[0] for text in runs.problems.values())
    return harness.Sample({**done.values, **done.joint()}, dict(done.raw), peers, lacks=lacks)


def parts_of(name: str, done: Progress) -> dict[str, list[str]]:
    """The goals of each size; those of several sizes belong to each of them, once all are known."""
    goals = list(harness.targets(name))
    joint = [key for key in goals if not any(f"_{size}_" in key for size in NAMES.values())]
    found = {}
    for size in NAMES.values():
        own = [key for key in goals if f"_{size}_" in key]
        is_growth_known = size in GROWTH and set(GROWTH) <= {size, *done.known}
        found[size] = own + [key for key in joint if key != "growth" or is_growth_known]
    return found


def main(name: str = "spark", sizes: Sequence[int] = (1_000_000,)) -> None:
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
    options = harness.Options.of(parser, chosen, part_option="rows")
    harness.adopt_orphans()  # Java outlives the process that started it
    sys.exit(max(run_sizes(name, sizes, chosen.rows, chosen.rounds, options)))


def run_sizes(
    name: str, sizes: Sequence[int], rows: Sequence[int], rounds: int, options: harness.Options
) -> list[int]:
    """Measure and store one size after the other; the exit status of each."""
    done, statuses = Progress.of(name), []
    is_part = bool(options.parts) and set(rows) <= set(sizes)
    for size in rows:
        of_size = replace(options, given={**options.given, "rows": [size]}, parts=())
        if is_part and len(sizes) > 1:
            of_size = replace(of_size, are_default=False, parts=(NAMES[size],))
        elif is_part:
            of_size = replace(of_size, are_default=True)
        parts = parts_of(name, done)
        of_this = partial(measure, size, rounds, done)
        statuses.append(harness.run(name, of_this, 1, of_size, parts=parts))
    return statuses


if __name__ == "__main__":
    main()
