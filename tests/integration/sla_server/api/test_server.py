from __future__ import annotations

import errno
import os
import pwd
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from pmdaemon.runtime.stop import Stop
from sla_server.api import server
from sla_server.api.config import ApiConfig
from sla_server.api.server import (
    LIMITS_S,
    HttpListener,
    WebServer,
    connections_to_close,
    open_listener,
    open_local,
    phase_of,
)
from tests.support import api

HALF = b"GET /api/v1/mode HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "


class Running:
    """A web server with few places at TCP, and a Unix socket."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.stop = Stop()
        self.mailbox = api.AnsweringMailbox(answer=lambda _header: (True, 200, {"mode": "observe"}))
        self.path = folder / "api.sock"
        local = open_local(self.path)
        assert local is not None
        listener = open_listener("127.0.0.1:0")
        self.server = WebServer(
            ApiConfig.model_validate({"listen": "127.0.0.1:0", "live_streams_max": 1, **settings}),
            api.data_dir(folder),
            api.FakeSource(),
            self.mailbox,
            listener,
            self.stop,
            local=local,
        )
        self.peers: list[socket.socket] = []  # open until the server has stopped
        self.ended: list[int] = []
        self.thread = threading.Thread(target=lambda: self.ended.append(self.server.serve()), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.stop.set()
        self.thread.join(60)
        for peer in self.peers:
            peer.close()
        self.server.listener.close()
        assert self.server.local is not None
        self.server.local.close()
        self.mailbox.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made = Running(tmp_path)
    yield made
    made.close()
    assert made.ended == [0]


def slow_connections(port: int, count: int) -> list[socket.socket]:
    made = []
    for _ in range(count):
        connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        connection.sendall(HALF)
        made.append(connection)
    return made


def test_half_requests_lock_no_client_out(running: Running) -> None:
    places = 4 * (server.WORKER_THREADS + 1)
    slow = slow_connections(running.server.port, places + 20)
    try:
        with httpx.Client(base_url=running.server.address, timeout=60) as browser:
            assert browser.get("/api/v1/mode").status_code == 200
        transport = httpx.HTTPTransport(uds=str(running.path))
        headers = {"Authorization": f"Bearer {api.TOKEN}"}
        with httpx.Client(
            base_url="http://localhost", timeout=60, transport=transport, headers=headers
        ) as ours:
            made = ours.post("/api/v1/logins")
        assert made.json()["address"].startswith(f"{running.server.address}login?code=")
    finally:
        for connection in slow:
            connection.close()


def test_no_line_of_the_log_lets_anyone_in(running: Running, tmp_path: Path) -> None:
    transport = httpx.HTTPTransport(uds=str(running.path))
    headers = {"Authorization": f"Bearer {api.TOKEN}"}
    with capture_logs() as lines:
        running.server.announce(tmp_path)
        with httpx.Client(
            base_url="http://localhost", transport=transport, headers=headers, timeout=60
        ) as ours:
            code = ours.post("/api/v1/logins").json()["address"].partition("code=")[2]
    assert [line["event"] for line in lines if "code=" in str(line)] == []
    assert "page-ready" in [line["event"] for line in lines]
    assert code
    assert code not in str(lines)
    assert api.TOKEN not in str(lines)


@pytest.mark.parametrize("url", ["", "https://sla.example.org"])
def test_who_asks_is_what_the_proxy_adds_if_there_is_one(tmp_path: Path, url: str) -> None:
    """The HTTP layer took the header off: all who came through the proxy shared the tries of one address."""
    behind = Running(tmp_path, external_url=url, reading="login")
    try:
        headers = {"X-Forwarded-For": "6.6.6.6, 10.9.8.7", "X-Forwarded-Proto": "https"}
        at = f"http://127.0.0.1:{behind.server.port}/login"
        assert httpx.post(at, data={"code": "wrong"}, headers=headers, timeout=60).status_code == 403
    finally:
        behind.close()
    noted = behind.mailbox.recorded[-1]["body"]["after"]
    assert noted == {"address": "10.9.8.7" if url else "127.0.0.1"}


@pytest.mark.parametrize("through_socket", [False, True])
def test_no_client_says_itself_which_user_it_is(running: Running, through_socket: bool) -> None:
    """The kernel's word about the Unix socket travels as a header: one from outside must not pass."""
    headers = {"Authorization": f"Bearer {api.TOKEN}", "Sla-Peer-Uid": "4242", "Sla-User": "boss"}
    transport = httpx.HTTPTransport(uds=str(running.path)) if through_socket else None
    base = "http://127.0.0.1" if through_socket else f"http://127.0.0.1:{running.server.port}"
    with httpx.Client(base_url=base, transport=transport, timeout=60) as client:
        assert client.put("/api/v1/mode", json={"mode": "observe"}, headers=headers).status_code == 200
    (asked,) = [each for each in running.mailbox.posted if each["op"] == "mode"]
    me = pwd.getpwuid(os.geteuid()).pw_name
    assert asked["who"] == (f"local ({me})" if through_socket else "local (says boss)")


SCRIPT = "GET /static/plotly.min.js HTTP/1.1\r\nHost: 127.0.0.1\r\n{}\r\n"


def unread_connections(port: int, request: str, count: int) -> list[socket.socket]:
    made = []
    for _ in range(count):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", port))
        connection.sendall(request.encode())
        made.append(connection)
    return made


@pytest.mark.parametrize("request_text", [SCRIPT.format("") * 3, SCRIPT.format("Range: bytes=0-\r\n")])
@pytest.mark.parametrize("count", [server.WORKER_THREADS + 8, 4 * (server.WORKER_THREADS + 1) + 20])
def test_answers_that_are_not_read_lock_no_client_out(
    running: Running, request_text: str, count: int
) -> None:
    unread = unread_connections(running.server.port, request_text, count)
    try:
        with httpx.Client(base_url=running.server.address, timeout=60) as browser:
            assert browser.get("/api/v1/mode").status_code == 200
    finally:
        for connection in unread:
            connection.close()


def script_files_open() -> int:
    links = [Path("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).endswith("plotly.min.js") for link in links if link.is_symlink())


def test_a_stop_closes_the_files_of_unread_answers(tmp_path: Path) -> None:
    running = Running(tmp_path)
    running.peers = unread_connections(running.server.port, SCRIPT.format(""), 3)
    for peer in running.peers:
        assert peer.recv(1) == b"H"
    assert script_files_open() == 3
    running.close()
    assert script_files_open() == 0


def test_a_request_sent_before_the_answer_to_the_last_ends_the_connection(running: Running) -> None:
    one = "GET /api/v1/mode HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with socket.create_connection(("127.0.0.1", running.server.port), timeout=60) as connection:
        connection.sendall(one.encode() * 3)
        with connection.makefile("rb") as answer:
            text = answer.read()
    assert text.count(b"HTTP/1.1 200 OK") == 1
    assert b"connection: close" in text.lower()


def test_the_local_socket_is_for_its_owner_and_its_path_may_be_long(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 90) / ("e" * 90)
    folder.mkdir(parents=True)
    (folder / "api.sock").write_text("left by another run")
    listener = open_local(folder / "api.sock")
    assert listener is not None
    listener.close()
    assert (folder / "api.sock").stat().st_mode & 0o777 == 0o600
    assert open_local(tmp_path / "absent" / "api.sock") is None


@pytest.fixture
def idle_listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[HttpListener, list[float]]]:
    now_s = [0.0]
    listener = open_listener("127.0.0.1:0")
    served = HttpListener(
        lambda *_: [], listener, threads=1, places=3, max_body_bytes=1000, now_s=lambda: now_s[0]
    )
    yield served, now_s
    stop = Stop()
    stop.set()
    served.serve(stop, lambda: None)


class Channel:
    """What the listener sees of a connection."""

    def __init__(self, listener: HttpListener, user: int = 7, **state: Any) -> None:
        self.total_outbufs_len = self.sent_bytes = 0
        self.requests: list[object] = []
        self.request: object = None
        self.creation_time, self.last_activity = 0.0, 1.0
        self.addr = ("127.0.0.1", id(self) % 65_536)
        self.user = user
        self.__dict__.update(state)
        self._open = listener._server.active_channels
        self._open[id(self)] = self

    def handle_close(self) -> None:
        del self._open[id(self)]

    @property
    def is_open(self) -> bool:
        return id(self) in self._open


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        ({"request": object()}, "asking"),
        ({"last_activity": 0.0}, "asking"),
        ({"requests": [1]}, "working"),
        ({"requests": [1], "total_outbufs_len": 5}, "answering"),
        ({}, "idle"),
    ],
)
def test_each_phase_has_its_limit(
    idle_listener: tuple[HttpListener, list[float]], state: dict[str, Any], phase: server.Phase
) -> None:
    listener, now_s = idle_listener
    channel = Channel(listener, **state)
    assert phase_of(channel) == phase
    listener.make_room()
    now_s[0] = LIMITS_S.get(phase, 1e6) - 1
    listener.make_room()
    assert channel.is_open
    now_s[0] += 1
    listener.make_room()
    assert channel.is_open == (phase == "working")


def test_bytes_that_trickle_do_not_prolong_a_request(idle_listener: tuple[HttpListener, list[float]]) -> None:
    listener, now_s = idle_listener
    channel = Channel(listener, request=object())
    for second in range(int(server.REQUEST_LIMIT_S) + 1):
        now_s[0] = float(second)
        channel.last_activity += 1
        listener.make_room()
    assert not channel.is_open


def test_when_all_places_are_taken_who_only_waits_gives_way(
    idle_listener: tuple[HttpListener, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, now_s = idle_listener
    working = Channel(listener, requests=[1])
    first = Channel(listener, request=object())
    listener.make_room()
    now_s[0] = 1.0
    second = Channel(listener)
    other = Channel(listener, user=8)
    users = {channel.addr: channel.user for channel in (working, first, second, other)}
    monkeypatch.setattr(server.sockets, "client_uids", lambda _port: users)
    listener.make_room()
    assert [item.is_open for item in (working, first, second, other)] == [True, False, False, True]


def test_many_connections_from_one_address_do_not_displace_those_of_others(
    idle_listener: tuple[HttpListener, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, now_s = idle_listener
    far = Channel(listener, addr=("198.51.100.9", 4001))
    listener.make_room()
    now_s[0] = 1.0
    many = [Channel(listener, addr=("203.0.113.5", port)) for port in (5001, 5002, 5003)]
    monkeypatch.setattr(server.sockets, "client_uids", lambda _port: {})
    listener.make_room()
    assert far.is_open, "it has waited longest, and is the only one from there"
    assert sum(one.is_open for one in many) == 1


def test_who_does_not_read_gives_way_before_who_reads(
    idle_listener: tuple[HttpListener, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, now_s = idle_listener
    reads = Channel(listener, total_outbufs_len=9)
    unread = Channel(listener, total_outbufs_len=9)
    listener.make_room()
    now_s[0], reads.sent_bytes = 5.0, 1
    other = Channel(listener, user=8, total_outbufs_len=9)
    users = {channel.addr: channel.user for channel in (reads, unread, other)}
    monkeypatch.setattr(server.sockets, "client_uids", lambda _port: users)
    listener.make_room()
    assert [item.is_open for item in (reads, unread, other)] == [True, False, True]
    late = Channel(listener, user=8, request=object())
    users[late.addr] = 8
    reads.user = users[reads.addr] = 8
    other.user = users[other.addr] = 7
    now_s[0], other.sent_bytes = 6.0, 1
    listener.make_room()
    assert [item.is_open for item in (reads, other, late)] == [False, True, True]


def test_the_user_with_the_most_connections_gives_way_first() -> None:
    waiting = {"a1": 1.0, "b1": 2.0, "b2": 3.0, "b3": 4.0, "x": 0.0}
    users = {"a1": 1, "b1": 2, "b2": 2, "b3": 2, "x": None}
    assert connections_to_close(waiting, users, 2) == ["b1", "b2"]
    assert sorted(connections_to_close(waiting, users, 9)) == ["a1", "b1", "b2", "b3", "x"]
    assert connections_to_close({}, {}, 3) == []
    assert connections_to_close({"a1": 1.0, "b1": 2.0}, users, 1) == ["b1"], "those that work count too"


def test_a_stalled_reader_loses_its_place_and_its_thread_ends(
    idle_listener: tuple[HttpListener, list[float]],
) -> None:
    listener, now_s = idle_listener
    channel = Channel(listener, total_outbufs_len=1 << 20)
    listener.make_room()
    now_s[0] = server.ANSWER_LIMIT_S
    listener.make_room()
    assert not channel.is_open


def test_without_descriptors_the_listener_is_not_polled_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A try at the first turn and one after the pause, in 60 turns with a connection in the backlog."""
    monkeypatch.setattr(server, "LOOP_S", 0)
    listener, stop, tries, turns = open_listener("127.0.0.1:0"), Stop(), [], []

    class Exhausted:
        """As the listener, in a process without descriptors."""

        def accept(self) -> object:
            tries.append(len(turns))
            raise OSError(errno.EMFILE, "Too many open files")

        def __getattr__(self, name: str) -> Any:
            return getattr(listener, name)

    class CountingListener(HttpListener):
        def make_room(self) -> None:
            super().make_room()
            turns.append(1)
            if len(turns) == 60:
                stop.set("enough turns")

    def now_s() -> float:
        return 1000.0 if len(turns) < 30 else 1001.0

    http = CountingListener(
        lambda *_call: [], listener, threads=1, places=4, max_body_bytes=1000, now_s=now_s
    )
    http._server.socket = Exhausted()  # waitress offers no other way
    peer = socket.create_connection(listener.getsockname())
    http.serve(stop, lambda: None)
    peer.close()
    assert tries == [0, 30]
