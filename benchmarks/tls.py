"""What TLS costs: CPU of a poll and of a session's beginning, and memory, with TLS 1.3 against plain TCP.

The product's own pair with the in-memory sink (``benchmarks.polling.rig``), the real cut of 16 streams, and
one swarm program for both forms, in a process of its own on the other processor. The forms alternate; the
figure is the CPU time of the measured process by polls, medians of the repetitions.

``make bench-tls``; ``python -m benchmarks.tls --gateways 200 --repeats 3`` is shorter.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import selectors
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import harness
from benchmarks.polling import payload
from benchmarks.polling.rig import MemorySink, Rig
from pmdaemon.pki import certificates, contexts
from pmdaemon.pki.authority import Authority
from pmdaemon.runtime import logs
from pmdaemon.wire import cut, frame
from pmdaemon.wire.frame import FrameReader
from pmdaemon.wire.kinds import Kind

FORMS = ("plain", "tls")
BATCH = 50  # connections adopted at once, so that no handshake waits long for its turn
LEAST_ROUNDS = 10
WARM_ROUNDS = 3


def make_keys(folder: Path) -> None:
    """A CA, the server's certificate and one for all gateways of the swarm."""
    authority = Authority(folder / "ca")
    authority.init()
    authority.ensure_server()
    key = certificates.make_key()
    gateway_id = payload.gateway_id(0)
    made = authority.issue(certificates.make_request(key, "swarm"), gateway_id, "swarm")
    (folder / "swarm.pem").write_bytes(certificates.key_pem(key) + certificates.pem_of_der(made))


class Gateway:
    """One connection of the swarm."""

    def __init__(self, index: int, sock: socket.socket) -> None:
        self.sock = sock
        self.reader = FrameReader()
        self.seq = 0
        self.gateway_id = payload.gateway_id(index)
        self.made = cut.decode(payload.cut_template())

    def answer(self, poll: dict[str, Any]) -> bytes:
        """A cut with its own seq, and the REPLY."""
        self.seq += 1
        made = cut.encode(dataclasses.replace(self.made, gateway_id=self.gateway_id, seq=self.seq))
        position = [payload.EPOCH, self.seq]
        reply = {"poll": poll["poll"], "sent_ns": poll["sent_ns"], "wall_us": time.time_ns() // 1000}
        reply |= {"cuts": 1, "first": position, "last": position, "dropped": 0}
        return made + frame.encode(Kind.REPLY, reply)


def swarm(folder: Path, port: int, count: int, form: str) -> None:
    """Connect, register, answer every poll until killed."""
    context = contexts.agent(folder / "ca" / "ca.crt", folder / "swarm.pem") if form == "tls" else None
    selector = selectors.DefaultSelector()
    for index in range(count):
        sock = socket.create_connection(("127.0.0.1", port), 60)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            sock = context.wrap_socket(sock)
        sock.sendall(payload.registration(index))
        sock.settimeout(0)
        selector.register(sock, selectors.EVENT_READ, Gateway(index, sock))
    while True:
        for key, _ in selector.select():
            gateway: Gateway = key.data
            try:
                data = gateway.sock.recv(65536)
            except (BlockingIOError, ssl.SSLWantReadError):
                continue
            if not data:
                return
            for received in gateway.reader.feed(data):
                if received.kind == Kind.POLL:
                    gateway.sock.settimeout(30)
                    gateway.sock.sendall(gateway.answer(received.header))
                    gateway.sock.settimeout(0)


def _register(rig: Rig, listener: socket.socket, count: int) -> None:
    listener.setblocking(False)
    adopted, until_s = 0, time.monotonic() + 120
    while len(rig.schedule.gateways) < count or not rig.registry.has_watermarks:
        while adopted < min(count, len(rig.schedule.gateways) + BATCH):
            try:
                rig.inbound.adopt(listener.accept()[0], f"127.0.0.1:{adopted}")
            except BlockingIOError:
                break
            adopted += 1
        rig.inbound.step(0.01)
        rig.outbound.step()
        if time.monotonic() > until_s:
            raise RuntimeError(f"{len(rig.schedule.gateways)} of {count} gateways registered")


def serve(folder: Path, count: int, seconds: float, form: str) -> dict[str, float]:
    """One form in this process; CPU us a poll and a session's beginning, resident KiB a session."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    command = [sys.executable, "-m", "benchmarks.tls", "--swarm", str(folder), str(listener.getsockname()[1])]
    gateways = subprocess.Popen([*command, str(count), form], stdout=subprocess.DEVNULL)
    if (cpus := os.cpu_count() or 1) > 1:
        os.sched_setaffinity(gateways.pid, {cpus - 1})
        os.sched_setaffinity(0, {0})
    try:
        rig = Rig(MemorySink())
        if form == "tls":
            ca = folder / "ca"
            worker = SimpleNamespace(
                context=contexts.server(ca / "ca.crt", ca / "server.pem"), revoked=frozenset()
            )
            # Its context is all that is used here.
            rig.inbound._admission._certificate_worker = worker  # type: ignore[assignment]
        begun_s, before_kib = _cpu_s(), _resident_kib()
        _register(rig, listener, count)
        session_us = (_cpu_s() - begun_s) * 1e6 / count
        session_kib = (_resident_kib() - before_kib) / count
        end_s, cpu_s, rounds = 0.0, 0.0, -WARM_ROUNDS
        while rounds < LEAST_ROUNDS or time.monotonic() < end_s:
            if rounds == 0:
                end_s, cpu_s = time.monotonic() + seconds, _cpu_s()
            target = rig.counters["replies"] + count
            rig.schedule.wanted = True
            rig.outbound.step()
            while rig.counters["replies"] < target:
                rig.inbound.step(0.05)
            rounds += 1
        poll_us = (_cpu_s() - cpu_s) * 1e6 / (rounds * count)
        return {"poll_us": poll_us, "session_us": session_us, "session_kib": session_kib}
    finally:
        gateways.kill()
        gateways.wait()
        listener.close()


def _resident_kib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(count: int, repeats: int, seconds: float) -> harness.Sample:
    """One whole run."""
    runs: dict[str, list[dict[str, float]]] = {form: [] for form in FORMS}
    with tempfile.TemporaryDirectory(prefix="sla-bench-tls-") as name:
        make_keys(Path(name))
        for repeat in range(repeats):
            for form in FORMS if repeat % 2 == 0 else FORMS[::-1]:
                command = [sys.executable, "-m", "benchmarks.tls", "--serve", name, str(count), str(seconds)]
                done = subprocess.run(
                    [*command, form], stdout=subprocess.PIPE, text=True, check=True, timeout=300
                )
                runs[form].append(json.loads(done.stdout.splitlines()[-1]))
    medians = {
        f"{form}_{key}": statistics.median(run[key] for run in found)
        for form, found in runs.items()
        for key in ("poll_us", "session_us", "session_kib")
    }
    ratio = statistics.median(
        tls["poll_us"] / plain["poll_us"] for tls, plain in zip(runs["tls"], runs["plain"], strict=True)
    )
    print(f"{count} gateways{'plain':>26}{'TLS':>8}")
    for key, what in (
        ("poll_us", "CPU us a poll"),
        ("session_us", "CPU us a session's beginning"),
        ("session_kib", "resident KiB a session"),
    ):
        print(f"{what:<30}{medians[f'plain_{key}']:>8.1f}{medians[f'tls_{key}']:>8.1f}")
    raw = {"gateways": count, "repeats": repeats, **{key: round(value, 1) for key, value in medians.items()}}
    return harness.Sample({"poll_ratio": ratio}, raw=raw, peers={"openssl": ssl.OPENSSL_VERSION})


def main() -> None:
    """See the module; ``--serve`` and ``--swarm`` are its own children."""
    logs.configure("bench-tls")
    if sys.argv[1:2] == ["--serve"]:
        print(json.dumps(serve(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])))
        return
    if sys.argv[1:2] == ["--swarm"]:
        swarm(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
        return
    parser = argparse.ArgumentParser(description="What TLS costs a poll.")
    parser.add_argument("--gateways", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=harness.MOST_RUNS)
    given = parser.parse_args()
    options = harness.Options.of(parser, given)
    harness.main("tls", lambda: measure(given.gateways, given.repeats, given.seconds), given.runs, options)


if __name__ == "__main__":
    os.environ["SLA_LOG_LEVEL"] = "error"
    main()
