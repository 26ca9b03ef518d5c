"""The one form of every benchmark: interleaved samples, a table, a JSON file, ``goals met: K of N``.

A benchmark module calls ``run(name, measure)``: ``measure()`` returns the values of one whole run (all
variants interleaved inside it) and its raw samples. While it runs, the CPU that *other* processes use is
read from /proc/stat; above 0.3 core the run is called noisy and repeated, up to 3 times; the quietest run
is reported. The record is ``benchmarks/results/NAME.json``, which names the options of its run. Only a
complete run replaces it: the default options, every part and goal measured, and quiet. Any other goes to
``NAME.json.tmp`` beside it, which git leaves out. A benchmark of an hour may be run in parts, each with the
default options: a quiet part replaces its own rows, which say when they were measured; the others stay, and
those of a part that was never run are not there. Rows of another machine are not mixed in.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NOISY_CORES = 0.3
MOST_RUNS = 3
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
SAME_MACHINE = ("cpu", "cores", "memory_bytes")


@dataclass
class Sample:
    """One whole run of a benchmark: goal key -> value, and everything it was computed from."""

    values: dict[str, float]
    raw: dict[str, Any] = field(default_factory=dict)
    peers: dict[str, str] = field(default_factory=dict)
    foreign_cores: float = 0.0
    lacks: str = ""  # what of it could not be measured; such a run is not recorded


def _busy_ticks() -> int:
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(value) for value in fields[:8])
    return user + nice + system + irq + softirq + steal


def _own_ticks(pid: int) -> int:
    """CPU ticks of a process, its waited-for children and its living descendants."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        tasks = Path(f"/proc/{pid}/task").iterdir()  # a child stands with the thread that started it
        children = [child for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return 0
    own = sum(int(value) for value in fields[11:15])
    return own + sum(_own_ticks(int(child)) for child in children)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends first, as Spark's Java does.

    They stay as zombies until this process ends, so that their processor time counts as ours.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class ForeignCpu:
    """Measures the cores that processes outside this one's family use.

    A process whose parent ended before it counts as foreign, unless ``adopt_orphans`` was called.
    """

    def __enter__(self) -> ForeignCpu:
        self._start = (_busy_ticks(), _own_ticks(os.getpid()), time.monotonic())
        return self

    def __exit__(self, *_exc: object) -> None:
        busy, own, started_s = self._start
        ticks = (_busy_ticks() - busy) - (_own_ticks(os.getpid()) - own)
        hertz = os.sysconf("SC_CLK_TCK")
        self.cores = max(0.0, ticks / hertz / max(time.monotonic() - started_s, 1e-9))


def machine_facts() -> dict[str, Any]:
    """What a reader needs to compare: CPU, cores, memory, kernel, Python."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1m": os.getloadavg()[0],
    }


def version_of(program: str, *arguments: str) -> str:
    """First line that a program prints about its version, or 'not installed'."""
    if shutil.which(program) is None:
        return "not installed"
    done = subprocess.run(
        [program, *(arguments or ("--version",))], capture_output=True, text=True, check=False
    )
    return (done.stdout or done.stderr).strip().splitlines()[0]


def targets(name: str) -> dict[str, dict[str, Any]]:
    """The targets of one benchmark."""
    tables: dict[str, dict[str, Any]] = tomllib.loads((HERE / "targets.toml").read_text())[name]
    return tables


def rows_for(name: str, values: dict[str, float]) -> list[dict[str, Any]]:
    """One row a target: goal, target, value, unit, met (None where it has no target: only measured)."""
    rows = []
    for key, target in targets(name).items():
        value = values.get(key)
        at_least = target["direction"] == "min"
        limit = target.get("target")
        met = None
        if limit is not None:
            met = value is not None and (value >= limit if at_least else value <= limit)
        rows.append(
            {
                "goal": target["goal"],
                "key": key,
                "target": limit,
                "direction": target["direction"],
                "value": value,
                "unit": target["unit"],
                "met": met,
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text that fits 80 columns."""
    lines = [f"{'goal':<46} {'target':>11} {'measured':>11}  met"]
    for row in rows:
        sign = ">=" if row["direction"] == "min" else "<="
        value = "missing" if row["value"] is None else f"{row['value']:.3g} {row['unit']}"
        goal = row["goal"]
        while len(goal) > 46:
            cut = goal.rfind(" ", 0, 46)
            lines.append(goal[:cut])
            goal = "  " + goal[cut + 1 :]
        target = "measured" if row["target"] is None else f"{sign} {row['target']:g} {row['unit']}"
        met = {True: "yes", False: "NO", None: "-"}[row["met"]]
        lines.append(f"{goal:<46} {target:>11} {value:>11}  {met}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Options:
    """How a run was asked for.

    Attributes:
        given: option -> value.
        are_default: whether it is the run that is recorded.
        parts: which parts of the run were asked for, all else as by default; none: all of them, or another
            option was given.
    """

    given: Mapping[str, Any] = field(default_factory=dict)
    are_default: bool = True
    parts: Sequence[str] = ()

    @classmethod
    def of(
        cls, parser: argparse.ArgumentParser, chosen: argparse.Namespace, *, part_option: str = ""
    ) -> Options:
        """What was chosen, compared with the parser's defaults.

        Args:
            parser: of the benchmark.
            chosen: by it.
            part_option: the one that chooses parts; "": it has none.
        """
        given, usual = vars(chosen), vars(parser.parse_args([]))
        is_part = part_option and given == {**usual, part_option: given[part_option]}
        return cls(given, given == usual, tuple(given[part_option] or ()) if is_part else ())


def store(name: str, result: dict[str, Any], lacks: str) -> None:
    """Write a result: as the record, or aside if it ``lacks`` something, which is said."""
    path = HERE / "results" / (f"{name}.json.tmp" if lacks else f"{name}.json")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    if lacks:
        print(f"not recorded: {lacks}; the result is in {path.relative_to(HERE.parent)}")


def joined(name: str, part: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The record with the rows of a part in the place of its former ones; and why it cannot be.

    Args:
        name: of the record.
        part: result of the run, with its rows alone.
    """
    stamp = {"finished_unix_s": part["finished_unix_s"], "foreign_cores": part["foreign_cores"][-1]}
    rows = {row["key"]: {**row, **stamp} for row in part["rows"]}
    path = HERE / "results" / f"{name}.json"
    former = json.loads(path.read_text()) if path.exists() else {"rows": [], "raw": {}, "peers": {}}
    here = {key: part["machine"][key] for key in SAME_MACHINE}
    if former["rows"] and {key: former["machine"][key] for key in SAME_MACHINE} != here:
        return part, "the other rows were measured on another machine"
    for row in former["rows"]:
        then = {"finished_unix_s": former.get("finished_unix_s"), "foreign_cores": None}
        rows.setdefault(row["key"], {**then, **row})
    ordered = [rows[key] for key in targets(name) if key in rows]
    merged = {key: {**former[key], **part[key]} for key in ("raw", "peers")}
    usual = {key: value for key, value in part["options"].items() if not isinstance(value, list)}
    return {**part, **merged, "rows": ordered, "options": usual}, ""


def run(
    name: str,
    measure: Callable[[], Sample],
    most_runs: int = MOST_RUNS,
    options: Options | None = None,
    *,
    is_timed: bool = True,
    parts: Mapping[str, Sequence[str]] | None = None,
) -> int:
    """Measure, print, write the JSON; returns 0 when every goal was met.

    Args:
        name: of the record.
        measure: one whole run.
        most_runs: how often, until it is quiet.
        options: how it was asked for.
        is_timed: whether what others do on the machine changes the values.
        parts: goals of each part that can be run alone.
    """
    options = options or Options()
    wanted = {key for part in options.parts for key in (parts or {})[part]}
    best: Sample | None = None
    attempts = []
    for attempt in range(1, most_runs + 1):
        with ForeignCpu() as foreign:
            sample = measure()
        sample.foreign_cores = foreign.cores
        attempts.append(foreign.cores)
        if best is None or sample.foreign_cores < best.foreign_cores:
            best = sample
        if foreign.cores <= NOISY_CORES or not is_timed:
            break
        print(
            f"noisy: other processes used {foreign.cores:.2f} core in run {attempt} of {most_runs}",
            flush=True,
        )
    assert best is not None  # MOST_RUNS is at least 1
    rows = [row for row in rows_for(name, best.values) if not wanted or row["key"] in wanted]
    is_noisy = is_timed and best.foreign_cores > NOISY_CORES
    missing = [row["key"] for row in rows if row["value"] is None]
    lacks = ", ".join(
        text
        for text, applies in (
            ("it has options of its own", not options.are_default and not wanted),
            (best.lacks, bool(best.lacks)),
            (f"not measured: {', '.join(missing)}", bool(missing)),
            (f"other processes used {best.foreign_cores:.2f} core", is_noisy),
        )
        if applies
    )
    result = {
        "benchmark": name,
        "options": dict(options.given),
        "rows": rows,
        "noisy": is_noisy,
        "foreign_cores": attempts,
        "machine": machine_facts(),
        "peers": best.peers,
        "raw": best.raw,
        "finished_unix_s": int(time.time()),
    }
    print(table(rows))
    counted = [row["met"] for row in rows if row["met"] is not None]
    print(f"goals met: {sum(counted)} of {len(counted)}")
    if wanted and not lacks:
        result, lacks = joined(name, result)
    store(name, result, lacks)
    return 0 if all(counted) and not best.lacks else 1


def main(
    name: str,
    measure: Callable[[], Sample],
    most_runs: int = MOST_RUNS,
    options: Options | None = None,
    *,
    is_timed: bool = True,
    parts: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Entry point of a benchmark module; without ``options`` it has none, and refuses what is given."""
    if options is None:
        about = (sys.modules["__main__"].__doc__ or name).partition("\n\n")[0]
        argparse.ArgumentParser(prog=f"benchmarks.{name}", description=about).parse_args()
    assert threading.current_thread() is threading.main_thread()
    sys.exit(run(name, measure, most_runs, options, is_timed=is_timed, parts=parts))
