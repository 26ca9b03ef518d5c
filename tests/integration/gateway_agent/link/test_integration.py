"""The real link process and the real agent over loopback and Unix sockets; everything waits on sockets."""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from pmdaemon.runtime.children import REASON_ENV, RESTARTS_ENV
from pmdaemon.runtime.clock import Deadline, SystemClock
from pmdaemon.runtime.watchdog import PARENT_REPORTED_S, Pulse
from pmdaemon.wire.kinds import Kind
from tests.support.link import GATEWAY, FakePlane, FakeServer, caps

LIMIT_S = 180.0


class World:
    """A fake plane and a fake PMDaemon on real sockets, pumped by the test until something is true."""

    def __init__(self, directory):
        self.plane, self.server = FakePlane(clock=SystemClock()), FakeServer()
        self.selector = selectors.DefaultSelector()
        self.plane_path = str(directory / "nbd-0.sock")
        plane = socket.socket(socket.AF_UNIX)
        plane.bind(self.plane_path)
        self._listen(plane, self._plane_connected)
        tcp = socket.socket()
        tcp.bind(("127.0.0.1", 0))
        self.port = tcp.getsockname()[1]
        self._listen(tcp, self._server_connected)
        self.link: socket.socket | None = None
        self._peers: dict[str, socket.socket] = {}

    def _listen(self, sock, accepted):
        sock.listen()
        self.selector.register(sock, selectors.EVENT_READ, lambda: accepted(sock.accept()[0]))

    def _plane_connected(self, sock):
        self.plane.reconnect()
        self._replace("plane", sock, self.plane)
        sock.sendall(self.plane.hello())

    def _server_connected(self, sock):
        self.server.reconnect()
        self.link = sock
        self._replace("server", sock, self.server)

    def _replace(self, name, sock, fake):
        former = self._peers.get(name)
        if former is not None and former.fileno() >= 0:
            self.selector.unregister(former)
            former.close()
        self._peers[name] = sock
        self.selector.register(sock, selectors.EVENT_READ, lambda: self._read(sock, fake))

    def _read(self, sock, fake):
        data = b""
        with suppress(ConnectionError):
            data = sock.recv(1 << 20)
        if not data:
            self.selector.unregister(sock)
            sock.close()
            return
        answer = fake.receive(data)
        if answer:
            sock.sendall(answer)

    def until(self, condition, what):
        deadline = Deadline(LIMIT_S)
        while not condition():
            assert not deadline.passed, f"not within {LIMIT_S} s: {what}"
            for key, _ in self.selector.select(deadline.left_s()):
                key.data()

    def poll(self, start):
        before = len(self.server.headers.get(Kind.REPLY, []))
        self.link.sendall(self.server.poll(start=start))
        self.until(lambda: len(self.server.headers.get(Kind.REPLY, [])) > before, "a reply")
        return self.server.last(Kind.REPLY)

    def poll_reads(self, start, reads):
        """Poll until the server has that many: a plane that answers late is in a later cut."""
        deadline = Deadline(LIMIT_S)
        while self.server.reads() < reads:
            assert not deadline.passed, f"{self.server.reads()} of {reads} reads within {LIMIT_S} s"
            self.poll(start)
        assert self.server.reads() == reads
        return self.server.last(Kind.REPLY)

    def wait_registered(self, times=1):
        self.until(lambda: len(self.server.headers.get(Kind.REGISTER, [])) >= times, "a registration")

    def close(self):
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()
        self.selector.close()


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.close()


@pytest.fixture
def start_link(tmp_path, world):
    started = []

    def start(pulse=None, identity=GATEWAY, output=None, **environment):
        (tmp_path / "gateway_id").write_text(identity)
        path = tmp_path / "agent.toml"
        path.write_text(
            f'name = "gw-a"\nstate_dir = "{tmp_path}"\nruntime_dir = "{tmp_path}"\n'
            f'server = "127.0.0.1:{world.port}"\nspool_bytes = {4 << 20}\n'
            "[reconnect]\nfirst_s = 0.01\nmax_s = 0.05\n"
            f'[[plane]]\nname = "nbd-0"\nlisten = "unix:{tmp_path}/nbd.sock"\n'
            '[[export]]\nvolume = "vol-1"\nbackend = "b0"\nfile = "/dev/zero"\n'
        )
        argv = [sys.executable, "-m", "gateway_agent.link.main", "--config", str(path)]
        fds = ()
        if pulse is not None:  # of a parent; seconds of its checks are hundredths
            code = (
                "from pmdaemon.runtime import watchdog; watchdog.CHECK_S = 0.01; "
                "from gateway_agent.link.main import main; main()"
            )
            argv[1:3], fds = ["-c", code], (pulse.fd,)
            environment |= pulse.env()
        started.append(subprocess.Popen(argv, env={**os.environ, **environment}, pass_fds=fds, stderr=output))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_statistics_caps_and_a_killed_link(world, start_link):
    link = start_link()
    world.wait_registered()
    first = world.server.last(Kind.HELLO)["ep"]
    world.plane.io(reads=3)
    assert world.poll_reads((first, 1), 3)["last"][0] == first
    world.link.sendall(caps(7))
    world.until(lambda: Kind.CAPS_ACK in world.server.headers, "an acknowledgement of the caps")
    assert world.server.last(Kind.CAPS_ACK)["ok"]

    world.plane.io(reads=10)
    link.kill()  # with ten reads that nobody collected
    link.wait()
    world.plane.io(reads=20)
    start_link()
    world.wait_registered(times=2)
    second = world.server.last(Kind.HELLO)["ep"]
    assert second != first
    register = world.server.last(Kind.REGISTER)
    assert [row[0] for row in register["spool"]] == [first]
    world.poll_reads((first, 1), 33)
    assert world.plane.lifetime["vol-1"] == 33
    assert world.plane.cap_gen == 7  # the plane held them all the while


def test_a_changed_identity_is_named_beside_the_one_of_the_spool(world, start_link, tmp_path):
    link = start_link()
    world.wait_registered()
    world.poll((world.server.last(Kind.HELLO)["ep"], 1))
    link.kill()
    link.wait()
    damaged = GATEWAY[:-1] + ("1" if GATEWAY[-1] == "0" else "0")
    again = start_link(identity=damaged, output=subprocess.PIPE)
    _, said = again.communicate(timeout=60)
    assert again.returncode == 78
    assert f"{tmp_path}/gateway_id: it says {damaged}" in said.decode()
    assert f"Write {GATEWAY} into it" in said.decode()


def test_a_restarted_link_tells_the_server(world, start_link):
    start_link(**{RESTARTS_ENV: "2", REASON_ENV: "it was killed by SIGKILL"})
    world.wait_registered()
    world.poll((world.server.last(Kind.HELLO)["ep"], 1))
    world.until(lambda: Kind.ALERT in world.server.headers, "an alert")
    alert = world.server.last(Kind.ALERT)
    assert (alert["kind"], alert["details"]["restarts"]) == ("process-restarted", 2)
    assert alert["text"] == "the link was restarted: it was killed by SIGKILL; restart 2"


@pytest.mark.parametrize("pid", [7, 8])  # the plane says 7
def test_a_plane_that_died_with_the_link_is_reported_by_the_next_one(world, start_link, tmp_path, pid):
    (tmp_path / "link.json").write_text(json.dumps({"planes": {"nbd-0": {"pid": pid}}}))
    start_link(**{RESTARTS_ENV: "1", REASON_ENV: "it was killed by SIGKILL"})
    world.wait_registered()
    world.poll((world.server.last(Kind.HELLO)["ep"], 1))
    died = ["plane-died", "plane-back"] if pid != 7 else []
    wanted = ["process-restarted", *died]
    world.until(lambda: len(world.server.headers.get(Kind.ALERT, [])) >= len(wanted), "the alerts")
    world.poll((world.server.last(Kind.HELLO)["ep"], 1))
    alerts = world.server.headers[Kind.ALERT]
    assert [each["kind"] for each in alerts] == wanted
    assert {each["details"]["subject"] for each in alerts[1:]} <= {"nbd-0"}


def test_the_link_of_a_parent_that_hangs_tells_the_server(world, start_link):
    pulse = Pulse()
    start_link(pulse)
    world.wait_registered()
    world.poll((world.server.last(Kind.HELLO)["ep"], 1))
    world.until(lambda: Kind.ALERT in world.server.headers, "an alert")
    alert = world.server.last(Kind.ALERT)
    assert (alert["kind"], alert["details"]["subject"]) == ("process-stalled", "agent")
    assert alert["text"].startswith(f"the agent's parent has made no progress for {PARENT_REPORTED_S} s")
    pulse.close()


def test_a_stopping_link_spools_a_last_cut_and_says_goodbye(world, start_link):
    link = start_link()
    world.wait_registered()
    epoch = world.server.last(Kind.HELLO)["ep"]
    _, seq = world.poll((epoch, 1))["last"]
    world.plane.io(reads=5)
    link.terminate()
    world.until(lambda: Kind.BYE in world.server.headers, "a goodbye")
    assert link.wait(LIMIT_S) == 0
    start_link()
    world.wait_registered(times=2)
    [row] = world.server.last(Kind.REGISTER)["spool"]
    assert (row[0], row[2] > seq) == (epoch, True)
    world.poll_reads((epoch, 1), 5)


def test_the_link_comes_back_to_a_server_that_dropped_it(world, start_link):
    start_link()
    world.wait_registered()
    epoch = world.server.last(Kind.HELLO)["ep"]
    world.link.sendall(b"\0" * 64)  # not a frame: the link must close and dial again
    world.wait_registered(times=2)
    assert world.server.last(Kind.HELLO)["ep"] == epoch
    assert world.server.last(Kind.ERROR)["code"] == "protocol"
    world.plane.io()
    world.poll_reads((epoch, 1), 1)


def read_agent(path):
    with suppress(FileNotFoundError):
        return json.loads(path.read_text())["children"]
    return {}


def test_the_agent_restarts_its_children_one_by_one_and_stops_them(tmp_path):
    """Real planes: a killed link leaves the plane alone; SIGTERM leaves no process behind."""
    (tmp_path / "disk").write_bytes(bytes(1 << 20))
    config = tmp_path / "agent.toml"
    config.write_text(
        f'name = "gw-a"\nstate_dir = "{tmp_path}/s"\nruntime_dir = "{tmp_path}/r"\nserver = "127.0.0.1:1"\n'
        f'[[plane]]\nname = "nbd-0"\nlisten = "unix:{tmp_path}/nbd.sock"\n'
        f'[[export]]\nvolume = "v"\nbackend = "b"\nfile = "{tmp_path}/disk"\n'
    )
    argv = [sys.executable, "-m", "gateway_agent", "run", "--config", str(config)]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    facts = tmp_path / "r" / "agent.json"

    def log_until(text):
        watchdog = threading.Timer(LIMIT_S, process.kill)  # the children end with it, and so does stderr
        watchdog.start()
        try:
            assert any(text in line for line in process.stderr), f"the agent did not say {text!r}"
        finally:
            watchdog.cancel()

    def children_without(*gone):
        """Pids of both once they are written, by the agent, which its children do not wait for."""
        deadline = Deadline(LIMIT_S)
        while not all((found := read_agent(facts)).get(name) for name in ("link", "nbd-0")) or (
            set(gone) & set(found.values())
        ):
            assert not deadline.passed, found
            time.sleep(0.02)
        return found

    try:
        log_until("connected to=nbd-0")
        before = children_without()
        os.kill(before["link"], signal.SIGKILL)
        log_until("connected to=nbd-0")
        after = children_without(before["link"])
        assert after["nbd-0"] == before["nbd-0"]
        os.kill(after["nbd-0"], signal.SIGKILL)
        log_until("connected to=nbd-0")
        last = children_without(after["nbd-0"])
        assert last["link"] == after["link"]
        process.terminate()
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0
        assert read_agent(facts) == {"nbd-0": None, "link": None}
        for pid in last.values():
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
    finally:
        process.kill()
        process.communicate()
