"""``make bench-nbd``: the NBD data plane against nbdkit and qemu-nbd, in one run, medians of 3 rounds.

fio on CPU 1, all servers on CPU 0 (with one CPU: unpinned). The same file on tmpfs for all; random reads of
4 KiB and sequential ones of 128 KiB, 5 s a cell; within a round the cells follow each other, and only
figures of one round are compared. The caps run at the same time, once, for 11 s of which fio leaves out the
first. Processor time is that of the plane (user and system), divided by fio's operations.

``bare`` is a plane whose completions are not counted (``nbd_bare``): it is there for one figure, what
counting and throttling cost.

As nbdkit and the gateway before it share CPU 0, the part that a proxy keeps of nbdkit's rate is bounded by
both: nbdkit's processor time of an operation, divided by that and the gateway's. With a processor of its own
the gateway serves 1 / (its processor time) operations a second.

tmpfs cannot say what is in memory (RWF_NOWAIT), so there every read of a file with workers is a worker's.
``cached`` is the same file with workers, and the same nbdkit, on the file system of ``/var/tmp``.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import harness
from tests.support.nbd_certificates import NbdAuthority
from tests.support.ports import free_port

SECONDS: Final = 5
ROUNDS: Final = 3
CAP_SECONDS: Final = 10
SIZE_MIB: Final = 256
START_LIMIT_S: Final = 30.0
PIN: Final = (os.cpu_count() or 1) > 1
CAPS: Final = {
    "cap-500": ("ops_per_s", 500.0, "--bs=4k"),
    "cap-5000": ("ops_per_s", 5000.0, "--bs=4k"),
    "cap-10m": ("bytes_per_s", 10e6, "--bs=64k"),
    "cap-100m": ("bytes_per_s", 100e6, "--bs=64k"),
}
CAP_DEPTH: Final = 16
SMALL: Final = "--rw=randread --bs=4k --norandommap"
LARGE: Final = "--rw=read --bs=128k"


@dataclass
class Bench:
    """Where everything of one run is, and which process serves what."""

    folder: Path
    disk: Path
    tls_ports: dict[str, int]
    planes: dict[str, int]

    def uri(self, server: str, export: str = "") -> str:
        """Of an export of a server, on its Unix socket."""
        return f"nbd+unix:///{export}?socket={self.folder}/{server}.sock"

    def tls_uri(self, server: str, export: str = "") -> str:
        """The same by TCP and TLS; fio gives libnbd no certificates, so it checks none."""
        return f"nbds://127.0.0.1:{self.tls_ports[server]}/{export}?tls-verify-peer=false"

    def cpu_s(self, plane: str) -> float:
        """Processor time that a plane has used."""
        fields = Path(f"/proc/{self.planes[plane]}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _agent_toml(folder: Path, disk: Path, tls_port: int, certificates: Path) -> str:
    lines = ['name = "bench"', f'state_dir = "{folder}/state"', f'runtime_dir = "{folder}/run"']

    def plane(name: str, listen: str, *more: str) -> None:
        lines.extend(["[[plane]]", f'name = "{name}"', f'listen = ["{listen}"]', *more])

    def export(on: str, volume: str, *more: str) -> None:
        table = ["[[export]]", f'plane = "{on}"', f'volume = "{volume}"', f'backend = "{on}"']
        lines.extend([*table, *more])

    upstream = f'upstream = "nbd+unix:///?socket={folder}/nbdkit.sock"'
    image = f'file = "{folder}/image"'
    plane("gateway", f"unix:{folder}/gateway.sock")
    export("gateway", "file", image)
    export("gateway", "workers", image, "workers = 4")
    export("gateway", "cached", f'file = "{disk}/image"', "workers = 4")
    export("gateway", "proxy", upstream)
    export("gateway", "proxy-capped", upstream, "cap = {ops_per_s = 1000000.0, bytes_per_s = 1e10}")
    for name, (rate, value, _) in CAPS.items():
        export("gateway", name, image, f"cap = {{{rate} = {value}}}")
    plane("bare", f"unix:{folder}/bare.sock")
    export("bare", "proxy-bare", upstream)
    security = ['tls = "require"', 'client_certificates = "none"']
    security += [f'tls_certificate = "{certificates}/server-cert.pem"']
    security += [f'tls_key = "{certificates}/server-key.pem"']
    plane("tls", f"tcp:127.0.0.1:{tls_port}", *security)
    export("tls", "file-tls", image)
    return "\n".join(lines) + "\n"


def _start(bench: Bench, stack: ExitStack) -> None:
    """All servers, each ready for clients."""
    folder = bench.folder
    image = folder / "image"
    image.write_bytes(os.urandom(1 << 20) * SIZE_MIB)
    cached = Path(shutil.copy(image, bench.disk / "image"))
    certificates = NbdAuthority(folder / "pki").issue("server", "bench", "127.0.0.1")
    (folder / "run").mkdir(mode=0o700)  # the agent's parent makes it, which does not run here
    (folder / "agent.toml").write_text(_agent_toml(folder, bench.disk, bench.tls_ports["tls"], certificates))

    def start(is_ready: Callable[[], bool], *command: str) -> int:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        stack.callback(process.wait, START_LIMIT_S)
        stack.callback(process.terminate)
        if PIN:
            os.sched_setaffinity(process.pid, {0})
        deadline_s = time.monotonic() + START_LIMIT_S
        while not is_ready():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{command[:4]} did not come up; exit status {process.poll()}")
            time.sleep(0.05)
        return process.pid

    def on(name: str) -> Callable[[], bool]:
        return (folder / f"{name}.sock").exists

    def answers(port: int) -> Callable[[], bool]:
        def is_open() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        return is_open

    start(on("nbdkit"), "nbdkit", "-f", "-U", f"{folder}/nbdkit.sock", "file", str(image))
    start(on("nbdkit-cached"), "nbdkit", "-f", "-U", f"{folder}/nbdkit-cached.sock", "file", str(cached))
    direct = f"socket={folder}/nbdkit.sock"
    start(on("nbdkit-proxy"), "nbdkit", "-f", "-U", f"{folder}/nbdkit-proxy.sock", "nbd", direct)
    qemu = ["qemu-nbd", "-t", "-e", "64", "-f", "raw", "-k", f"{folder}/qemu-proxy.sock"]
    start(on("qemu-proxy"), *qemu, f"nbd+unix:///?{direct}")
    port = bench.tls_ports["nbdkit"]
    tls = ["--tls=require", f"--tls-certificates={certificates}", "-i", "127.0.0.1", "-p", str(port)]
    start(answers(port), "nbdkit", "-f", *tls, "file", str(image))
    for plane, is_ready in (
        ("gateway", on("gateway")),
        ("bare", on("bare")),
        ("tls", answers(bench.tls_ports["tls"])),
    ):
        module = "benchmarks.nbd_bare" if plane == "bare" else "gateway_agent.nbd.plane"
        arguments = ["--config", f"{folder}/agent.toml", "--plane", plane]
        bench.planes[plane] = start(is_ready, sys.executable, "-m", module, *arguments)


def _fio_command(uri: str, pattern: str, depth: int, seconds: int, *more: str) -> list[str]:
    command = ["fio", "--name=j", "--ioengine=nbd", f"--uri={uri}", *pattern.split(), f"--iodepth={depth}"]
    command += ["--time_based", f"--runtime={seconds}", "--thread", "--output-format=json", *more]
    return ["taskset", "-c", "1", *command] if PIN else command


def _read_part(output: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output[output.index("{") :])["jobs"][0]["read"]
    return found


def _cell(uri: str, pattern: str, depth: int) -> dict[str, Any]:
    command = _fio_command(uri, pattern, depth, SECONDS)
    return _read_part(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _round(bench: Bench) -> dict[str, float]:
    """One round: I/Os a second by cell, and processor microseconds an I/O of three of them."""
    found: dict[str, float] = {}
    file, direct, proxy = bench.uri("gateway", "file"), bench.uri("nbdkit"), bench.uri("gateway", "proxy")
    for depth in (1, 16, 64):
        for name, uri in (("file", file), ("nbdkit", direct), ("proxy", proxy)):
            found[f"{name}-{depth}"] = _cell(uri, SMALL, depth)["iops"]
    for name, uri in (("file", file), ("nbdkit", direct), ("proxy", proxy)):
        found[f"{name}-128k"] = _cell(uri, LARGE, 8)["iops"]
    for depth in (16, 64):
        found[f"workers-{depth}"] = _cell(bench.uri("gateway", "workers"), SMALL, depth)["iops"]
        found[f"cached-{depth}"] = _cell(bench.uri("gateway", "cached"), SMALL, depth)["iops"]
        found[f"nbdkit-cached-{depth}"] = _cell(bench.uri("nbdkit-cached"), SMALL, depth)["iops"]
    for peer in ("nbdkit-proxy", "qemu-proxy"):
        found[f"{peer}-16"] = _cell(bench.uri(peer), SMALL, 16)["iops"]
    for name, server, export in (("file-tls", "tls", "file-tls"), ("nbdkit-tls", "nbdkit", "")):
        found[f"{name}-16"] = _cell(bench.tls_uri(server, export), SMALL, 16)["iops"]
    for plane, export in (("gateway", "proxy-capped"), ("bare", "proxy-bare")):
        before_s = bench.cpu_s(plane)
        ios = _cell(bench.uri(plane, export), SMALL, 64)["total_ios"]
        found[f"{export}-cpu-us"] = (bench.cpu_s(plane) - before_s) * 1e6 / ios
    return found


def _capped(bench: Bench) -> dict[str, dict[str, float]]:
    """Four caps at once: by volume the errors over 10 s and 1 s, and p50 against depth / cap."""
    running = {}
    for name, (_, _, size) in CAPS.items():
        log = f"--write_bw_log={bench.folder}/{name}"
        more = ["--ramp_time=1", log, "--log_avg_msec=1000"]
        uri = bench.uri("gateway", name)
        command = _fio_command(uri, f"{size} --rw=randread --norandommap", CAP_DEPTH, CAP_SECONDS, *more)
        running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    found = {}
    for name, process in running.items():
        part = _read_part(process.communicate()[0])
        rate, cap, _ = CAPS[name]
        io_bytes = 4096 if rate == "ops_per_s" else 65_536
        cap_ops = cap if rate == "ops_per_s" else cap / io_bytes
        seconds = [
            int(line.split(",")[1]) * 1024 / io_bytes
            for line in (bench.folder / f"{name}_bw.1.log").read_text().splitlines()
        ]
        # Of fio's figures: its count of I/Os (and "iops") is without those under way when the ramp ended, 16
        # of 1,526 at 10 MB/s, while its bytes and its time are of all.
        ops = part["io_bytes"] / io_bytes / (part["runtime"] / 1000)
        found[name] = {
            "error_10s": abs(ops / cap_ops - 1),
            "error_1s": max(abs(ops / cap_ops - 1) for ops in seconds),
            "p50_error": abs(part["clat_ns"]["percentile"]["50.000000"] / 1e9 / (CAP_DEPTH / cap_ops) - 1),
        }
    return found


def _values(rounds: list[dict[str, float]], capped: dict[str, dict[str, float]]) -> dict[str, float]:
    """Medians of the ratios within each round, which cancel the machine's mood."""

    def ratio(above: str, below: str) -> float:
        return statistics.median(each[above] / each[below] for each in rounds)

    counted, bare = "proxy-capped-cpu-us", "proxy-bare-cpu-us"
    return {
        "file_d1": ratio("file-1", "nbdkit-1"),
        "file_d16": ratio("file-16", "nbdkit-16"),
        "file_d64": ratio("file-64", "nbdkit-64"),
        "file_128k": ratio("file-128k", "nbdkit-128k"),
        "workers_d16": ratio("workers-16", "nbdkit-16"),
        "workers_d64": ratio("workers-64", "nbdkit-64"),
        "cached_d16": ratio("cached-16", "nbdkit-cached-16"),
        "cached_d64": ratio("cached-64", "nbdkit-cached-64"),
        "proxy_d1": ratio("proxy-1", "nbdkit-1"),
        "proxy_d16": ratio("proxy-16", "nbdkit-16"),
        "proxy_d64": ratio("proxy-64", "nbdkit-64"),
        "proxy_128k": ratio("proxy-128k", "nbdkit-128k"),
        "proxy_vs_nbdkit_proxy": ratio("proxy-16", "nbdkit-proxy-16"),
        "proxy_vs_qemu_proxy": ratio("proxy-16", "qemu-proxy-16"),
        "proxy_cpu_us": statistics.median(each[counted] for each in rounds),
        "tls_d16": ratio("file-tls-16", "nbdkit-tls-16"),
        "cap_error_10s": max(each["error_10s"] for each in capped.values()),
        "cap_error_1s": max(each["error_1s"] for each in capped.values()),
        "cap_p50_error": max(each["p50_error"] for each in capped.values()),
        "counting_share": 1 - statistics.median(each[bare] / each[counted] for each in rounds),
    }


def measure() -> harness.Sample:
    """One whole run."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="sla-bench-", dir=place))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        disk = Path(tempfile.mkdtemp(prefix="sla-bench-", dir="/var/tmp"))
        stack.callback(shutil.rmtree, disk, ignore_errors=True)
        bench = Bench(folder, disk, {"tls": free_port(), "nbdkit": free_port()}, {})
        _start(bench, stack)
        rounds = [_round(bench) for _ in range(ROUNDS)]
        capped = _capped(bench)
    peers = {name: harness.version_of(name) for name in ("nbdkit", "qemu-nbd", "fio")}
    return harness.Sample(_values(rounds, capped), raw={"rounds": rounds, "caps": capped}, peers=peers)


if __name__ == "__main__":
    harness.main("nbd", measure)
