"""Sessions that end by time: stalled, silent, never registered; durability that lags."""

from __future__ import annotations

import pytest

from pmdaemon.poller.catch_up import BEYOND
from pmdaemon.poller.positions import LAG_NS
from pmdaemon.poller.timeouts import HANDSHAKE_NS, TimeoutPolicy
from pmdaemon.wire.kinds import Kind
from tests.support.gateways import GATEWAY, hello, make_cut
from tests.support.pair import OTHER, SECOND, PairRig


def test_durability_that_lags_is_asked_for_again(rig: PairRig) -> None:
    rig.watermarks()
    agent = rig.up()
    starts = []
    for _ in range(LAG_NS // SECOND + 3):
        rig.pass_time(1)
        for poll in rig.polls(agent):
            starts.append(poll.header["from"][1])
            agent.answer(poll)
        rig.step()
    assert starts[:3] == [1, 2, 3]
    assert rig.counters["lag_rewinds"] == 1
    assert starts.count(1) == 2


def test_where_durability_takes_longer_nothing_is_asked_for_again_so_soon(rig: PairRig) -> None:
    lag_s = 12 * LAG_NS // SECOND
    # The rig's own is that of a server by itself.
    rig.inbound._timeouts._policy = TimeoutPolicy.for_interval(SECOND, lag_s * SECOND)
    rig.watermarks()
    agent = rig.up()
    starts = []
    for _ in range(lag_s + 3):
        rig.pass_time(1)
        for poll in rig.polls(agent):
            starts.append(poll.header["from"][1])
            agent.answer(poll)
        rig.step()
    assert starts[:lag_s] == list(range(1, lag_s + 1))
    assert rig.counters["lag_rewinds"] == 1


def test_what_waits_in_a_full_mailbox_is_not_asked_for_again(rig: PairRig) -> None:
    rig.watermarks()
    agent = rig.up()

    def asked(seconds: int) -> list[int]:
        starts = []
        for _ in range(seconds):
            rig.pass_time(1)
            for poll in rig.polls(agent):
                starts.append(poll.header["from"][1])
                agent.answer(poll)
            rig.step()
        return starts

    assert asked(1) == [1]
    rig.pass_time(0.5)
    assert rig.mailbox.cuts_to("dbmanager") == [(1, False)]
    rig.mailbox.full = {"dbmanager"}
    starts = asked(LAG_NS // SECOND + 5)
    assert set(starts) == {2, BEYOND}
    assert rig.publisher.refused_keeping > 1
    assert rig.counters["lag_rewinds"] == 0
    rig.mailbox.full = set()
    assert 1 in asked(3 * LAG_NS // SECOND), "nothing is full, and still no notice of it"


def test_stalled_then_recovered(rig: PairRig) -> None:
    rig.watermarks()
    agent = rig.up()
    other = rig.up(OTHER)
    rig.pass_time(1)
    (poll,) = rig.polls(agent)
    answered = 0
    for _ in range(5):
        for other_poll in rig.polls(other):
            other.answer(other_poll)
            answered += 1
        rig.pass_time(1)
    assert answered == 5  # the stalled one delays no other
    assert rig.mailbox.states().count((GATEWAY, "stalled")) == 1
    again = rig.polls(agent)
    assert len(again) == 1
    agent.answer(poll)
    rig.step()
    assert rig.mailbox.states()[-1] == (GATEWAY, "recovered")
    agent.answer(again[0])
    rig.step()
    rig.pass_time(0.1)
    assert rig.mailbox.cuts_to("dbmanager").count((1, False)) == 2  # once for each gateway


def test_silent_for_ten_seconds_is_lost_and_closed(rig: PairRig) -> None:
    rig.watermarks()
    agent = rig.up()
    rig.pass_time(9)
    assert (GATEWAY, "lost") not in rig.mailbox.states()
    rig.pass_time(3)
    assert rig.mailbox.states()[-1] == (GATEWAY, "lost")
    assert "nothing arrived" in rig.mailbox.to("services", Kind.GATEWAY)[-1].header["reason"]
    rig.received(agent)
    assert agent.sock.recv(1) == b""
    assert rig.inbound.connections == 0


@pytest.mark.parametrize(
    ("interval_s", "stalled_s", "lost_s"), [(0.1, 2, 10), (1, 3, 10), (5, 15, 17), (60, 180, 182)]
)
def test_patience(interval_s: float, stalled_s: float, lost_s: float) -> None:
    policy = TimeoutPolicy.for_interval(round(interval_s * SECOND))
    assert policy.stalled_after_ns == stalled_s * SECOND
    assert policy.lost_after_ns == lost_s * SECOND


def test_connection_that_never_registers_is_closed(rig: PairRig) -> None:
    agent = rig.dial()
    agent.send(hello())
    rig.step()
    rig.pass_time(HANDSHAKE_NS / SECOND + 1)
    assert rig.inbound.connections == 0
    assert rig.counters["refusal_slow"] == 1
    rig.received(agent)
    assert agent.sock.recv(1) == b""


def test_a_gateway_that_trickles_is_stalled_and_holds_no_more_than_a_frame(rig: PairRig) -> None:
    rig.watermarks()
    slow, good = rig.up(), rig.up(OTHER)
    answered = 0
    for byte in make_cut(rows=4)[:300]:  # a byte each 100 ms: never silent, never whole
        slow.send(bytes([byte]))
        rig.pass_time(0.1)
        for poll in rig.polls(good):
            good.answer(poll)
            answered += 1
    assert (GATEWAY, "stalled") in rig.mailbox.states()
    assert answered >= 29, "one a second for the other, whatever this one does"
    [conn] = [item for item in rig.connections if item.gateway.gateway_id == GATEWAY]
    assert conn.session.pending_bytes == 300
    assert len(rig.polls(slow)) <= 16, "polled again only when it was called stalled"
