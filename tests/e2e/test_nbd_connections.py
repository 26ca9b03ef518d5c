"""Several connections to an upstream for one client, and counts under every kind of cap at once: with fio.

What an upstream sees is read from its own log; no upstream or client here shares code with the gateway.
"""

from __future__ import annotations

import itertools
import re
import threading
from pathlib import Path

import pytest

from gateway_agent.nbd import protocol as p
from pmdaemon.wire.kinds import Kind
from tests.e2e.test_nbd_chunks import serve, sparse, start
from tests.support.planes import SIZE, Link, Processes, fio, upstream, wait_for

pytestmark = pytest.mark.e2e
MIB = 1 << 20


def connections_of(log: Path) -> set[str]:
    """Connections on which nbdkit read or wrote, by the numbers of its log filter."""
    return set(re.findall(r"connection=(\d+) (?:Read|Write) ", log.read_text()))


@pytest.mark.parametrize("kind", ["nbdkit", "qemu-nbd"])
def test_fio_verifies_on_several_connections_and_its_counts_are_ours(
    run: Processes, tmp_path: Path, kind: str
) -> None:
    log, image = tmp_path / "upstream.txt", tmp_path / "disk.img"
    if kind == "nbdkit":
        command = ("-f", "-U", f"{tmp_path}/up.sock", "--threads=1", "--filter=log", "memory", str(SIZE))
        start(run, tmp_path, "nbdkit", *command, f"logfile={log}")
    else:
        sparse(image)
        serve(run, tmp_path, kind, image)
    run.plane(exports=[upstream(tmp_path) | {"upstream_connections": 4}])
    link = run.link()
    for depth in (1, 32):
        told = fio(tmp_path, f"vol-1@host-{depth}", depth, "--size=2m")
        ours = link.totals()["vol-1", f"host-{depth}"]
        assert {name: ours[name] for name in told} == told
        assert (ours["errors"], ours["inflight"], ours["held"]) == (0, 0, 0)
    if kind == "nbdkit":
        assert len(connections_of(log)) >= 4


def test_a_client_of_several_connections_stays_while_its_storage_restarts(
    run: Processes, tmp_path: Path
) -> None:
    image = tmp_path / "disk.img"
    content = sparse(image)
    server = serve(run, tmp_path, "nbdkit", image)
    run.plane(exports=[upstream(tmp_path) | {"reconnect_s": 60, "upstream_connections": 4}])
    client = run.client("vol-1")

    def ask(cookie: int, offset: int) -> None:
        client.sock.sendall(p.request(p.Cmd.READ, cookie, offset, MIB // 2))

    def answers(count: int) -> dict[int, bytes]:
        found = {}
        for _ in range(count):
            _, error, cookie = p.SIMPLE_REPLY.unpack(client.exactly(16))
            assert not error
            found[cookie] = client.exactly(MIB // 2)
        return found

    client.sock.sendall(p.request(p.Cmd.FLUSH, 1, 0, 0))
    assert client.exactly(16) == p.simple_reply(1)
    for _ in range(2):
        server.kill()
        server.wait()
        for number in range(8):
            ask(number, (20 + number) * MIB // 2)
        server = serve(run, tmp_path, "nbdkit", image)
        found = answers(8)
        assert found == {n: content[(20 + n) * MIB // 2 :][: MIB // 2] for n in range(8)}
    client.sock.sendall(p.request(p.Cmd.WRITE, 5, 0, 4096) + b"o" * 4096)
    assert client.exactly(16) == p.simple_reply(5)
    server.kill()
    server.wait()
    assert client.exactly(1) == b"", "what it wrote may be lost: its connection says so"


def change_caps(link: Link, done: threading.Event) -> None:
    """Other rates, bursts, clients and groups again and again; the last set has none."""
    for number in itertools.count(1):
        factor = (1.0, 3.0, 0.7)[number % 3]
        rates = {"ops_per_s": 300 * factor, "bytes_per_s": 9e6 * factor, "cost_per_s": 450 * factor}
        caps = [{"volume": "vol-1", "burst_s": (0.02, 1.0)[number % 2]} | rates]
        clients = [
            {"volume": "vol-1", "client": "greedy", "ops_per_s": 250 * factor},
            {"volume": "vol-1", "client": "*", "cost_per_s": 400},
        ]
        groups = [{"group": "g", "volumes": {"vol-1": 1, "other": 2}, "bytes_per_s": 8e6 * factor}]
        parts: dict[str, object] = {"caps": caps if number % 5 else []}
        parts |= {"clients": clients} if number % 4 else {}
        parts |= {"groups": groups} if number % 3 else {}
        parts |= {"whole_clients": [{"client": "greedy", "ops_per_s": 280 * factor}]} if number % 2 else {}
        link.send(Kind.DP_CAPS, gen=number, lease_us=100_000 if number % 7 == 0 else 600_000_000, **parts)
        if done.wait(0.03):
            link.send(Kind.DP_CAPS, gen=number + 1, lease_us=600_000_000, caps=[])
            return


@pytest.mark.parametrize("mode", ["upstream", "several", "file", "workers"])
def test_counts_are_those_of_fio_while_every_kind_of_cap_changes(
    run: Processes, tmp_path: Path, mode: str
) -> None:
    if mode in ("upstream", "several"):
        run.nbdkit(tmp_path / "up.sock", "--threads=1", "memory", str(SIZE))
        export = upstream(tmp_path) | {"upstream_connections": 3 if mode == "several" else 1}
    else:
        with open(tmp_path / "disk.img", "wb") as file:
            file.truncate(SIZE)
        export = {"volume": "vol-1", "backend": "disk", "file": f"{tmp_path}/disk.img"}
        export["workers"] = 3 if mode == "workers" else 0
    run.plane(exports=[export])
    link, done = run.link(), threading.Event()
    link.totals()
    changing = threading.Thread(target=change_caps, args=(link, done))
    changing.start()
    try:
        told = fio(tmp_path, "vol-1@greedy", 32)
    finally:
        done.set()
        changing.join()
    ours = link.totals()["vol-1", "greedy"]
    assert {name: ours[name] for name in told} == told
    assert (ours["errors"], ours["inflight"], ours["held"]) == (0, 0, 0)
    assert ours["delay_sum_us"] > 0, "caps held something"
    wait_for("the set without caps is in force", lambda: link.collect().header["tg"] > 0)
