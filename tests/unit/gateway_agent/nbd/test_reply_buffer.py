from hypothesis import given
from hypothesis import strategies as st

from gateway_agent.nbd.reply_buffer import ReplyBuffer
from tests.support.nbd import FakeSocket


def test_an_io_is_finished_when_its_last_byte_is_out():
    sock = FakeSocket(window=15)
    flow = ReplyBuffer(sock)
    flow.finishing.append((10, 1, 0, 0, 0))
    flow.finishing.append((20, 2, 0, 0, 0))
    assert not flow.send(b"a" * 20)
    assert [item[1] for item in flow.take_finished()] == [1]
    sock.window = 4
    assert not flow.flush()
    assert flow.take_finished() == []
    sock.window = 1
    assert flow.flush()
    assert [item[1] for item in flow.take_finished()] == [2]


@given(
    pieces=st.lists(st.binary(min_size=1, max_size=50), max_size=20),
    windows=st.lists(st.integers(0, 60), max_size=40),
)
def test_bytes_leave_in_order_whatever_the_socket_takes(pieces, windows):
    sock = FakeSocket(window=0)
    flow, given_windows = ReplyBuffer(sock), iter(windows)
    for piece in pieces:
        scratch = bytearray(piece)
        sock.window = next(given_windows, 0)
        flow.send(memoryview(scratch))
        scratch[:] = bytes(len(scratch))  # the buffer is used again at once
    assert flow.queued_pos - flow.unsent_bytes == len(sock.sent)
    for window in (*given_windows, 1 << 20):
        sock.window = window
        flow.flush()
    assert bytes(sock.sent) == b"".join(pieces)
    assert flow.is_empty
