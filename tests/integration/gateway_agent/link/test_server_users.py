"""Without TLS an agent knows its server by the user of its process, as the kernel says it.

Review, finding 5: while the server was down any local user could take its port, and slow down every volume.
"""

from __future__ import annotations

import os
import random
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

from gateway_agent.config import AgentConfig
from gateway_agent.link.connection import LinkListener, PeerConnection
from gateway_agent.link.elsewhere import EVERY_NS, Attempt
from gateway_agent.link.server_users import EVERY_USER, ServerUsers
from pmdaemon.runtime.backoff import Backoff
from pmdaemon.runtime.client_user import server_uids
from pmdaemon.runtime.clock import Deadline, FakeClock, wall_clock
from tests.support import other_user

LIMIT_S = 120.0
STRANGER = ServerUsers(frozenset((os.geteuid() + 1,)))
"""The server runs as another user than this test, which listens."""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of other users")


class Told:
    """What a connection reports."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def opened(self) -> None:
        self.told.append("opened")

    def received(self, data: bytes) -> None:
        self.told.append(data.decode())

    def lost(self, reason: str) -> None:
        self.told.append(reason)

    def pending(self) -> bytearray:
        return bytearray()


def dial(
    port: int, users: ServerUsers, ends: Callable[[list[str], list[str]], bool]
) -> tuple[list[str], list[str]]:
    """Run a connection until it ``ends``; returns what its peer was told, and why it could not connect."""
    peer, reasons, deadline = Told(), list[str](), Deadline(LIMIT_S)
    backoff = Backoff(1.0, 5.0, 0.0, random.Random(1))
    with selectors.DefaultSelector() as selector, structlog.testing.capture_logs() as logs:
        connection = PeerConnection(
            "pmdaemon", [("127.0.0.1", port)], peer, backoff, selector, wall_clock(), users=users
        )
        while not ends(peer.told, reasons):
            assert not deadline.passed, (peer.told, logs)
            connection.turn()
            for _key, events in selector.select(0.05):
                connection.ready(events)
            reasons = [entry["reason"] for entry in logs if entry["event"] == "cannot-connect"]
        connection.abandon()
    return peer.told, reasons


@pytest.mark.parametrize(
    ("users", "told"), [(ServerUsers.named([]), ["opened"]), (EVERY_USER, ["opened"]), (STRANGER, [])]
)
def test_a_server_of_another_user_is_no_server(users: ServerUsers, told: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found, reasons = dial(listener.getsockname()[1], users, lambda told, reasons: bool(told or reasons))
    assert found == told
    assert all("which is not the server's. Name that user in server_users" in each for each in reasons)
    assert bool(reasons) == (told == [])


@as_root
@pytest.mark.parametrize("accepts", [False, True])
def test_the_kernel_says_whose_the_other_end_is(accepts: bool) -> None:
    with other_user.listening(accepts=accepts) as (port, process):
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as connection:
            if accepts:
                assert process.stdout is not None
                assert process.stdout.readline() == "accepted\n"
            assert server_uids(connection) == {other_user.UID}
            assert "user nobody is at the other end" in ServerUsers.named([]).why_not_dialled(connection)
            for names in ([other_user.NOBODY], ["*"], ["no-such-user", other_user.NOBODY]):
                assert ServerUsers.named(names).why_not_dialled(connection) == ""
        connection_to_nothing = socket.socket()
        with connection_to_nothing:
            assert "does not say which user" in ServerUsers.named([]).why_not_dialled(connection_to_nothing)


@pytest.mark.parametrize(("users", "stays"), [(ServerUsers.named([]), True), (STRANGER, False)])
def test_another_server_of_the_list_is_looked_at_in_the_same_way(users: ServerUsers, stays: bool) -> None:
    clock = FakeClock()
    with socket.create_server(("127.0.0.1", 0)) as listener, selectors.DefaultSelector() as selector:
        address = "127.0.0.1", int(listener.getsockname()[1])
        attempt = Attempt(1, address, selector, clock, None, None, random.Random(1), users)
        clock.advance(EVERY_NS / 1e9)
        attempt.turn()
        assert attempt.transport is not None
        assert selector.select(LIMIT_S)
        attempt.ready(selectors.EVENT_WRITE)
        assert (attempt.transport is not None) == stays
        attempt.close()


class Taken:
    def __init__(self) -> None:
        self.sockets: list[socket.socket] = []

    def take(self, sock: socket.socket) -> None:
        self.sockets.append(sock)


@pytest.mark.parametrize(("users", "count"), [(ServerUsers.named([]), 1), (STRANGER, 0)])
def test_who_dials_an_agent_that_is_dialled_is_looked_at_too(users: ServerUsers, count: int) -> None:
    taken = Taken()
    with selectors.DefaultSelector() as selector, structlog.testing.capture_logs() as logs:
        listening = LinkListener(("127.0.0.1", 0), taken, selector, FakeClock(), None, None, users)  # type: ignore[arg-type]
        with socket.create_connection(("127.0.0.1", listening.port), timeout=LIMIT_S) as dialled:
            assert selector.select(LIMIT_S)
            listening.ready(selectors.EVENT_READ)
            assert len(taken.sockets) == count
            if not count:
                assert dialled.recv(1) == b"", "it is hung up on"
                assert [entry["event"] for entry in logs] == ["not-the-server"]
        listening.close()
        for sock in taken.sockets:
            sock.close()


@as_root
def test_a_stranger_who_dials_gets_no_byte() -> None:
    taken = Taken()
    users = ServerUsers.named([])
    with selectors.DefaultSelector() as selector:
        listening = LinkListener(("127.0.0.1", 0), taken, selector, FakeClock(), None, None, users)  # type: ignore[arg-type]
        with other_user.dialling(listening.port) as stranger:
            deadline = Deadline(LIMIT_S)
            while stranger.poll() is None:
                assert not deadline.passed
                if selector.select(0.05):
                    listening.ready(selectors.EVENT_READ)
            assert stranger.stdout is not None
            assert stranger.stdout.read() == "0\n"
        assert taken.sockets == []
        listening.close()


@as_root
def test_an_agent_speaks_to_no_port_that_another_user_has_taken(tmp_path: Path) -> None:
    """The process as a whole: what its file says reaches the link."""
    image = tmp_path / "a.img"
    image.write_bytes(bytes(4096))
    with other_user.listening(accepts=True) as (port, _process):
        file = tmp_path / "agent.toml"
        file.write_text(
            f'name = "gw-a"\nserver = "127.0.0.1:{port}"\n'
            f'state_dir = "{tmp_path}/s"\nruntime_dir = "{tmp_path}/r"\n'
            f'[[plane]]\nname = "nbd-0"\nlisten = "unix:{tmp_path}/x.sock"\n'
            f'[[export]]\nvolume = "a"\nbackend = "b"\nfile = "{image}"\n'
        )
        log = tmp_path / "agent.log"
        with log.open("wb") as output:
            command = [sys.executable, "-m", "gateway_agent", "run", "--config", str(file)]
            agent = subprocess.Popen(command, stderr=output)
        try:
            deadline = Deadline(LIMIT_S)
            while "server_users" not in log.read_text():
                assert not deadline.passed, log.read_text()
                assert agent.poll() is None, log.read_text()
                threading.Event().wait(0.05)  # no descriptor tells of a line
            assert "user nobody is at the other end" in log.read_text()
        finally:
            agent.terminate()
            agent.wait(LIMIT_S)


def test_the_user_of_the_package_s_server_is_known_without_being_named() -> None:
    config = AgentConfig.model_validate({"name": "gw", "host": {"enabled": True}})
    assert config.server_users == ["sla"]
    assert {0, os.geteuid()} <= (ServerUsers.named(config.server_users).uids or set())
