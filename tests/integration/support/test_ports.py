"""Ports of a test's own processes: no other process gets them, also between two runs of a server."""

from __future__ import annotations

import socket

import pytest

from pmdaemon.runtime.sockets import open_listener
from tests.support.ports import free_port


def test_a_port_is_kept_from_others_and_open_to_its_server_again_and_again() -> None:
    port = free_port()
    for _run in range(2):
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind(("127.0.0.1", port))
        with (
            open_listener("pmdaemon.listen", "127.0.0.1", port) as listener,
            socket.create_connection(("127.0.0.1", port), timeout=60) as client,
        ):
            accepted, peer = listener.accept()
            assert peer == client.getsockname()
            accepted.close()  # first, so that this port waits in TIME_WAIT


def test_a_wanted_port_is_refused_while_a_server_listens_on_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        free_port(taken.getsockname()[1])
