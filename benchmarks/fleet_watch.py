"""What ``benchmarks.fleet`` watches: CPU and memory of every process, the daemon's figures, the simulator.

CPU is read from /proc as time used, not sampled as a share. Memory is RSS and PSS (shared pages, the
mailboxes above all, are split between those who have them mapped).
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

_PARTS: Final = (
    (re.compile(r"sla_server\.process (\w+)"), r"\1"),
    (re.compile(r"pmdaemon pair --index (\d+)"), r"pair-\1"),
    (re.compile(r"pmdaemon run"), "pmdaemon"),
    (re.compile(r"pmdaemon\.runtime\.template (\d+ )?pmdaemon\.cli\s*$"), "pairs-template"),
    (re.compile(r"pmdaemon\.runtime\.template"), "template"),
    (re.compile(r"sla_server start"), "supervisor"),
)


@dataclass(frozen=True)
class Usage:
    """One process, or PostgreSQL's all together: CPU seconds so far, memory in bytes now."""

    cpu_s: float
    rss_bytes: int
    pss_bytes: int


def cpu_s(pid: int, *, dead_children: bool) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    last = 15 if dead_children else 13
    return sum(int(value) for value in fields[11:last]) / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> tuple[int, int]:
    """RSS and PSS in bytes; what was swapped out counts as if it were there."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines[1:]}
    swapped = sizes.get("SwapPss", 0)
    return sizes.get("Rss", 0) + swapped, sizes.get("Pss", 0) + swapped


def _name_of(process: psutil.Process) -> str | None:
    line = " ".join(process.cmdline())
    for pattern, name in _PARTS:
        if found := pattern.search(line):
            return found.expand(name)
    return None


def part(server_pid: int, name: str) -> psutil.Process:
    """One of the server's processes."""
    processes = psutil.Process(server_pid).children(recursive=True)  # parts are children of the template
    return next(child for child in processes if _name_of(child) == name)


def family(server_pid: int) -> dict[str, int]:
    """All processes of a server: name to process id. One that we do not know has its id as its name."""
    server = psutil.Process(server_pid)
    return {_name_of(p) or f"process {p.pid}": p.pid for p in (server, *server.children(recursive=True))}


def usage(server_pid: int, postgres_pid: int, simulator_pid: int) -> dict[str, Usage]:
    """Every process of the run by name, in the order of a cut's way."""
    found: dict[str, Usage] = {"simulator": _one(simulator_pid)}
    pids = family(server_pid)
    order = ("pmdaemon", *sorted(n for n in pids if n.startswith("pair-")), "services", "dbmanager")
    for name in (*order, "appserver", "supervisor"):
        found[name] = _one(pids[name])
    found["postgresql"] = _all(postgres_pid)
    return found


def _one(pid: int) -> Usage:
    return Usage(cpu_s(pid, dead_children=False), *memory(pid))


def _all(pid: int) -> Usage:
    """A process and its children, ended ones too. One may end while we look."""
    spent_s, rss, pss = cpu_s(pid, dead_children=True), *memory(pid)
    for child in psutil.Process(pid).children(recursive=True):
        try:
            used = memory(child.pid)
            spent_s += cpu_s(child.pid, dead_children=True)
        except (OSError, ProcessLookupError):
            continue
        rss, pss = rss + used[0], pss + used[1]
    return Usage(spent_s, rss, pss)


def daemon_figures(path: Path) -> dict[str, float]:
    """The PMDaemon's figures by short name, summed over its pairs; empty before it wrote any."""
    found: dict[str, float] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            short = name.split("{")[0].removeprefix("sla_pmdaemon_")
            found[short] = found.get(short, 0.0) + float(value)
    return found


def require_open_files(gateways: int) -> None:
    """Raise the limit of open files to its hard limit, for everything started from here.

    Raises:
        SystemExit: the hard limit is too low for the simulator and the PMDaemon; says what to do.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < gateways + 100:
        raise SystemExit(
            f"bench-fleet: the hard limit of open files is {hard}, {gateways} gateways need "
            f"{gateways + 100}. Raise it (ulimit -Hn, limits.conf) or give --gateways"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Simulator:
    """The swarm's process."""

    def __init__(self, program: Path, port: int, spec: Path, interval_us: int, log: Path) -> None:
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(program), str(port), str(spec), str(interval_us)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
            )
        self._log = log

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def ask(self, command: str = "look") -> dict[str, Any]:
        """Its counts; ``mark`` forgets the lags measured so far, ``freeze`` ends the making of cuts.

        Raises:
            RuntimeError: it has ended, which it says in its log.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(command.encode() + b"\n")
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise RuntimeError(f"the simulator has ended: {self._log.read_text().strip()}")
        return dict(json.loads(line))

    def stop(self) -> None:
        """End of its standard input: it stops."""
        self._process.communicate()


def rows(
    before: dict[str, Usage], after: dict[str, Usage], elapsed_s: float
) -> Iterator[tuple[str, float, float, float]]:
    """(process, cores, RSS in MB, PSS in MB)."""
    for name, used in after.items():
        cores = (used.cpu_s - before[name].cpu_s) / elapsed_s
        yield name, cores, used.rss_bytes / 1e6, used.pss_bytes / 1e6
