"""The end of a connection to an upstream: its answers are taken, then DISC is said, then it closes."""

import pytest

from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.farewell import FAREWELL_NS, UpstreamFarewell
from gateway_agent.nbd.loop import IN, OUT
from gateway_agent.nbd.upstream_handshake import Agreed
from tests.support.nbd import FakeSocket, Rig
from tests.support.nbd_proxy import IN_CHUNKS, Pair, read, write

DISC = p.request(p.Cmd.DISC, 0, 0, 0)


@pytest.fixture
def pair() -> Pair:
    return Pair(Rig())


def said_behind(pair: Pair, *requests: bytes) -> bytes:
    """What the upstream was sent behind these."""
    sent, before = bytes(pair.far.sent), b"".join(requests)
    assert sent.startswith(before)
    return sent[len(before) :]


def test_a_client_that_goes_leaves_its_answers_to_be_taken_before_disc_is_said(pair):
    requests = read(1, 100), write(2, b"x" * 50), read(3, 40)
    pair.say(*requests)
    pair.end(pair.near)
    assert pair.session.is_closed
    assert pair.rig.context.farewells
    answers = p.simple_reply(3) + b"c" * 40 + p.simple_reply(2, p.EIO) + p.simple_reply(1) + b"a" * 100
    for at in range(len(answers)):
        assert said_behind(pair, *requests) == b""
        pair.answer(answers[at : at + 1])
    assert said_behind(pair, *requests) == DISC
    assert not pair.far.is_closed
    pair.end(pair.far)
    assert pair.far.is_closed
    assert pair.rig.context.farewells == set()
    assert pair.rig.loop.timers == {}


def test_a_reply_that_is_here_in_part_is_completed(pair):
    pair.say(read(1, 100), read(2, 100))
    pair.answer(p.simple_reply(1) + b"a" * 30)
    pair.end(pair.near)
    pair.answer(b"a" * 70 + p.simple_reply(2)[:5])
    assert said_behind(pair, read(1, 100), read(2, 100)) == b""
    pair.answer(p.simple_reply(2)[5:] + b"b" * 100)
    assert said_behind(pair, read(1, 100), read(2, 100)) == DISC


def test_replies_in_chunks_are_taken_to_the_last_one():
    pair = Pair(Rig(), mode=IN_CHUNKS, agreed=Agreed(structured=True))
    pair.say(read(1, 100), write(2, b"x" * 50))
    first, last = p.data_chunk_head(1, 0, 60, last=False), p.data_chunk_head(1, 60, 40, last=True)
    pair.answer(first + b"a" * 20)
    pair.end(pair.near)
    pair.answer(b"a" * 40 + p.none_chunk(2))
    assert said_behind(pair, read(1, 100), write(2, b"x" * 50)) == b""
    pair.answer(last + b"b" * 40)
    assert said_behind(pair, read(1, 100), write(2, b"x" * 50)) == DISC


def test_within_a_request_our_direction_ends_and_its_answers_are_taken_all_the_same(pair):
    torn = write(2, b"x" * 50)[:-7]
    pair.say(read(1, 100), torn)
    pair.end(pair.near)
    assert said_behind(pair, read(1, 100), torn) == b""
    assert pair.far.is_shut
    pair.answer(p.simple_reply(1) + b"a" * 100)
    assert not pair.far.is_closed
    pair.end(pair.far)
    assert pair.far.is_closed


def test_a_storage_that_hangs_is_waited_for_within_a_bound(pair):
    pair.say(read(1, 100))
    pair.end(pair.near)
    pair.rig.loop.fire(FAREWELL_NS / 1e9 - 0.1)
    assert not pair.far.is_closed
    pair.rig.loop.fire(0.1)
    assert pair.far.is_closed
    assert pair.rig.context.farewells == set()


def test_what_was_not_asked_for_ends_it(pair):
    pair.say(read(1, 100))
    pair.end(pair.near)
    pair.far.incoming.append(p.simple_reply(99))
    watched = pair.rig.loop
    with pytest.raises(Exception, match="unknown cookie") as caught:
        watched.handlers[pair.far.fileno()](IN)
    watched.failures[pair.far.fileno()](caught.value)
    assert pair.far.is_closed


def test_a_change_counts_as_under_way_until_it_is_answered():
    rig = Rig()
    pair = Pair(rig)
    ours = rig.volume.ledger_of(rig.export.upstream).joined()
    ours.flushed(ours.mark())
    assert not ours.is_covered, "a writer that nobody counts"
    pair.say(write(2, b"x" * 50))
    pair.end(pair.near)
    ours.flushed(ours.mark())
    assert not ours.is_covered
    pair.answer(p.simple_reply(2))
    ours.flushed(ours.mark())
    assert ours.is_covered


def test_last_words_wait_for_room_in_the_socket():
    rig, sock, closed = Rig(), FakeSocket(window=10), []
    farewell = UpstreamFarewell(rig.loop, sock, DISC, on_closed=closed.append)
    assert bytes(sock.sent) == DISC[:10]
    assert rig.loop.is_watched_for(sock.fileno(), OUT)
    rig.open_window(sock)
    assert bytes(sock.sent) == DISC
    assert not rig.loop.is_watched_for(sock.fileno(), OUT)
    sock.is_ended = True
    rig.loop.handlers[sock.fileno()](IN)
    assert (sock.is_closed, closed) == (True, [farewell])


def test_one_that_takes_no_words_is_closed():
    rig, sock = Rig(), FakeSocket()
    sock.is_shut = True
    assert UpstreamFarewell(rig.loop, sock, DISC).is_closed
    assert sock.is_closed
    assert rig.loop.timers == {}
