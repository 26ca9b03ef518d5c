"""TLS as a non-blocking socket: both ends in one thread, over a socket pair."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pmdaemon.pki import certificates, contexts
from pmdaemon.pki.authority import Authority
from pmdaemon.pki.certificates import SERVER_URI
from pmdaemon.runtime.transport import HandshakeFailed, TlsTransport, WantRead, WantWrite

GATEWAY = "6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f0001"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ca.crt, server.pem and gateway.pem."""
    directory = tmp_path_factory.mktemp("keys") / "ca"
    authority = Authority(directory)
    authority.init()
    authority.ensure_server()
    key = certificates.make_key()
    made = authority.issue(certificates.make_request(key, "gw-a"), GATEWAY, "gw-a")
    (directory / "gateway.pem").write_bytes(certificates.key_pem(key) + certificates.pem_of_der(made))
    return directory


class Two:
    """Server and agent ends."""

    def __init__(self, keys: Path, own: str | None = "gateway.pem") -> None:
        near, far = socket.socketpair()
        self.server = TlsTransport(
            near, contexts.server(keys / "ca.crt", keys / "server.pem"), server_side=True
        )
        context = contexts.agent(keys / "ca.crt", keys / own if own else None)
        self.agent = TlsTransport(far, context, server_side=False)

    def shake(self) -> None:
        """Until both are done."""
        for _ in range(10):
            states = (self.agent.handshake(), self.server.handshake())
            if states == (None, None):
                return
        raise AssertionError(f"no handshake: {states}")

    def close(self) -> None:
        self.server.close()
        self.agent.close()


@pytest.fixture
def two(keys: Path) -> Iterator[Two]:
    made = Two(keys)
    made.shake()
    yield made
    made.close()


def test_the_handshake_says_what_it_waits_for(keys: Path) -> None:
    two = Two(keys)
    assert two.server.handshake() == selectors.EVENT_READ
    two.shake()
    two.close()


def test_who_the_peer_is(two: Two, keys: Path) -> None:
    assert SERVER_URI in two.agent.peer_uris()
    assert two.server.peer_der() is not None
    without = Two(keys, own=None)
    without.shake()
    assert without.server.peer_der() is None
    without.close()


def test_nothing_to_read_is_a_blocking_error(two: Two) -> None:
    buffer = memoryview(bytearray(1 << 17))
    with pytest.raises(WantRead):
        two.server.recv_into(buffer)
    assert two.agent.send(b"hello") == 5
    assert two.server.recv_into(buffer) == 5
    assert bytes(buffer[:5]) == b"hello"


def test_several_records_come_in_one_read(two: Two) -> None:
    data = bytes(range(256)) * 256
    assert two.agent.send(data) == len(data)  # 64 KiB: four records, within a socket pair's buffer
    buffer = memoryview(bytearray(1 << 17))
    assert two.server.recv_into(buffer) == len(data)
    assert bytes(buffer[: len(data)]) == data


def test_a_write_that_blocks_goes_on_where_it_stopped(two: Two) -> None:
    waiting = bytearray(bytes(range(256)) * 8192)  # 2 MiB
    expected, received = bytes(waiting), bytearray()
    buffer = memoryview(bytearray(1 << 17))
    blocked = 0
    while len(received) < len(expected):
        try:
            while waiting:
                del waiting[: two.agent.send(waiting)]
                waiting_before = len(waiting)
                if waiting_before:
                    assert waiting[0] == expected[-waiting_before]
        except WantWrite:
            blocked += 1
        try:
            size = two.server.recv_into(buffer)
            received += buffer[:size]
        except WantRead:
            pass
    assert blocked
    assert bytes(received) == expected


def test_the_end_of_the_stream_is_zero(two: Two) -> None:
    two.agent.send(b"last words")
    two.agent.shutdown(socket.SHUT_WR)
    buffer = memoryview(bytearray(1 << 17))
    assert two.server.recv_into(buffer) == 10
    assert two.server.recv_into(buffer) == 0


@pytest.mark.parametrize(
    ("said", "code"),
    [(b"GET / HTTP/1.1\r\n\r\n", "not-tls"), (b"\0" * 100, "not-tls"), (b"", "closed")],
)
def test_no_tls(keys: Path, said: bytes, code: str) -> None:
    near, far = socket.socketpair()
    server = TlsTransport(near, contexts.server(keys / "ca.crt", keys / "server.pem"), server_side=True)
    far.send(said)
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(HandshakeFailed) as caught:
        server.handshake()
    assert caught.value.code == code
    server.close()
    far.close()


def test_a_gateways_certificate_cannot_act_as_a_server(keys: Path) -> None:
    near, far = socket.socketpair()
    impostor = TlsTransport(near, contexts.server(keys / "ca.crt", keys / "gateway.pem"), server_side=True)
    agent = TlsTransport(far, contexts.agent(keys / "ca.crt", keys / "gateway.pem"), server_side=False)
    assert agent.handshake() == selectors.EVENT_READ
    impostor.handshake()
    with pytest.raises(HandshakeFailed) as caught:
        agent.handshake()
    assert caught.value.code == "wrong-certificate"
    impostor.close()
    agent.close()
