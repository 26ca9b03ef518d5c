"""Debian's Prometheus as a peer: CPU per scrape of the equal information, one configuration, one run.

200 targets (one loopback address each, all answered by the C swarm), interval and timeout 1 s, CPU from /proc
over 15 s after 8 s of warm-up. Its data directory is temporary; the process is ended by us.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from benchmarks.polling import payload

TARGETS = 200
WARM_S = 8
SECONDS = 15


def is_installed() -> bool:
    """Whether the program is there."""
    return shutil.which("prometheus") is not None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _config(folder: Path, port: int) -> Path:
    targets = ", ".join(f"'127.1.{index // 250}.{index % 250 + 1}:{port}'" for index in range(TARGETS))
    path = folder / "prometheus.yml"
    path.write_text(
        "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
        f"scrape_configs: [{{job_name: gateways, static_configs: [{{targets: [{targets}]}}]}}]\n"
    )
    return path


def cpu_us_per_scrape(folder: Path) -> float:
    """CPU time of the whole process by scrapes due in the window."""
    body, port, own = folder / "metrics.txt", _free_port(), _free_port()
    body.write_text(payload.exporter_text())
    swarm = subprocess.Popen([str(folder / "swarm"), "http", str(port), str(body)], stdout=subprocess.DEVNULL)
    command = [
        "prometheus",
        f"--config.file={_config(folder, port)}",
        f"--web.listen-address=127.0.0.1:{own}",
    ]
    command += [f"--storage.tsdb.path={folder / 'tsdb'}", "--log.level=error"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(WARM_S)
        begun_s, begun_cpu_s = time.monotonic(), _cpu_s(server.pid)
        time.sleep(SECONDS)
        spent_s, used_s = time.monotonic() - begun_s, _cpu_s(server.pid) - begun_cpu_s
    finally:
        for process in (server, swarm):
            process.kill()
            process.wait()
    return used_s * 1e6 / (TARGETS * spent_s)
