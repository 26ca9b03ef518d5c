"""One connection over a socket pair: optimistic sends, the bounded buffer, draining."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from pmdaemon.errors import WireError
from pmdaemon.poller.connection import DRAIN_BYTES, DRAIN_NS, MAX_OUT_BYTES, AgentConnection, Sent
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.session import SessionState

BUFFER = memoryview(bytearray(128 << 10))


class Line:
    def __init__(self) -> None:
        ours, self.far = socket.socketpair()
        self.blocked: list[AgentConnection] = []
        self.conn = AgentConnection(ours, "127.0.0.1:9", 100, self.blocked.append)
        self.far.settimeout(5)

    def handshake(self) -> None:
        for kind in (Kind.WELCOME, Kind.REGISTERED):
            assert self.conn.send((kind, frame.encode(kind, {}))) is Sent.SENT

    def hear(self) -> list[int]:
        """Kinds of everything in the far end's buffer."""
        self.far.setblocking(False)
        reader = frame.FrameReader()
        found: list[int] = []
        try:
            while data := self.far.recv(1 << 20):
                found += [item.kind for item in reader.feed(data)]
        except BlockingIOError:
            pass
        return found

    def kinds(self) -> list[int]:
        """Kinds of the frames received in one read."""
        size = self.conn.receive(BUFFER, 200)
        assert size is not None
        return [item.kind for item in self.conn.session.feed(BUFFER[:size])]


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.conn.close()
    made.far.close()


def poll(size: int = 0) -> tuple[Kind, bytes]:
    return Kind.POLL, frame.encode(Kind.POLL, {}, bytes(size))


def test_frames_of_one_send_are_one_write(line: Line) -> None:
    line.handshake()
    assert line.hear() == [Kind.WELCOME, Kind.REGISTERED]
    caps = (Kind.CAPS, frame.encode(Kind.CAPS, {"gen": 1}))
    assert line.conn.send(caps, poll()) is Sent.SENT
    line.far.setblocking(False)
    together = line.far.recv(1 << 20)
    assert [frame.decode(raw).kind for raw in frame.split(together)] == [Kind.CAPS, Kind.POLL]
    assert line.conn.session.state is SessionState.POLLING
    assert line.blocked == []


def test_what_blocks_is_kept_in_order_and_leaves_when_the_socket_clears(line: Line) -> None:
    line.handshake()
    sent = 0
    while line.conn.send(poll(60_000)) is Sent.SENT:
        sent += 1
    assert line.conn.waiting_bytes > 0
    assert line.blocked == [line.conn]
    assert line.conn.send(poll(8)) is Sent.WAITING
    assert not line.conn.flush()
    kinds = []
    while not line.conn.flush():
        kinds += bytes_of(line)
    kinds += bytes_of(line)
    reader = frame.FrameReader()
    frames = list(reader.feed(b"".join(kinds)))
    assert [item.kind for item in frames[2:]] == [Kind.POLL] * (sent + 2)
    assert len(frames[-1].blob) == 8
    assert line.conn.waiting_bytes == 0


def bytes_of(line: Line) -> list[bytes]:
    line.far.setblocking(False)
    found = []
    try:
        while data := line.far.recv(1 << 20):
            found.append(data)
    except BlockingIOError:
        pass
    return found


def test_a_peer_that_does_not_read_is_doomed_at_1_mib(line: Line) -> None:
    line.handshake()
    results = []
    while not results or results[-1] in (Sent.SENT, Sent.WAITING):
        results.append(line.conn.send(poll(200_000)))
    assert results[-1] is Sent.OVERFLOW
    assert line.conn.waiting_bytes <= MAX_OUT_BYTES
    assert "unread" in line.conn.doomed
    assert line.blocked[-1] is line.conn


def test_sending_in_a_state_that_does_not_allow_it_sends_nothing(line: Line) -> None:
    assert line.conn.send(poll()) is Sent.GONE
    assert line.hear() == []
    line.conn.close()
    assert line.conn.send((Kind.WELCOME, frame.encode(Kind.WELCOME, {}))) is Sent.GONE


def test_sending_to_a_dead_peer_dooms(line: Line) -> None:
    line.far.close()
    assert line.conn.send((Kind.WELCOME, frame.encode(Kind.WELCOME, {}))) is Sent.GONE
    assert line.conn.doomed.startswith("sending failed")
    assert line.blocked == [line.conn]


def test_receiving(line: Line) -> None:
    hello = frame.encode(Kind.HELLO, {"a": 1})
    assert line.kinds() == []  # nothing there: no frame, no error
    line.far.sendall(hello[:5])
    assert line.kinds() == []
    line.far.sendall(hello[5:])
    assert line.kinds() == [Kind.HELLO]
    assert line.conn.last_received_ns == 200
    line.far.shutdown(socket.SHUT_WR)
    assert line.conn.receive(BUFFER, 200) is None


def test_malformed_input_raises(line: Line) -> None:
    line.far.sendall(b"\xff" * 8)
    with pytest.raises(WireError):
        line.kinds()


def test_finish_sends_the_reason_and_discards_what_still_comes(line: Line) -> None:
    line.far.sendall(frame.encode(Kind.HELLO, {}))
    line.kinds()
    line.conn.finish(Kind.ERROR, frame.encode(Kind.ERROR, {"code": "x"}), "because", 200)
    line.conn.finish(Kind.BYE, frame.encode(Kind.BYE, {}), "again", 300)  # only the first counts
    assert line.conn.end_reason == "because"
    assert line.conn.drain_until_ns == 200 + DRAIN_NS
    assert line.conn.session.state is SessionState.DRAINING
    line.far.sendall(frame.encode(Kind.HELLO, {}))
    assert line.kinds() == []
    assert line.conn.send((Kind.WELCOME, b"")) is Sent.GONE
    assert line.hear() == [Kind.ERROR]
    assert line.far.recv(10) == b""


def test_the_last_frame_leaves_behind_output_that_waits(line: Line) -> None:
    line.handshake()
    while line.conn.send(poll(60_000)) is not Sent.OVERFLOW:
        pass
    line.blocked.clear()
    line.conn.finish(Kind.BYE, frame.encode(Kind.BYE, {}), "stop", 200)
    assert line.blocked == [line.conn], "write readiness is asked for"
    assert line.conn.send(poll()) is Sent.GONE
    got: list[bytes] = []
    while not line.conn.flush():
        got += bytes_of(line)
    got += bytes_of(line)
    kinds = [item.kind for item in frame.FrameReader().feed(b"".join(got))]
    assert kinds[-2:] == [Kind.POLL, Kind.BYE]
    assert line.far.recv(10) == b"", "and our side has ended behind it"


def test_draining_does_not_go_on_for_ever(line: Line) -> None:
    line.conn.finish(Kind.BYE, frame.encode(Kind.BYE, {}), "stop", 200)
    line.far.setblocking(False)
    discarded = 0
    while True:
        with contextlib.suppress(BlockingIOError):
            line.far.send(bytes(65536))
        if line.conn.receive(BUFFER, 200) is None:
            break
        discarded += 1
        assert discarded < 10 * DRAIN_BYTES / 4096
