import pytest

from gateway_agent.errors import NbdProtocolError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.accounting import FAILED_BIT, LENGTH_SHIFT, word_of
from gateway_agent.nbd.ledger import ChangeLedger
from gateway_agent.nbd.replies import ReplyReader, SimpleReplyTranslator
from tests.support.nbd_proxy import asked_for, feed_in_pieces, read, write


def entry(length, kind=0):
    return (1, 2, word_of(kind, length, failed=False), 0 if kind else length)


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
    reader = ReplyReader("up")
    out, finished = feed_in_pieces(reader, data, inflight, piece)
    assert out == data
    assert not inflight
    assert [item[1] >> LENGTH_SHIFT for item in finished] == [512, 4096, 77, 100]
    assert [bool(item[1] & FAILED_BIT) for item in finished] == [False, True, False, False]
    assert reader.in_progress is None


def test_the_boundary_is_behind_the_last_whole_reply():
    reader = ReplyReader("up")
    view = memoryview(p.simple_reply(1) + p.simple_reply(2) + b"abc")
    usable, _ = reader.feed(view, 0, {1: entry(0, 1), 2: entry(10)}, 9)
    assert (usable, reader.boundary, reader.payload_left) == (len(view), 16, 7)
    assert reader.in_progress is not None
    reader.feed(memoryview(b"defg"), 0, {}, 9)
    assert reader.boundary is None, "there is none within a payload"
    reader.feed(memoryview(b"hij"), 0, {}, 9)
    assert reader.boundary == 3


@pytest.mark.parametrize("error", [2, 255, 0xFFFFFFFF])
def test_an_error_number_outside_the_protocol_becomes_eio(error):
    out, finished = feed_in_pieces(
        ReplyReader("up"),
        p.simple_reply(1, error) + p.simple_reply(2, p.ENOSPC),
        {1: entry(512), 2: entry(0, 1)},
        32,
    )
    assert out == p.simple_reply(1, p.EIO) + p.simple_reply(2, p.ENOSPC)
    assert all(item[1] & FAILED_BIT for item in finished)


@pytest.mark.parametrize("data", [p.simple_reply(5), bytes(16), p.SIMPLE_REPLY.pack(0x668E33EF, 0, 1)])
def test_a_reply_that_nobody_asked_for_or_of_another_kind_is_refused(data):
    with pytest.raises(NbdProtocolError):
        ReplyReader("up").feed(memoryview(data), 0, {1: entry(0, 1)}, 9)


def asked_twice():
    """Two reads and a write, in a request buffer of nothing else."""
    return asked_for(read(1, 512, 4096), read(2, 0), write(3, b"x" * 77)[:28], read(4, 100, 1 << 40))


@pytest.mark.parametrize("piece", [1, 7, 16, 17, 100, 10_000])
def test_simple_replies_become_chunks_for_a_client_that_wants_them(piece):
    asked, inflight = asked_twice()
    data = p.simple_reply(3) + p.simple_reply(1) + b"x" * 512 + p.simple_reply(2) + p.simple_reply(4, 99)
    out, finished = feed_in_pieces(SimpleReplyTranslator("up", asked), data, inflight, piece)
    assert out == b"".join(
        (
            p.simple_reply(3),
            p.data_chunk_head(1, 4096, 512, True),
            b"x" * 512,
            p.none_chunk(2),
            p.error_chunk(4, p.EIO, "the storage behind this export reports an error"),
        )
    )
    assert (inflight, dict(asked)) == ({}, {})
    assert [item[1] >> LENGTH_SHIFT for item in finished] == [77, 512, 0, 100]
    assert [bool(item[1] & FAILED_BIT) for item in finished] == [False, False, False, True]


def test_the_boundary_of_a_translation_is_behind_the_last_whole_chunk_of_it():
    asked, inflight = asked_twice()
    reader = SimpleReplyTranslator("up", asked)
    view = memoryview(p.simple_reply(3) + p.simple_reply(1) + b"abc")
    usable, _ = reader.feed(view, 0, inflight, 9)
    assert (usable, reader.boundary, reader.payload_left) == (len(view), 16, 509)
    assert len(reader.passed(view, usable)) == 16 + 28 + 3
    assert reader.in_progress is not None
    reader.feed(memoryview(b"d" * 500), 0, inflight, 9)
    assert reader.boundary is None
    reader.feed(memoryview(b"e" * 9), 0, inflight, 9)
    assert reader.boundary == 9


@pytest.mark.parametrize("data", [p.simple_reply(5), bytes(16), p.none_chunk(1)])
def test_a_translator_refuses_what_was_not_asked_for_or_is_of_another_kind(data):
    asked, inflight = asked_twice()
    with pytest.raises(NbdProtocolError):
        SimpleReplyTranslator("up", asked).feed(memoryview(data), 0, inflight, 9)
    assert sorted(inflight) == [1, 2, 3, 4]


FLUSH = p.request(p.Cmd.FLUSH, 9, 0, 0)


def test_changes_and_flushes_are_counted_in_the_ledger_when_they_are_answered():
    ledger = ChangeLedger()
    ours = ledger.joined()
    change, stable = write(1, b"x")[:28], write(2, b"x", p.CMD_FLAG_FUA)[:28]
    asked, inflight = asked_for(change, stable, FLUSH, counted=ours)
    assert not ledger.is_quiet(0)
    assert ledger.is_quiet(2)
    reader = ReplyReader("up", asked)
    reader.feed(memoryview(p.simple_reply(2) + p.simple_reply(9)), 0, inflight, 9)
    assert ours.is_covered, "what was under way when the flush was sent needs none yet"
    reader.feed(memoryview(p.simple_reply(1)), 0, inflight, 9)
    assert (ours.is_covered, ledger.is_quiet(0)) == (False, True)
    asked, inflight = asked_for(FLUSH, counted=ours)
    ReplyReader("up", asked).feed(memoryview(bytearray(p.simple_reply(9, p.EIO))), 0, inflight, 9)
    assert not ours.is_covered
    asked, inflight = asked_for(FLUSH, counted=ours)
    ReplyReader("up", asked).feed(memoryview(p.simple_reply(9)), 0, inflight, 9)
    assert ours.is_covered


def test_changes_that_are_waited_for_no_more_are_under_way_no_more():
    ledger = ChangeLedger()
    asked, _ = asked_for(write(1, b"x")[:28], read(2), counted=ledger.joined())
    asked.forget()
    assert (dict(asked), ledger.is_quiet(0)) == ({}, True)
