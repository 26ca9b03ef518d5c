"""Holes, block status and errors of upstreams, seen through the plane by other people's clients.

The yardstick is the upstream itself: what a client finds through the gateway is what it finds there. No
upstream or client here shares code with the gateway.
"""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gateway_agent.nbd import protocol as p
from tests.e2e.test_nbd_model import is_listening
from tests.support.nbd import assembled, chunks
from tests.support.planes import Client, Processes, upstream, wait_for

pytestmark = pytest.mark.e2e
MIB = 1 << 20
SIZE = 64 * MIB
IN_CHUNKS = p.ReplyMode(structured=True, allocation=True)
KINDS = ("nbdkit", "nbdkit --no-sr", "nbdkit noextents", "qemu-nbd")
WITHOUT_ZEROES = "nbdkit nozero"
KNOWS_HOLES = ("nbdkit", "qemu-nbd")
GATEWAY = "nbd+unix:///vol-1?socket={}/gw.sock"
DIRECT = "nbd+unix:///?socket={}/up.sock"


def sparse(path: Path) -> bytes:
    """A file with data at three places, one of them odd, and holes between."""
    rng = random.Random(path.name)
    with open(path, "wb") as file:
        file.truncate(SIZE)
        for offset, size in ((0, 64 << 10), (20 * MIB, 3 * MIB), (SIZE - 4096, 4096)):
            file.seek(offset)
            file.write(rng.randbytes(size))
    return path.read_bytes()


def start(run: Processes, folder: Path, *command: str) -> subprocess.Popen[bytes]:
    """An upstream at up.sock. A connection that only looks whether it is there can end an nbdkit 1.32."""
    sock = folder / "up.sock"
    sock.unlink(missing_ok=True)
    server = run.start(*command)
    wait_for("the upstream listens", lambda: is_listening(sock))
    return server


def nbdkit(run: Processes, folder: Path, *command: str) -> subprocess.Popen[bytes]:
    """One with a thread for each connection, since 1.32 may end when one leaves that has several."""
    return start(run, folder, "nbdkit", "-f", "-U", f"{folder}/up.sock", "--threads=1", *command)


def serve(run: Processes, folder: Path, kind: str, image: Path) -> subprocess.Popen[bytes]:
    """One that serves ``image``."""
    if kind == "qemu-nbd":
        options = ("--format=raw", "-t", "-e", "0", "--discard=unmap", f"--socket={folder}/up.sock")
        return start(run, folder, "qemu-nbd", *options, str(image))
    more = {
        "nbdkit --no-sr": ["--no-sr"],
        "nbdkit noextents": ["--filter=noextents"],
        WITHOUT_ZEROES: ["--filter=nozero"],
    }
    return nbdkit(run, folder, *more.get(kind, ()), "file", str(image))


def done(*command: str) -> str:
    """What a program says; it must succeed."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, f"{' '.join(command)}: {ended.stdout}{ended.stderr}"
    return ended.stdout


def extents(uri: str) -> list[tuple[int, int, int]]:
    """(offset, length, state) as nbdinfo sees them, neighbours of one state joined."""
    found: list[tuple[int, int, int]] = []
    for each in json.loads(done("nbdinfo", "--map", "--json", uri)):
        offset, length, state = each["offset"], each["length"], each["type"]
        if found and found[-1][2] == state and sum(found[-1][:2]) == offset:
            offset, length = found[-1][0], found[-1][1] + length
            found.pop()
        found.append((offset, length, state))
    return found


def qemu_map(uri: str) -> list[dict[str, Any]]:
    """As qemu-img sees them."""
    text = done("qemu-img", "map", "--output=json", "--image-opts", f"driver=nbd,{uri}")
    return [{key: each[key] for key in ("start", "length", "zero", "data")} for each in json.loads(text)]


def answer(client: Client) -> list[tuple[int, int | None, bool, bytes]]:
    """What answers one request, in chunks; a simple reply has no data (see ``tests.support.nbd.chunks``)."""
    raw = b""
    while True:
        head = client.exactly(p.SIMPLE_REPLY_BYTES)
        if head[:4] == p.CHUNK_MAGIC.to_bytes(4, "big"):
            head += client.exactly(p.CHUNK_BYTES - p.SIMPLE_REPLY_BYTES)
            head += client.exactly(p.CHUNK.unpack(head)[4])
        raw += head
        found = chunks(raw)
        if found[-1][2]:
            return found


@pytest.mark.parametrize("kind", KINDS)
def test_holes_are_what_the_upstream_says_and_copies_keep_them(
    run: Processes, tmp_path: Path, kind: str
) -> None:
    content = sparse(tmp_path / "disk.img")
    serve(run, tmp_path, kind, tmp_path / "disk.img")
    run.plane(exports=[upstream(tmp_path)])
    near, far = GATEWAY.format(tmp_path), DIRECT.format(tmp_path)
    seen = extents(near)
    if kind == "nbdkit --no-sr":
        assert seen == [(0, SIZE, 0)], "it knows none: all is data"
    else:
        assert seen == extents(far)
    assert any(state for _, _, state in seen) == (kind in KNOWS_HOLES)
    ways = [f"server.type=unix,server.path={tmp_path}/{name}" for name in ("gw.sock,export=vol-1", "up.sock")]
    assert qemu_map(ways[0]) == qemu_map(ways[1])
    copy = tmp_path / "copy.img"
    done("nbdcopy", near, str(copy))
    assert copy.read_bytes() == content
    if kind in KNOWS_HOLES:
        assert copy.stat().st_blocks * 512 < 8 * MIB
    done("qemu-img", "convert", "-f", "raw", "-O", "qcow2", near, str(tmp_path / "copy.qcow2"))
    done("qemu-img", "compare", "-f", "raw", "-F", "qcow2", near, str(tmp_path / "copy.qcow2"))


@pytest.mark.parametrize("kind", [*KINDS, WITHOUT_ZEROES])
def test_copies_to_the_volume_leave_holes_there(run: Processes, tmp_path: Path, kind: str) -> None:
    content = sparse(tmp_path / "in.img")
    for name in ("disk.img", "other.img"):
        (tmp_path / name).write_bytes(b"\x55" * SIZE)
    serve(run, tmp_path, kind, tmp_path / "disk.img")
    run.plane(exports=[upstream(tmp_path)])
    near = GATEWAY.format(tmp_path)
    done("nbdcopy", "--flush", str(tmp_path / "in.img"), near)
    assert (tmp_path / "disk.img").read_bytes() == content
    assert (tmp_path / "disk.img").stat().st_blocks * 512 < 8 * MIB or kind == WITHOUT_ZEROES
    done("qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", str(tmp_path / "other.img"), near)
    assert (tmp_path / "disk.img").read_bytes() == b"\x55" * SIZE


def test_an_upstream_of_16_tib_is_served_to_its_end(run: Processes, tmp_path: Path) -> None:
    nbdkit(run, tmp_path, "memory", "16T")
    run.plane(exports=[upstream(tmp_path)])
    size = 16 << 40
    assert int(done("nbdinfo", "--size", GATEWAY.format(tmp_path))) == size
    client = run.client("vol-1", IN_CHUNKS)
    payload = random.Random(1).randbytes(MIB)
    client.sock.sendall(p.request(p.Cmd.WRITE, 1, size - MIB, MIB) + payload)
    assert answer(client) == [(1, None, True, bytes(4))]
    client.sock.sendall(p.request(p.Cmd.READ, 2, size - 32 * MIB, 32 * MIB))
    assert assembled(answer(client), size - 32 * MIB, 32 * MIB) == bytes(31 * MIB) + payload
    client.sock.sendall(p.request(p.Cmd.BLOCK_STATUS, 3, size - 32 * MIB, 32 * MIB))
    [(_, kind, _, raw)] = answer(client)
    assert kind == p.Chunk.BLOCK_STATUS
    assert raw[:4] == p.ALLOCATION_ID.to_bytes(4, "big")
    client.sock.sendall(p.request(p.Cmd.READ, 4, size - 512, 1024))
    assert answer(client)[0][1] == p.Chunk.ERROR


@pytest.mark.parametrize("chunks_of_upstream", [True, False])
@pytest.mark.parametrize("mode", [IN_CHUNKS, p.SIMPLE_REPLIES])
def test_errors_of_the_upstream_are_errors_with_their_number(
    run: Processes, tmp_path: Path, chunks_of_upstream: bool, mode: p.ReplyMode
) -> None:
    nbdkit(
        run, tmp_path, *([] if chunks_of_upstream else ["--no-sr"]),
        "--filter=error", "memory", str(SIZE),
        "error-pread=ENOSPC", "error-pread-rate=100%", "error-pwrite=EPERM", "error-pwrite-rate=100%",
    )  # fmt: skip
    run.plane(exports=[upstream(tmp_path)])
    client = run.client("vol-1", mode)
    for cookie, said, error in (
        (1, p.request(p.Cmd.READ, 1, 0, 4096), p.ENOSPC),
        (2, p.request(p.Cmd.WRITE, 2, 0, 512) + bytes(512), p.EPERM),
    ):
        client.sock.sendall(said)
        [(found, _, is_last, raw)] = answer(client)
        assert (found, is_last, int.from_bytes(raw[:4], "big")) == (cookie, True, error)
    totals = run.link().totals()["vol-1", "uid-0"]
    assert (totals["reads"], totals["writes"], totals["errors"], totals["read_bytes"]) == (1, 1, 2, 0)


def test_a_client_stays_while_its_storage_restarts_if_that_can_have_lost_nothing(
    run: Processes, tmp_path: Path
) -> None:
    image = tmp_path / "disk.img"
    content = sparse(image)
    server = serve(run, tmp_path, "nbdkit", image)
    run.plane(exports=[upstream(tmp_path) | {"reconnect_s": 60}])
    writer, reader = run.client("vol-1", IN_CHUNKS), run.client("vol-1")
    for request in (
        p.request(p.Cmd.WRITE, 1, 0, 4096) + b"n" * 4096,
        p.request(p.Cmd.FLUSH, 2, 0, 0),
    ):
        writer.sock.sendall(request)
        assert answer(writer)[0][3] == bytes(4)
    for _ in range(2):
        server.kill()
        server.wait()
        reader.sock.sendall(p.request(p.Cmd.READ, 3, 0, 4096))
        writer.sock.sendall(p.request(p.Cmd.READ, 4, 20 * MIB, MIB))
        server = serve(run, tmp_path, "nbdkit", image)
        assert reader.exactly(16 + 4096) == p.simple_reply(3) + b"n" * 4096
        assert assembled(answer(writer), 20 * MIB, MIB) == content[20 * MIB : 21 * MIB]
    writer.sock.sendall(p.request(p.Cmd.WRITE, 5, 0, 4096) + b"o" * 4096)
    assert answer(writer)[0][3] == bytes(4)
    server.kill()
    server.wait()
    assert writer.exactly(1) == b"", "what it wrote may be lost: its connection says so"
    assert reader.exactly(1) == b"", "and so does any other that could read it"
