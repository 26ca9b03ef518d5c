import pytest

from gateway_agent.errors import NbdProtocolError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.accounting import FAILED_BIT, word_of
from gateway_agent.nbd.replies import ReplyReader


def entry(length, kind=0):
    return (1, 2, word_of(kind, length, failed=False), 0 if kind else length)


def run(data, inflight, piece):
    """Feed ``data`` in pieces as a session does, keeping cut-off headers."""
    reader, kept, position, out, finished = ReplyReader("up"), b"", 0, bytearray(), []
    for start in range(0, len(data), piece):
        view = memoryview(bytearray(kept + data[start : start + piece]))
        usable, done = reader.feed(view, position, inflight, 9)
        out += view[:usable]
        kept = bytes(view[usable:])
        position += usable
        finished += done
    assert not kept
    return bytes(out), finished, reader


@pytest.mark.parametrize("piece", [1, 7, 16, 17, 100, 10_000])
def test_replies_in_any_pieces_are_found_and_passed_on_unchanged(piece):
    data = (
        p.simple_reply(1)
        + b"x" * 512
        + p.simple_reply(2, p.EIO)
        + p.simple_reply(3)
        + p.simple_reply(4)
        + b"y" * 100
    )
    inflight = {1: entry(512), 2: entry(4096), 3: entry(77, kind=1), 4: entry(100)}
    out, finished, reader = run(data, inflight, piece)
    assert out == data
    assert not inflight
    assert [item[0] for item in finished] == [528, 544, 560, 676]
    assert [bool(item[1] & FAILED_BIT) for item in finished] == [False, True, False, False]
    assert reader.in_progress is None


def test_the_boundary_is_behind_the_last_whole_reply():
    reader = ReplyReader("up")
    view = memoryview(p.simple_reply(1) + p.simple_reply(2) + b"abc")
    usable, _ = reader.feed(view, 0, {1: entry(0, 1), 2: entry(10)}, 9)
    assert (usable, reader.boundary, reader.payload_left) == (len(view), 16, 7)
    assert reader.in_progress is not None
    reader.feed(memoryview(b"defg"), len(view), {}, 9)
    assert reader.boundary is None, "there is none within a payload"
    reader.feed(memoryview(b"hij"), len(view) + 4, {}, 9)
    assert reader.boundary == 3


@pytest.mark.parametrize("error", [2, 255, 0xFFFFFFFF])
def test_an_error_number_outside_the_protocol_becomes_eio(error):
    out, finished, _ = run(
        p.simple_reply(1, error) + p.simple_reply(2, p.ENOSPC), {1: entry(512), 2: entry(0, 1)}, 32
    )
    assert out == p.simple_reply(1, p.EIO) + p.simple_reply(2, p.ENOSPC)
    assert all(item[1] & FAILED_BIT for item in finished)


@pytest.mark.parametrize("data", [p.simple_reply(5), bytes(16), p.SIMPLE_REPLY.pack(0x668E33EF, 0, 1)])
def test_a_reply_that_nobody_asked_for_or_of_another_kind_is_refused(data):
    with pytest.raises(NbdProtocolError):
        ReplyReader("up").feed(memoryview(data), 0, {1: entry(0, 1)}, 9)
