import itertools
import random

import pytest

from gateway_agent.errors import NbdProtocolError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.accounting import FAILED_BIT, LENGTH_SHIFT
from gateway_agent.nbd.chunks import MOST_EXTENTS, MOST_HEAD_BYTES, MOST_SCATTERED, ChunkReader
from gateway_agent.nbd.ledger import ChangeLedger
from tests.support.nbd import chunks
from tests.support.nbd_proxy import asked_for, feed_in_pieces, read, write

AT = 1 << 20
FAR_ID = 77  # what the upstream calls base:allocation
STATUS = p.request(p.Cmd.BLOCK_STATUS, 5, AT, 8192)
FLUSH = p.request(p.Cmd.FLUSH, 6, 0, 0)


def data(cookie, offset, payload, last=False):
    return p.data_chunk_head(cookie, offset, len(payload), last) + payload


def reader_of(*requests, counted=None):
    asked, inflight = asked_for(*requests, counted=counted)
    return ChunkReader("up", asked, FAR_ID), inflight


def fed(said, *requests):
    reader, inflight = reader_of(*requests)
    reader.feed(memoryview(bytearray(said)), 0, inflight, 9)
    return reader, inflight


@pytest.mark.parametrize("piece", [1, 7, 19, 21, 27, 33, 100, 100_000])
def test_chunks_in_any_pieces_pass_unchanged_but_for_two_numbers(piece):
    extents = [(4096, p.STATE_HOLE), (1 << 31, 0)]
    parts = [
        data(1, AT, b"x" * 3000),
        p.status_chunk(5, FAR_ID, extents, False),
        p.hole_chunk(1, AT + 3000, 1096, False),
        p.none_chunk(1),
        p.none_chunk(5),
        p.simple_reply(6),
        p.error_chunk(2, 255, "broken", AT + 5, last=False),
        data(2, AT, b"y" * 10),
        p.none_chunk(2),
        p.simple_reply(3, 255),
        data(4, AT, b"z" * 512, last=True),
    ]
    replaced = {
        1: p.status_chunk(5, p.ALLOCATION_ID, extents, False),
        6: p.error_chunk(2, p.EIO, "broken", AT + 5, last=False),
        9: p.simple_reply(3, p.EIO),
    }
    requests = read(1, 4096, AT), read(2, 512, AT), write(3, b"w" * 9)[:28], read(4, 512, AT), STATUS, FLUSH
    reader, inflight = reader_of(*requests)
    out, finished = feed_in_pieces(reader, b"".join(parts), inflight, piece)
    assert out == b"".join(replaced.get(number, part) for number, part in enumerate(parts))
    assert (inflight, reader.payload_left, reader.in_progress) == ({}, 0, None)
    assert [item[1] >> LENGTH_SHIFT for item in finished] == [4096, 8192, 0, 512, 9, 512]
    assert [bool(item[1] & FAILED_BIT) for item in finished] == [False, False, False, True, True, False]


def test_a_request_is_in_flight_until_its_last_chunk_is_complete():
    reader, inflight = fed(
        data(1, AT, b"x" * 100) + p.data_chunk_head(1, AT + 100, 412, True), read(1, 512, AT)
    )
    assert (reader.payload_left, reader.boundary, sorted(inflight)) == (412, 128, [1])
    usable, finished = reader.feed(memoryview(b"x" * 411), 0, inflight, 10)
    assert (usable, finished, reader.boundary) == (411, [], None)
    _, finished = reader.feed(memoryview(b"x"), 0, inflight, 11)
    assert (len(finished), finished[-1], reader.boundary, inflight) == (5, 11, 1, {})


@pytest.mark.parametrize("seed", range(5))
def test_a_read_may_arrive_in_any_order(seed):
    rng = random.Random(seed)
    edges = [AT, *sorted(rng.sample(range(AT + 1, AT + 4096), 9)), AT + 4096]
    pieces = [
        p.hole_chunk(1, begin, end - begin, False)
        if rng.random() < 0.3
        else data(1, begin, b"x" * (end - begin))
        for begin, end in itertools.pairwise(edges)
    ]
    rng.shuffle(pieces)
    said = b"".join(pieces) + p.none_chunk(1)
    reader, inflight = reader_of(read(1, 4096, AT))
    out, finished = feed_in_pieces(reader, said, inflight, 500)
    assert (out, len(finished)) == (said, 1)
    missing = b"".join(pieces[1:]) + p.none_chunk(1)
    with pytest.raises(NbdProtocolError, match="without its bytes"):
        fed(missing, read(1, 4096, AT))


DF = read(1, 512, AT, p.CMD_FLAG_DF)
ONE = p.request(p.Cmd.BLOCK_STATUS, 5, AT, 8192, p.CMD_FLAG_REQ_ONE)
READ, EXTENTS = read(1, 512, AT), [(4096, 0), (4096, 0)]


def chunk(kind, payload=b"", flags=p.CHUNK_DONE, cookie=1):
    return p.CHUNK.pack(p.CHUNK_MAGIC, flags, kind, cookie, len(payload)) + payload


@pytest.mark.parametrize(
    ("request_bytes", "said"),
    [
        (READ, bytes(20)),
        (READ, data(9, AT, b"x" * 512, last=True)),
        (READ, chunk(p.Chunk.OFFSET_DATA, b"", 0)),
        (READ, chunk(p.Chunk.OFFSET_DATA, AT.to_bytes(8, "big"))),
        (READ, data(1, AT - 1, b"x" * 512, last=True)),
        (READ, data(1, AT + 1, b"x" * 512, last=True)),
        (READ, data(1, 1 << 63, b"x" * 512, last=True)),
        (READ, p.data_chunk_head(1, AT, 0xFFFFFFFF - 8, True)),
        (READ, data(1, AT, b"x" * 511, last=True)),
        (READ, data(1, AT, b"x" * 300) + data(1, AT + 299, b"x" * 213, last=True)),
        (READ, data(1, AT, b"x" * 300) * 2),
        (READ, data(1, AT + 1, b"x") + data(1, AT + 1, b"x" * 511) + data(1, AT, b"x", last=True)),
        (READ, p.none_chunk(1)),
        (READ, p.hole_chunk(1, AT, 0, False)),
        (READ, p.hole_chunk(1, AT, 513, True)),
        (READ, chunk(p.Chunk.OFFSET_HOLE, bytes(11))),
        (READ, chunk(p.Chunk.NONE, b"", 0)),
        (READ, chunk(p.Chunk.NONE, b"x")),
        (READ, chunk(3)),
        (READ, chunk(p.Chunk.NONE, b"", 3)),
        (READ, p.status_chunk(1, FAR_ID, EXTENTS, True)),
        (READ, p.simple_reply(1)),
        (READ, p.simple_reply(1, p.EIO)),
        (READ, p.error_chunk(1, 0, "no number")),
        (READ, chunk(p.Chunk.ERROR, bytes(5))),
        (READ, chunk(p.Chunk.ERROR, b"\0\0\0\x05\0\x02x")),
        (READ, chunk(p.Chunk.ERROR, b"\0\0\0\x05\0\0x")),
        (READ, chunk(p.Chunk.ERROR_OFFSET, b"\0\0\0\x05\0\0")),
        (READ, p.error_chunk(1, p.EIO, "outside", AT + 512)),
        (READ, p.CHUNK.pack(p.CHUNK_MAGIC, 1, p.Chunk.ERROR, 1, MOST_HEAD_BYTES)),
        (DF, data(1, AT, b"x" * 256) + data(1, AT + 256, b"x" * 256, last=True)),
        (FLUSH, data(6, 0, b"x")),
        (FLUSH, p.status_chunk(6, FAR_ID, EXTENTS, True)),
        (STATUS, p.none_chunk(5)),
        (STATUS, p.simple_reply(5)),
        (STATUS, data(5, AT, b"x" * 16, last=True)),
        (STATUS, p.status_chunk(5, FAR_ID + 1, EXTENTS, True)),
        (STATUS, p.status_chunk(5, FAR_ID, [], True)),
        (STATUS, p.status_chunk(5, FAR_ID, EXTENTS, False) * 2),
        (STATUS, chunk(p.Chunk.BLOCK_STATUS, FAR_ID.to_bytes(4, "big") + bytes(9), cookie=5)),
        (
            STATUS,
            p.STATUS_CHUNK.pack(p.CHUNK_MAGIC, 1, p.Chunk.BLOCK_STATUS, 5, 12 + 8 * MOST_EXTENTS, FAR_ID)
            + p.EXTENT.pack(512, 0),
        ),
        (STATUS, p.status_chunk(5, FAR_ID, [(0, 3), (512, 0)], True)),
        (STATUS, p.error_chunk(5, p.EIO, "", last=False) + p.simple_reply(5, p.EIO)),
        (ONE, p.status_chunk(5, FAR_ID, EXTENTS, True)),
    ],
)
def test_what_the_protocol_does_not_allow_is_refused(request_bytes, said):
    with pytest.raises(NbdProtocolError):
        fed(said, request_bytes)


def test_a_read_in_too_many_pieces_out_of_order_is_refused():
    many = MOST_SCATTERED + 2
    said = b"".join(p.hole_chunk(1, AT + 2 * number + 1, 1, False) for number in range(many))
    with pytest.raises(NbdProtocolError, match="too many pieces"):
        fed(said, read(1, 2 * many, AT))


def test_what_was_complete_before_a_fault_is_under_way_again_since_it_is_not_passed_on():
    reader, inflight = reader_of(READ, read(2), FLUSH)
    with pytest.raises(NbdProtocolError):
        reader.feed(memoryview(data(1, AT, b"x" * 512, last=True) + p.simple_reply(2)), 0, inflight, 9)
    assert len(inflight) == 3


def test_an_unknown_kind_of_error_is_an_error():
    said = chunk(0x8009, b"\0\0\0\x1c\0\x02no" + b"more to come")
    reader, inflight = reader_of(READ)
    out, finished = feed_in_pieces(reader, said, inflight, 1000)
    assert (out, bool(finished[0][1] & FAILED_BIT)) == (said, True)


def test_the_longest_error_is_held_until_it_is_here():
    said = p.error_chunk(1, p.ENOSPC, "x" * 5000, AT)
    assert len(said) == MOST_HEAD_BYTES
    reader, inflight = reader_of(READ)
    assert reader.feed(memoryview(bytearray(said[:-1])), 0, inflight, 9) == (0, [])
    assert reader.boundary == 0
    out, finished = feed_in_pieces(reader, said, inflight, len(said))
    assert chunks(out)[0][:3] == (1, p.Chunk.ERROR_OFFSET, 1)
    assert len(finished) == 1


def test_a_flush_in_a_chunk_counts_in_the_ledger():
    ours = ChangeLedger().joined()
    reader, inflight = reader_of(FLUSH, counted=ours)
    reader.feed(memoryview(p.none_chunk(6)), 0, inflight, 9)
    assert ours.is_covered
