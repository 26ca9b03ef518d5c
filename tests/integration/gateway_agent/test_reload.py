"""A real agent whose file changes under clients that do I/O: none of those that stay sees anything of it.

Every wait is for an event, with a deadline. That a client is not held up is shown by the order of events: its
I/Os go on while the connection of a removed export is still being drained.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from gateway_agent import status
from gateway_agent.errors import StateFileBroken
from gateway_agent.link import state_files
from gateway_agent.link.spool import Spool
from gateway_agent.nbd import protocol as p
from pmdaemon.wire import cut, names
from tests.support.planes import DEADLINE_S, Client, wait_for

SIZE = 1 << 20
BLOCK = 4096
DEPTH = 8


class Busy:
    """A client that writes and reads back on one connection, ``DEPTH`` at a time, until it is stopped."""

    def __init__(self, sock, export):
        self.client = Client(sock, export)
        self.rounds = 0
        self.error = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self):
        try:
            while not self._stop.is_set():
                self._round(bytes([self.rounds % 251]) * BLOCK)
                self.rounds += 1
        except (OSError, AssertionError) as exc:
            self.error = exc

    def _round(self, data):
        cookies = range(DEPTH)
        self.client.sock.sendall(
            b"".join(p.request(p.Cmd.WRITE, n, n * BLOCK, BLOCK) + data for n in cookies)
        )
        for _ in cookies:
            assert p.SIMPLE_REPLY.unpack(self.client.exactly(16))[1] == 0
        self.client.sock.sendall(b"".join(p.request(p.Cmd.READ, n, n * BLOCK, BLOCK) for n in cookies))
        for _ in cookies:
            assert p.SIMPLE_REPLY.unpack(self.client.exactly(16))[1] == 0
            assert self.client.exactly(BLOCK) == data

    def goes_on(self):
        """Some rounds more on the same connection."""
        before = self.rounds
        wait_for("the client goes on", lambda: self.error or self.rounds >= before + 3)
        assert self.error is None

    def stop(self):
        self._stop.set()
        self._thread.join(DEADLINE_S)
        assert self.error is None
        self.client.sock.close()
        return self.rounds * DEPTH


ENDED = ("applied", "unchanged", "refused")


class Host:
    """The agent, its file, and the sockets of its clients."""

    def __init__(self, folder):
        self.folder = folder
        self.path = folder / "agent.toml"
        self.run_dir = folder / "r"
        self.top = f'name = "gw-a"\nstate_dir = "{folder}/s"\nruntime_dir = "{folder}/r"\n'
        self.top += 'server = "127.0.0.1:1"\nclient_rule = "export-suffix"\n'
        self.process = self._fio = None
        self._sockets = []

    def write(self, planes, top=""):
        """``planes``: {plane: {volume: more keys of its export}}."""
        text = self.top.replace('"gw-a"', top or '"gw-a"')
        for plane, exports in planes.items():
            text += f'[[plane]]\nname = "{plane}"\nlisten = "unix:{self.folder}/{plane}.clients"\n'
            for volume, more in exports.items():
                image = self.folder / f"{volume}.img"
                if not image.exists():
                    image.write_bytes(bytes(SIZE))
                text += f'[[export]]\nvolume = "{volume}"\nbackend = "disk"\nplane = "{plane}"\n'
                text += f'file = "{image}"\n{more}'
        aside = self.path.with_suffix(".aside")
        aside.write_text(text)
        aside.replace(self.path)

    def start(self):
        argv = [sys.executable, "-m", "gateway_agent", "run", "--config", str(self.path)]
        with open(self.folder / "log", "wb") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log)
        wait_for("the link knows the planes", lambda: self.link() and all(self.planes_connected().values()))

    def read(self, name):
        with suppress(StateFileBroken):
            return state_files.read_json(self.run_dir / name, "") or {}
        return {}

    def link(self):
        return self.read("link.json")

    def server(self):
        return self.link().get("server", {}).get("address")

    def planes_connected(self):
        return {name: plane["connected"] for name, plane in self.link().get("planes", {}).items()}

    def record(self):
        return self.read("agent.json")["reload"]

    def children(self):
        return self.read("agent.json")["children"]

    def reload(self):
        """SIGHUP, and what came of it."""
        before = self.record()["number"]
        os.kill(self.process.pid, signal.SIGHUP)
        return self.next_record(before)

    def next_record(self, before):
        wait_for(
            "the reload ends",
            # A plane that has no processor for 10 s makes it incomplete, until it has confirmed its part.
            lambda: self.record()["number"] > before and self.record()["state"] in ENDED,
        )
        return self.record()

    def connect(self, plane="nbd-0"):
        sock = socket.socket(socket.AF_UNIX)
        self._sockets.append(sock)
        sock.settimeout(DEADLINE_S)
        sock.connect(str(self.folder / f"{plane}.clients"))
        return sock

    def command(self, *arguments):
        argv = [sys.executable, "-m", "gateway_agent", *arguments, "--config", str(self.path)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False)

    def fio(self, export):
        """Another program's client: it ends with an error if one of its I/Os does, or its connection."""
        uri = f"nbd+unix:///{export}?socket={self.folder}/nbd-0.clients"
        command = [
            "fio", "--name=job", "--ioengine=nbd", f"--uri={uri}", "--rw=randrw", "--bs=4k", "--iodepth=16",
            f"--offset={SIZE // 2}", f"--size={SIZE // 2}", "--time_based", "--runtime=600", "--thread",
            "--output-format=json",
        ]  # fmt: skip
        self._fio = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=self.folder)
        return self._fio

    def end_of(self, fio):
        """Ask it to end; returns the errors that it had."""
        assert fio.poll() is None, "it has gone on all the while"
        fio.send_signal(signal.SIGINT)
        out, _ = fio.communicate(timeout=DEADLINE_S)
        [job] = json.loads(out[out.index("{") :])["jobs"]
        assert job["read"]["total_ios"] > 0
        assert job["write"]["total_ios"] > 0
        return int(job["error"])

    def stop(self):
        self.process.terminate()
        assert self.process.wait(DEADLINE_S) == 0

    def spooled(self, volume, client):
        """Reads and writes of one stream in all cuts."""
        gateway_id = (self.folder / "s" / "gateway_id").read_text().strip()
        stream = names.stream_id(gateway_id, volume, client)
        spool = Spool(self.folder / "s" / "spool", 64 << 20)
        cuts = [cut.decode(item.raw) for item in spool.read_from(None)]
        spool.close()
        chosen = [(each, each.column("stream_id") == stream) for each in cuts]
        return tuple(
            sum(int(each.column(io)[rows].sum()) for each, rows in chosen) for io in ("reads", "writes")
        )

    def close(self):
        for sock in self._sockets:
            sock.close()
        if self._fio is not None:
            self._fio.kill()
            self._fio.wait()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        print((self.folder / "log").read_text() if (self.folder / "log").exists() else "")


@pytest.fixture
def host(tmp_path):
    made = Host(tmp_path)
    yield made
    made.close()


def read_one(client, cookie, offset=0):
    client.sock.sendall(p.request(p.Cmd.READ, cookie, offset, BLOCK))


def answer(client):
    raw = client.exactly(16)
    if len(raw) < 16:
        return None
    _, error, cookie = p.SIMPLE_REPLY.unpack(raw)
    if not error:
        client.exactly(BLOCK)
    return cookie, error


def test_exports_come_and_go_under_clients_that_do_io(host):
    slow = "cap = {ops_per_s = 1.0}\n"
    host.write({"nbd-0": {"vol-a": "", "vol-slow": slow}})
    host.start()
    pids = host.children()
    busy = Busy(host.connect(), "vol-a@busy")
    busy.goes_on()

    # A new export: found by itself when the file has changed.
    number = host.record()["number"]
    host.write({"nbd-0": {"vol-a": "", "vol-slow": slow, "vol-new": ""}})
    record = host.next_record(number)
    assert (record["state"], record["cause"]) == ("applied", "the file was changed")
    assert record["changes"] == ["exports added: vol-new"]
    new = Busy(host.connect(), "vol-new@new")
    new.goes_on()
    busy.goes_on()

    # A mistake changes nothing.
    good = host.path.read_text()
    host.path.write_text(good + "[[export]]\nvolume = 3\n")
    record = host.reload()
    assert record["state"] == "refused"
    assert "volume" in record["text"]
    assert "Nothing was changed" in record["text"]
    shown = list(status.lines(status.gather(host.run_dir), time.time_ns() // 1000))
    assert any(line.startswith("reload   refused") for line in shown)
    assert max(map(len, shown)) <= 80
    new.goes_on()

    # A removed export: what its client has sent is answered, others go on meanwhile.
    client = Client(host.connect(), "vol-slow@slow")
    for cookie in range(3):  # one passes, the others are held for a second each
        read_one(client, cookie)
    assert answer(client) == (0, 0)
    host.write({"nbd-0": {"vol-a": "", "vol-new": ""}})
    assert host.reload()["changes"] == ["exports removed: vol-slow"]
    read_one(client, 3)
    busy.goes_on()
    report = status.gather(host.run_dir)["planes"]["nbd-0"]
    assert [volume.volume for volume in report.volumes] == ["vol-a", "vol-new"]
    found = list(iter(lambda: answer(client), None))  # until its end
    assert {(1, 0), (2, 0)} <= set(found)
    assert set(found) <= {(1, 0), (2, 0), (3, p.ESHUTDOWN)}, "the last one may come behind the end"
    with pytest.raises(Exception, match="no volume 'vol-slow' here"):
        Client(host.connect(), "vol-slow")
    new.goes_on()

    assert host.children() == pids, "no process was started again"
    ios = {("vol-a", "busy"): busy.stop(), ("vol-new", "new"): new.stop()}
    host.stop()
    for stream, count in ios.items():
        assert host.spooled(*stream) == (count, count)
    assert host.spooled("vol-slow", "slow") == (1 + len(found), 0), "nothing is lost with the export"


def test_planes_come_and_go_and_what_needs_a_restart_is_named(host):
    host.write({"nbd-0": {"vol-a": ""}})
    host.start()
    busy, fio = Busy(host.connect(), "vol-a@busy"), host.fio("vol-a@fio")

    host.write({"nbd-0": {"vol-a": ""}, "nbd-1": {"vol-b": ""}}, top='"gw-b"')
    before = host.record()["number"]
    said = host.command("reload")
    assert said.returncode == 0 or "incomplete" in said.stdout, said.stdout + said.stderr
    record = host.next_record(before)
    assert record["changes"] == ["exports added: vol-b", "planes added: nbd-1"]
    assert record["needs_restart"] == ["name"]
    assert "needs a restart of the agent: name" in said.stdout
    assert 'name = "gw-a"' in (host.run_dir / "running.toml").read_text()
    other = Busy(host.connect("nbd-1"), "vol-b@other")
    other.goes_on()
    ios = {("vol-b", "other"): other.stop()}

    host.write({"nbd-0": {"vol-a": ""}})
    assert host.reload()["changes"] == ["exports removed: vol-b", "planes removed: nbd-1"]
    wait_for("the plane has ended", lambda: "nbd-1" not in host.children())
    wait_for("the link has forgotten it", lambda: "nbd-1" not in host.link()["planes"])
    assert not (host.folder / "nbd-1.clients").exists()
    busy.goes_on()

    # Settings of the link: it is started again, and no client sees it.
    pids = host.children()
    host.top = host.top.replace("127.0.0.1:1", "127.0.0.1:2")
    host.write({"nbd-0": {"vol-a": ""}})
    assert host.reload()["changes"] == ["settings changed: server"]
    wait_for(
        "the link dials elsewhere", lambda: host.link().get("server", {}).get("address") == "127.0.0.1:2"
    )
    assert host.children()["nbd-0"] == pids["nbd-0"]
    busy.goes_on()
    ios["vol-a", "busy"] = busy.stop()
    assert host.end_of(fio) == 0
    host.stop()
    for stream, count in ios.items():
        assert host.spooled(*stream) == (count, count)


def test_a_stop_waits_for_a_link_that_was_started_again_just_before(host):
    """What was counted is with the plane, which ends before the link: nobody else could bring it to disk."""
    host.write({"nbd-0": {"vol-a": ""}})
    host.start()
    busy, link = Busy(host.connect(), "vol-a@busy"), host.children()["link"]
    busy.goes_on()
    os.kill(link, signal.SIGKILL)
    wait_for("another link", lambda: host.children().get("link") not in (None, link))
    count = busy.stop()
    host.stop()
    assert host.spooled("vol-a", "busy") == (count, count)
    assert "link-does-not-collect" not in (host.folder / "log").read_text()


def test_a_client_that_would_not_be_let_in_any_more_is_ended_and_no_other(host):
    host.write({"nbd-0": {"vol-a": "", "vol-b": "allow_networks = ['unix']\n"}})
    host.start()
    busy, client = Busy(host.connect(), "vol-a@busy"), Client(host.connect(), "vol-b@late")
    read_one(client, 1)
    assert answer(client) == (1, 0)
    host.write({"nbd-0": {"vol-a": "", "vol-b": "allow_networks = ['10.0.0.0/8']\n"}})
    assert host.reload()["changes"] == ["exports changed: vol-b"]
    assert client.sock.recv(1) == b"", "ended, although it asks for nothing"
    with pytest.raises(Exception, match="no volume 'vol-b'"):
        Client(host.connect(), "vol-b")
    busy.goes_on()
    busy.stop()
    host.stop()
    assert (
        "it was connected to vol-b; allow_networks does not have its address"
        in (host.folder / "log").read_text()
    )
