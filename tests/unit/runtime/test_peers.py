from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from pmdaemon.runtime import peers


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_users_of_both_ends(family: int, host: str) -> None:
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        assert peers.listener_uids(host, port) == {os.geteuid()}
        with socket.create_connection((host, port), timeout=30) as client:
            assert peers.client_uids(port)[client.getsockname()[:2]] == os.geteuid()
    assert peers.listener_uids(host, port) == set()


def test_a_listener_for_every_address_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
    row = "   0: {}:20DB {}:0000 0A 00000000:00000000 00:00000000 00000000  {} 0 1\n"
    four = tmp_path / "tcp"
    four.write_text(head + row.format("00000000", "00000000", 7) + row.format("0100007F", "00000000", 9))
    six = tmp_path / "tcp6"
    six.write_text(head + row.format("0" * 24 + "00000000", "0" * 32, 8))
    monkeypatch.setattr(peers, "TABLES", (four, six, tmp_path / "absent"))
    assert peers.listener_uids("127.0.0.1", 8411) == {7, 8, 9}
    assert peers.listener_uids("127.0.0.1", 8412) == set()
    assert peers.listener_uids("127.0.0.2", 8411) == {7, 8}


def test_the_user_behind_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(path)
        listener.listen()
        client.connect(path)
        assert peers.unix_peer_uid(client) == os.geteuid()
