"""An agent that is upgraded under load: no connect fails, nothing acknowledged is lost, counts are exact.

"The new release" is the same program, started again. Every wait is for an event, with a deadline.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gateway_agent import status, upgrade
from gateway_agent.errors import UpgradeFailed
from gateway_agent.nbd import protocol as p
from gateway_agent.status import UPGRADE_S
from tests.integration.gateway_agent.test_reload import BLOCK, SIZE, Busy, Host
from tests.support.planes import DEADLINE_S, Client, wait_for

REGION = 16  # blocks of one client


class Persistent:
    """A client that connects again when it loses its connection, and repeats what has no answer.

    One request at a time, of ``REGION`` blocks in turn: a write, and then a read of what it wrote there. What
    was answered is counted.
    """

    def __init__(self, connect, export, first_block):
        self.connect, self.export, self.first = connect, export, first_block
        self.reads = self.writes = self.connections = 0
        self.errors = []
        self.content = {}
        self._stop = threading.Event()
        self._client = None
        self._thread = threading.Thread(target=self._work, name="persistent")
        self._thread.start()

    def _work(self):
        number = 0
        try:
            while not self._stop.is_set():
                number += 1
                block, data = self.first + number % REGION, number.to_bytes(4, "big") * (BLOCK // 4)
                self._do(p.request(p.Cmd.WRITE, number, block * BLOCK, BLOCK) + data, 0)
                self.writes += 1
                self.content[block] = data
                found = self._do(p.request(p.Cmd.READ, number, block * BLOCK, BLOCK), BLOCK)
                self.reads += 1
                assert found == data, "an acknowledged write is there"
            self._client.sock.sendall(p.request(p.Cmd.DISC, 0, 0, 0))
        except (OSError, AssertionError) as exc:
            self.errors.append(exc)

    def _do(self, request, length):
        while True:
            if self._client is None:
                self._client = Client(self.connect(), self.export)  # an error here ends the test
                self.connections += 1
            self._client.sock.sendall(request)
            head = self._client.exactly(16)
            if len(head) == 16:
                _, error, _ = p.SIMPLE_REPLY.unpack(head)
                assert not error, f"error {error} instead of an end of the connection"
                return self._client.exactly(length)
            assert not head, "a part of a reply"
            self._client.sock.close()
            self._client = None

    def goes_on(self):
        before = self.reads
        wait_for("the client goes on", lambda: self.errors or self.reads >= before + 3)
        assert not self.errors

    def end(self):
        self._stop.set()
        self._thread.join(DEADLINE_S)

    def stop(self):
        self.end()
        assert not self.errors
        return self.reads, self.writes


class Knocker:
    """Connects and leaves, again and again: counts what was refused."""

    def __init__(self, path):
        self.path, self.knocks, self.refused = str(path), 0, []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="knocker")
        self._thread.start()

    def _work(self):
        while not self._stop.is_set():
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(DEADLINE_S)
                try:
                    sock.connect(self.path)
                    assert sock.recv(18) == p.greeting()
                    self.knocks += 1
                except (OSError, AssertionError) as exc:
                    self.refused.append(exc)
            self._stop.wait(0.005)

    def stop(self):
        self._stop.set()
        self._thread.join(DEADLINE_S)
        assert self.refused == []
        return self.knocks


class Upgraded(Host):
    """An agent with two planes, whose former processes wait ``drain_s`` for their clients."""

    def begin(self, drain_s, **planes):
        self.machines = []
        self.top += f"drain_s = {drain_s}\n"
        self.write(planes or {"nbd-0": {"vol-a": ""}, "nbd-1": {"vol-b": ""}})
        self.start()

    def command(self, *arguments):
        argv = [sys.executable, "-m", "gateway_agent", *arguments, "--config", str(self.path)]
        return subprocess.run(
            argv, capture_output=True, text=True, timeout=UPGRADE_S + DEADLINE_S, check=False
        )

    def upgrade(self):
        said = self.command("upgrade")
        assert said.returncode == 0, said.stdout + said.stderr
        return said.stdout

    def machine(self, export):
        self.machines.append(Machine(self.folder / "nbd-0.clients", export))
        return self.machines[-1]

    def close(self):
        for machine in self.machines:
            machine.kill()
        super().close()

    def former(self):
        return [name for name in self.children() if "." in name]

    def wait_for_former_to_end(self):
        wait_for("the former processes have ended", lambda: not self.former())
        wait_for(
            "the link has forgotten them", lambda: all("." not in name for name in self.link()["planes"])
        )


@pytest.fixture
def host(tmp_path):
    made = Upgraded(tmp_path)
    yield made
    made.close()


class Machine:
    """QEMU's block driver, as a virtual machine has it: it connects again, and repeats what had no answer."""

    def __init__(self, path, export):
        where = f"server.type=unix,server.path={path},export={export},reconnect-delay=600"
        command = ["qemu-io", "--image-opts", f"driver=nbd,{where}"]
        self._shell = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def do(self, order, answer):
        self._shell.stdin.write(order + "\n")
        self._shell.stdin.flush()
        line = ""
        while answer not in line:
            line = self._shell.stdout.readline()
            assert line, f"it ended before it said {answer}"
            assert "Pattern verification failed" not in line

    def stop(self):
        self._shell.communicate("quit\n", timeout=DEADLINE_S)

    def kill(self):
        self._shell.kill()
        self._shell.wait()


def test_clients_that_connect_again_go_on_at_the_next_process_and_every_io_is_counted_once(host):
    host.begin(drain_s=0.0)
    pids, parent = host.children(), host.process.pid
    clients = {
        ("vol-a", "one"): Persistent(host.connect, "vol-a@one", 0),
        ("vol-a", "two"): Persistent(host.connect, "vol-a@two", REGION),
        ("vol-b", "one"): Persistent(lambda: host.connect("nbd-1"), "vol-b@one", 0),
    }
    knocker = Knocker(host.folder / "nbd-0.clients")
    machine = host.machine("vol-a@vm")
    machine.do("write -P 7 512k 64k", "wrote 65536/65536")
    for client in clients.values():
        client.goes_on()
    assert host.upgrade().startswith("upgrade  done")
    host.wait_for_former_to_end()
    machine.do("read -P 7 512k 64k", "read 65536/65536")
    machine.do("write -P 8 576k 64k", "wrote 65536/65536")
    machine.stop()
    for client in clients.values():
        client.goes_on()
    assert host.process.poll() is None
    assert host.read("agent.json")["pid"] == parent, "a service manager sees no restart"
    assert not set(pids.values()) & set(host.children().values()), "every process is another one"
    assert knocker.stop() > 0
    counts = {stream: client.stop() for stream, client in clients.items()} | {("vol-a", "vm"): (1, 2)}
    assert [client.connections for client in clients.values()] == [2, 2, 2]
    assert sorted(path.name for path in host.run_dir.glob("*.sock")) == ["nbd-0.sock", "nbd-1.sock"]
    host.stop()
    for stream, count in counts.items():
        assert host.spooled(*stream) == count
    for (volume, _), client in clients.items():
        image = (host.folder / f"{volume}.img").read_bytes()
        for block, data in client.content.items():
            assert image[block * BLOCK : (block + 1) * BLOCK] == data
    assert (host.folder / "vol-a.img").read_bytes()[SIZE // 2 :][
        :131_072
    ] == b"\7" * 65_536 + b"\x08" * 65_536
    assert "plane-died" not in (host.folder / "log").read_text()


def test_clients_that_do_not_connect_again_keep_their_connection_for_as_long_as_said(host):
    host.begin(600.0, **{"nbd-0": {"vol-a": "", "vol-c": "cap = {ops_per_s = 0.02}\n"}})
    fio, busy = host.fio("vol-a@fio"), Busy(host.connect(), "vol-a@busy")
    capped = Client(host.connect(), "vol-c@early")
    busy.goes_on()
    [former_pid] = [pid for name, pid in host.children().items() if name == "nbd-0"]
    assert f"these let their clients go: nbd-0.{former_pid}" in host.upgrade()
    busy.goes_on()

    # Both processes are shown and throttled, and new clients come to the next one.
    found = status.gather(host.run_dir)
    former = found["planes"][f"nbd-0.{former_pid}"]
    assert former.handed_over.connections == 3
    assert 0 < former.handed_over.drain_left_s <= 600
    assert (former.hello.exports, former.hello.listening) == ([], [])
    lines = list(status.lines(found, 0))
    assert any("no more; 3 connections stay" in line for line in lines)
    assert any(line.startswith("vol-a (former)") for line in lines)
    assert max(map(len, lines)) <= 80
    late = Client(host.connect(), "vol-c@late")
    for client in (capped, late):
        client.sock.sendall(b"".join(p.request(p.Cmd.READ, n, 0, 512) for n in range(2)))
        assert len(client.exactly(528)) == 528
    wait_for("both hold the second one", lambda: held(host) == {"early": 1, "late": 1})

    # A link that is started again finds both.
    killed, name = host.children()["link"], f"nbd-0.{former_pid}"
    os.kill(killed, signal.SIGKILL)
    wait_for("the next link is started", lambda: host.children()["link"] not in (None, killed))
    next_link = host.children()["link"]
    wait_for("it writes its own state", lambda: host.link()["pid"] == next_link)
    wait_for("it finds both", lambda: host.planes_connected() == {"nbd-0": True, name: True})
    busy.goes_on()
    ios = busy.stop()
    assert host.end_of(fio) == 0

    # A stop in the middle of it stops all processes, and loses no count.
    pids = [pid for pid in host.children().values() if pid]
    assert len(pids) == 3
    host.stop()
    assert (capped.exactly(1), late.exactly(1)) == (b"", b"")
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert host.spooled("vol-a", "busy") == (ios, ios)
    assert (host.spooled("vol-c", "early"), host.spooled("vol-c", "late")) == ((1, 0), (1, 0))


def held(host):
    found = {}
    for report in status.gather(host.run_dir)["planes"].values():
        for volume in getattr(report, "volumes", ()):  # none of a plane that does not answer
            found |= {each.client: each.held for each in volume.streams if volume.volume == "vol-c"}
    return found


def test_a_reload_ends_the_wait_of_former_processes_whose_plane_it_changes(host):
    """A removed export is served no more, a lowered cap holds: clients come back to what is in force."""
    capped = "cap = {ops_per_s = 0.02}\n"
    host.begin(600.0, **{"nbd-0": {"vol-a": "", "vol-c": ""}, "nbd-1": {"vol-b": ""}})
    removed, lowered = Client(host.connect(), "vol-a@one"), Client(host.connect(), "vol-c@one")
    other = Client(host.connect("nbd-1"), "vol-b@one")
    assert host.reload()["number"] >= 1, "so the next program must count on"
    host.upgrade()
    [former] = [name for name in host.former() if name.startswith("nbd-1.")]
    host.write({"nbd-0": {"vol-c": capped}, "nbd-1": {"vol-b": ""}})
    host.reload()
    for client in (removed, lowered):
        assert client.exactly(1) == b""
    wait_for("the former process of the changed plane has ended", lambda: host.former() == [former])
    other.sock.sendall(p.request(p.Cmd.READ, 1, 0, 512))
    assert len(other.exactly(528)) == 528, "nothing was changed of its plane"


def test_a_plane_that_cannot_be_taken_over_goes_on_and_the_upgrade_says_so(host):
    host.begin(0.0)
    client = Persistent(host.connect, "vol-a@one", 0)
    client.goes_on()
    pids = host.children()
    blocking = host.run_dir / f"{pids['nbd-1']}.sock"
    blocking.touch()  # where its second control socket would be
    said = host.command("upgrade")
    assert said.returncode == 1
    assert "upgrade  incomplete" in said.stdout
    assert "nbd-1: its new process did not take over" in said.stdout
    other = Persistent(lambda: host.connect("nbd-1"), "vol-b@one", 0)
    other.goes_on()
    client.goes_on()
    assert host.children()["nbd-1"] == pids["nbd-1"]
    assert host.children()["nbd-0"] != pids["nbd-0"]
    blocking.unlink()
    assert host.upgrade().startswith("upgrade  done"), "tried again when the reason is gone"
    other.goes_on()
    assert host.children()["nbd-1"] != pids["nbd-1"]
    counts = {("vol-a", "one"): client.stop(), ("vol-b", "one"): other.stop()}
    host.wait_for_former_to_end()
    host.stop()
    for stream, count in counts.items():
        assert host.spooled(*stream) == count


def test_the_program_is_checked_with_the_configuration_in_force(tmp_path, monkeypatch):
    running = tmp_path / "running.toml"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UpgradeFailed, match="cannot check the configuration"):
        upgrade.check_program(running)
    Path(sys.executable).write_text('#!/bin/sh\necho "$@" >&2\nexit 78\n')
    Path(sys.executable).chmod(0o755)
    with pytest.raises(
        UpgradeFailed, match=r"refuses to start: -m gateway_agent run --config .*running\.toml"
    ):
        upgrade.check_program(running)
