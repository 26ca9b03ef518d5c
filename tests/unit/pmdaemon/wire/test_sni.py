"""The gateway's name in a ClientHello: real ones of OpenSSL, and damaged ones."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.pki import contexts
from pmdaemon.runtime.transport import TlsTransport
from pmdaemon.wire.sni import gateway_named, name_of

GATEWAY = "6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f0001"


def client_hello(server_name: str | None) -> bytes:
    near, far = socket.socketpair()
    transport = TlsTransport(near, contexts.unverified(), server_side=False, server_name=server_name)
    transport.handshake()
    data = far.recv(65536)
    transport.close()
    far.close()
    return data


HELLO = client_hello(name_of(GATEWAY))


def test_the_gateway_is_found() -> None:
    assert gateway_named(HELLO) == GATEWAY


@pytest.mark.parametrize("name", [None, "sla.example.org", "no-uuid.gateway.invalid", GATEWAY])
def test_other_names_are_no_gateway(name: str | None) -> None:
    assert gateway_named(client_hello(name)) is None


@pytest.mark.parametrize("cut", range(0, len(HELLO) - 1, 7))
def test_a_part_is_the_gateway_or_nothing(cut: int) -> None:
    assert gateway_named(HELLO[:cut]) in (None, GATEWAY)


def test_what_is_not_tls_is_nothing() -> None:
    assert gateway_named(b"GET / HTTP/1.1\r\n" * 20) is None
    assert gateway_named(b"") is None


@given(st.integers(0, len(HELLO) - 1), st.integers(0, 255))
def test_damage_never_raises(at: int, value: int) -> None:
    damaged = bytearray(HELLO)
    damaged[at] = value
    found = gateway_named(bytes(damaged))
    assert found is None or len(found) == len(GATEWAY)


@given(st.binary(max_size=600))
def test_junk_never_raises(junk: bytes) -> None:
    found = gateway_named(b"\x16\x03\x01\x02\x00\x01" + junk)
    assert found is None or len(found) == len(GATEWAY)
