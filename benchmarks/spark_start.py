"""``make bench-spark_start``: a start of Spark with the archive of its classes, and without.

A cold process starts a session as a job on little data does, sums up a thousand rows, and ends; with the
archive and without it in turn, ``PAIRS`` times. *CPU*: processor time of its Java, until the sum is there;
*time*: until then, by the clock. What making the archive takes is given in starts without one. Medians.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import psutil

from benchmarks import harness
from sla_server.policy_jobs import class_archive, make_class_archive, session

PAIRS: Final = 5
LIMIT_S: Final = 600


def one_start(options: str) -> None:
    """Start Spark with these options of Java too, and print Java's seconds of CPU and those by the clock."""
    since_s = time.monotonic()
    key = "spark.driver.extraJavaOptions"
    with tempfile.TemporaryDirectory(prefix="sla-bench-start-", ignore_cleanup_errors=True) as name:
        work = Path(name)
        java = session.settings("local[*]", work, "1g", make_class_archive.ROWS)[key]
        java = java.removesuffix(class_archive.java_options()) + f" {options}"
        with session.stderr_to(work / "java.log"):
            spark = session.build_session("local[*]", work, "1g", {key: java}, make_class_archive.ROWS)
            spark.range(1_000).selectExpr("id % 7 as key", "id").groupBy("key").sum("id").toArrow()
        took_s = time.monotonic() - since_s
        (found,) = (each for each in psutil.Process().children(recursive=True) if each.name() == "java")
        cpu = found.cpu_times()
        print(cpu.user + cpu.system, took_s)
        session.end_java()


def _run(*arguments: str) -> tuple[list[str], float]:
    """What a Python process prints, and the CPU of it and of its children that it waited for."""
    before = psutil.Process().cpu_times()
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    after = psutil.Process().cpu_times()
    used_s = after.children_user + after.children_system - before.children_user - before.children_system
    return done.stdout.split(), used_s


def measure() -> harness.Sample:
    """All pairs."""
    harness.adopt_orphans()
    _, made_s = _run("sla_server.policy_jobs.make_class_archive")
    taken: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    for _ in range(PAIRS):
        for way, options in (("with", class_archive.java_options()), ("without", "-Xshare:auto")):
            cpu_s, took_s = map(float, _run("benchmarks.spark_start", options)[0])
            taken[way].append((cpu_s, took_s))
            print(f"{way:>7}: {cpu_s:5.1f} s of CPU, {took_s:5.1f} s", flush=True)
    (cpu_with, s_with), (cpu_without, s_without) = (
        [statistics.median(column) for column in zip(*taken[way], strict=True)] for way in ("with", "without")
    )
    values = {
        "cpu_ratio": cpu_with / cpu_without,
        "time_ratio": s_with / s_without,
        "made_starts": made_s / cpu_without,
    }
    return harness.Sample(values, {"cpu_s_and_s": taken, "made_cpu_s": made_s})


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("-X"):
        one_start(sys.argv[1])
    else:
        harness.main("spark_start", measure)
