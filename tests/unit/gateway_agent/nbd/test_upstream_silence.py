"""Upstreams whose host is gone: a fake socket says how long nothing came from it."""

from __future__ import annotations

import socket
import struct

import pytest

from gateway_agent.nbd.upstream_silence import EVERY_NS, MOST_SILENT, end_when_silent
from pmdaemon.runtime.clock import FakeClock
from tests.support.nbd import FakeLoop

EVERY_S = EVERY_NS / 1e9


class TcpSocket:
    """What the kernel says of a connection."""

    family = socket.AF_INET

    def __init__(self):
        self.silent_ms, self.probes, self.doubled, self.is_open, self.is_shut = 0, 0, 0, True, False
        self.options = {}

    def fileno(self):
        return 7 if self.is_open else -1

    def setsockopt(self, level, name, value):
        self.options[level, name] = value

    def getsockopt(self, _level, _name, size):
        head = bytes((1, 0, 0, self.probes, self.doubled))
        return (head + bytes(51) + struct.pack("=I", self.silent_ms))[:size]

    def shutdown(self, _how):
        self.is_shut = True


@pytest.fixture
def watched():
    loop, sock = FakeLoop(FakeClock()), TcpSocket()
    end_when_silent(loop, sock, "nbd://storage")
    return loop, sock


def fall_silent(loop, sock, looks):
    """So many looks, nothing having come since the first of them."""
    for number in range(looks):
        sock.silent_ms, sock.probes = round((number + 1) * EVERY_S * 1000) + 5_000, number + 1
        loop.fire(EVERY_S)


def test_a_host_that_is_gone_ends_the_connection_within_a_minute(watched):
    loop, sock = watched
    assert sock.options[socket.IPPROTO_TCP, socket.TCP_KEEPIDLE] == EVERY_S
    fall_silent(loop, sock, MOST_SILENT - 1)
    assert not sock.is_shut
    fall_silent(loop, sock, 1)
    assert sock.is_shut
    assert not loop.timers, "and it is looked at no more"


def test_one_that_acknowledges_keepalives_is_kept_however_long_it_answers_nothing(watched):
    loop, sock = watched
    for _ in range(100):
        sock.silent_ms = round(EVERY_S * 1000)
        loop.fire(EVERY_S)
    assert not sock.is_shut


def test_storage_that_hangs_and_takes_no_bytes_is_waited_for(watched):
    """Its kernel answers each probe of its window; they are two minutes apart in the end."""
    loop, sock = watched
    sock.doubled = 10
    for second in range(0, 3600, 15):
        sock.silent_ms, sock.probes = second % 120 * 1000, 0
        loop.fire(EVERY_S)
    assert not sock.is_shut


def test_one_lost_question_for_a_window_is_no_silence_and_two_are(watched):
    loop, sock = watched
    sock.doubled, sock.probes = 10, 1
    for second in range(120, 240, 15):
        sock.silent_ms = second * 1000
        loop.fire(EVERY_S)
    assert not sock.is_shut
    sock.probes = 2
    for second in range(240, 285, 15):
        sock.silent_ms = second * 1000
        loop.fire(EVERY_S)
    assert sock.is_shut


def test_a_pause_of_this_machine_is_no_silence_of_the_other(watched):
    loop, sock = watched
    for _ in range(5):
        sock.silent_ms, sock.probes = 3_600_000, 1
        loop.fire(EVERY_S)
        sock.silent_ms, sock.probes = 100, 0  # it has answered since
        loop.fire(EVERY_S)
    assert not sock.is_shut


def test_a_socket_that_was_closed_is_forgotten(watched):
    loop, sock = watched
    sock.is_open = False
    loop.fire(EVERY_S)
    assert not loop.timers


def test_of_a_unix_socket_nothing_is_looked_at():
    loop = FakeLoop(FakeClock())
    near, far = socket.socketpair()
    with near, far:
        end_when_silent(loop, near, "nbd+unix:///x")
    assert not loop.timers
