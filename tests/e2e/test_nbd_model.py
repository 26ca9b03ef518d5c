"""The data plane against a plain array of bytes, in all its modes, and against the peers it stands before.

Bounded by counts, seeded; ``make fuzz`` runs the same for long. No wait here is for a time.
"""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.handshake import Close, Open, Send, ServerHandshake, Transmit
from tests.fuzz import nbd_targets
from tests.fuzz.nbd_bytes import fuzz_plane
from tests.fuzz.nbd_clients import drive, exactly, negotiate
from tests.support.planes import DEADLINE_S, SIZE, Processes, can_connect, upstream, wait_for

SEED = 12
OPERATIONS = 120  # of each connection
MIB = 1 << 20


@pytest.mark.parametrize("kind", nbd_targets.PLANES + nbd_targets.PEERS)
def test_random_requests_of_many_connections_against_an_array(
    run: Processes, tmp_path: Path, kind: str
) -> None:
    target = nbd_targets.start(run, tmp_path, kind, SEED)
    counts = drive(target.clients(SEED, OPERATIONS, 4 * MIB))
    wanted = {"read", "write", "trim", "zero", "flush", "status", "refusal", "twin", "pause", "cut"}
    assert wanted == set(counts) - {"cache"}
    assert "cache" in counts or not kind.startswith(("file", "workers"))
    if kind in nbd_targets.PLANES:
        fuzz_plane(random.Random(SEED), target, 60)
        assert "handler-failed" not in run.logs()


REFUSED = (
    lambda cookie: p.request(p.Cmd.READ, cookie, 1 << 40, 4096),  # beyond the end
    lambda cookie: p.request(9, cookie, 0, 4096),  # no such command
    lambda cookie: p.request(p.Cmd.WRITE, cookie, 1 << 40, 5) + b"alien",  # with a payload
)


@pytest.mark.parametrize("kind", ["file", "workers", "nbdkit", "qemu-nbd"])
def test_refusals_behind_a_read_that_is_not_taken_leave_its_bytes_alone(
    run: Processes, tmp_path: Path, kind: str
) -> None:
    target = nbd_targets.start(run, tmp_path, kind, SEED)
    content = (tmp_path / "disk.img").read_bytes()[MIB : 9 * MIB]
    for family, address in (
        (socket.AF_UNIX, str(target.unix)),
        (socket.AF_INET, ("127.0.0.1", target.port)),
    ):
        for refused in REFUSED:
            with socket.socket(family) as sock:
                sock.settimeout(DEADLINE_S)
                sock.connect(address)
                negotiate(sock, target.export)
                sock.sendall(p.request(p.Cmd.READ, 1, MIB, len(content)))
                assert sock.recv(1, socket.MSG_PEEK), "the answer has begun; the rest waits for us"
                sock.sendall(b"".join(refused(cookie) for cookie in range(2, 12)))
                answered = []
                for _ in range(11):
                    _, error, cookie = p.SIMPLE_REPLY.unpack(exactly(sock, 16))
                    answered.append(cookie)
                    assert (error == 0) == (cookie == 1)
                    assert cookie != 1 or exactly(sock, len(content)) == content
                assert sorted(answered) == list(range(1, 12))


def test_qemu_img_keeps_to_the_block_sizes_of_the_upstream(run: Processes, tmp_path: Path) -> None:
    run.nbdkit(
        tmp_path / "up.sock", "--filter=blocksize-policy", "memory", str(SIZE),
        "blocksize-minimum=4096", "blocksize-maximum=1M", "blocksize-error-policy=error",
    )  # fmt: skip
    run.plane(exports=[upstream(tmp_path)])
    image = tmp_path / "in.img"
    image.write_bytes(random.Random(SEED).randbytes(5 * MIB + 512) + bytes(SIZE - 5 * MIB - 512))
    uri = f"nbd+unix:///vol-1?socket={tmp_path}/gw.sock"
    for command in (
        ["qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", str(image), uri],
        ["qemu-img", "compare", "-f", "raw", "-F", "raw", str(image), uri],
        ["qemu-io", "-f", "raw", "-c", "write -P 7 512 512", "-c", "read -P 7 512 512", uri],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "error" not in done.stdout.lower()


def test_asking_for_the_size_leaves_a_qemu_nbd_of_one_client_to_that_client(
    run: Processes, tmp_path: Path
) -> None:
    with open(tmp_path / "disk.img", "wb") as file:
        file.truncate(SIZE)
    up = tmp_path / "up.sock"
    server = run.start("qemu-nbd", "--format=raw", f"--socket={up}", str(tmp_path / "disk.img"))
    wait_for("qemu-nbd listens", lambda: is_listening(up))  # a connection would be its first and only client
    run.plane(exports=[upstream(tmp_path)])
    wait_for("the size is known", lambda: known_size(run) == SIZE)
    client = run.client("vol-1")
    client.sock.sendall(p.request(p.Cmd.READ, 1, 0, 512))
    assert client.exactly(16 + 512) == p.simple_reply(1) + bytes(512)
    client.sock.sendall(p.request(p.Cmd.DISC, 0, 0, 0))
    assert server.wait(DEADLINE_S) == 0, "without --persistent it ends with its first client, not before"


def is_listening(path: Path) -> bool:
    """Whether a process listens on a Unix socket, found out without a connection."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return any(line.endswith(f" {path}") and line.split()[3] == "00010000" for line in lines)


def known_size(run: Processes) -> int:
    """The size of the volume that a link is shown now."""
    link = run.link()
    size = int(link.hello.header["exports"][0]["size_bytes"])
    link.close()
    return size


class DyingUpstream(threading.Thread):
    """An NBD server that takes a mebibyte of requests and dies.

    Thread: ends with its one client in transmission; joined by ``join``.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(name="dying-upstream")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(DEADLINE_S)
        self.start()

    def run(self) -> None:
        """Serve connections until one has been in transmission."""
        with self._listener:
            while True:
                sock, _ = self._listener.accept()
                with sock, contextlib.suppress(BrokenPipeError):  # a client that aborts awaits no answer
                    sock.settimeout(DEADLINE_S)
                    if self._negotiate(sock):
                        exactly(sock, MIB)
                        return

    def _negotiate(self, sock: socket.socket) -> bool:
        machine = ServerHandshake(["disk"], "gateway")
        sock.sendall(machine.greeting())
        while data := sock.recv(65_536):
            actions = machine.feed(data)
            while actions:
                action = actions.pop(0)
                if isinstance(action, Open):
                    actions += machine.opened(p.ExportFacts(64 * MIB, p.TX_HAS_FLAGS))
                elif isinstance(action, Send):
                    sock.sendall(action.data)
                elif isinstance(action, Close):
                    return False
                elif isinstance(action, Transmit):
                    return True
        return False


def test_a_client_in_the_middle_of_sending_gets_its_errors_when_the_upstream_dies(
    run: Processes, tmp_path: Path
) -> None:
    dying = DyingUpstream(tmp_path / "up.sock")
    run.plane(exports=[upstream(tmp_path)], listen=["tcp:127.0.0.1:0"])
    port = int(str(run.link().hello.header["listening"][0]).rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as sock:
        negotiate(sock, "vol-1")
        sock.sendall(b"".join(p.request(p.Cmd.READ, n, 0, 512) for n in range(5)))
        sock.sendall(p.request(p.Cmd.WRITE, 5, 0, 32 * MIB) + bytes(32 * MIB))  # reset here, before
        found = [p.SIMPLE_REPLY.unpack(exactly(sock, 16)) for _ in range(6)]
        assert sorted(found) == [(p.SIMPLE_REPLY_MAGIC, p.EIO, n) for n in range(6)]
        assert sock.recv(1) == b"", "and then the end"
    dying.join()
    assert can_connect(tmp_path / "nbd-0.sock")
