"""One variant, one size, in a fresh process: prints one JSON object.

Usage: python -m benchmarks.polling.child VARIANT N SECONDS SPEC SWARM CLOOP [STALLED]. The measured process
is pinned to CPU 0, unless it is a ``*-free`` one, and the swarm to the last CPU. CPU time is that of the
measured rounds, of all threads.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.polling import ours, payload
from benchmarks.polling.peers import (
    BARE,
    FREE,
    LEAN,
    PEERS,
    WARM_ROUNDS,
    BareWork,
    End,
    LeanWork,
    Timed,
    Works,
)
from pmdaemon.runtime import logs

LEAST_ROUNDS = 4
UNPACED = (
    b"reno"  # bbr, some machines' default, spreads small answers by timers: its pauses would be measured
)


class Meter:
    """Decides how many rounds to make, and reads the CPU clock where the measured part begins."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._begun_s = 0.0
        self._usage: Any = None
        self.threads = 0

    def go_on(self, times: Timed) -> bool:
        """Whether another round is wanted; at the end of the warm-up, forget its times."""
        if self._usage is None:
            if len(times) < WARM_ROUNDS:
                return True
            times.clear()
            self.threads = threading.active_count()
            self._begun_s, self._usage = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
            return True
        if len(times) < LEAST_ROUNDS or time.monotonic() - self._begun_s < self._seconds:
            return True
        self._end = resource.getrusage(resource.RUSAGE_SELF)
        self._wall_s = time.monotonic() - self._begun_s
        return False

    def result(self, times: Timed) -> dict[str, Any]:
        """What the C loop prints as well."""
        start, end = self._usage, self._end
        return {
            "cpu_s": end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime,
            "wall_s": self._wall_s,
            "switches": end.ru_nvcsw + end.ru_nivcsw - start.ru_nvcsw - start.ru_nivcsw,
            "rss_kb": end.ru_maxrss,
            "threads": self.threads,
            "round_s": times,
        }


def _works(variant: str, sockets: list[socket.socket]) -> tuple[list[socket.socket], Works, End]:
    """(sockets, work of each, what ends a round)."""
    sink: list[bytes] = []
    if variant.endswith(BARE):
        size = payload.answer_bytes()
        return sockets, [BareWork(payload.request(), size) for _ in sockets], sink.clear
    if not variant.endswith(LEAN):
        return ours.product_works(sockets)
    return sockets, [LeanWork(payload.request(), sink) for _ in sockets], sink.clear


def _c_loop(program: str, count: int, seconds: float, listener: socket.socket) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile() as request:
        request.write(payload.request())
        request.flush()
        fd = listener.fileno()
        command = [program, str(count), str(seconds), str(LEAST_ROUNDS), request.name, str(fd)]
        done = subprocess.run(command, pass_fds=(fd,), capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result | {"threads": 1}


def run(
    variant: str, count: int, seconds: float, swarm: list[str], cloop: str, stalled: int
) -> dict[str, Any]:
    """Start the swarm, serve it, measure."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, UNPACED)
    program, spec = swarm
    port = str(listener.getsockname()[1])
    gateways = subprocess.Popen(
        [program, "poll", port, str(count), spec, str(stalled)], stdout=subprocess.DEVNULL
    )
    if (cpus := os.cpu_count() or 1) > 1:
        os.sched_setaffinity(gateways.pid, {cpus - 1})
        if not variant.endswith(FREE):
            os.sched_setaffinity(0, {0})
    variant = variant.removesuffix(FREE)
    try:
        if variant == "c":
            return _c_loop(cloop, count, seconds, listener) | {"n": count}
        sockets = ours.accept_all(listener, count)
        for sock in sockets:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        meter = Meter(seconds)
        if variant == ours.STALLED:
            times = ours.stalled_pair(sockets, stalled, meter.go_on)
        elif variant in ours.FORMS:
            times = ours.FORMS[variant](sockets, stalled, meter.go_on)
        else:
            name = variant.removesuffix(LEAN).removesuffix(BARE)
            times = PEERS[name](*_works(variant, sockets), meter.go_on)
        return meter.result(times) | {"n": count, "t_ptmax_us": list(ours.T_PTMAX)}
    finally:
        gateways.kill()
        gateways.wait()
        listener.close()


def main() -> None:
    """See the module."""
    variant, count, seconds, spec, swarm, cloop = sys.argv[1:7]
    stalled = int(sys.argv[7]) if len(sys.argv) > 7 else 0
    os.environ["SLA_LOG_LEVEL"] = "error"
    logs.configure("bench-poll")
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    result = run(variant, int(count), float(seconds), [swarm, spec], cloop, stalled)
    polls = (int(count) - stalled) * len(result["round_s"])
    print(json.dumps(result | {"variant": variant, "cpu_us": result["cpu_s"] * 1e6 / polls}))


if __name__ == "__main__":
    Path(sys.argv[4]).stat()  # fail early and clearly without the SPEC file
    main()
