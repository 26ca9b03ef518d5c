"""A connection whose other end is gone without a word, as the kernel sees it: its packets are dropped."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from gateway_agent.nbd import upstream_silence as module
from gateway_agent.nbd.loop import IN, EventLoop
from gateway_agent.nbd.upstream_silence import MOST_SILENT, end_when_silent
from pmdaemon.runtime.clock import SystemClock

LIMIT_S = 120.0
_SO_ATTACH_FILTER = 26
_DROP_ALL = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))  # BPF: return 0


def cut_off(sock: socket.socket) -> None:
    """From now on nothing reaches it, and nothing is acknowledged: as a host without power."""
    program = struct.pack("@HP", 1, ctypes.addressof(_DROP_ALL))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far = listener.accept()[0]
    near.setblocking(False)
    with near, far:
        yield near, far


@pytest.mark.parametrize("how", ["waits for an answer", "has sent more", "its window is full"])
def test_an_end_that_says_nothing_ends_the_connection_and_one_that_hangs_does_not(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    near, far = pair
    monkeypatch.setattr(module, "EVERY_NS", 10**9)  # the least that the kernel knows
    monkeypatch.setattr(module, "_SPREAD_MS", 50)
    loop, seen = EventLoop(SystemClock()), list[bytes]()

    def readable(_events: int) -> None:
        seen.append(near.recv(64))
        loop.forget(near.fileno())

    loop.watch(near.fileno(), IN, readable, lambda _exc: None)
    end_when_silent(loop, near, "nbd://storage")
    looks = [0]

    def count(now_ns: int) -> None:
        looks[0] += 1
        loop.at("count", now_ns + 10**9, count)

    loop.at("count", loop.clock.monotonic_ns() + 10**9, count)
    if how == "its window is full":
        near.setblocking(True)
        near.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            while near.send(bytes(65_536)):
                pass
        near.setblocking(False)
        while looks[0] < 2 * MOST_SILENT + 2:
            loop.step()
        assert not seen, "its kernel answers for it"
    cut_off(far)
    if how == "has sent more":
        near.send(b"more")
    end_s = time.monotonic() + LIMIT_S
    while not seen:
        assert time.monotonic() < end_s
        loop.step()
    assert seen == [b""]
    loop.close()
