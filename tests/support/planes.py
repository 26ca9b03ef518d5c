"""A data plane and the programs around it as processes, and small clients of its two sockets.

Every wait is for an event, with a deadline.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from gateway_agent.config import AgentConfig
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.handshake import HandshakeState
from gateway_agent.nbd.upstream_handshake import ClientHandshake
from pmdaemon.runtime.config import show
from pmdaemon.wire import frame
from pmdaemon.wire.cut import COLUMNS
from pmdaemon.wire.kinds import Kind
from tests.support.nbd import as_cut

DEADLINE_S = 180.0
SIZE = 32 << 20


def wait_for(what: str, check: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not check():
        assert time.monotonic() < end, f"{what}: not within {DEADLINE_S:g} s"
        time.sleep(0.01)


def can_connect(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return not sock.connect_ex(str(path))


class Processes:
    """Starts programs and ends exactly those, at the end of a ``with`` block, and prints what they logged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._all: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop_all()
        print(self.logs())

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{len(self._all)}.log", "wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._all.append(process)
        return process

    def nbdkit(self, sock: Path, *plugin: str) -> subprocess.Popen[bytes]:
        sock.unlink(missing_ok=True)
        process = self.start("nbdkit", "-f", "-U", str(sock), *plugin)
        wait_for("nbdkit listens", lambda: sock.exists() and can_connect(sock))
        return process

    def plane(
        self,
        exports: list[dict[str, object]],
        listen: list[str] | None = None,
        client_rule: str = "export-suffix",
        prefix: tuple[str, ...] = (),
        **settings: object,
    ) -> subprocess.Popen[bytes]:
        config = AgentConfig.model_validate(
            {
                "name": "gw-a",
                "state_dir": self.folder,
                "runtime_dir": self.folder,
                "client_rule": client_rule,
                "plane": [{"name": "nbd-0", "listen": listen or f"unix:{self.folder}/gw.sock"} | settings],
                "export": exports,
            }
        )
        file = self.folder / "agent.toml"
        file.write_text(show(config))
        command = (sys.executable, "-m", "gateway_agent.nbd.plane", "--config", str(file), "--plane", "nbd-0")
        process = self.start(*prefix, *command)
        wait_for("the plane listens", lambda: can_connect(self.folder / "nbd-0.sock"))
        return process

    def connected(self, name: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        self._sockets.append(sock)
        sock.settimeout(DEADLINE_S)
        sock.connect(str(self.folder / name))
        return sock

    def link(self) -> Link:
        return Link(self.connected("nbd-0.sock"))

    def client(self, export: str, mode: p.ReplyMode = p.SIMPLE_REPLIES) -> Client:
        return Client(self.connected("gw.sock"), export, mode)

    def logs(self) -> str:
        return "\n".join(file.read_text() for file in sorted(self.folder.glob("*.log")))

    def stop_all(self) -> None:
        for sock in self._sockets:
            sock.close()
        for process in self._all:
            process.terminate()
        for process in self._all:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Link:
    """The link's side of the control socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = frame.FrameReader()
        self._frames: list[frame.Frame] = []
        self.got = 0
        self.hello = self.receive(Kind.DP_HELLO)

    def send(self, kind: Kind, **header: object) -> None:
        self._sock.sendall(frame.encode(kind, header))

    def receive(self, kind: Kind) -> frame.Frame:
        while True:
            for index, found in enumerate(self._frames):
                if found.kind == kind:
                    return self._frames.pop(index)
            data = self._sock.recv(1 << 20)
            assert data, "the plane closed the control connection"
            self._frames += self._reader.feed(data)

    def collect(self) -> frame.Frame:
        self.send(Kind.DP_COLLECT, got=self.got)
        cut = self.receive(Kind.DP_CUT)
        self.got = cut.header["id"]
        return cut

    def totals(self) -> dict[tuple[str, str], dict[str, int]]:
        """Sums of everything since the last call, by (volume, client)."""
        sums: dict[tuple[str, str], dict[str, int]] = {}
        while True:
            cut = self.collect()
            decoded = as_cut(bytes(cut.raw))
            for row, stream in enumerate(cut.header["streams"]):
                total = sums.setdefault((stream["volume"], stream["client"]), dict.fromkeys(COLUMNS, 0))
                for name in COLUMNS:
                    total[name] += int(decoded.column(name)[row])
                total["hist"] = total.get("hist", 0) + int(decoded.dense_hist(0, 198)[row].sum())
                total["counted"] = total.get("counted", 0) + sum(
                    int(item["counted"]) for item in decoded.entries(0) if item["row"] == row
                )
            if not cut.header["more"]:
                return sums

    def close(self) -> None:
        self._sock.close()


class Client:
    """A small NBD client that sees errors as they are."""

    def __init__(self, sock: socket.socket, export: str, mode: p.ReplyMode = p.SIMPLE_REPLIES) -> None:
        self.sock = sock
        machine = ClientHandshake(export, "gateway", mode=mode)
        while machine.state is not HandshakeState.READY:
            data = self.sock.recv(65_536)
            assert data, "the gateway closed the connection during negotiation"
            self.sock.sendall(machine.feed(data))
        assert machine.facts is not None
        self.facts = machine.facts

    def exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.sock.recv(count - len(data))
            if not piece:
                return data
            data += piece
        return data


def upstream(folder: Path, volume: str = "vol-1") -> dict[str, object]:
    return {"volume": volume, "backend": "disk", "upstream": f"nbd+unix:///?socket={folder}/up.sock"}


def fio(folder: Path, export: str, depth: int, *more: str) -> dict[str, int]:
    """Counts of one fio job with verification: completed reads (also those that verify) and writes."""
    command = [
        "fio", "--name=job", "--ioengine=nbd", f"--uri=nbd+unix:///{export}?socket={folder}/gw.sock",
        "--rw=randrw", f"--iodepth={depth}", "--size=6m", "--bsrange=4k-64k", "--bs_unaligned=1",
        "--verify=crc32c", "--verify_fatal=1", "--thread", "--output-format=json", *more,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    assert job["error"] == 0
    return {
        "reads": job["read"]["total_ios"],
        "writes": job["write"]["total_ios"],
        "read_bytes": job["read"]["io_bytes"],
        "write_bytes": job["write"]["io_bytes"],
    }
