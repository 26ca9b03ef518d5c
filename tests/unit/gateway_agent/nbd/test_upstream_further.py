"""Connections made behind a loss: which of them may be used, and from when on."""

from __future__ import annotations

import pytest

from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.loop import IN
from tests.support.nbd import replies
from tests.support.nbd_proxy import IN_CHUNKS, read, write
from tests.support.nbd_several import Several

DISC = p.request(p.Cmd.DISC, 0, 0, 0)


def test_a_flush_never_goes_to_a_restarted_upstream_that_has_lost_what_it_would_cover(openings):
    each = Several(openings, most=2, opened=2)
    each.say(write(1, b"w" * 512))
    each.answer(1, p.simple_reply(1))  # acknowledged, and not stable
    each.end(1)  # the host of the upstream restarts; the other connection has not noticed yet
    each.rig.loop.fire(5)
    restarted = each.open_next()
    for cookie in (2, 3):
        each.say(p.request(p.Cmd.FLUSH, cookie, 0, 0))
    assert restarted.sent == b""
    each.end(0)
    each.rig.loop.fire(1)
    assert [error for _, error, _ in replies(each.near.sent)] == [0, p.EIO, p.EIO]
    assert bytes(restarted.sent) == DISC


def test_an_answer_to_what_was_asked_before_proves_no_new_connection(openings):
    """It may have been on its way when the upstream was restarted."""
    each = Several(openings, most=2, opened=2)
    each.say(write(1, b"w" * 512))
    each.answer(1, p.simple_reply(1))  # acknowledged, and not stable
    each.say(read(2))
    each.end(1)
    each.rig.loop.fire(5)
    restarted = each.open_next()
    each.answer(0, p.simple_reply(2) + b"r" * 512)
    for cookie in (3, 4):
        each.say(p.request(p.Cmd.FLUSH, cookie, 0, 0))
    assert restarted.sent == b""
    each.answer(0, p.simple_reply(3))
    for cookie in (5, 6):
        each.say(read(cookie))
    assert restarted.sent, "that one was asked since: it is the same upstream"


def test_the_rest_of_a_reply_that_had_begun_proves_no_new_connection(openings):
    """It may have been on its way as well, however large it is."""
    each = Several(openings, most=2, opened=2)
    each.say(write(1, b"w" * 512))
    each.answer(1, p.simple_reply(1))  # acknowledged, and not stable
    each.say(read(2, 2000))
    each.end(1)
    each.answer(0, p.simple_reply(2) + b"r" * 700)
    each.rig.loop.fire(5)
    restarted = each.open_next()
    each.answer(0, b"r" * 1300)
    for cookie in (3, 4):
        each.say(p.request(p.Cmd.FLUSH, cookie, 0, 0))
    assert restarted.sent == b""
    each.answer(0, p.simple_reply(3))
    for cookie in (5, 6):
        each.say(read(cookie))
    assert restarted.sent, "that one was asked since"


@pytest.mark.parametrize("how", ["ends", "speaks", "fails"])
def test_one_that_ends_before_it_is_used_gets_nothing_and_is_opened_again(openings, how):
    """As with an upstream that is restarted, or lets go of what is idle, while the client says nothing."""
    each = Several(openings, most=2, opened=2)
    each.end(1)
    each.rig.loop.fire(5)
    ended = each.open_next()
    if how == "fails":
        each.rig.loop.failures[ended.fileno()](OSError(5, "I/O error"))
    elif how == "speaks":
        each.rig.deliver(ended, b"?")
    else:
        each.pair.end(ended)
    assert ended.is_closed
    for cookie in (1, 2, 3):
        each.say(read(cookie))
        each.answer(0, p.simple_reply(cookie) + b"r" * 512)
    assert each.is_kept
    assert openings == []
    each.rig.loop.fire(5)
    again = each.open_next()
    each.say(read(4))
    each.answer(0, p.simple_reply(4) + b"r" * 512)
    for cookie in (5, 6):
        each.say(read(cookie))
    assert again.sent
    assert each.is_kept


def test_what_tls_says_on_its_own_is_no_end(openings):
    """Tickets of a session, behind the handshake: nothing to read comes of them."""
    each = Several(openings, most=2, opened=2)
    each.end(1)
    each.rig.loop.fire(5)
    made = each.open_next()
    each.rig.loop.handlers[made.fileno()](IN)
    assert not made.is_closed
    each.say(read(1))
    each.answer(0, p.simple_reply(1) + b"r" * 512)
    for cookie in (2, 3):
        each.say(read(cookie))
    assert made.sent


def test_one_that_waits_to_be_used_is_let_go_with_its_session(openings):
    each = Several(openings, most=2, opened=2, mode=IN_CHUNKS)
    each.end(1)
    each.rig.loop.fire(5)
    made = each.open_next()
    each.say(DISC)
    assert bytes(made.sent) == DISC
    each.pair.end(made)
    assert made.is_closed
