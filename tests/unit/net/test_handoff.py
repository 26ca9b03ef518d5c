"""Descriptors to the pair, reports to the parent, and hand-overs between threads."""

from __future__ import annotations

import select
import socket

import pytest

from pmdaemon.errors import PeerGone
from pmdaemon.net import handoff
from pmdaemon.net.handover import Handover


def test_a_moved_socket_works_with_bytes_that_were_already_there() -> None:
    parent, pair = handoff.make()
    near, far = socket.socketpair()
    far.sendall(b"sent before the move")
    assert handoff.offer(parent, near, "127.0.0.1:5000")
    near.close()
    receiver = handoff.Receiver(pair)
    ((moved, address),) = receiver.take()
    assert address == "127.0.0.1:5000"
    assert moved.recv(100) == b"sent before the move"
    moved.sendall(b"answer")
    assert far.recv(100) == b"answer"
    assert receiver.take() == []
    assert not moved.get_inheritable()
    parent.close()
    with pytest.raises(PeerGone):
        receiver.take()
    for item in (pair, far, moved):
        item.close()


def test_sockets_before_the_end_of_the_stream_are_served_first() -> None:
    parent, pair = handoff.make()
    near, far = socket.socketpair()
    handoff.offer(parent, near, "a")
    parent.close()
    receiver = handoff.Receiver(pair)
    ((moved, _),) = receiver.take()
    with pytest.raises(PeerGone):
        receiver.take()
    for item in (pair, near, far, moved):
        item.close()


def test_a_pair_that_does_not_take_refuses_and_nothing_blocks() -> None:
    parent, pair = handoff.make()
    near, far = socket.socketpair()
    offers = 0
    while handoff.offer(parent, near, "x"):
        offers += 1
        assert offers < 100_000
    assert offers > 0
    pair.close()
    assert not handoff.offer(parent, near, "x")
    for item in (parent, near, far):
        item.close()


def test_reports() -> None:
    parent, pair = handoff.make()
    assert handoff.take_reports(parent) == []
    handoff.report(pair, handoff.Report(3, 2, 123.5))
    handoff.report(pair, handoff.Report(4, 3, 100.0))
    assert handoff.take_reports(parent) == [handoff.Report(3, 2, 123.5), handoff.Report(4, 3, 100.0)]
    for _ in range(100_000):
        handoff.report(pair, handoff.Report(4, 3, 100.0))  # nobody reads: dropped, no error, no wait
        if not select.select([], [pair], [], 0)[1]:
            break
    pair.close()
    with pytest.raises(PeerGone):
        handoff.take_reports(parent)
    parent.close()


def test_handover_wakes_and_keeps_order() -> None:
    bag: Handover[int] = Handover()
    assert not select.select([bag], [], [], 0)[0]
    for number in range(5):
        bag.put(number)
    assert select.select([bag], [], [], 0)[0]
    assert bag.drain() == [0, 1, 2, 3, 4]
    assert not select.select([bag], [], [], 0)[0]
    assert bag.drain() == []
    bag.close()
    bag.put(9)  # a late put by the other thread is not an error
