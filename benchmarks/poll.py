"""``make bench-poll``: polling N gateways, our pair against other ways (P18), CPU us per poll as the figure.

Every cell is a fresh process on CPU 0 against a swarm of simulated gateways in C on the last CPU; all send
and receive the same bytes, a real cut of 16 streams. Variants are interleaved within each repetition; a
ratio is the median of the ratios within the repetitions. A round asks all and ends with the last reply.

    c             a C epoll loop: the floor              threads    a blocking thread a gateway
    pair          the product's pair, in-memory sink     blocking   one blocking thread
    pair-mailbox  the same, real mailbox and DURABLE     streams    asyncio streams
    unified       P15, in-memory sink                    protocol   asyncio Protocol
    *-lean        decode and keep, no bookkeeping        buffered   asyncio BufferedProtocol
    *-bare        nothing is done with an answer         uvloop     the same on uvloop
    *-free        not bound to one CPU                   loop       one epoll loop, in Python

All but the floor, ``*-lean`` and ``*-bare`` do the product's own work for each poll: positions,
acknowledgement, session table, clock offset, batches for the mailbox; only the way of input and output
differs. ``*-bare`` shows what the ways differ by when there is nothing else.

Loopback runs the receiver's kernel work in the sender's time, for all alike. Prometheus scrapes the same
information as text, 200 targets a second for 15 s; it also indexes and stores, so compare with care.
Options: ``--sizes 50,1000``, ``--repeats 5``, ``--seconds 1``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.polling import ours, payload, prometheus
from benchmarks.polling.peers import BARE, FREE, LEAN, PEERS

HERE = Path(__file__).parent / "polling"
STALL_SIZE = 1000
BARE_SIZE = 1000
STALLED = f"{ours.STALLED}/{STALL_SIZE}"
STALL_SECONDS = 4.0  # a p99 needs many rounds: some 100 with the stalled gateway, as many without
CELL_S = 120
SIZES_AT = 50
STREAM_COUNTS = (1, 16, 256, 1600)  # 1600 streams with histograms are 0.9 MB, nearly the largest frame
Cells = dict[str, list[dict[str, Any]]]


def compile_programs(folder: Path) -> dict[str, str]:
    """The two C programs; without a compiler there is no benchmark.

    Raises:
        SystemExit: no compiler; says what to install.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("bench-poll: no C compiler; install one (apt-get install gcc libc6-dev)")
    for name in ("swarm", "cloop"):
        subprocess.run([compiler, "-O2", "-o", str(folder / name), str(HERE / f"{name}.c")], check=True)
    return {name: str(folder / name) for name in ("swarm", "cloop")}


def variants() -> list[str]:
    """All that can run here with every size; ``*-bare`` ones with ``BARE_SIZE`` alone."""
    names = ["c", *ours.FORMS, *PEERS, *(f"{name}{LEAN}" for name in ("threads", "protocol", "uvloop"))]
    names += [f"pair{FREE}", f"threads{FREE}", *(f"{name}{BARE}" for name in ("loop", "protocol", "uvloop"))]
    try:
        import uvloop  # noqa: F401  # only asked for
    except ImportError:
        print("uvloop is not installed: left out (pip install the extra 'bench')", flush=True)
        names = [name for name in names if not name.startswith("uvloop")]
    return names


def cell(
    folder: Path,
    programs: dict[str, str],
    variant: str,
    count: int,
    seconds: float,
    stalled: int = 0,
    streams: int = payload.STREAMS,
) -> dict[str, Any]:
    """One fresh process; its JSON."""
    registers = variant != "c" and not variant.endswith((LEAN, BARE))
    spec = folder / f"spec-{count}-{registers}-{streams}"
    if not spec.exists():
        payload.write_spec(spec, count, registers=registers, streams=streams)
    command = [sys.executable, "-m", "benchmarks.polling.child", variant, str(count), str(seconds)]
    command += [str(spec), programs["swarm"], programs["cloop"], str(stalled)]
    # A group of its own: what the cell started must not go on beside the next one if it has to be killed.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            printed, _ = process.communicate(timeout=CELL_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return result


def collect(folder: Path, sizes: list[int], repeats: int, seconds: float) -> Cells:
    """Every cell, keyed "variant/n"; in each repetition every variant once."""
    programs = compile_programs(folder)
    names = variants()
    cells: Cells = {}
    for count in sizes:
        for repeat in range(repeats):
            chosen = [
                (f"{variant}/{count}", variant, 0)
                for variant in names
                if count == BARE_SIZE or not variant.endswith(BARE)
            ]
            if count == STALL_SIZE:
                chosen.append((STALLED, ours.STALLED, 1))
            for name, variant, stalled in chosen if repeat % 2 == 0 else chosen[::-1]:
                try:
                    measured_s = STALL_SECONDS if stalled else seconds
                    result = cell(folder, programs, variant, count, measured_s, stalled)
                except subprocess.SubprocessError as exc:
                    print(f"{name} failed and is left out of repetition {repeat + 1}: {exc}", flush=True)
                    continue
                cells.setdefault(name, []).append(result | {"repeat": repeat})
        print(f"{count} gateways done", flush=True)
    return cells


def reply_sizes(folder: Path, repeats: int, seconds: float) -> list[dict[str, Any]]:
    """P11: processing time of a message against the size of the reply, up to the largest cut allowed."""
    programs = {name: str(folder / name) for name in ("swarm", "cloop")}
    runs: dict[int, list[dict[str, Any]]] = {}
    for _ in range(repeats):
        for streams in STREAM_COUNTS:
            runs.setdefault(streams, []).append(
                cell(folder, programs, "pair", SIZES_AT, seconds, streams=streams)
            )
    return [
        {
            "streams": streams,
            "reply_bytes": len(payload.cut_template(streams)),
            "cpu_us": round(_median(cells, "cpu_us"), 1),
            "message_us": round(statistics.median(run["t_ptmax_us"][0] for run in cells), 1),
        }
        for streams, cells in runs.items()
    ]


def percentile(values: list[float], ratio: float) -> float:
    """The value at ``ratio`` of the sorted values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * ratio))]


def _ratio(cells: Cells, above: str, below: str) -> float | None:
    if above not in cells or below not in cells:
        return None
    others = {run["repeat"]: run for run in cells[below]}
    ratios = [
        run["cpu_us"] / others[run["repeat"]]["cpu_us"] for run in cells[above] if run["repeat"] in others
    ]
    return statistics.median(ratios) if ratios else None


def _rounds_ms(runs: list[dict[str, Any]], ratio: float) -> float:
    return statistics.median(percentile(run["round_s"], ratio) for run in runs) * 1000


def goals(cells: Cells, scrape_us: float | None) -> dict[str, float]:
    """The values of targets.toml that this run can tell."""
    wanted = {
        "c_memory": ("pair/1000", "c/1000"),
        "c_mailbox": ("pair-mailbox/1000", "c/1000"),
        "threads_200": ("threads/200", "pair/200"),
        "threads_1000": ("threads/1000", "pair/1000"),
        "threads_4000": ("threads/4000", "pair/4000"),
        "protocol_1000": ("protocol/1000", "pair/1000"),
        "uvloop_1000": ("uvloop/1000", "pair/1000"),
        "threads_lean_200": ("threads-lean/200", "pair/200"),
        "threads_lean_1000": ("threads-lean/1000", "pair/1000"),
        "threads_lean_4000": ("threads-lean/4000", "pair/4000"),
        "protocol_lean_1000": ("protocol-lean/1000", "pair/1000"),
        "uvloop_lean_1000": ("uvloop-lean/1000", "pair/1000"),
        "protocol_bare_1000": ("protocol-bare/1000", "loop-bare/1000"),
        "uvloop_bare_1000": ("uvloop-bare/1000", "loop-bare/1000"),
        "threads_c_4000": ("threads/4000", "c/4000"),
    }
    values = {key: _ratio(cells, *names) for key, names in wanted.items()}
    if scrape_us is not None and "pair-mailbox/200" in cells:
        values["prometheus"] = scrape_us / _median(cells["pair-mailbox/200"], "cpu_us")
    if "pair/1000" in cells:
        rounds = cells["pair/1000"]
        values["round_p99_to_p50"] = _rounds_ms(rounds, 0.99) / _rounds_ms(rounds, 0.5)
    if STALLED in cells:
        beside = [time_s for run in cells[STALLED] for time_s in run["round_s"][::2]]
        without = [time_s for run in cells[STALLED] for time_s in run["round_s"][1::2]]
        values["stalled_p99"] = percentile(beside, 0.99) / percentile(without, 0.99)
    return {key: value for key, value in values.items() if value is not None}


def _median(runs: list[dict[str, Any]], key: str) -> float:
    return float(statistics.median(run[key] for run in runs))


def summary(cells: Cells) -> list[dict[str, Any]]:
    """One row a cell: what the table of P18 asks for."""
    rows = []
    for name, runs in cells.items():
        polls = [run["n"] * len(run["round_s"]) for run in runs]
        switches = [run["switches"] / count for run, count in zip(runs, polls, strict=True)]
        rows.append(
            {
                "cell": name,
                "cpu_us": round(_median(runs, "cpu_us"), 2),
                "polls_per_s": round(
                    statistics.median(count / run["wall_s"] for run, count in zip(runs, polls, strict=True))
                ),
                "round_p50_ms": round(_rounds_ms(runs, 0.5), 2),
                "round_p99_ms": round(_rounds_ms(runs, 0.99), 2),
                "threads": runs[0]["threads"],
                "switches_per_poll": round(statistics.median(switches), 3),
                "rss_mb": round(_median(runs, "rss_kb") / 1024, 1),
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """The table on the terminal."""
    print(
        f"{'cell':<19}{'CPU us':>8}{'polls/s':>9}{'p50 ms':>9}{'p99 ms':>9}{'thr':>6}{'sw/poll':>9}{'MB':>7}"
    )
    for row in rows:
        print(
            f"{row['cell']:<19}{row['cpu_us']:>8.1f}{row['polls_per_s']:>9}{row['round_p50_ms']:>9.1f}"
            f"{row['round_p99_ms']:>9.1f}{row['threads']:>6}{row['switches_per_poll']:>9.2f}{row['rss_mb']:>7.0f}"
        )


def measure(sizes: list[int], repeats: int, seconds: float) -> harness.Sample:
    """One whole run."""
    with tempfile.TemporaryDirectory(prefix="sla-bench-poll-") as name:
        folder = Path(name)
        cells = collect(folder, sizes, repeats, seconds)
        by_size = reply_sizes(folder, repeats, seconds)
        scrape_us = prometheus.cpu_us_per_scrape(folder) if prometheus.is_installed() else None
    rows = summary(cells)
    show(rows)
    for row in by_size:
        print("reply of {reply_bytes} bytes: {message_us} us CPU a message, {cpu_us} a poll".format(**row))
    if scrape_us is not None:
        print(f"prometheus: {scrape_us:.0f} us CPU a scrape of {payload.STREAMS} streams")
    peers = {"prometheus": harness.version_of("prometheus"), "cc": harness.version_of("cc")}
    raw = {
        "by_size": by_size,
        "cells": rows,
        "prometheus_cpu_us": scrape_us,
        "repeats": repeats,
        "seconds": seconds,
    }
    return harness.Sample(goals(cells, scrape_us), raw=raw, peers=peers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Polling N gateways, our pair against other ways.")
    parser.add_argument("--sizes", default="50,200,1000,4000")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument(
        "--runs", type=int, default=harness.MOST_RUNS, help="at most, while others use the CPU"
    )
    given = parser.parse_args()
    numbers = [int(size) for size in given.sizes.split(",")]
    os.environ.setdefault("PYTHONHASHSEED", "0")
    options = harness.Options.of(parser, given)
    harness.main("poll", lambda: measure(numbers, given.repeats, given.seconds), given.runs, options)
