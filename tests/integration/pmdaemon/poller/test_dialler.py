"""Dialling listed gateways: real sockets on loopback, fake clock, no chance.

The waits of single entries are read directly: they show outside only as the time of the next attempt.
"""

from __future__ import annotations

import errno
import os
import random
import select
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from pmdaemon.poller.dialler import (
    CONNECT_NS,
    FIRST_S,
    HEALTHY_NS,
    MAX_S,
    OTHER_ACTS,
    Dialler,
    Target,
)
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.term import LEASE_FILE, Term


class NoChance(random.Random):
    """Always 0: waits are not shortened."""

    def random(self) -> float:
        return 0.0


class Bench:
    """A gateway that listens, a pair that takes a duplicate, as SCM_RIGHTS would."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.gateway = socket.create_server(("127.0.0.1", 0))
        self.gateway.settimeout(60)
        self.address = f"127.0.0.1:{self.gateway.getsockname()[1]}"
        self.taken: list[socket.socket] = []
        self.pair: object | None = object()
        self.dialler = Dialler(self.offer, self.clock, NoChance())

    def offer(self, sock: socket.socket, _address: str) -> object | None:
        if self.pair is not None:
            self.taken.append(sock.dup())
        return self.pair

    def wait(self) -> None:
        """Until the dialler's descriptor is readable."""
        ready, _, _ = select.select([self.dialler], [], [], 60)
        assert ready
        self.dialler.step()

    def connect(self) -> socket.socket:
        """Dial; returns the gateway's end."""
        self.dialler.step()
        self.wait()
        return self.gateway.accept()[0]

    def close(self) -> None:
        self.dialler.close()
        for sock in (*self.taken, self.gateway):
            sock.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def test_dials_and_gives_the_connection_away(bench: Bench) -> None:
    bench.dialler.replace([Target("gw-a", bench.address)])
    far = bench.connect()
    assert bench.dialler.connected == 1
    assert bench.dialler.due_ns() is None
    far.sendall(b"hello")
    assert bench.taken[0].recv(10) == b"hello"
    bench.dialler.step()
    assert not select.select([bench.dialler], [], [], 0)[0], "data is the pair's business"
    far.close()


def test_outside_its_term_a_server_dials_nobody(bench: Bench, tmp_path: Path) -> None:
    term = Term(tmp_path, 7, lambda: 1)
    bench.dialler = Dialler(bench.offer, bench.clock, NoChance(), term)
    bench.dialler.replace([Target("gw-a", bench.address)])
    bench.dialler.step()
    assert bench.dialler.states()[0]["reason"] == "another server acts"
    due_ns = bench.dialler.due_ns()
    assert due_ns is not None
    assert due_ns > bench.clock.monotonic_ns(), "it does not spin"
    (tmp_path / LEASE_FILE).write_text('{"fence": 7, "until_ns": 2}')
    bench.clock.advance(60.0)
    bench.connect().close()
    assert len(bench.taken) == 1


def test_what_was_dialled_before_its_term_ended_is_given_to_no_pair(bench: Bench, tmp_path: Path) -> None:
    """The machine stood still while the gateway's host answered."""
    now_ns = 1
    bench.dialler = Dialler(bench.offer, bench.clock, NoChance(), Term(tmp_path, 7, lambda: now_ns))
    (tmp_path / LEASE_FILE).write_text('{"fence": 7, "until_ns": 2}')
    bench.dialler.replace([Target("gw-a", bench.address)])
    bench.dialler.step()
    now_ns = 2
    bench.wait()
    assert bench.taken == []
    assert bench.dialler.states()[0] == {
        "name": "gw-a",
        "address": bench.address,
        "source": "list",
        "state": "waiting",
        "reason": OTHER_ACTS,
    }
    far = bench.gateway.accept()[0]
    assert far.recv(1) == b"", "the gateway sees the end at once"
    far.close()


def test_dials_again_when_the_gateway_hangs_up(bench: Bench) -> None:
    bench.dialler.replace([Target("gw-a", bench.address)])
    bench.connect().close()
    bench.wait()
    assert bench.dialler.connected == 0
    due_ns = bench.dialler.due_ns()
    assert due_ns == bench.clock.monotonic_ns() + round(FIRST_S * 1e9)
    bench.clock.advance(FIRST_S)
    bench.connect().close()
    assert len(bench.taken) == 2


def test_dials_again_when_the_pair_ends_the_connection(bench: Bench) -> None:
    bench.dialler.replace([Target("gw-a", bench.address)])
    far = bench.connect()
    bench.taken[0].shutdown(socket.SHUT_RDWR)  # as Connection.close does
    bench.taken[0].close()
    assert far.recv(1) == b"", "the gateway sees the end at once"
    bench.wait()
    assert bench.dialler.connected == 0
    far.close()


def test_a_killed_pair_ends_its_connections(bench: Bench) -> None:
    bench.dialler.replace([Target("gw-a", bench.address)])
    far = bench.connect()
    bench.taken.pop().close()  # the kernel closes what the dead pair held; the duplicate keeps it open
    bench.dialler.forget_pair(object())
    assert bench.dialler.connected == 1
    bench.dialler.forget_pair(bench.pair)
    assert bench.dialler.connected == 0
    assert far.recv(1) == b""
    far.close()


def test_waits_double_and_begin_anew_after_a_healthy_life(bench: Bench) -> None:
    bench.pair = None  # nobody takes it: a failure each time
    bench.dialler.replace([Target("gw-a", bench.address)])
    waits = []
    for _ in range(9):
        bench.connect().close()
        due_ns = bench.dialler.due_ns()
        assert due_ns is not None
        waits.append((due_ns - bench.clock.monotonic_ns()) / 1e9)
        bench.clock.advance(waits[-1])
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, MAX_S, MAX_S, MAX_S]
    bench.pair = object()
    far = bench.connect()
    bench.clock.advance(HEALTHY_NS / 1e9)
    far.close()
    bench.wait()
    assert bench.dialler.due_ns() == bench.clock.monotonic_ns() + round(FIRST_S * 1e9)


def test_nobody_there_is_tried_again(bench: Bench) -> None:
    bench.gateway.close()
    bench.dialler.replace([Target("gw-a", bench.address)])
    bench.dialler.step()
    bench.wait()
    assert bench.dialler.connected == 0
    assert bench.dialler.due_ns() == bench.clock.monotonic_ns() + round(FIRST_S * 1e9)


def test_what_is_wrong_with_a_listed_gateway_is_told(bench: Bench) -> None:
    bench.dialler.replace([Target("gw-a", bench.address)])

    def told() -> tuple[str, str]:
        [row] = bench.dialler.states()
        assert (row["name"], row["address"], row["source"]) == ("gw-a", bench.address, "list")
        return row["state"], row["reason"]

    assert told() == ("waiting", "")
    far = bench.connect()
    assert told() == ("connected", "")
    with structlog.testing.capture_logs() as lines:
        for _ in range(2):  # it says who it is, and that is wrong; the second time is no news
            bench.dialler.refused(bench.address, "wrong-name: it calls itself 'b'")
            far.close()
            bench.wait()
            assert told() == ("waiting", "wrong-name: it calls itself 'b'")
            bench.clock.advance(MAX_S)
            far = bench.connect()
            assert told() == ("dialling", "wrong-name: it calls itself 'b'"), "connected is not accepted"
    assert [line["event"] for line in lines].count("not-accepted") == 1
    bench.clock.advance(HEALTHY_NS / 1e9)
    assert told() == ("connected", "")
    far.close()
    bench.wait()
    assert told() == ("waiting", "the connection ended")
    bench.gateway.close()
    bench.clock.advance(MAX_S)
    bench.dialler.step()
    bench.wait()
    assert told() == ("waiting", "Connection refused")
    bench.dialler.refused("127.0.0.1:1", "of a line that is not listed any more")


def test_a_connection_that_got_lost_on_the_way_is_ended_here(bench: Bench) -> None:
    bench.dialler.replace([Target("gw-a", bench.address)])
    far = bench.connect()
    bench.taken.pop().close()  # the kernel dropped it: the pair had no descriptor for it
    bench.dialler.refused(bench.address, "its descriptor was lost", is_over=True)
    assert far.recv(1) == b""
    assert bench.dialler.connected == 0
    far.close()
    bench.clock.advance(FIRST_S)
    bench.connect().close()


def test_without_a_descriptor_it_is_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_args: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    bench.dialler.replace([Target("gw-a", bench.address)])
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", none_left)
        bench.dialler.step()
    assert bench.dialler.states()[0]["reason"] == "Too many open files"
    bench.clock.advance(FIRST_S)
    bench.connect().close()


def test_an_answer_that_never_comes_is_given_up(bench: Bench) -> None:
    bench.dialler.replace([Target("gw-a", bench.address)])
    bench.dialler.step()  # under way; what epoll says is not looked at
    entry = bench.dialler._entries[bench.address]
    bench.dialler._epoll.modify(entry.sock.fileno(), 0)  # type: ignore[union-attr]  # as if no answer came
    bench.clock.advance(CONNECT_NS / 1e9)
    bench.dialler.step()
    assert entry.sock is None
    assert bench.dialler.due_ns() == bench.clock.monotonic_ns() + round(FIRST_S * 1e9)


def test_the_list_may_change(bench: Bench) -> None:
    bench.dialler.replace([Target("gw-a", bench.address)])
    far = bench.connect()
    bench.dialler.replace([Target("gw-a2", bench.address)])
    assert bench.dialler.connected == 1, "the same address goes on"
    bench.dialler.replace([])
    assert far.recv(1) == b""
    assert bench.dialler.due_ns() is None
    far.close()


def test_a_connection_that_is_reset_before_it_is_looked_at_is_tried_again(bench: Bench) -> None:
    bench.dialler.replace([Target("gw-a", bench.address)])
    bench.dialler.step()
    sock = bench.dialler._entries[bench.address].sock
    assert sock is not None
    far = bench.gateway.accept()[0]
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()  # a reset
    poll = select.poll()
    poll.register(sock, 0)  # reports the reset alone
    assert poll.poll(60_000)
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # which is so reported once: it comes between
    bench.dialler.step()
    assert not bench.taken
    assert bench.dialler.states()[0]["reason"] == "Connection reset by peer"
    bench.clock.advance(FIRST_S)
    bench.connect().close()


@pytest.mark.parametrize(("uid", "taken"), [(os.geteuid(), 1), (os.geteuid() + 1, 0)])
def test_without_tls_a_listed_gateway_is_a_process_of_a_user_whose_agents_are_served(
    bench: Bench, uid: int, taken: int
) -> None:
    """Review, finding 5: any local user could listen where an agent was listed, and be that gateway."""
    bench.dialler.close()
    bench.dialler = Dialler(bench.offer, bench.clock, NoChance(), uids=frozenset((uid,)))
    bench.dialler.replace([Target("gw-a", bench.address)])
    bench.dialler.step()
    bench.wait()
    assert len(bench.taken) == taken
    (row,) = bench.dialler.states()
    assert row["state"] == ("connected" if taken else "waiting")
    assert ("name it in pmdaemon.agent_users, or enable TLS" in row["reason"]) == (not taken)
