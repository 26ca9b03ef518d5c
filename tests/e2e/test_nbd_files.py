"""File mode as a process: what a client sends and does not read, sends in part, or sends too much of.

Every wait is for an event, with a deadline; nothing here asserts how fast something is.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from gateway_agent.link.spool import Spool
from gateway_agent.nbd import protocol as p
from pmdaemon.wire import cut, frame
from pmdaemon.wire.kinds import Kind
from tests.support.nbd import as_cut
from tests.support.planes import DEADLINE_S, Client, Processes, can_connect, wait_for

pytestmark = pytest.mark.e2e
MIB = 1 << 20
SIZE = 128 * MIB


@pytest.fixture
def run(run: Processes, tmp_path: Path) -> Processes:
    with open(tmp_path / "disk.img", "wb") as file:
        file.write(b"o" * MIB)
        file.truncate(SIZE)
    return run


def serve(run: Processes, workers: int, listen: list[str] | None = None, **more: object) -> None:
    file = {"volume": "vol-1", "backend": "disk", "file": f"{run.folder}/disk.img", "workers": workers}
    run.plane([file | more], listen)


def write(cookie: int, offset: int, payload: bytes) -> bytes:
    return p.request(p.Cmd.WRITE, cookie, offset, len(payload)) + payload


def by_tcp(run: Processes) -> Client:
    link = run.link()
    address = next(text for text in link.hello.header["listening"] if text.startswith("tcp:"))
    sock = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), DEADLINE_S)
    run._sockets.append(sock)
    return Client(sock, "vol-1")


@pytest.mark.parametrize("workers", [0, 4])
@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_client_may_send_32_mib_before_it_reads_32_mib(run: Processes, workers: int, kind: str) -> None:
    serve(run, workers, listen=[f"unix:{run.folder}/gw.sock", "tcp:127.0.0.1:0"])
    client = run.client("vol-1") if kind == "unix" else by_tcp(run)
    for mib in (1, 3, 32):
        payload = os.urandom(mib * MIB)
        client.sock.sendall(p.request(p.Cmd.READ, 1, 0, mib * MIB))
        client.sock.sendall(write(2, 64 * MIB, payload))
        seen = set()
        for _ in range(2):
            magic, error, cookie = p.SIMPLE_REPLY.unpack(client.exactly(16))
            assert (magic, error) == (p.SIMPLE_REPLY_MAGIC, 0)
            seen.add(cookie)
            if cookie == 1:
                assert len(client.exactly(mib * MIB)) == mib * MIB
        assert seen == {1, 2}
        with open(run.folder / "disk.img", "rb") as file:
            file.seek(64 * MIB)
            assert file.read(mib * MIB) == payload


@pytest.mark.parametrize("workers", [0, 4])
def test_a_client_that_disappears_within_a_write_changes_nothing(run: Processes, workers: int) -> None:
    serve(run, workers)
    for length, sent in ((4096, 1000), (MIB, 700_001)):
        client = run.client("vol-1")
        client.sock.sendall(write(1, 0, b"N" * length)[: 28 + sent])
        client.sock.close()
    probe = run.client("vol-1")
    probe.sock.sendall(p.request(p.Cmd.READ, 1, 0, MIB))
    assert probe.exactly(16 + MIB)[16:] == b"o" * MIB


def test_what_is_no_request_in_the_packet_of_go_ends_the_connection(run: Processes) -> None:
    serve(run, 0)
    sock, received = run.connected("gw.sock"), b""
    flags = p.CLIENT_FLAGS.pack(p.FLAG_FIXED_NEWSTYLE | p.FLAG_NO_ZEROES)
    sock.sendall(flags + p.option(p.Opt.GO, p.go_data("vol-1")) + bytes(p.REQUEST.size))
    while data := sock.recv(65_536):
        received += data
    assert received.endswith(p.option_reply(p.Opt.GO, p.Rep.ACK))
    assert run.client("vol-1").facts.size_bytes == SIZE


def test_a_plane_that_stops_hands_its_last_counts_to_the_link(run: Processes) -> None:
    serve(run, 0)
    link, client = run.link(), run.client("vol-1")
    link.collect()
    for number in range(50):
        client.sock.sendall(p.request(p.Cmd.READ, number, 0, 512))
        assert len(client.exactly(528)) == 528
    run._all[0].terminate()
    while not link.receive(Kind.DP_HELLO).header["stopping"]:
        pass
    assert client.exactly(1) == b"", "clients are closed first"
    last = link.collect()
    assert as_cut(bytes(last.raw)).column("reads").tolist() == [50]
    assert run._all[0].poll() is None, "it waits until they are spooled"
    link.send(Kind.DP_COLLECT, got=link.got)
    assert run._all[0].wait(DEADLINE_S) == 0


def test_an_agent_stopped_under_load_has_every_acknowledged_io_in_a_cut(run: Processes) -> None:
    folder = run.folder
    (folder / "agent.toml").write_text(
        f"""name = "gw"\nstate_dir = "{folder}/state"\nruntime_dir = "{folder}/run"\nserver = "127.0.0.1:9"
[[plane]]\nname = "nbd-0"\nlisten = ["unix:{folder}/gw.sock"]
[[export]]\nvolume = "vol-1"\nbackend = "b"\nplane = "nbd-0"\nfile = "{folder}/disk.img"\n"""
    )
    agent = run.start(sys.executable, "-m", "gateway_agent", "run", "--config", str(folder / "agent.toml"))
    wait_for("the plane listens", lambda: (folder / "gw.sock").exists() and can_connect(folder / "gw.sock"))
    wait_for("the link is there", lambda: "link-connected" in run.logs())
    client, done = run.client("vol-1"), 0
    with contextlib.suppress(OSError):  # the plane closes the connection
        while True:
            client.sock.sendall(p.request(p.Cmd.READ, done, 0, 512))
            if len(client.exactly(528)) < 528:
                break
            done += 1
            if done == 2000:
                agent.terminate()
    assert done >= 2000
    assert agent.wait(DEADLINE_S) == 0
    spool = Spool(folder / "state" / "spool", 64 << 20)
    cuts = [cut.decode(frame.decode(item.raw)) for item in spool.read_from(None)]
    spool.close()
    assert done <= sum(int(each.column("reads").sum()) for each in cuts) <= done + 1


def test_a_deep_queue_gets_its_cap_and_no_more_and_the_cut_says_that_it_waits(run: Processes) -> None:
    rate, depth = 40, 400
    serve(run, 0, cap={"ops_per_s": rate})
    link, client = run.link(), run.client("vol-1")
    began_s, answered = time.monotonic(), 0
    client.sock.sendall(b"".join(p.request(p.Cmd.READ, number, 0, 512) for number in range(depth)))
    late: dict[str, list[int]] = {}
    while late.get("vol-1", [0])[0] < 10:
        assert time.monotonic() - began_s < DEADLINE_S, "nothing is reported as held for too long"
        assert len(client.exactly(528)) == 528
        answered += 1
        # A throttle that is exact never gets ahead of this, however slow the machine is.
        assert answered <= rate * (time.monotonic() - began_s + 0.02) + 1
        client.sock.sendall(p.request(p.Cmd.READ, depth + answered, 0, 512))
        if answered % rate == 0:
            late = link.collect().header.get("late", {})
    assert late["vol-1"][1] >= 5_000_000
    assert answered >= rate, (
        "nothing is late before 5 s have passed; what a busy machine misses is not made up for"
    )
