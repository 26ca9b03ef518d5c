"""The data plane as a process, before a real NBD server, driven by fio and libnbd's tools.

Every wait is for an event, with a deadline; nothing here asserts how fast something is.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest

from gateway_agent.nbd import protocol as p
from pmdaemon.wire import histogram
from pmdaemon.wire.kinds import Kind
from tests.support.nbd import as_cut
from tests.support.planes import DEADLINE_S, SIZE, Processes, fio, upstream, wait_for

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("mode", ["upstream", "file", "workers"])
def test_fio_verifies_and_its_counts_are_ours_exactly(run: Processes, tmp_path: Path, mode: str) -> None:
    if mode == "upstream":
        run.nbdkit(tmp_path / "up.sock", "memory", str(SIZE))
        export = upstream(tmp_path)
    else:
        with open(tmp_path / "disk.img", "wb") as file:
            file.truncate(SIZE)
        export = {"volume": "vol-1", "backend": "disk", "file": f"{tmp_path}/disk.img"}
        export["workers"] = 3 if mode == "workers" else 0
    run.plane(exports=[export])
    link = run.link()
    assert [item["size_bytes"] for item in link.hello.header["exports"]] in ([SIZE], [0])
    link.send(
        Kind.DP_THRESHOLDS,
        version=1,
        entries=[{"volume": "vol-1", "client": "host-*", "io": "any", "threshold_us": 1}],
    )
    link.totals()
    for depth in (1, 32):
        told = fio(tmp_path, f"vol-1@host-{depth}", depth)
        assert told["reads"] > 100
        assert told["writes"] > 100
        ours = link.totals()["vol-1", f"host-{depth}"]
        assert {name: ours[name] for name in told} == told
        transfers = told["reads"] + told["writes"]
        assert ours["arrived"] == ours["hist"] == ours["counted"] == transfers
        assert (ours["errors"], ours["inflight"], ours["held"]) == (0, 0, 0)
        assert ours["lat_sum_us"] >= ours["svc_sum_us"] > 0


def test_percentiles_are_within_a_bucket_of_those_of_fio(run: Processes, tmp_path: Path) -> None:
    """Storage is so slow that what passes between the plane's clock and fio's is a small part of it.

    One request at a time: at its end fio takes the answers to all that are under way as one.
    """
    delays = ("rdelay=2", "wdelay=1")
    run.nbdkit(tmp_path / "up.sock", "--filter=delay", "--threads=16", "memory", str(SIZE), *delays)
    run.plane(exports=[upstream(tmp_path)])
    link = run.link()
    command = [
        "fio", "--name=job", "--ioengine=nbd", f"--uri=nbd+unix:///vol-1?socket={tmp_path}/gw.sock",
        "--rw=randrw", "--bs=4k", "--iodepth=1", "--numjobs=8", "--number_ios=4", "--group_reporting",
        "--thread", "--output-format=json",
    ]  # fmt: skip
    said = subprocess.run(
        command, capture_output=True, text=True, timeout=600, cwd=tmp_path, check=True
    ).stdout
    job = json.loads(said[said.index("{") :])["jobs"][0]
    cut = as_cut(bytes(link.collect().raw))
    for kind, first in (("read", histogram.TOTAL_READ), ("write", histogram.TOTAL_WRITE)):
        counts = cut.dense_hist(first, histogram.BUCKETS).sum(axis=0)
        assert counts.sum() == job[kind]["total_ios"] > 0
        for name, fio_ns in job[kind]["clat_ns"]["percentile"].items():
            rank = math.ceil(float(name) / 100 * counts.sum())
            ours = int(np.searchsorted(counts.cumsum(), rank))
            theirs = histogram.bucket_of_ns(fio_ns)
            assert abs(ours - theirs) <= 1, f"{kind} {name}"


def test_fio_verifies_under_a_cap_that_bites(run: Processes, tmp_path: Path) -> None:
    run.nbdkit(tmp_path / "up.sock", "memory", str(SIZE))
    run.plane(exports=[upstream(tmp_path)])
    link = run.link()
    caps = [{"volume": "vol-1", "ops_per_s": None, "bytes_per_s": None, "cost_per_s": 1500.0}]
    link.send(Kind.DP_CAPS, gen=3, lease_us=600_000_000, caps=caps)
    link.totals()
    told = fio(tmp_path, "vol-1@greedy", 32, "--size=2m")
    ours = link.totals()["vol-1", "greedy"]
    assert {name: ours[name] for name in told} == told
    assert ours["delay_sum_us"] > 0
    assert link.collect().header["tg"] == 3


def test_libnbd_copies_round_trip_and_leaves_when_it_is_done(run: Processes, tmp_path: Path) -> None:
    run.nbdkit(tmp_path / "up.sock", "memory", str(SIZE))
    run.plane(exports=[upstream(tmp_path), upstream(tmp_path, "vol-2")])
    original = tmp_path / "in.img"
    original.write_bytes(os.urandom(3 << 20) + bytes(2 << 20) + os.urandom(SIZE - (5 << 20)))
    uri = f"nbd+unix:///vol-1?socket={tmp_path}/gw.sock"
    for command in (
        ["nbdinfo", uri],
        ["nbdinfo", "--list", uri],
        ["nbdcopy", "--flush", str(original), uri],
        ["nbdcopy", uri, str(tmp_path / "out.img")],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        if "--list" in command:
            assert 'export="vol-1"' in done.stdout
            assert 'export="vol-2"' in done.stdout
    assert (tmp_path / "out.img").read_bytes() == original.read_bytes()


def test_an_upstream_that_is_not_there_is_refused_clearly_and_found_later(
    run: Processes, tmp_path: Path
) -> None:
    run.plane(exports=[upstream(tmp_path)])
    link = run.link()
    assert link.hello.header["exports"][0]["size_bytes"] == 0
    with pytest.raises(Exception, match=r"not available.*up\.sock"):
        run.client("vol-1")
    run.nbdkit(tmp_path / "up.sock", "memory", str(SIZE))
    assert run.client("vol-1").facts.size_bytes == SIZE
    assert link.receive(Kind.DP_HELLO).header["exports"][0]["size_bytes"] == SIZE


def test_an_upstream_that_dies_gives_eio_and_is_counted_and_the_plane_lives_on(
    run: Processes, tmp_path: Path
) -> None:
    server = run.nbdkit(tmp_path / "up.sock", "--filter=delay", "memory", str(SIZE), "rdelay=60")
    run.plane(exports=[upstream(tmp_path)])
    link = run.link()
    client = run.client("vol-1@host-a")
    client.sock.sendall(b"".join(p.request(p.Cmd.READ, n, 0, 4096) for n in range(5)))
    wait_for(
        "the requests are under way", lambda: link.totals().get(("vol-1", "host-a"), {}).get("inflight") == 5
    )
    server.send_signal(signal.SIGKILL)
    raw = client.exactly(5 * 16)
    answers = [p.SIMPLE_REPLY.unpack_from(raw, 16 * n) for n in range(5)]
    assert sorted(answers) == [(p.SIMPLE_REPLY_MAGIC, p.EIO, n) for n in range(5)]
    assert client.exactly(1) == b"", "and then the end"
    ours = link.totals()["vol-1", "host-a"]
    assert (ours["reads"], ours["errors"], ours["read_bytes"]) == (5, 5, 0)
    run.nbdkit(tmp_path / "up.sock", "memory", str(SIZE))
    assert fio(tmp_path, "vol-1@host-a", 8, "--size=1m")["writes"] > 0


def test_kill_dash_nine_leaves_a_stale_socket_that_the_next_plane_replaces(
    run: Processes, tmp_path: Path
) -> None:
    run.nbdkit(tmp_path / "up.sock", "memory", str(SIZE))
    first = run.plane(exports=[upstream(tmp_path)])
    first.kill()
    first.wait()
    assert (tmp_path / "gw.sock").exists()
    run.plane(exports=[upstream(tmp_path)])
    assert run.client("vol-1").facts.size_bytes == SIZE


def test_a_second_plane_on_the_same_socket_is_refused_and_harms_nothing(
    run: Processes, tmp_path: Path
) -> None:
    run.nbdkit(tmp_path / "up.sock", "memory", str(SIZE))
    run.plane(exports=[upstream(tmp_path)])
    second = run.plane(exports=[upstream(tmp_path)])
    assert second.wait(DEADLINE_S) == 78
    assert "another process is listening" in run.logs()
    assert run.client("vol-1").facts.size_bytes == SIZE


def test_a_link_that_dies_loses_and_doubles_nothing_and_io_never_notices(
    run: Processes, tmp_path: Path
) -> None:
    run.nbdkit(tmp_path / "up.sock", "memory", str(SIZE))
    run.plane(exports=[upstream(tmp_path)])
    first = run.link()
    told = fio(tmp_path, "vol-1@host-a", 16, "--size=1m")
    first.send(Kind.DP_COLLECT, got=0)
    lost = first.receive(Kind.DP_CUT)  # received, and the link dies before it is spooled
    first.close()
    more = fio(tmp_path, "vol-1@host-a", 16, "--size=1m")
    second = run.link()
    second.send(Kind.DP_COLLECT, got=0)
    again = second.receive(Kind.DP_CUT)
    assert bytes(again.raw) == bytes(lost.raw)
    assert int(as_cut(bytes(again.raw)).column("reads").sum()) == told["reads"]
    second.got = again.header["id"]
    assert second.totals()["vol-1", "host-a"]["reads"] == more["reads"]


def test_a_malformed_frame_ends_that_link_only(run: Processes, tmp_path: Path) -> None:
    run.nbdkit(tmp_path / "up.sock", "memory", str(SIZE))
    run.plane(exports=[upstream(tmp_path)])
    link = run.link()
    link.send(Kind.POLL)
    assert link.receive(Kind.UNSUPPORTED).header == {"kind": int(Kind.POLL)}
    link._sock.sendall(b"\xff" * 64)
    assert link.receive(Kind.ERROR).header["code"] == "FrameTooLarge"
    assert run.client("vol-1").facts.size_bytes == SIZE
    assert run.link().collect().header["n"] == 0


def test_a_lease_that_nobody_renews_ends_and_static_caps_stay(run: Processes, tmp_path: Path) -> None:
    run.nbdkit(tmp_path / "up.sock", "memory", str(SIZE))
    run.plane(exports=[upstream(tmp_path) | {"cap": {"ops_per_s": 100_000.0}}])
    link = run.link()
    caps = [{"volume": "vol-1", "cost_per_s": 0.5}]
    link.send(Kind.DP_CAPS, gen=9, lease_us=400_000, caps=caps)
    client = run.client("vol-1@host-a")
    client.sock.sendall(b"".join(p.request(p.Cmd.READ, n, 0, 512) for n in range(3)))
    assert len(client.exactly(3 * 528)) == 3 * 528, "released when the lease ended"
    wait_for("generation 0", lambda: link.collect().header["tg"] == 0)
    assert link.totals().get(("vol-1", "host-a"), {"held": 0})["held"] == 0


def test_sigterm_ends_it_cleanly(run: Processes, tmp_path: Path) -> None:
    with open(tmp_path / "disk.img", "wb") as file:
        file.truncate(SIZE)
    export = {"volume": "vol-1", "backend": "disk", "file": f"{tmp_path}/disk.img", "workers": 2}
    process = run.plane(exports=[export], listen=["tcp:127.0.0.1:0", f"unix:{tmp_path}/gw.sock"])
    link, client = run.link(), run.client("")
    listening = link.hello.header["listening"]
    assert listening[1] == f"unix:{tmp_path}/gw.sock"
    with socket.create_connection(("127.0.0.1", int(listening[0].rpartition(":")[2])), DEADLINE_S) as sock:
        assert sock.recv(18) == p.greeting()
    process.terminate()
    assert process.wait(DEADLINE_S) == 0
    assert client.exactly(1) == b""
    assert not (tmp_path / "gw.sock").exists()
    assert not (tmp_path / "nbd-0.sock").exists()
