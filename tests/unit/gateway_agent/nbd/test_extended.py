"""Extended headers: a client and an upstream that both have them, and who is offered them."""

from ipaddress import ip_address

import pytest

from gateway_agent.errors import NbdProtocolError, UpstreamError
from gateway_agent.nbd import extended
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.access import ClientIdentity
from gateway_agent.nbd.accounting import FAILED_BIT
from gateway_agent.nbd.buffers import FLAGS, LENGTH, RequestBuffer
from gateway_agent.nbd.exports import EXTENDED_AGAIN_NS, ExportTable
from gateway_agent.nbd.extended import ExtendedChunkReader
from gateway_agent.nbd.handshake import HandshakeState, ServerHandshake
from gateway_agent.nbd.replies import AskedRequests
from gateway_agent.nbd.session import STORAGE_GONE
from gateway_agent.nbd.upstream_handshake import Agreed, ClientHandshake
from tests.support.nbd import ALL_FLAGS, Rig, plane_config
from tests.support.nbd_proxy import Pair, feed_in_pieces
from tests.unit.gateway_agent.nbd.test_handshake import FLAGS as CLIENT_FLAGS
from tests.unit.gateway_agent.nbd.test_handshake import GO, option_replies, sent
from tests.unit.gateway_agent.nbd.test_reconnect import come_back, is_kept, lose, openings, rig_of

TIB = 1 << 40
AT = 5 * TIB
FAR_ID = 77
MODE = p.ReplyMode(structured=True, allocation=True, extended=True)
AGREED = Agreed(structured=True, context_id=FAR_ID, extended=True)
OFFERED = ALL_FLAGS | p.TX_SEND_DF | p.TX_SEND_CACHE
say = p.extended_request
__all__ = ["openings"]  # a fixture


def chunk(kind, cookie=1, begin=AT, payload=b"", flags=p.CHUNK_DONE):
    return extended.CHUNK.pack(extended.CHUNK_MAGIC, flags, kind, cookie, begin, len(payload)) + payload


def data(payload, cookie=1, begin=AT, place=None, flags=p.CHUNK_DONE):
    place = begin if place is None else place
    return chunk(p.Chunk.OFFSET_DATA, cookie, begin, place.to_bytes(8, "big") + payload, flags)


def hole(length, cookie=1, begin=AT, place=AT, flags=p.CHUNK_DONE):
    payload = place.to_bytes(8, "big") + length.to_bytes(4, "big")
    return chunk(p.Chunk.OFFSET_HOLE, cookie, begin, payload, flags)


def asked_for(*requests):
    asked, inflight = AskedRequests(None, p.EXTENDED_REQUEST.size), {}
    for raw in requests:
        _, flags, command, cookie, offset, length = p.EXTENDED_REQUEST.unpack_from(raw)
        asked.admitted((1, cookie, command, length, offset, flags & ~p.CMD_FLAG_PAYLOAD_LEN, 32))
        inflight[cookie] = (1, 2, 0, 0)
    return ExtendedChunkReader("up", asked, FAR_ID), inflight


READ = say(p.Cmd.READ, 1, AT, 512)
STATUS = say(p.Cmd.BLOCK_STATUS, 2, AT, TIB)
WRITE = say(p.Cmd.WRITE, 3, AT, 512)
ZEROES = say(p.Cmd.WRITE_ZEROES, 4, AT, TIB)


# -- replies


@pytest.mark.parametrize("piece", [1, 7, 31, 33, 40, 100, 100_000])
def test_chunks_in_any_pieces_pass_unchanged_but_for_two_numbers(piece):
    extents = [(TIB - 4096, 3), (4096, 0)]
    parts = [
        data(b"r" * 300, place=AT, flags=0),
        extended.status_chunk(2, AT, FAR_ID, extents),
        hole(212, place=AT + 300),
        chunk(p.Chunk.NONE, 3),
        extended.error_chunk(4, AT, 255, "broken", AT + 5),
        data(b"z" * 100, 5, 0),
    ]
    requests = READ, STATUS, WRITE, ZEROES, say(p.Cmd.READ, 5, 0, 100)
    reader, inflight = asked_for(*requests)
    out, finished = feed_in_pieces(reader, b"".join(parts), inflight, piece)
    parts[1] = extended.status_chunk(2, AT, p.ALLOCATION_ID, extents)
    parts[4] = extended.error_chunk(4, AT, p.EIO, "broken", AT + 5)
    assert out == b"".join(parts)
    assert (inflight, reader.payload_left) == ({}, 0)
    assert [bool(item[1] & FAILED_BIT) for item in finished] == [False, False, False, True, False]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (READ, bytes(32)),
        (WRITE, p.simple_reply(3) + bytes(16)),
        (READ, p.data_chunk_head(1, AT, 512, True) + bytes(512)),
        (READ, data(b"x" * 512, cookie=9)),
        (READ, data(b"x" * 512, begin=0, place=AT)),
        (READ, data(b"x" * 513)),
        (READ, data(b"x" * 511)),
        (READ, chunk(p.Chunk.NONE, 1)),
        (READ, extended.CHUNK.pack(extended.CHUNK_MAGIC, 1, p.Chunk.OFFSET_DATA, 1, AT, 1 << 32)),
        (STATUS, p.status_chunk(2, FAR_ID, [(4096, 0)], True) + bytes(16)),
        (STATUS, chunk(p.Chunk.BLOCK_STATUS, 2, AT, bytes(12))),
        (STATUS, extended.status_chunk(2, AT, FAR_ID + 1, [(4096, 0)])),
        (STATUS, extended.status_chunk(2, AT, FAR_ID, [])),
        (STATUS, extended.status_chunk(2, AT, FAR_ID, [(0, 3), (4096, 0)])),
        (STATUS, chunk(extended.BLOCK_STATUS, 2, AT, FAR_ID.to_bytes(4, "big") + bytes(4 + 16))),
        (
            STATUS,
            chunk(extended.BLOCK_STATUS, 2, AT, FAR_ID.to_bytes(4, "big") + bytes(3) + b"\1" + bytes(15)),
        ),
        (STATUS, chunk(extended.BLOCK_STATUS, 2, AT, bytes(7))),
        (WRITE, extended.status_chunk(3, AT, FAR_ID, [(512, 0)])),
    ],
)
def test_what_is_wrong_ends_the_connection_before_any_of_it_is_passed_on(asked, said):
    reader, inflight = asked_for(asked)
    with pytest.raises(NbdProtocolError):
        reader.feed(memoryview(bytearray(said)), 0, inflight, 9)
    assert len(inflight) == 1


def test_a_status_of_the_extended_form_is_wrong_without_extended_headers():
    pair = Pair(Rig(), mode=p.ReplyMode(True, True), agreed=Agreed(True, FAR_ID))
    pair.say(p.request(p.Cmd.BLOCK_STATUS, 2, 0, 512))
    with pytest.raises(NbdProtocolError, match="type 6"):
        pair.answer(p.CHUNK.pack(p.CHUNK_MAGIC, 1, extended.BLOCK_STATUS, 2, 24) + bytes(24))


# -- requests


def received(*said):
    buffer = RequestBuffer("client", 4096, extended=True)
    whole = b"".join(said)
    buffer.room()[: len(whole)] = whole
    transfers = buffer.received(len(whole), 7)
    return buffer, transfers


def test_a_write_has_its_payload_with_and_without_the_flag_and_its_storage_gets_the_flag():
    bare = p.EXTENDED_REQUEST.pack(p.EXTENDED_REQUEST_MAGIC, p.CMD_FLAG_FUA, p.Cmd.WRITE, 1, AT, 4)
    flagged = say(p.Cmd.WRITE, 2, AT, 4, p.CMD_FLAG_FUA)
    buffer, transfers = received(bare, b"aaaa", flagged, b"bbbb", READ)
    assert (transfers, [item[FLAGS] for item in buffer.queue]) == (3, [p.CMD_FLAG_FUA] * 2 + [0])
    buffer.admit_pos = buffer.end_pos
    assert bytes(buffer.outgoing()) == say(p.Cmd.WRITE, 1, AT, 4, 1) + b"aaaa" + flagged + b"bbbb" + READ


def test_lengths_have_64_bits_and_payloads_the_limit_they_always_had():
    buffer, _ = received(say(p.Cmd.TRIM, 1, 0, (1 << 64) - 1), p.extended_request(p.Cmd.DISC, 2, 0, 0))
    assert (buffer.queue[0][LENGTH], buffer.disconnecting) == ((1 << 64) - 1, True)
    for bad in (
        say(p.Cmd.WRITE, 1, 0, p.MAX_PAYLOAD_BYTES + 1),
        say(p.Cmd.BLOCK_STATUS, 1, 0, p.MAX_PAYLOAD_BYTES + 1, p.CMD_FLAG_PAYLOAD_LEN),
        p.request(p.Cmd.READ, 1, 0, 512) + bytes(4),
    ):
        with pytest.raises(NbdProtocolError):
            received(bad)


# -- a session


def pair_of(rig=None, agreed=AGREED):
    return Pair(rig or Rig(16 * TIB, OFFERED), mode=MODE, agreed=agreed)


def test_requests_of_any_length_pass_through_and_are_counted():
    pair = pair_of()
    said = READ + STATUS + WRITE + b"w" * 512 + ZEROES
    pair.say(said)
    assert bytes(pair.far.sent) == said
    answers = [data(b"r" * 512), chunk(p.Chunk.NONE, 3), chunk(p.Chunk.NONE, 4)]
    pair.answer(*answers, extended.status_chunk(2, AT, FAR_ID, [(TIB, 3)]))
    told = b"".join((*answers, extended.status_chunk(2, AT, p.ALLOCATION_ID, [(TIB, 3)])))
    assert bytes(pair.near.sent) == told
    row = pair.row()
    assert (row["reads"], row["writes"], row["others"], row["errors"]) == (1, 1, 2, 0)
    assert (row["read_bytes"], row["write_bytes"], row["cost_milli"]) == (
        512,
        512,
        1000 * (4 + TIB // 65_536) + 15,
    )
    pair.say(p.extended_request(p.Cmd.DISC, 9, 0, 0))
    assert bytes(pair.far.sent[len(said) :]) == p.extended_request(p.Cmd.DISC, 0, 0, 0)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (say(p.Cmd.TRIM, 1, TIB, (1 << 64) - 1), p.EINVAL),
        (say(p.Cmd.WRITE_ZEROES, 1, TIB, 16 * TIB), p.ENOSPC),
        (say(p.Cmd.READ, 1, TIB, 1 << 40), p.EINVAL),
        (say(p.Cmd.BLOCK_STATUS, 1, TIB, 12, p.CMD_FLAG_PAYLOAD_LEN) + bytes(12), p.EINVAL),
        (say(p.Cmd.READ, 1, TIB, 512, p.CMD_FLAG_PAYLOAD_LEN) + bytes(512), p.EINVAL),
    ],
)
def test_what_is_refused_is_answered_with_its_offset_and_its_payload_is_dropped(said, error):
    pair = pair_of()
    pair.say(said + READ)
    assert bytes(pair.far.sent) == READ
    magic, flags, kind, cookie, begin, length = extended.CHUNK.unpack_from(pair.near.sent)
    assert (magic, flags, kind, cookie, begin) == (extended.CHUNK_MAGIC, 1, p.Chunk.ERROR, 1, TIB)
    assert len(pair.near.sent) == extended.CHUNK.size + length
    assert int.from_bytes(pair.near.sent[32:36], "big") == error
    assert pair.row()["errors"] == 1


def test_an_upstream_without_block_status_is_all_data_however_long_the_range():
    pair = pair_of(agreed=Agreed(structured=True, extended=True))
    pair.say(STATUS)
    assert bytes(pair.near.sent) == extended.status_chunk(2, AT, p.ALLOCATION_ID, [(TIB, 0)])
    assert not pair.far.sent


def test_an_upstream_that_goes_away_is_an_error_of_each_request_at_its_offset():
    pair = pair_of()
    pair.say(READ, say(p.Cmd.TRIM, 2, TIB, TIB))
    pair.end(pair.far)
    assert bytes(pair.near.sent) == b"".join(
        extended.error_chunk(cookie, at, p.EIO, STORAGE_GONE) for cookie, at in ((1, AT), (2, TIB))
    )


@pytest.mark.parametrize("window", [0, 3, 32, 40, 10_000])
def test_what_was_not_answered_is_asked_again_with_extended_headers(openings, window):
    rig = rig_of(p.TX_HAS_FLAGS | p.TX_READ_ONLY, size_bytes=16 * TIB)
    pair = pair_of(rig)
    pair.far.window = window
    pair.say(READ + STATUS)
    lose(pair)
    assert openings.tries[0][1]["mode"] == MODE
    come_back(pair, openings, AGREED)
    assert bytes(pair.far.sent) == READ + STATUS
    assert is_kept(pair)


# -- negotiation


EXTENDED = p.option(p.Opt.EXTENDED_HEADERS)


def server(*said, has=True):
    machine = ServerHandshake(["vol-1"], "client test", has_extended=lambda: has)
    return machine, machine.feed(b"".join((CLIENT_FLAGS, *said)))


def test_a_client_gets_them_where_the_storage_has_them_and_then_all_replies_are_chunks():
    _, actions = server(EXTENDED, EXTENDED, p.option(p.Opt.STRUCTURED_REPLY), GO)
    kinds = [kind for _, kind, _ in option_replies(sent(actions))]
    assert kinds == [p.Rep.ACK, p.Rep.ACK, p.Rep.ERR_EXT_HEADER_REQD]
    assert actions[-1].mode == p.ReplyMode(structured=True, extended=True)
    _, actions = server(EXTENDED, GO, has=False)
    assert [kind for _, kind, _ in option_replies(sent(actions))] == [p.Rep.ERR_UNSUP]
    assert actions[-1].mode == p.SIMPLE_REPLIES
    assert option_replies(sent(server(p.option(p.Opt.EXTENDED_HEADERS, b"x"))[1]))[0][1] == p.Rep.ERR_INVALID


def test_they_need_go_and_end_with_what_was_said_before_tls():
    with pytest.raises(NbdProtocolError, match="GO"):
        server(EXTENDED, p.option(p.Opt.EXPORT_NAME, b"vol-1"))
    machine = ServerHandshake(["vol-1"], "client test", "offer", lambda: True)
    machine.feed(CLIENT_FLAGS + EXTENDED)
    machine.feed(p.option(p.Opt.STARTTLS))
    machine.secured()
    assert machine.feed(GO)[-1].mode == p.SIMPLE_REPLIES


def upstream(*said, mode=MODE, will_transmit=True):
    near = ClientHandshake("vol-1", "up", mode=mode, will_transmit=will_transmit)
    return near, [near.feed(data) for data in (p.greeting(), *said)]


def test_an_upstream_is_asked_for_them_in_place_of_structured_replies():
    ack = p.option_reply(p.Opt.EXTENDED_HEADERS, p.Rep.ACK)
    near, out = upstream(ack)
    assert out[0].endswith(EXTENDED)
    assert out[1] == p.option(p.Opt.SET_META_CONTEXT, p.meta_context_data("vol-1", [p.ALLOCATION]))
    near.feed(p.option_reply(p.Opt.SET_META_CONTEXT, p.Rep.ERR_UNSUP))
    assert near.agreed == Agreed(structured=True, extended=True)
    assert near.farewell == p.extended_request(p.Cmd.DISC, 0, 0, 0)


def test_one_that_has_none_is_known_by_it_and_no_client_that_has_them_is_given_to_it():
    no = p.option_reply(p.Opt.EXTENDED_HEADERS, p.Rep.ERR_UNSUP)
    near, _ = upstream(no, mode=p.ReplyMode(structured=True, extended=True), will_transmit=False)
    assert (near.state, near.agreed) == (HandshakeState.GO, Agreed())
    with pytest.raises(UpstreamError, match="connect again"):
        upstream(no)


def test_they_are_offered_where_all_that_a_client_sees_has_them_and_others_are_asked_again():
    rig, asked = Rig(), []

    def ask(volume):
        asked.append(volume.name)
        volume.extended.asked_ns = rig.clock.monotonic_ns()

    one, two = ({"volume": name, "backend": "b", "upstream": f"nbd://127.0.0.1/{name}"} for name in "ab")
    table = ExportTable(plane_config(one, two | {"allow_networks": ["unix"]}), rig.context, lambda: None, ask)
    near, far = ClientIdentity("uid-0", None), ClientIdentity("10.0.0.7", ip_address("10.0.0.7"))
    table.volumes["a"].extended.has = True
    assert (table.has_extended(far), table.has_extended(near), asked) == (True, False, ["b"])
    table.has_extended(near)
    assert asked == ["b"]
    rig.clock.advance(EXTENDED_AGAIN_NS / 1e9)
    table.has_extended(near)
    assert asked == ["b", "b"]
    table.volumes["b"].extended.has = True
    assert table.has_extended(near)
    table.apply(plane_config(one | {"upstream": "nbd://127.0.0.1/other"}))
    assert not table.has_extended(near), "it is another server, which was not asked yet"
    table.close()


def test_a_file_has_none_and_no_upstream_is_asked_because_of_it(tmp_path):
    (tmp_path / "image").write_bytes(bytes(512))
    asked = []
    entries = {"volume": "f", "backend": "b", "file": f"{tmp_path}/image"}
    other = {"volume": "u", "backend": "b", "upstream": "nbd://127.0.0.1/u"}
    table = ExportTable(plane_config(entries, other), Rig().context, lambda: None, asked.append)
    assert not table.has_extended(ClientIdentity("uid-0", None))
    assert asked == []
    table.close()


def test_requests_with_extended_headers_are_counted_as_sequential_too():
    buffer = RequestBuffer("client", extended=True)

    def sequential(*requests):
        raw = b"".join(requests)
        buffer.room()[: len(raw)] = raw
        buffer.received(len(raw), 1)
        return buffer.sequential

    def read(begin):
        return say(p.Cmd.READ, begin, AT + begin, 512)

    def write(begin):
        return say(p.Cmd.WRITE, begin, AT + begin, 512) + bytes(512)

    assert sequential(read(0), read(512), write(1024), read(1024)) == 2
    assert sequential(say(p.Cmd.TRIM, 9, 0, TIB)) == 0, "of this call, which has neither reads nor writes"
    assert sequential(write(1536), read(0), write(2048)) == 2
