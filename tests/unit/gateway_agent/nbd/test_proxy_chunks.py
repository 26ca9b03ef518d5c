"""Upstream mode for a client that wants structured replies, before upstreams that have them or not."""

import pytest

from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.loop import IN
from gateway_agent.nbd.session import STORAGE_GONE
from gateway_agent.nbd.upstream_handshake import Agreed
from pmdaemon.wire.rates import Rates
from tests.support.nbd import ALL_FLAGS, MIB, Rig, chunks
from tests.support.nbd_proxy import IN_CHUNKS, Pair, read, write

FAR_ID = 9
CUT_THROUGH, NO_STATUS, SIMPLE = Agreed(True, FAR_ID), Agreed(True), Agreed()
OFFERED = ALL_FLAGS | p.TX_SEND_DF | p.TX_SEND_CACHE


def pair_of(agreed=CUT_THROUGH, flags=OFFERED, size=MIB, **more):
    return Pair(Rig(size, flags, **more), mode=IN_CHUNKS, agreed=agreed)


def status(cookie, length=8192, offset=0, flags=0):
    return p.request(p.Cmd.BLOCK_STATUS, cookie, offset, length, flags)


def data(cookie, offset, payload, last=True):
    return p.data_chunk_head(cookie, offset, len(payload), last) + payload


def counted(pair):
    row = pair.row()
    return {name: row[name] for name in ("arrived", "reads", "writes", "others", "read_bytes", "errors")}


def test_chunks_pass_through_and_each_request_counts_once_until_its_last_chunk():
    pair = pair_of()
    said = read(1, 8192, 4096) + status(2) + write(3, b"w" * 100) + p.request(p.Cmd.CACHE, 4, 0, 512)
    pair.say(said)
    assert bytes(pair.far.sent) == said
    pair.rig.clock.advance(1)
    first = data(1, 4096, b"r" * 4096, last=False)
    pair.answer(first)
    pair.rig.clock.advance(1)
    rest = [
        p.status_chunk(2, FAR_ID, [(8192, 3)], True),
        p.simple_reply(3),
        p.hole_chunk(1, 8192, 4096, True),
        p.none_chunk(4),
    ]
    pair.answer(b"".join(rest))
    assert bytes(pair.near.sent) == first + p.status_chunk(2, p.ALLOCATION_ID, [(8192, 3)], True) + b"".join(
        rest[1:]
    )
    row = pair.row()
    assert (row["arrived"], row["reads"], row["writes"], row["others"], row["errors"]) == (2, 1, 1, 2, 0)
    assert (row["read_bytes"], row["lat_sum_us"], row["cost_milli"]) == (8192, 4_000_000, 4134)


def test_an_error_in_a_chunk_is_counted_once_however_many_there_are():
    pair = pair_of()
    pair.say(read(1, 512))
    said = p.error_chunk(1, p.ENOSPC, "first", 5, last=False) + p.error_chunk(1, p.EIO, "second")
    pair.answer(said)
    assert bytes(pair.near.sent) == said
    assert counted(pair) == {"arrived": 1, "reads": 1, "writes": 0, "others": 0, "read_bytes": 0, "errors": 1}


def test_an_upstream_without_chunks_is_translated():
    pair = pair_of(SIMPLE, ALL_FLAGS)
    pair.say(read(1, 512, 4096), write(2, b"w" * 10), read(3))
    pair.answer(p.simple_reply(1) + b"r" * 100)
    pair.answer(b"r" * 412 + p.simple_reply(2), p.simple_reply(3, p.EIO))
    found = chunks(pair.near.sent)
    assert found[0] == (1, p.Chunk.OFFSET_DATA, 1, (4096).to_bytes(8, "big") + b"r" * 512)
    assert found[1] == (2, None, True, bytes(4))
    assert found[2][:3] == (3, p.Chunk.ERROR, 1)
    assert counted(pair) == {
        "arrived": 3,
        "reads": 2,
        "writes": 1,
        "others": 0,
        "read_bytes": 512,
        "errors": 1,
    }


@pytest.mark.parametrize("agreed", [NO_STATUS, SIMPLE])
@pytest.mark.parametrize("caps", [Rates(), Rates(ops_per_s=1)])
def test_a_block_status_that_no_upstream_knows_is_all_data_and_never_reaches_it(agreed, caps):
    pair = pair_of(agreed, caps=caps)
    asked = status(1, MIB - 512, 512), status(2, 1, 7, p.CMD_FLAG_REQ_ONE), status(3, 8192, MIB - 512)
    for each in asked:
        pair.say(each)
    pair.rig.loop.fire(3)
    assert bytes(pair.far.sent) == b""
    expected = [p.status_chunk(1, p.ALLOCATION_ID, [(MIB - 512, 0)], True)]
    expected.append(p.status_chunk(2, p.ALLOCATION_ID, [(1, 0)], True))
    found = chunks(pair.near.sent)
    assert sorted(found)[:2] == sorted(chunks(b"".join(expected)))
    assert sorted(found)[2][:2] == (3, p.Chunk.ERROR), "beyond the end"
    row = pair.row()
    assert (row["others"], row["errors"], row["cost_milli"]) == (3, 1, 2000)


@pytest.mark.parametrize("caps", [Rates(), Rates(ops_per_s=1)])
def test_a_block_status_answered_here_keeps_its_place_and_is_charged_once(caps):
    pair = pair_of(SIMPLE, ALL_FLAGS, caps=caps)
    pair.far.window = 10
    pair.say(read(1), status(2), read(3))
    pair.rig.loop.fire(10)
    assert bytes(pair.near.sent) == b"", "what is before it has not gone"
    before_ns = pair.rig.rates.ready_ns()
    pair.rig.open_window(pair.far)
    pair.rig.loop.fire(10)
    assert chunks(pair.near.sent) == chunks(p.status_chunk(2, 1, [(8192, 0)], True))
    assert bytes(pair.far.sent) == read(1) + read(3)
    assert caps == Rates() or pair.rig.rates.ready_ns() - before_ns >= 10**9


@pytest.mark.parametrize("agreed", [CUT_THROUGH, SIMPLE])
@pytest.mark.parametrize("piece", [1, 40, 3000])
def test_a_refusal_lands_between_chunks_and_never_within_one(agreed, piece):
    pair = pair_of(agreed, ALL_FLAGS)
    pair.say(read(1, 5000), read(2, 5000))
    payloads = {1: b"a" * 5000, 2: b"b" * 5000}
    whole = b"".join(
        data(cookie, 0, payload) if agreed.structured else p.simple_reply(cookie) + payload
        for cookie, payload in payloads.items()
    )
    pair.answer(whole[:100])
    pair.say(read(3, 512, 2 * MIB))
    for start in range(100, len(whole), piece):
        pair.answer(whole[start : start + piece])
    found = chunks(pair.near.sent)
    assert sorted(item[0] for item in found) == [1, 2, 3]
    assert {item[0]: item[3][8:] for item in found if item[0] != 3} == payloads
    assert next(item for item in found if item[0] == 3)[1] == p.Chunk.ERROR


@pytest.mark.parametrize(
    ("flags", "request_bytes"),
    [
        (ALL_FLAGS, p.request(p.Cmd.CACHE, 1, 0, 512)),
        (ALL_FLAGS, read(1, 512, 0, p.CMD_FLAG_DF)),
        (ALL_FLAGS, p.request(p.Cmd.WRITE_ZEROES, 1, 0, 512, p.CMD_FLAG_FAST_ZERO)),
        (OFFERED, status(1, 512, 0, p.CMD_FLAG_DF)),
        (OFFERED, read(1, 512, 0, p.CMD_FLAG_REQ_ONE)),
    ],
)
def test_what_the_upstream_does_not_offer_never_reaches_it(flags, request_bytes):
    pair = pair_of(CUT_THROUGH, flags)
    pair.say(request_bytes)
    assert bytes(pair.far.sent) == b""
    assert chunks(pair.near.sent)[0][:3] == (1, p.Chunk.ERROR, 1)


def test_what_the_upstream_offers_reaches_it_with_its_flags():
    pair = pair_of(CUT_THROUGH, OFFERED | p.TX_SEND_FAST_ZERO)
    said = (
        read(1, 512, 0, p.CMD_FLAG_DF)
        + p.request(p.Cmd.CACHE, 2, 0, 512)
        + p.request(p.Cmd.WRITE_ZEROES, 3, 0, 512, p.CMD_FLAG_FAST_ZERO)
        + status(4, 512, 0, p.CMD_FLAG_REQ_ONE)
    )
    pair.say(said)
    assert bytes(pair.far.sent) == said


def test_an_upstream_that_dies_between_chunks_gives_an_error_chunk_for_each_request():
    pair = pair_of()
    pair.say(read(1, 8192), write(2, b"w"))
    pair.answer(data(1, 0, b"r" * 4096, last=False))
    pair.end(pair.far)
    found = chunks(pair.near.sent)
    text = p.EIO.to_bytes(4, "big") + len(STORAGE_GONE).to_bytes(2, "big") + STORAGE_GONE.encode()
    assert sorted(found)[1:] == [(1, p.Chunk.ERROR, 1, text), (2, p.Chunk.ERROR, 1, text)]
    assert pair.near.is_shut
    assert counted(pair)["errors"] == 2


def test_an_upstream_that_dies_within_a_chunk_ends_the_client_at_once():
    pair = pair_of()
    pair.say(read(1, 8192), read(2))
    pair.answer(data(1, 0, b"r" * 4096, last=False)[:-1])
    pair.end(pair.far)
    assert len(pair.near.sent) == 28 + 4095
    assert pair.near.is_shut
    assert counted(pair)["errors"] == 2


def test_a_chunk_that_is_wrong_ends_the_client_and_nothing_of_it_is_passed_on():
    pair = pair_of()
    pair.say(read(1), read(2))
    pair.far.incoming.append(data(1, 0, b"r" * 512) + data(2, 512, b"r" * 512))
    with pytest.raises(Exception, match="beyond a read") as caught:
        pair.rig.loop.handlers[pair.far.fileno()](IN)
    pair.rig.loop.failures[pair.far.fileno()](caught.value)
    assert pair.session.is_closed
    assert bytes(pair.near.sent) == b""
    assert counted(pair)["errors"] == 2


def test_a_client_that_takes_no_answers_makes_no_read_older_though_a_part_of_it_has_come():
    pair = pair_of()
    pair.near.window = 100
    pair.say(read(1, 8192))
    pair.rig.clock.advance(1)
    pair.answer(data(1, 0, b"r" * 4096, last=False))
    for _ in range(2):
        pair.rig.clock.advance(60)
        pair.taken()
    pair.rig.open_window(pair.near)
    pair.rig.clock.advance(1)
    pair.answer(p.hole_chunk(1, 4096, 4096, True))
    row = pair.row()
    assert (row["reads"], row["lat_sum_us"], row["svc_sum_us"]) == (1, 2_000_000, 2_000_000)
