"""``make bench-gateway``: the NBD data plane against nbdkit, in one run, variants interleaved, medians of 5.

fio on CPU 1, the measured server on CPU 0 (with one CPU: unpinned). Peers: nbdkit serving the same file
directly, and nbdkit's own ``nbd`` plugin as a proxy before it. File on tmpfs; 4 KiB random reads; 2 s a cell.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import harness
from tests.support.stage import Agent, Stage

SECONDS = 2
ROUNDS = 5
SIZE_MIB = 256
PIN = (os.cpu_count() or 1) > 1


def _on_cpu(cpu: int, pid: int) -> None:
    if PIN:
        os.sched_setaffinity(pid, {cpu})


def _nbdkit(sockets: Path, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        ["nbdkit", "--foreground", "--unix", str(sockets / f"{name}.sock"), *arguments]
    )
    _on_cpu(0, process.pid)
    return process


def _fio(uri: str, depth: int) -> tuple[float, int]:
    """(IOPS, operations) of one cell."""
    options = (
        f"--name=j --ioengine=nbd --uri={uri} --rw=randread --bs=4k --iodepth={depth} --time_based "
        f"--runtime={SECONDS} --norandommap --thread --output-format=json"
    )
    command = ["fio", *options.split()]
    if PIN:
        command = ["taskset", "-c", "1", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    read = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]
    return float(read["iops"]), int(read["total_ios"])


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _cells(stage: Stage, agent: Agent, plane_pid: int) -> dict[str, Callable[[], dict[str, float]]]:
    sockets, gateway = stage.sockets, agent.socket(stage)

    def plain(name: str, socket: Path, export: str, depth: int) -> Callable[[], dict[str, float]]:
        return lambda: {name: _fio(f"nbd+unix:///{export}?socket={socket}", depth)[0]}

    def deep() -> dict[str, float]:
        before_s = _cpu_s(plane_pid)
        iops, operations = _fio(f"nbd+unix:///proxied?socket={gateway}", 64)
        return {"proxy_qd64": iops, "proxy_cpu_us": (_cpu_s(plane_pid) - before_s) * 1e6 / operations}

    return {
        "direct_qd16": plain("direct_qd16", sockets / "file.sock", "", 16),
        "proxy_qd16": plain("proxy_qd16", gateway, "proxied", 16),
        "nbdkit_proxy_qd16": plain("nbdkit_proxy_qd16", sockets / "proxy.sock", "", 16),
        "file_qd16": plain("file_qd16", gateway, "local", 16),
        "proxy_qd64": deep,
    }


def measure() -> harness.Sample:
    """One whole run."""
    folder = Path(
        tempfile.mkdtemp(prefix="sla-bench-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    )
    started: list[subprocess.Popen[bytes]] = []
    rows: dict[str, list[float]] = {}
    try:
        image = folder / "image"
        image.write_bytes(os.urandom(1 << 20) * SIZE_MIB)
        with Stage(folder / "stage") as stage:
            started.append(_nbdkit(stage.sockets, "file", "file", str(image)))
            stage.wait((stage.sockets / "file.sock").exists, "nbdkit")
            started.append(_nbdkit(stage.sockets, "proxy", "nbd", f"socket={stage.sockets}/file.sock"))
            stage.wait((stage.sockets / "proxy.sock").exists, "nbdkit's proxy")
            uri = f"nbd+unix:///?socket={stage.sockets}/file.sock"
            agent = Agent("bench", {"proxied": uri, "local": str(image)})
            stage.start_agent(agent)
            plane_pid = stage.pids("gateway_agent.nbd.plane")[0]
            _on_cpu(0, plane_pid)
            for _ in range(ROUNDS):
                for cell in _cells(stage, agent, plane_pid).values():
                    for name, value in cell().items():
                        rows.setdefault(name, []).append(value)
    finally:
        for process in started:
            process.terminate()
            process.wait(10)
        shutil.rmtree(folder, ignore_errors=True)
    return harness.Sample(_ratios(rows), raw={"samples": rows}, peers=_peers())


def _ratios(rows: dict[str, list[float]]) -> dict[str, float]:
    """Medians of the ratios within each round, which cancels the machine's mood."""

    def ratio(above: str, below: str) -> float:
        return statistics.median(a / b for a, b in zip(rows[above], rows[below], strict=True))

    return {
        "proxy_qd16_vs_direct": ratio("proxy_qd16", "direct_qd16"),
        "proxy_qd16_vs_nbdkit_proxy": ratio("proxy_qd16", "nbdkit_proxy_qd16"),
        "file_qd16_vs_nbdkit_file": ratio("file_qd16", "direct_qd16"),
        "proxy_cpu_us_per_op": statistics.median(rows["proxy_cpu_us"]),
    }


def _peers() -> dict[str, Any]:
    return {"nbdkit": harness.version_of("nbdkit"), "fio": harness.version_of("fio")}


if __name__ == "__main__":
    harness.main("gateway", measure)
