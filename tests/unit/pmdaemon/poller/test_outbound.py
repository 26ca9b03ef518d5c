"""The outbound thread step by step: polls, orders, notices; fake clock and mailbox, real sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pmdaemon.mailbox.errors import MessageDamaged
from pmdaemon.poller import outbound
from pmdaemon.poller.outbound import MANY_DUE
from pmdaemon.runtime.term import Term
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.agent import Registration
from pmdaemon.wire.messages.server import CapsState
from tests.support.gateways import GATEWAY, hello, schema
from tests.support.pair import OTHER, PairRig


def test_nobody_is_polled_before_the_watermarks(rig: PairRig) -> None:
    agent = rig.up()
    rig.pass_time(5)
    assert rig.polls(agent) == []
    rig.watermarks(1, (GATEWAY, 7, 4))
    rig.pass_time(1)
    (poll,) = rig.polls(agent)
    assert poll.header["ack"] == [[7, 4]]
    assert poll.header["from"] == [7, 5]
    assert poll.header["lease"] is False


def test_one_poll_an_interval_and_not_again_before_the_answer(rig: PairRig) -> None:
    rig.watermarks()
    agent = rig.up()
    rig.pass_time(2.9)
    (poll,) = rig.polls(agent)
    assert rig.counters["polls_skipped"] == 2
    agent.answer(poll)
    rig.step()
    rig.pass_time(3)
    assert len(rig.polls(agent)) == 1


def test_acknowledged_by_durable_and_ignored_from_a_dead_dbmanager(rig: PairRig) -> None:
    rig.watermarks(2)
    agent = rig.up()
    rig.pass_time(1)
    agent.answer(rig.polls(agent)[0])
    rig.step()
    rig.deliver(Kind.DURABLE, inc=1, hw=[[GATEWAY, 7, 1]])
    assert rig.counters["stale_durable_notices"] == 1
    rig.deliver(Kind.DURABLE, inc=2, hw=[[GATEWAY, 7, 1]])
    rig.pass_time(1)
    assert rig.polls(agent)[0].header["ack"] == [[7, 1]]


def test_new_dbmanager_rewinds_and_hears_of_every_gateway_again(rig: PairRig) -> None:
    rig.watermarks(1)
    agent = rig.up()
    for _ in range(3):
        rig.pass_time(1)
        agent.answer(rig.polls(agent)[0])
        rig.step()
    rig.mailbox.posts.clear()
    rig.watermarks(2, (GATEWAY, 7, 1))
    assert rig.mailbox.states("dbmanager") == [(GATEWAY, "up")]
    assert len(rig.mailbox.to("dbmanager", Kind.STREAMS_SEEN)) == 1
    rig.pass_time(1)
    assert rig.polls(agent)[0].header["from"] == [7, 2]


def test_restarted_services_hear_of_every_gateway_again(rig: PairRig) -> None:
    agent = rig.up()
    lost = rig.up(OTHER)
    lost.close()
    rig.step()
    rig.mailbox.posts.clear()
    rig.deliver(Kind.LEASE, inc=2)
    assert rig.mailbox.states("services") == [(GATEWAY, "up")]
    assert rig.mailbox.states("dbmanager") == []
    rig.deliver(Kind.SET_THRESHOLDS, gw=GATEWAY, version=9, entries=[])
    assert [item.header for item in rig.received(agent) if item.kind == Kind.THRESHOLDS] == [
        {"version": 9, "entries": []}
    ]


def test_services_are_told_who_is_there_once_a_start_of_theirs(rig: PairRig) -> None:
    rig.up()
    announced = []
    for incarnation in (1, 1, 1, 2, 2):
        rig.mailbox.posts.clear()
        rig.deliver(Kind.LEASE, inc=incarnation)
        announced.append(len(rig.mailbox.states("services")))
    assert announced == [1, 0, 0, 1, 0]


def test_thresholds_reach_the_gateway_they_are_for_and_no_other(rig: PairRig) -> None:
    agent, other = rig.up(), rig.up(OTHER)
    rig.received(agent)
    rig.received(other)
    rig.deliver(Kind.SET_THRESHOLDS, gw=OTHER, version=4, entries=[])
    rig.deliver(Kind.SET_THRESHOLDS, gw="nobody", version=5, entries=[])
    assert rig.received(agent) == []
    assert [item.header["version"] for item in rig.received(other)] == [4]


def test_costs_reach_the_gateway_they_are_for_the_newest_once(rig: PairRig) -> None:
    agent, other = rig.up(), rig.up(OTHER)
    rig.received(agent)
    rig.received(other)
    for version in (3, 4):
        header = {"gw": OTHER, "version": version, "backends": []}
        rig.mailbox.deliver("services", Kind.SET_COSTS, header)
    rig.step()
    assert rig.received(agent) == []
    assert [(item.kind, item.header) for item in rig.received(other)] == [
        (Kind.COSTS, {"version": 4, "backends": []})
    ]


def test_caps_thresholds_and_poll_leave_as_one_write(rig: PairRig) -> None:
    rig.watermarks()
    agent = rig.up()
    rig.received(agent)
    rig.mailbox.deliver("services", Kind.SET_CAPS, {"gw": GATEWAY, "gen": 1, "lease_us": 1, "caps": []})
    rig.mailbox.deliver("services", Kind.SET_CAPS, {"gw": GATEWAY, "gen": 2, "lease_us": 1, "caps": []})
    rig.mailbox.deliver("services", Kind.SET_THRESHOLDS, {"gw": GATEWAY, "version": 1, "entries": []})
    rig.mailbox.deliver("services", Kind.LEASE, {})
    rig.clock.advance(1)
    writes = rig.counters["writes"]
    rig.step()
    assert rig.counters["writes"] == writes + 1
    got = rig.received(agent)
    assert [item.kind for item in got] == [Kind.CAPS, Kind.THRESHOLDS, Kind.POLL]
    assert got[0].header["gen"] == 2
    assert got[2].header["lease"] is True
    sent = [item.header for item in rig.mailbox.to("services", Kind.CAPS_STATE)]
    assert [(item["gen"], item["state"]) for item in sent] == [(2, "sent")]
    agent.send(frame.encode(Kind.CAPS_ACK, {"gen": 2, "ok": False, "reason": "no such volume"}))
    rig.step()
    last = rig.mailbox.to("services", Kind.CAPS_STATE)[-1].header
    assert (last["state"], last["reason"]) == ("refused", "no such volume")
    assert "refused" not in last
    agent.send(frame.encode(Kind.CAPS_ACK, {"gen": 2, "ok": True, "reason": "", "refused": ["vol-9"]}))
    rig.step()
    last = CapsState.parse(rig.mailbox.to("services", Kind.CAPS_STATE)[-1].header, 0)
    assert (last.state, last.refused) == ("confirmed", ("vol-9",))


def test_lease_is_not_renewed_once_services_is_silent(rig: PairRig) -> None:
    rig.watermarks()
    agent = rig.up()
    rig.deliver(Kind.LEASE)
    leases = []
    for _ in range(5):
        rig.pass_time(1)
        for poll in rig.polls(agent):
            leases.append(poll.header["lease"])
            agent.answer(poll)
    assert leases[:2] == [True, True]
    assert leases[-1] is False


def test_orders_for_a_gateway_that_is_not_there_wait_for_it(rig: PairRig) -> None:
    rig.deliver(Kind.SET_CAPS, gw=GATEWAY, gen=4, lease_us=1, caps=[])
    assert rig.mailbox.to("services", Kind.CAPS_STATE) == []
    agent = rig.up()
    assert [item.kind for item in rig.received(agent)] == [Kind.CAPS]
    assert rig.mailbox.to("services", Kind.CAPS_STATE)[-1].header["gen"] == 4


def test_many_due_are_served_shard_by_shard_and_mail_does_not_wait_for_all(rig: PairRig) -> None:
    rig.watermarks()
    names = [f"6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f{index:04}" for index in range(3 * MANY_DUE)]
    agents = {name: rig.up(name) for name in names}
    rig.clock.advance(5)  # the process slept: all are due at once
    taken: list[int] = []
    take = rig.mailbox.take
    sent = rig.counters
    rig.mailbox.take = lambda *limits: taken.append(sent["polls"]) or take(*limits)  # type: ignore[method-assign]
    rig.outbound.step()
    assert [count - taken[0] for count in taken] == [0, MANY_DUE, 2 * MANY_DUE, 3 * MANY_DUE]
    assert all(len(rig.polls(agent)) == 1 for agent in agents.values())


@pytest.mark.parametrize(
    "header", [{"inc": "x"}, {"inc": 1, "hw": [[1]]}], ids=["no incarnation", "a row of another form"]
)
def test_bad_mail_is_counted_and_nothing_stops(rig: PairRig, header: dict[str, Any]) -> None:
    agent = rig.up()
    rig.deliver(Kind.WATERMARKS, **header)
    rig.deliver(Kind.SNAPSHOT)
    assert rig.counters["bad_orders"] == 2
    rig.watermarks()
    rig.pass_time(1)
    assert len(rig.polls(agent)) == 1


def test_poll_that_cannot_leave_yet_is_not_awaited(rig: PairRig) -> None:
    """A gateway dials again: known to the schedule, but its session has had no REGISTERED yet."""
    rig.watermarks()
    rig.up().close()
    rig.step()
    agent = rig.dial()
    agent.send(hello(), schema())
    rig.inbound.step(0)
    (conn,) = (item for item in rig.connections if item.gateway is None)
    assert conn.hello is not None
    rig.registry.register(conn, conn.hello, Registration([], []))
    rig.clock.advance(1)
    rig.outbound.step()
    gateway = rig.registry.get(GATEWAY)
    assert gateway is not None
    assert gateway.awaiting_since_ns is None
    assert gateway.record.oldest_poll_sent_ns is None
    gateway.end()


def test_polls_wait_for_those_due_soon_after_the_first_whatever_wakes_the_thread(
    rig: PairRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_s: list[float] = []
    monkeypatch.setattr(outbound, "wait_any", lambda _boxes, limit_s, _others: waited_s.append(limit_s))
    rig.watermarks()
    agent = rig.up()
    due_ns = rig.schedule.next_due_ns()
    assert due_ns is not None
    left = []
    for left_ms in (10, 0, -10, -49, -50):
        rig.clock.advance((due_ns - left_ms * 1_000_000 - rig.clock.monotonic_ns()) / 1e9)
        rig.outbound.sleep()  # which notes how long it would
        rig.outbound.step()
        left.append(len(rig.polls(agent)))
    assert waited_s == [0.06, 0.05, 0.04, 0.001, 0]
    assert left == [0, 0, 0, 0, 1]


def test_a_damaged_message_of_the_mailbox_is_passed_by(rig: PairRig, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(*_limits: int) -> list[object]:
        raise MessageDamaged("lane of dbmanager", 1)

    with monkeypatch.context() as patch:
        patch.setattr(rig.mailbox, "take", torn)
        rig.outbound.step()
    rig.outbound.step()
    assert rig.counters["mail_discarded"] == 1


def test_nothing_reaches_a_gateway_once_the_term_of_this_server_has_ended(tmp_path: Path) -> None:
    """The machine has stood still: caps wait in the mailbox, a poll is due, and another server acts."""

    class Ending(Term):
        lasts = True

        def is_on(self) -> bool:
            return self.lasts

    term = Ending(tmp_path, 7)
    rig = PairRig(term=term)
    rig.watermarks()
    agent, other = rig.up(), rig.up(OTHER)
    rig.deliver(Kind.SET_CAPS, gw=GATEWAY, gen=1, lease_us=1, caps=[])
    rig.pass_time(1.5)
    for each in (agent, other):
        each.answer(next(item for item in rig.received(each) if item.kind == Kind.POLL))
    rig.step()
    term.lasts = False
    rig.mailbox.deliver("services", Kind.LEASE, {})
    rig.mailbox.deliver("services", Kind.SET_CAPS, {"gw": GATEWAY, "gen": 2, "lease_us": 1, "caps": []})
    rig.pass_time(5)
    assert rig.received(agent) == rig.received(other) == []
    term.lasts = True  # it was renewed after all, and nobody has acted meanwhile
    rig.pass_time(1)
    assert [item.kind for item in rig.received(agent)] == [Kind.CAPS, Kind.POLL]
    assert [item.kind for item in rig.received(other)] == [Kind.POLL]
    rig.close()


class EndsMeanwhile(Term):
    looks = 1 << 30

    def is_on(self) -> bool:
        self.looks -= 1
        return self.looks >= 0


def test_a_term_that_ends_among_polls_of_one_go_ends_them(tmp_path: Path) -> None:
    term = EndsMeanwhile(tmp_path, 7)
    rig = PairRig(term=term)
    rig.watermarks()
    agents = [rig.up(), rig.up(OTHER)]
    rig.pass_time(1.5)
    for agent in agents:
        agent.answer(next(item for item in rig.received(agent) if item.kind == Kind.POLL))
    rig.step()
    term.looks = 2  # as the round begins, and before the first poll
    rig.clock.advance(1.5)
    rig.outbound.step()
    assert sorted(len(rig.received(agent)) for agent in agents) == [0, 1]
    rig.close()


def test_polls_and_caps_that_were_made_before_the_term_ended_are_not_sent_after_it(tmp_path: Path) -> None:
    term = EndsMeanwhile(tmp_path, 7)
    rig = PairRig(term=term)
    rig.watermarks()
    agent = rig.up()
    rig.received(agent)
    for made_orders in (False, True):
        if made_orders:
            rig.mailbox.deliver(
                "services", Kind.SET_CAPS, {"gw": GATEWAY, "gen": 1, "lease_us": 1, "caps": []}
            )
        term.looks = 1  # the look as the round begins
        rig.clock.advance(1)
        rig.outbound.step()
        assert rig.received(agent) == []
    term.looks = 1 << 30
    rig.pass_time(1)
    assert [item.kind for item in rig.received(agent)] == [Kind.CAPS, Kind.POLL]
    rig.close()
