"""``make bench-demo ARGS="--runs 20 --busy 1"``: the demonstration again and again.

Each run is a process of its own, ``python -m benchmarks.demonstration --for SECONDS``, as a stranger would
start it. ``--busy N`` keeps N processors busy beside it. Printed: a row a run, with its figures and each
condition that did not hold, and how many runs closed the cycle. The exit status is 0 when all of them did.
Nothing is stored.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

COLUMNS: Final = {
    "violation_ratio": "broken x",
    "restore_s": "held s",
    "bad_seconds_ratio": "bad",
    "neighbour_kept_ratio": "kept",
    "release_s": "freed s",
    "policy_version": "policy",
}
HEAD: Final = f"{'run':>4} {'took':>6}" + "".join(f"{title:>10}" for title in COLUMNS.values()) + "  closed"
FINISH_S: Final = 1500.0  # beyond the seconds of its phases: start, Spark, and deadlines that run out


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that do nothing but use a processor each, until the end of the block."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def row_of(number: int, took_s: float, summary: dict[str, Any]) -> str:
    """One line of the table; a run without a summary did not come to its end."""
    cells = ""
    for key in COLUMNS:
        value = summary.get(key)
        text = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
        cells += f"{text:>10}"
    verdict = "yes" if summary.get("ok") else "NO: " + ", ".join(summary.get("failed", ["no summary"]))
    return f"{number:>4} {took_s:>5.0f}s{cells}  {verdict}"


def one_run(seconds: int, folder: Path) -> tuple[dict[str, Any], str]:
    """The summary of one demonstration, empty if it printed none, and all that it printed."""
    command = [sys.executable, "-m", "benchmarks.demonstration", "--for", str(seconds)]
    try:
        done = subprocess.run(
            [*command, "--folder", str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds + FINISH_S,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        return {}, str(exc)
    lines = done.stdout.splitlines()
    with contextlib.suppress(json.JSONDecodeError, IndexError):
        summary = json.loads(lines[-1])
        if isinstance(summary, dict) and summary.get("ok") is (done.returncode == 0):
            return summary, done.stdout
    return {}, done.stdout


def run(runs: int, busy: int, seconds: int) -> int:
    """Print the table; returns 0 when every run closed the cycle."""
    closed = 0
    beside = f"{busy} busy loop{'' if busy == 1 else 's'} beside each" if busy else "nothing beside them"
    print(f"{runs} runs of {seconds} s, {beside}\n{HEAD}", flush=True)
    with busy_loops(busy):
        for number in range(1, runs + 1):
            start_s = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="sla-bench-") as folder:
                summary, output = one_run(seconds, Path(folder) / "demo")
            print(row_of(number, time.monotonic() - start_s, summary), flush=True)
            closed += bool(summary.get("ok"))
            if not summary.get("ok"):
                print("".join(f"     | {line}\n" for line in output.splitlines()[-30:]), end="", flush=True)
    print(f"the cycle closed in {closed} of {runs} runs")
    return 0 if closed == runs else 1
