"""The channel between parent and pair, and hand-overs between threads."""

from __future__ import annotations

import os
import select
import socket

import pytest

from pmdaemon.errors import PeerGone
from pmdaemon.poller import channel
from pmdaemon.poller.channel import Channel
from pmdaemon.poller.channel_messages import Mail, MovedConnection, NewConnection, PairReport
from pmdaemon.runtime.threads import ThreadInbox

NEW = NewConnection("127.0.0.1:5000", dialled=False)
MOVED = MovedConnection(3, "g", 1, "127.0.0.1:5000", dialled=True, opened_ns=7)


def ends() -> tuple[Channel, Channel]:
    parent, pair = channel.make()
    return Channel(parent), Channel(pair)


def test_a_moved_socket_works_with_bytes_that_were_already_there() -> None:
    parent, pair = ends()
    near, far = socket.socketpair()
    far.sendall(b"sent before the move")
    assert parent.offer(NEW, near)
    near.close()
    (message,) = pair.take()
    assert message.body == NEW
    moved = message.take_socket()
    assert moved.recv(100) == b"sent before the move"
    moved.sendall(b"answer")
    assert far.recv(100) == b"answer"
    assert pair.take() == []
    assert not moved.get_inheritable()
    parent.close()
    with pytest.raises(PeerGone):
        pair.take()
    for item in (pair, far, moved):
        item.close()


def test_bytes_of_any_size_travel_with_their_socket() -> None:
    parent, pair = ends()
    near, far = socket.socketpair()
    data = os.urandom(3 << 20)
    pair.send(MOVED, [os.dup(near.fileno()), channel.memory_file(data)])
    (message,) = parent.take()
    assert message.take_bytes() == data
    with message.take_socket() as moved:
        moved.sendall(b"x")
        assert far.recv(1) == b"x"
    assert message.descriptors == []
    for item in (parent, pair, near, far):
        item.close()


def test_what_finds_no_room_waits_in_order_and_closes_its_descriptors() -> None:
    parent, pair = ends()
    near, far = socket.socketpair()
    count = 0
    while not parent.waiting:
        parent.send(Mail(count, "services"), [os.dup(near.fileno())])
        count += 1
        assert count < 100_000
    near.close()
    assert not parent.offer(NEW, far)  # a new connection does not overtake
    got: list[int] = []
    while len(got) < count:
        for message in pair.take():
            assert isinstance(message.body, Mail)
            got.append(message.body.shard)
            message.close()
        parent.flush()
    assert got == list(range(count))
    assert not parent.waiting
    assert far.recv(1) == b""  # every copy was closed
    for item in (parent, pair, far):
        item.close()


def test_closing_an_end_closes_what_waits() -> None:
    parent, pair = ends()
    near, far = socket.socketpair()
    while not parent.waiting:
        parent.send(Mail(0, "services"), [os.dup(near.fileno())])
    near.close()
    parent.close()
    pair.close()
    assert far.recv(1) == b""
    far.close()


def test_messages_before_the_end_of_the_stream_are_served_first() -> None:
    parent, pair = ends()
    near, far = socket.socketpair()
    assert parent.offer(NEW, near)
    parent.close()
    (message,) = pair.take()
    message.close()
    with pytest.raises(PeerGone):
        pair.take()
    for item in (pair, near, far):
        item.close()


def test_a_pair_that_does_not_take_refuses_and_nothing_blocks() -> None:
    parent, pair = ends()
    near, far = socket.socketpair()
    offers = 0
    while parent.offer(NEW, near):
        offers += 1
        assert offers < 100_000
    assert offers > 0
    pair.close()
    assert not parent.offer(NEW, near)
    for item in (parent, near, far):
        item.close()


def test_reports_are_dropped_when_nobody_reads() -> None:
    parent, pair = ends()
    report = PairReport(3, 2, 123.5, 0.25, [[7, 2]], {"inbound thread": 9}, {"polls": 5.0})
    pair.send_or_drop(report)
    (message,) = parent.take()
    assert message.body == report
    for _ in range(100_000):
        pair.send_or_drop(report)  # no error, no wait
        if not select.select([], [pair], [], 0)[1]:
            break
    assert not pair.waiting
    pair.close()
    while True:
        try:
            parent.take()
        except PeerGone:
            break
    parent.close()


def test_handover_wakes_and_keeps_order() -> None:
    bag: ThreadInbox[int] = ThreadInbox()
    assert not select.select([bag], [], [], 0)[0]
    for number in range(5):
        bag.put(number)
    assert select.select([bag], [], [], 0)[0]
    assert bag.drain() == [0, 1, 2, 3, 4]
    assert not select.select([bag], [], [], 0)[0]
    assert bag.drain() == []
    bag.close()
    bag.put(9)  # a late put by the other thread is not an error
