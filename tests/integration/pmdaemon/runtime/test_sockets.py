from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from pmdaemon.errors import ConfigError
from pmdaemon.runtime import client_user, sockets
from pmdaemon.runtime.client_user import client_uid


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_users_of_both_ends(family: int, host: str) -> None:
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        assert sockets.listener_uids(host, port) == {os.geteuid()}
        with socket.create_connection((host, port), timeout=60) as client:
            assert sockets.client_uids(port)[client.getsockname()[:2]] == os.geteuid()
    assert sockets.listener_uids(host, port) == set()


@pytest.mark.parametrize("asks_kernel", [True, False])
@pytest.mark.parametrize(
    ("family", "host", "to"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET6, "::1", "::1"),
        (socket.AF_INET6, "::", "127.0.0.1"),
    ],
)
def test_the_user_of_one_connection(
    family: int, host: str, to: str, asks_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not asks_kernel:
        monkeypatch.setattr(client_user, "NETLINK_SOCK_DIAG", 31)  # no such family of messages
    with socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::") as listener:
        address = to, listener.getsockname()[1]
        with socket.create_connection(address, timeout=60):
            connection, _ = listener.accept()
            with connection:
                assert client_uid(connection) == os.geteuid()
        with socket.create_connection(address, timeout=60) as client:
            client.sendall(b"closed at once")
        connection, _ = listener.accept()
        with connection:
            assert client_uid(connection) is None, "what it has said is of nobody, not of user 0"


ANY4, OWN4, ANY6, OWN6 = "00000000", "0100007F", "0" * 32, "0" * 24 + "01000000"
MAPPED4 = "0" * 16 + "FFFF0000" + OWN4


@pytest.mark.parametrize(
    ("listening", "host", "users"),
    [
        ({ANY4: 7}, "127.0.0.1", {7}),
        ({ANY6: 8}, "127.0.0.1", {8}),
        ({OWN4: 9, ANY6: 8}, "127.0.0.1", {9}),
        ({ANY4: 7, ANY6: 8}, "127.0.0.2", {7}),
        ({OWN4: 9, ANY6: 8}, "::ffff:127.0.0.1", {9}),
        ({MAPPED4: 9, ANY6: 8}, "127.0.0.1", {9}),
        ({OWN4: 9}, "127.0.0.2", set()),
        ({ANY4: 7}, "::1", set()),
        ({ANY4: 7, ANY6: 8}, "::1", {8}),
        ({OWN6: 6, ANY6: 8}, "::1", {6}),
    ],
)
def test_the_listener_that_gets_the_connection_counts(
    listening: dict[str, int],
    host: str,
    users: set[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
    row = "   0: {}:20DB {}:0000 0A 00000000:00000000 00:00000000 00000000  {} 0 1\n"
    tables = (tmp_path / "tcp", tmp_path / "tcp6", tmp_path / "absent")
    for table, length in zip(tables, (8, 32), strict=False):
        rows = [row.format(own, "0" * length, uid) for own, uid in listening.items() if len(own) == length]
        table.write_text(head + "".join(rows))
    monkeypatch.setattr(sockets, "TABLES", tables)
    assert sockets.listener_uids(host, 8411) == users
    assert sockets.listener_uids(host, 8412) == set()


def test_the_user_behind_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(path)
        listener.listen()
        client.connect(path)
        assert sockets.unix_peer_uid(client) == os.geteuid()


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_who_has_a_port_is_said(family: int, host: str) -> None:
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        found = sockets.listener_at(host, port)
        assert found is not None
        assert (found.pid, found.uid) == (os.getpid(), os.geteuid())
        assert str(found).startswith(f"process {os.getpid()} (")
        with pytest.raises(ConfigError, match=rf"Address already in use by process {os.getpid()} \("):
            sockets.open_listener("api.listen", host, port)
    assert sockets.listener_at(host, port) is None


def test_a_listener_of_every_address_has_the_port_of_each() -> None:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        found = sockets.listener_at("127.0.0.1", listener.getsockname()[1])
        assert found is not None
        assert found.pid == os.getpid()


def test_a_process_that_cannot_be_looked_into_is_said_by_its_user() -> None:
    assert str(sockets.Listener(0, "", 1000)) == "a process of user 1000, which root can name (ss -ltnp)"
    assert str(sockets.Listener(0, "", -1)) == "another process"
    assert str(sockets.Listener(7, "nbdkit " + "x" * 200, 0)).endswith("...)")


def test_a_dial_that_is_answered_is_connected_unless_by_itself(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as dialled:
        dialled.connect(listener.getsockname())
        assert sockets.dial_error(dialled) == 0
    with socket.socket() as alone:  # as to a port of the ephemeral range that no process listens on
        alone.bind(("127.0.0.1", 0))
        alone.connect(alone.getsockname())
        assert sockets.dial_error(alone) == errno.ECONNREFUSED
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as dialled:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        dialled.connect(str(tmp_path / "s"))
        assert sockets.dial_error(dialled) == 0
