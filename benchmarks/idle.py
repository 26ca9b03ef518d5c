"""``make bench-idle``: the memory of a server that has nothing to do, in all its processes together.

The server is the product with its built-in configuration: SQLite, no agents, nobody at the page. It is
started a second time, as a server in use is: the first start has made its schema. It runs for ``--settle``
seconds, in which the parts make their first rounds (retention, figures, the page's snapshots), then the
memory of each process is read ``--samples`` times. It is PSS, what the kernel charges a process when pages
that several have mapped are divided between them: libraries and mailbox segments count once. Pages that were
swapped out count, too. The median of the sums is held against the goal.

Two more figures are measured without a goal: the sum after the page and the API were used once (what is
imported only then stays), and the CPU of all processes while idle.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import httpx

from benchmarks import fleet_watch, harness

START_LIMIT_S: Final = 300.0
SAMPLE_S: Final = 1.0
USED: Final = (
    "/api/v1/live",
    "/api/v1/health",
    "/api/v1/slas",
    "/api/v1/volumes",
    "/api/v1/events",
    "/metrics",
)
"""What a browser and a Prometheus ask for first."""


def _server(folder: Path, *arguments: str) -> str:
    """``sla-server arguments``: what it prints."""
    command = [sys.executable, "-m", "sla_server", *arguments, "--config", str(folder / "server.toml")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=START_LIMIT_S)
    return done.stdout


def _start(folder: Path) -> int:
    """Start a server in the folder; its supervisor's process id.

    Raises:
        RuntimeError: it is not ready in time.
    """
    (folder / "server.toml").write_text(
        f'data_dir = "{folder}/data"\nruntime_dir = "{folder}/run"\n'
        '[pmdaemon]\nlisten = "127.0.0.1:0"\n[api]\nlisten = "127.0.0.1:0"\n'
    )
    _server(folder, "start", "--background")
    until_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < until_s:  # a busy machine: the command gives up before the server does
        if said := _server(folder, "status", "-o", "json"):
            status = json.loads(said)
            if status["is_well"]:
                return int(status["pid"])
        time.sleep(SAMPLE_S)
    raise RuntimeError(f"the server is not ready; {folder}/data/server.log says more")


def _memory(pid: int) -> dict[str, int]:
    return {name: fleet_watch.memory(each)[1] for name, each in fleet_watch.family(pid).items()}


def _cpu_s(pid: int) -> float:
    return sum(fleet_watch.cpu_s(each, dead_children=True) for each in fleet_watch.family(pid).values())


def _use(folder: Path) -> int:
    """Ask for what a first visitor sees; how many answers were good."""
    port = (folder / "run" / "api.port").read_text().strip()
    token = (folder / "data" / "api.token").read_text().strip()
    good = 0
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        for path in USED:
            answer = client.get(path, headers={"Authorization": f"Bearer {token}"})
            good += answer.is_success
    return good


def measure(settle_s: float, samples: int) -> harness.Sample:
    """One server from its start to its stop."""
    with tempfile.TemporaryDirectory(prefix="sla-bench-idle-") as name:
        folder = Path(name)
        _start(folder)
        _server(folder, "stop")
        pid = _start(folder)
        try:
            time.sleep(settle_s)
            cpu_s, begun_s, found = _cpu_s(pid), time.monotonic(), []
            for _ in range(samples):
                found.append(_memory(pid))
                time.sleep(SAMPLE_S)
            cores = (_cpu_s(pid) - cpu_s) / (time.monotonic() - begun_s)
            good = _use(folder)
            used = _memory(pid)
        finally:
            _server(folder, "stop")
    typical = sorted(found, key=lambda sample: sum(sample.values()))[len(found) // 2]
    print(f"{'process':<14}{'idle MB':>9}{'used MB':>9}")
    for process, size in typical.items():
        print(f"{process:<14}{size / 1e6:>9.1f}{used.get(process, 0) / 1e6:>9.1f}")
    values = {
        "idle_mb": statistics.median(sum(sample.values()) for sample in found) / 1e6,
        "used_mb": sum(used.values()) / 1e6,
        "idle_cores": cores,
    }
    raw = {
        "idle_mb": {process: round(size / 1e6, 1) for process, size in typical.items()},
        "used_mb": {process: round(size / 1e6, 1) for process, size in used.items()},
        "samples_mb": [round(sum(sample.values()) / 1e6, 1) for sample in found],
        "asked": f"{good} of {len(USED)}",
    }
    return harness.Sample(values, raw)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="The memory of an idle server.")
    parser.add_argument("--settle", type=float, default=30.0)
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--runs", type=int, default=harness.MOST_RUNS)
    given = parser.parse_args()
    options = harness.Options.of(parser, given)
    harness.main("idle", lambda: measure(given.settle, given.samples), given.runs, options)


if __name__ == "__main__":
    os.environ["SLA_LOG_LEVEL"] = "error"
    main()
