"""What the model is compared with: the plane in its three modes, before nbdkit and qemu-nbd, and those two.

A target serves one volume of four regions: three that may be changed, and one that is also exported read-only
(by a plane). Everything listens in one temporary folder, and on loopback with a free port.
"""

from __future__ import annotations

import random
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gateway_agent.nbd import protocol as p
from tests.fuzz.nbd_choices import Plan
from tests.fuzz.nbd_clients import Client, Connect
from tests.fuzz.nbd_model import GATEWAY, PEER, READ_ONLY, STUCK_S, Rules
from tests.support.nbd_certificates import NbdAuthority
from tests.support.nbd_tls import TlsTunnel, client_context, tls_settings
from tests.support.planes import Processes, can_connect, wait_for
from tests.support.ports import free_port

REGION_BYTES: Final = 10 << 20
WRITERS: Final = 3
VOLUME_BYTES: Final = (WRITERS + 1) * REGION_BYTES

BY_TLS: Final = " by TLS"
SEVERAL: Final = " on several connections"
PLANES: Final = (
    "file", "workers", "nbdkit", "nbdkit of 4 KiB blocks --no-sr", "qemu-nbd", f"file{BY_TLS}",
    f"nbdkit{BY_TLS}", f"nbdkit{SEVERAL}", f"qemu-nbd{SEVERAL}", f"nbdkit{BY_TLS}{SEVERAL}",
)  # fmt: skip
PEERS: Final = ("nbdkit itself", "qemu-nbd itself")
MODES: Final = (
    p.ReplyMode(structured=True, allocation=True), p.SIMPLE_REPLIES, p.ReplyMode(structured=True)
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A server that runs, and what is expected of it."""

    export: str
    read_only_export: str | None
    rules: Rules
    unix: Path
    port: int | None
    tls: ssl.SSLContext | None = None

    def connect(self, rng: random.Random) -> socket.socket:
        """A connection, by Unix socket or TCP, some with a small receive buffer; or a tunnel of TLS."""
        if self.tls is not None:
            return TlsTunnel(self.connect_raw(rng), self.tls).near
        return self.connect_raw(rng)

    def connect_raw(self, rng: random.Random) -> socket.socket:
        """The same without TLS."""
        if self.port is None or (self.tls is None and rng.random() < 0.6):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(STUCK_S)
            sock.connect(str(self.unix))
            return sock
        sock = socket.socket()
        if rng.random() < 0.5:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        sock.settimeout(STUCK_S)
        sock.connect(("127.0.0.1", self.port))
        return sock

    def clients(self, seed: int, operations: int, most_bytes: int) -> list[Client]:
        """One client for each region, and a greedy one that may change nothing."""
        rng = random.Random(seed)
        made = []
        for number in range(WRITERS + (self.read_only_export is not None)):
            is_writer = number < WRITERS
            plan = Plan(
                seed=rng.getrandbits(32),
                operations=operations,
                depth=rng.choice((1, 4, 16, 64)),
                most_bytes=most_bytes,
                rules=self.rules if is_writer else READ_ONLY,
                is_read_only=not is_writer,
                mode=MODES[number % len(MODES)],
            )
            export = self.export if is_writer else self.read_only_export or ""
            connect: Connect = self.connect
            region = (number * REGION_BYTES, REGION_BYTES)
            made.append(Client(f"client {number}", plan, connect, export, region))
        return made


def start(run: Processes, folder: Path, kind: str, seed: int) -> Target:
    """Start the servers of one target.

    Args:
        run: what starts and ends them.
        folder: an empty one.
        kind: one of ``PLANES`` and ``PEERS``.
        seed: of the volume's first content.
    """
    upstream_connections = 3 if kind.endswith(SEVERAL) else 1
    kind = kind.removesuffix(SEVERAL)
    image = folder / "disk.img"
    image.write_bytes(random.Random(seed).randbytes(VOLUME_BYTES))
    peer = folder / "peer.sock"
    if kind.endswith(BY_TLS):
        authority = NbdAuthority(folder / "pki")
        server, client = authority.issue("server", "gw", "127.0.0.1"), authority.issue("client", "host-a")
    if "qemu-nbd" in kind:
        run.start(
            "qemu-nbd", "--format=raw", "--persistent", "--shared=0", "--discard=unmap", "--export-name=disk",
            f"--socket={peer}", str(image),
        )  # fmt: skip
        wait_for("qemu-nbd listens", lambda: peer.exists() and can_connect(peer))
    elif kind == f"nbdkit{BY_TLS}":
        _start_secure_nbdkit(run, port := free_port(), image, server)
    elif "nbdkit" in kind:
        # One thread: 1.32 ends with an assertion when a client leaves while another thread answers it.
        blocks = ["--no-sr", "--filter=blocksize-policy"] if "4 KiB" in kind else []
        sizes = ["blocksize-minimum=4096", "blocksize-maximum=1M", "blocksize-error-policy=error"]
        run.nbdkit(peer, "--threads=1", *blocks, "file", str(image), *(sizes if blocks else []))
    if kind in PEERS:
        return Target("disk" if "qemu" in kind else "", None, PEER, peer, None)
    source: dict[str, object] = {"upstream": f"nbd+unix:///{'disk' if 'qemu' in kind else ''}?socket={peer}"}
    if kind.startswith(("file", "workers")):
        source = {"file": str(image), "workers": 3 if kind == "workers" else 0}
    volume = {"volume": "vol-1", "backend": "disk"} | source
    settings: dict[str, object] = {}
    context = None
    if kind.endswith(BY_TLS):
        settings, context = dict(tls_settings(authority, server)), client_context(authority, client)
    if kind == f"nbdkit{BY_TLS}":
        volume |= {"upstream": f"nbds://127.0.0.1:{port}/", "upstream_ca": str(authority.file)}
    volume |= {"upstream_connections": upstream_connections} if upstream_connections > 1 else {}
    run.plane(
        exports=[volume, volume | {"volume": "vol-ro", "read_only": True}],
        listen=[f"unix:{folder}/gw.sock", "tcp:127.0.0.1:0"],
        client_rule="address",
        **settings,
    )
    link = run.link()
    port = int(str(link.hello.header["listening"][1]).rpartition(":")[2])
    link.close()
    return Target("vol-1", "vol-ro", GATEWAY, folder / "gw.sock", port, context)


def _start_secure_nbdkit(run: Processes, port: int, image: Path, certificates: Path) -> None:
    run.start(
        "nbdkit", "-f", "--threads=1", "-i", "127.0.0.1", "-p", str(port), "--tls=require",
        f"--tls-certificates={certificates}", "file", str(image),
    )  # fmt: skip

    def is_open() -> bool:
        with socket.socket() as sock:
            return not sock.connect_ex(("127.0.0.1", port))

    wait_for("nbdkit listens", is_open)
