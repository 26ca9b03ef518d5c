"""A plane's next process takes the sockets of the former one: each side by itself, and two real planes."""

import errno
import os
import socket
import sys
import threading

import pytest

from gateway_agent import status
from gateway_agent.errors import PlaneLost
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd import takeover
from gateway_agent.nbd.control import ControlServer
from gateway_agent.nbd.loop import EventLoop
from gateway_agent.nbd.sockets import Address, listen_at
from gateway_agent.nbd.takeover import FormerProcesses, Inheritance, former_processes, take_over
from pmdaemon.runtime.clock import Deadline, SystemClock
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.planes import DpHandOver, DpHello
from tests.support.nbd import Rig, as_cut
from tests.support.planes import DEADLINE_S, Link, Processes, can_connect, wait_for

CAPS = {"gen": 3, "lease_us": 30_000_000, "caps": [{"volume": "vol-1", "ops_per_s": 5.0}]}
HELLO = DpHello("nbd-0", 1, [], [], is_stopping=False)


class Former:
    """The process that serves: its control socket, one socket for clients, and what it was told."""

    def __init__(self, folder):
        self.path = str(folder / "nbd-0.sock")
        self.clients = listen_at(Address(path=str(folder / "gw.sock")), 0o600)
        self.loop = EventLoop(SystemClock())
        self.told = []
        self.offers = True
        self.is_done = False
        self.server = ControlServer(self.loop, listen_at(Address(path=self.path), 0o600), self)
        self._thread = threading.Thread(target=self._work, name="former")

    def _work(self):
        while not self.is_done:
            self.loop.at("turn", SystemClock().monotonic_ns() + 10_000_000, lambda _now: None)
            self.loop.step()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_what):
        self.is_done = True
        self._thread.join()
        self.server.close()
        self.clients.close()
        self.loop.close()

    def hello(self):
        return HELLO

    def offer(self):
        if not self.offers:
            return None
        self.told.append("offer")
        said = DpHandOver(["unix:gw"], CAPS, 77, {"version": 4, "entries": []}, 5, 6)
        return said.encode(), [self.clients]

    def keep(self):
        self.told.append("keep")

    def handed_over(self):
        self.told.append("handed over")
        self.is_done = True


@pytest.fixture
def former(tmp_path):
    return Former(tmp_path)


def wait(former, told):
    deadline = Deadline(120)
    while former.told != told:
        assert not deadline.passed, former.told
        threading.Event().wait(0.01)


def test_the_sockets_and_orders_of_the_former_process_are_taken(former):
    with former:
        early = socket.socket(socket.AF_UNIX)
        early.connect(former.clients.getsockname())
        got = take_over(former.path, "nbd-0", SystemClock())
        assert (got.caps, got.lease_end_ns, got.thresholds) == (CAPS, 77, {"version": 4, "entries": []})
        assert (got.start_ns, got.start_us, got.pid) == (5, 6, HELLO.pid)
        taken = got.listeners.pop("unix:gw")
        assert not os.get_inheritable(taken.fileno())
        got.confirm()
        wait(former, ["offer", "handed over"])
    # The former process has closed its own: who waited is accepted here, and the links come here, too.
    accepted, _ = taken.accept()
    with early, accepted:
        accepted.sendall(b"x")
        assert early.recv(1) == b"x"
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(former.path)
        got.control.accept()[0].close()
    taken.close()
    got.control.close()


def test_a_listener_that_is_wanted_no_more_is_closed_and_its_file_removed(former):
    path = former.clients.getsockname()
    with former:
        got = take_over(former.path, "nbd-0", SystemClock())
        assert os.path.exists(path)
        got.confirm()
        wait(former, ["offer", "handed over"])
    assert not os.path.exists(path)
    got.control.close()


def test_a_next_process_that_ends_before_it_serves_leaves_all_as_it_was(former):
    with former:
        got = take_over(former.path, "nbd-0", SystemClock())
        with pytest.raises(PlaneLost, match="does not hand over"):  # one at a time
            take_over(former.path, "nbd-0", SystemClock())
        got._former.close()
        wait(former, ["offer", "keep"])
        for sock in (*got.listeners.values(), got.control):
            sock.close()
        again = take_over(former.path, "nbd-0", SystemClock())
        again.confirm()
        again.control.close()
        wait(former, ["offer", "keep", "offer", "handed over"])


def test_a_process_that_cannot_hand_over_says_so(former, tmp_path):
    assert take_over(str(tmp_path / "nobody.sock"), "nbd-0", SystemClock()) is None
    former.offers = False
    with former, pytest.raises(PlaneLost, match="does not hand over; see its log"):
        take_over(former.path, "nbd-0", SystemClock())
    assert former.told == []


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (frame.encode(Kind.DP_HELLO, HELLO.header() | {"plane": "nbd-1"}), "calls itself"),
        (frame.encode(Kind.UNSUPPORTED, {"kind": 120}), "of a release without upgrade"),
        (frame.encode(Kind.DP_HAND_OVER, {"listeners": 3}), "hands over listeners 3"),
        (DpHandOver([], None, None, None, 1, 2).encode(), "names 0 listeners, and sends 0 sockets"),
        (b"\xff" * 16, "frame"),
        (b"", "does not hand over"),
    ],
)
def test_an_answer_that_is_none_is_refused(tmp_path, answer, problem):
    path = str(tmp_path / "nbd-0.sock")
    with listen_at(Address(path=path), 0o600) as listener:
        listener.setblocking(True)

        def reply():
            sock, _ = listener.accept()
            with sock:
                sock.recv(65_536)
                sock.sendall(answer)

        thread = threading.Thread(target=reply, name="former")
        thread.start()
        with pytest.raises(PlaneLost, match=problem):
            take_over(path, "nbd-0", SystemClock())
        thread.join()


def test_a_process_that_hangs_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(takeover, "LIMIT_S", 0.05)
    path = str(tmp_path / "nbd-0.sock")
    with listen_at(Address(path=path), 0o600), pytest.raises(PlaneLost, match=r"timed out|not answer"):
        take_over(path, "nbd-0", SystemClock())


def test_the_heir_is_not_pushed_out_by_terminals(former):
    with former:
        got = take_over(former.path, "nbd-0", SystemClock())
        crowd = []
        for _ in range(12):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(former.path)
            sock.settimeout(60)
            assert sock.recv(1), "its hello"
            crowd.append(sock)
        got.confirm()
        wait(former, ["offer", "handed over"])
        for sock in (*crowd, got.control):
            sock.close()


def test_frames_of_an_unknown_kind_are_answered_as_ever(former):
    with former, socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(former.path)
        sock.sendall(frame.encode(Kind.DP_TAKEN, {}))  # of no heir
        sock.sendall(frame.encode(Kind.POLL, {}))
        reader, kinds = frame.FrameReader(), []
        while Kind.UNSUPPORTED not in kinds:
            kinds += [each.kind for each in reader.feed(sock.recv(65_536))]
    assert former.told == []


def test_a_former_process_is_one_that_listens_beside_us(tmp_path):
    own = str(tmp_path / "nbd-0.sock")
    assert former_processes(own) == 0
    with listen_at(Address(path=str(tmp_path / "nbd-0.4711.sock")), 0o600):
        assert former_processes(own) == 1
        assert former_processes(str(tmp_path / "nbd-1.sock")) == 0
    assert (tmp_path / "nbd-0.4711.sock").exists()
    assert former_processes(own) == 0, "it was killed"


def test_ledgers_are_believed_again_when_all_former_processes_have_ended_and_a_flush_came_behind(tmp_path):
    rig, own = Rig(), str(tmp_path / "nbd-0.sock")
    ours = rig.volume.ledger_of("nbd://127.0.0.1/x").joined()
    with listen_at(Address(path=str(tmp_path / "nbd-0.4711.sock")), 0o600):
        FormerProcesses(rig.loop, own, rig.context, None)
        rig.loop.fire(3)
        ours.flushed(ours.mark())
        assert (rig.context.other.may_serve, ours.is_covered) == (True, True)
    rig.loop.fire(3)
    assert (rig.context.other.may_serve, ours.is_covered) == (False, False)
    ours.flushed(ours.mark())
    assert ours.is_covered
    assert rig.loop.timers == {}


@pytest.mark.parametrize("what", ["socket", "scandir"])
def test_without_descriptors_former_processes_still_count_and_are_looked_for_again(
    tmp_path, monkeypatch, what
):
    """Looked for no more, they would count for ever: caps would be shared with nobody, and stay halved."""
    rig, own = Rig(), str(tmp_path / "nbd-0.sock")

    def exhausted(*_args, **_options):
        raise OSError(errno.EMFILE, "Too many open files")

    with listen_at(Address(path=str(tmp_path / "nbd-0.4711.sock")), 0o600):
        former = FormerProcesses(rig.loop, own, rig.context, None)
        with monkeypatch.context() as patch:
            patch.setattr(socket if what == "socket" else os, what, exhausted)
            rig.loop.fire(3)
        assert (former.number, rig.context.other.may_serve) == (1, True)
    rig.loop.fire(3)
    assert (former.number, rig.context.other.may_serve) == (0, False)


@pytest.mark.parametrize(
    ("pid", "may_serve", "numbers"), [(1, True, []), (None, True, [0]), (1 << 30, False, [0])]
)
def test_the_process_that_hands_over_counts_until_it_has_ended_also_before_it_has_its_own_socket(
    tmp_path, pid, may_serve, numbers
):
    rig, changed = Rig(), []
    with socket.socket(socket.AF_UNIX) as control:
        inherited = Inheritance(control, {}, pid=pid)
        former = FormerProcesses(
            rig.loop,
            str(tmp_path / "nbd-0.sock"),
            rig.context,
            inherited,
            lambda _now_ns: changed.append(former.number),
        )
        assert (rig.context.other.may_serve, former.number) == (True, 1)
        rig.loop.fire(5)
    assert changed == numbers
    assert rig.context.other.may_serve == may_serve


# -- two planes


@pytest.fixture
def run(tmp_path):
    (tmp_path / "disk.img").write_bytes(bytes(1 << 20))
    with Processes(tmp_path) as processes:
        yield processes


def next_plane(run):
    config = str(run.folder / "agent.toml")
    command = (sys.executable, "-m", "gateway_agent.nbd.plane", "--config", config, "--plane", "nbd-0")
    return run.start(*command, "--take-over")


def leaving(link):
    while "leaving" not in (said := link.receive(Kind.DP_HELLO).header):
        pass
    return said["leaving"]


def cap_of(run, plane):
    [volume] = status.plane_status(str(run.folder / f"{plane}.sock"), plane).volumes
    return volume.caps.ops_per_s


def test_caps_and_thresholds_hold_from_the_first_io_and_the_last_counts_are_kept(run):
    file = {"volume": "vol-1", "backend": "b", "file": f"{run.folder}/disk.img"}
    first = run.plane([file])
    link, early = run.link(), run.client("vol-1@early")
    caps = [{"volume": "vol-1", "ops_per_s": 0.02}]
    limit = {"volume": "vol-1", "client": "*", "io": "any", "threshold_us": 1}
    link.send(Kind.DP_THRESHOLDS, version=4, entries=[limit])
    link.send(Kind.DP_CAPS, gen=3, lease_us=600_000_000, caps=caps)
    link.totals()
    early.sock.sendall(p.request(p.Cmd.READ, 1, 0, 512))
    assert len(early.exactly(528)) == 528
    second = next_plane(run)
    name = leaving(link)
    assert name == f"nbd-0.{first.pid}"
    link.close()

    late = run.client("vol-1@late")
    late.sock.sendall(b"".join(p.request(p.Cmd.READ, n, 0, 512) for n in range(2)))
    assert len(late.exactly(528)) == 528
    next_link = run.link()
    found = next_link.collect()
    assert (found.header["tg"], found.header["ts"]) == (3, 4), "during the whole of its first cut"
    assert [row["client"] for row in found.header["streams"]] == ["late"]
    columns = as_cut(bytes(found.raw))
    assert (columns.column("held").tolist(), columns.column("reads").tolist()) == ([1], [1])
    assert next_link.hello.header["exports"][0]["volume"] == "vol-1"
    assert (cap_of(run, "nbd-0"), cap_of(run, name)) == (0.01, 0.01), "together they do not exceed it"

    early.sock.close()
    former = Link(run.connected(f"{name}.sock"))
    while not former.hello.header["stopping"]:
        former.hello = former.receive(Kind.DP_HELLO)
    former.got = link.got
    last = former.collect()
    assert as_cut(bytes(last.raw)).column("reads").tolist() == [1]
    assert first.poll() is None, "it waits until they are spooled"
    former.send(Kind.DP_COLLECT, got=former.got)
    assert first.wait(DEADLINE_S) == 0
    assert not (run.folder / f"{name}.sock").exists()
    assert second.poll() is None
    assert (run.folder / "nbd-0.sock").exists()
    wait_for("the cap is whole again", lambda: cap_of(run, "nbd-0") == 0.02)


def test_a_plane_that_has_no_former_process_starts_as_ever(run):
    (run.folder / "nbd-0.sock").unlink(missing_ok=True)
    file = {"volume": "vol-1", "backend": "b", "file": f"{run.folder}/disk.img"}
    first = run.plane([file])
    first.kill()
    first.wait()
    next_plane(run)  # behind two stale socket files
    wait_for("it listens", lambda: can_connect(run.folder / "gw.sock"))
    assert run.client("vol-1").facts.size_bytes == 1 << 20


def test_neither_process_keeps_clients_over_the_loss_of_an_upstream(run):
    """A flush at one process says nothing of a write at the other, which may be lost with the upstream."""
    socket_path = run.folder / "up.sock"
    storage = run.start("nbdkit", "-f", "--unix", str(socket_path), "memory", "1M")
    wait_for("the storage listens", lambda: can_connect(socket_path))
    uri = f"nbd+unix:///?socket={socket_path}"
    run.plane([{"volume": "vol-1", "backend": "b", "upstream": uri, "reconnect_s": 300}])
    link, early = run.link(), run.client("vol-1@early")
    next_plane(run)
    leaving(link)
    clients = [early, run.client("vol-1@late")]
    for client in clients:
        client.sock.sendall(p.request(p.Cmd.FLUSH, 1, 0, 0))
        assert p.SIMPLE_REPLY.unpack(client.exactly(16))[1] == 0
    storage.kill()
    for client in clients:
        assert client.exactly(1) == b""
