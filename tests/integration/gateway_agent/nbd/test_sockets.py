"""Listening on a path: what is there already, and how many may wait."""

import contextlib
import socket
import stat
from pathlib import Path

import pytest

from gateway_agent.nbd import sockets
from gateway_agent.nbd.sockets import Address
from pmdaemon.errors import ConfigError


@pytest.fixture
def address(tmp_path):
    return Address(path=str(tmp_path / "gw.sock"))


def test_a_stale_socket_file_is_replaced_and_has_its_mode(address, tmp_path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(address.path)
    with sockets.listen_at(address, 0o600) as sock:
        assert sockets.bound_address(sock) == address
        assert stat.S_IMODE((tmp_path / "gw.sock").stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address.path)
    sockets.unlink_own(address)
    sockets.unlink_own(address)
    assert not (tmp_path / "gw.sock").exists()


def test_a_burst_of_connects_is_queued_and_not_turned_away(address):
    with sockets.listen_at(address, 0o600), contextlib.ExitStack() as clients:
        kernel_limit = int(Path("/proc/sys/net/core/somaxconn").read_text())
        wanted, connected = min(200, kernel_limit), 0
        for _ in range(wanted):
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            client.connect(address.path)  # BlockingIOError when the queue is full
            connected += 1
        assert connected == wanted


def test_a_living_listener_is_left_alone(address):
    with sockets.listen_at(address, 0o600), pytest.raises(ConfigError, match="another process is listening"):
        sockets.listen_at(address, 0o600)
