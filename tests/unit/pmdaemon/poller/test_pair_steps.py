"""Both threads' work, one step at a time in one thread: fake clock, fake mailbox, agents on socket pairs."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from pmdaemon.mailbox.errors import MessageDamaged
from pmdaemon.poller import publisher as courier_module
from pmdaemon.poller.catch_up import CatchUp
from pmdaemon.poller.cut_batch import BATCH_AGE_NS
from pmdaemon.poller.frame_handlers import FrameHandlers
from pmdaemon.poller.inbound import TIMED_READS, Hint, Inbound
from pmdaemon.poller.migration import ToOutbound
from pmdaemon.poller.outbound import MANY_DUE, MAX_SLEEP_MS, Outbound
from pmdaemon.poller.positions import LAG_NS
from pmdaemon.poller.publisher import CutPublisher
from pmdaemon.poller.refusal_backoff import BEYOND
from pmdaemon.poller.registry import Registry
from pmdaemon.poller.schedule import Schedule
from pmdaemon.poller.timeouts import HANDSHAKE_NS, TimeoutPolicy
from pmdaemon.poller.unregistered import UnregisteredConnections
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.thread_inbox import ThreadInbox
from pmdaemon.wire import cut, frame
from pmdaemon.wire.frame import FLAG_LIVE, Frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.agent import Registration
from tests.support.gateways import (
    GATEWAY,
    Agent,
    FakeMailbox,
    hello,
    make_cut,
    register,
    schema,
    streams,
)

OTHER = "6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f0002"
SECOND = 10**9


class Bench:
    """A pair without threads, processes or a real clock."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.box = FakeMailbox()
        self.registry = Registry(CatchUp(1 << 40, SECOND))
        self.counters: Counter[str] = Counter()
        self.hints: ThreadInbox[Hint] = ThreadInbox()
        self.registered: ThreadInbox[ToOutbound] = ThreadInbox()
        self.courier = CutPublisher(self.box, 0, self.registry.refused)
        reception = FrameHandlers(
            self.registry,
            self.courier,
            self.clock,
            interval_us=1_000_000,
            on_registered=self.registered.put,
            counters=self.counters,
        )
        self.inbound = Inbound(
            self.registry,
            reception,
            self.courier,
            self.clock,
            TimeoutPolicy.for_interval(SECOND),
            hints=self.hints,
            mover=None,
            counters=self.counters,
            thread_time_ns=lambda: 0,
        )
        self.schedule = Schedule(SECOND)
        self.outbound = Outbound(
            self.registry,
            self.box,
            self.clock,
            self.schedule,
            hints=self.hints,
            registered=self.registered,
            counters=self.counters,
        )
        self.agents: list[Agent] = []

    def step(self) -> None:
        """Everything that is ready, both ways."""
        for _ in range(4):
            self.inbound.step(0)
            self.outbound.step()

    def pass_time(self, seconds: float) -> None:
        """Let time pass in steps of 100 ms."""
        for _ in range(round(seconds * 10)):
            self.clock.advance(0.1)
            self.step()

    def dial(self, gateway_id: str = GATEWAY, epoch: int = 7) -> Agent:
        near, far = socket.socketpair()
        self.inbound.adopt(near, f"127.0.0.1:{5000 + len(self.agents)}")
        agent = Agent(far, gateway_id, epoch)
        self.agents.append(agent)
        return agent

    def up(self, gateway_id: str = GATEWAY, epoch: int = 7, spool: Any = ()) -> Agent:
        agent = self.dial(gateway_id, epoch)
        agent.send(hello(gateway_id, epoch), schema(), register(spool), streams(gateway_id))
        self.step()
        agent.expect(Kind.WELCOME)
        agent.expect(Kind.REGISTERED)
        return agent

    def tell(self, kind: Kind, **header: Any) -> None:
        sender = "dbmanager" if kind in (Kind.WATERMARKS, Kind.DURABLE) else "services"
        self.box.deliver(sender, kind, header)
        self.step()

    def marks(self, inc: int = 1, *rows: Any) -> None:
        self.tell(Kind.WATERMARKS, inc=inc, hw=[list(row) for row in rows])

    def heard(self, agent: Agent) -> list[Frame]:
        """Everything that has arrived at an agent."""
        agent.sock.setblocking(False)
        found = []
        try:
            while True:
                found.append(agent.read())
        except (BlockingIOError, EOFError):
            return found
        finally:
            agent.sock.setblocking(True)

    def polls(self, agent: Agent) -> list[Frame]:
        return [item for item in self.heard(agent) if item.kind == Kind.POLL]

    def close(self) -> None:
        self.inbound.shut("the test is over")
        for agent in self.agents:
            agent.close()
        self.hints.close()
        self.registered.close()
        self.box.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def test_registration_is_announced_to_both(bench: Bench) -> None:
    bench.up()
    for who in ("services", "dbmanager"):
        up = bench.box.to(who, Kind.GATEWAY)[0].header
        assert (up["gw"], up["state"], up["name"], up["ep"]) == (GATEWAY, "up", "gw-0001", 7)
        assert up["exports"][0]["backend"] == "disk-1"
        seen = bench.box.to(who, Kind.STREAMS_SEEN)[0].header
        assert seen["streams"][0]["client"] == "host-a"


def test_nobody_is_polled_before_the_watermarks(bench: Bench) -> None:
    agent = bench.up()
    bench.pass_time(5)
    assert bench.polls(agent) == []
    bench.marks(1, (GATEWAY, 7, 4))
    bench.pass_time(1)
    (poll,) = bench.polls(agent)
    assert poll.header["ack"] == [[7, 4]]
    assert poll.header["from"] == [7, 5]
    assert poll.header["lease"] is False


def test_one_poll_an_interval_and_not_again_before_the_answer(bench: Bench) -> None:
    bench.marks()
    agent = bench.up()
    bench.pass_time(2.9)
    (poll,) = bench.polls(agent)
    assert bench.counters["polls_skipped"] == 2
    agent.answer(poll)
    bench.step()
    bench.pass_time(3)
    assert len(bench.polls(agent)) == 1


def test_cuts_go_to_both_with_offset_and_times(bench: Bench) -> None:
    bench.marks()
    agent = bench.up()
    for _ in range(3):
        while not (polls := bench.polls(agent)):
            bench.pass_time(0.1)
        bench.clock.advance(0.01)
        agent.answer(polls[0], wall_us=bench.clock.unix_us() - 5_000_000)
        bench.step()
    bench.clock.advance(BATCH_AGE_NS / 1e9)
    bench.step()
    assert (
        bench.box.cuts_to("dbmanager")
        == bench.box.cuts_to("services")
        == [(1, False), (2, False), (3, False)]
    )
    offsets = [item.header["offset_us"][0] for item in bench.box.to("dbmanager", Kind.CUTS)]
    assert offsets[0] == 0  # nothing was known yet
    assert offsets[-1] == pytest.approx(5_000_000, abs=10_000)


def test_acknowledged_by_durable_and_ignored_from_a_dead_dbmanager(bench: Bench) -> None:
    bench.marks(2)
    agent = bench.up()
    bench.pass_time(1)
    agent.answer(bench.polls(agent)[0])
    bench.step()
    bench.tell(Kind.DURABLE, inc=1, hw=[[GATEWAY, 7, 1]])
    assert bench.counters["stale_durable_notices"] == 1
    bench.tell(Kind.DURABLE, inc=2, hw=[[GATEWAY, 7, 1]])
    bench.pass_time(1)
    assert bench.polls(agent)[0].header["ack"] == [[7, 1]]


def test_new_dbmanager_rewinds_and_hears_of_every_gateway_again(bench: Bench) -> None:
    bench.marks(1)
    agent = bench.up()
    for _ in range(3):
        bench.pass_time(1)
        agent.answer(bench.polls(agent)[0])
        bench.step()
    bench.box.posts.clear()
    bench.marks(2, (GATEWAY, 7, 1))
    assert bench.box.states("dbmanager") == [(GATEWAY, "up")]
    assert len(bench.box.to("dbmanager", Kind.STREAMS_SEEN)) == 1
    bench.pass_time(1)
    assert bench.polls(agent)[0].header["from"] == [7, 2]


def test_restarted_services_hear_of_every_gateway_again(bench: Bench) -> None:
    agent = bench.up()
    lost = bench.up(OTHER)
    lost.close()
    bench.step()
    bench.box.posts.clear()
    bench.tell(Kind.LEASE, inc=2)
    assert bench.box.states("services") == [(GATEWAY, "up")]
    assert bench.box.states("dbmanager") == []
    bench.tell(Kind.SET_THRESHOLDS, gw=GATEWAY, version=9, entries=[])
    assert [item.header for item in bench.heard(agent) if item.kind == Kind.THRESHOLDS] == [
        {"version": 9, "entries": []}
    ]


def test_services_are_told_who_is_there_once_a_start_of_theirs(bench: Bench) -> None:
    bench.up()
    announced = []
    for incarnation in (1, 1, 1, 2, 2):
        bench.box.posts.clear()
        bench.tell(Kind.LEASE, inc=incarnation)
        announced.append(len(bench.box.states("services")))
    assert announced == [1, 0, 0, 1, 0]


def test_thresholds_reach_the_gateway_they_are_for_and_no_other(bench: Bench) -> None:
    agent, other = bench.up(), bench.up(OTHER)
    bench.heard(agent)
    bench.heard(other)
    bench.tell(Kind.SET_THRESHOLDS, gw=OTHER, version=4, entries=[])
    bench.tell(Kind.SET_THRESHOLDS, gw="nobody", version=5, entries=[])
    assert bench.heard(agent) == []
    assert [item.header["version"] for item in bench.heard(other)] == [4]


def test_services_that_missed_an_announcement_hear_of_everybody_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(courier_module, "NEWS_BYTES", 1)  # keeps one announcement
    bench.box.full = {"services"}
    bench.up()
    bench.up(OTHER)
    assert bench.courier.dropped_news > 0
    bench.box.full = set()
    bench.box.posts.clear()
    bench.step()
    assert {(GATEWAY, "up"), (OTHER, "up")} <= set(bench.box.states("services"))
    assert bench.box.states("dbmanager") == []
    bench.box.posts.clear()
    bench.step()
    assert bench.box.states("services") == []


def test_a_gateway_is_registered_before_services_hears_of_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the thresholds that services answers with could meet a session that may not get them yet."""
    agent, post = bench.dial(), bench.courier.news
    heard: list[list[int]] = []

    def news(message: bytes, *recipients: str) -> None:
        heard.append([item.kind for item in bench.heard(agent)])
        post(message, *recipients)

    monkeypatch.setattr(bench.courier, "news", news)
    agent.send(hello(), schema(), register(()))
    bench.step()
    assert heard == [[Kind.WELCOME, Kind.REGISTERED]]


def test_refused_by_dbmanager_is_asked_for_again_and_judged_once(bench: Bench) -> None:
    bench.marks()
    agent = bench.up()
    bench.box.full = {"dbmanager"}
    bench.pass_time(1)
    agent.answer(bench.polls(agent)[0])
    bench.step()
    bench.pass_time(0.1)
    bench.box.full = set()
    bench.pass_time(1)
    (poll,) = bench.polls(agent)
    assert poll.header["from"] == [7, BEYOND], "for the moment the newest alone"
    agent.answer(poll)
    bench.step()
    bench.pass_time(1)
    (poll,) = bench.polls(agent)
    assert poll.header["from"] == [7, 1]
    agent.answer(poll)
    bench.step()
    bench.pass_time(0.1)
    assert bench.box.cuts_to("dbmanager") == [(1, False), (2, False), (3, False)]
    assert bench.box.cuts_to("services") == [(1, False), (2, True), (3, False)]


def test_durability_that_lags_is_asked_for_again(bench: Bench) -> None:
    bench.marks()
    agent = bench.up()
    starts = []
    for _ in range(LAG_NS // SECOND + 3):
        bench.pass_time(1)
        for poll in bench.polls(agent):
            starts.append(poll.header["from"][1])
            agent.answer(poll)
        bench.step()
    assert starts[:3] == [1, 2, 3]
    assert bench.counters["lag_rewinds"] == 1
    assert starts.count(1) == 2


def test_hole_that_no_gap_explains_is_announced_before_the_cut(bench: Bench) -> None:
    bench.marks()
    agent = bench.up()
    bench.pass_time(1)
    bench.polls(agent)
    bench.box.posts.clear()
    agent.send(make_cut(seq=1), make_cut(seq=5))
    bench.step()
    bench.pass_time(0.1)
    mail = bench.box.to("dbmanager")
    assert [item.kind for item in mail] == [Kind.CUTS, Kind.GATEWAY, Kind.CUTS]
    assert mail[1].header["spool"] == [[7, 5, 5]]
    assert bench.box.cuts_to("dbmanager") == [(1, False), (5, False)]
    assert bench.counters["unexplained_holes"] == 1


def test_hole_is_not_given_up_when_the_cuts_before_it_were_refused(bench: Bench) -> None:
    bench.marks()
    agent = bench.up()
    bench.pass_time(1)
    bench.polls(agent)
    bench.box.full = {"dbmanager"}
    agent.send(make_cut(seq=1), make_cut(seq=5))
    bench.step()
    bench.box.full = set()
    bench.pass_time(0.1)
    assert bench.box.cuts_to("dbmanager") == []
    assert bench.counters["unexplained_holes"] == 0
    assert bench.registry.get(GATEWAY).record.spool() == [[7, 1, 0]]


def test_spool_of_the_agent_is_announced(bench: Bench) -> None:
    bench.up(spool=[[3, 5, 9], [7, 2, 4]])
    assert bench.box.to("dbmanager", Kind.GATEWAY)[0].header["spool"] == [[3, 5, 9], [7, 2, 1]]


def test_live_cut_is_not_kept(bench: Bench) -> None:
    bench.marks()
    agent = bench.up()
    bench.pass_time(1)
    bench.polls(agent)
    agent.send(make_cut(seq=1), make_cut(seq=50, flags=FLAG_LIVE))
    bench.step()
    bench.pass_time(0.1)
    assert bench.box.cuts_to("dbmanager") == [(1, False)]
    assert bench.box.cuts_to("services") == [(1, False), (50, True)]


def test_caps_thresholds_and_poll_leave_as_one_write(bench: Bench) -> None:
    bench.marks()
    agent = bench.up()
    bench.heard(agent)
    bench.box.deliver("services", Kind.SET_CAPS, {"gw": GATEWAY, "gen": 1, "lease_us": 1, "caps": []})
    bench.box.deliver("services", Kind.SET_CAPS, {"gw": GATEWAY, "gen": 2, "lease_us": 1, "caps": []})
    bench.box.deliver("services", Kind.SET_THRESHOLDS, {"gw": GATEWAY, "version": 1, "entries": []})
    bench.box.deliver("services", Kind.LEASE, {})
    bench.clock.advance(1)
    writes = bench.counters["writes"]
    bench.step()
    assert bench.counters["writes"] == writes + 1
    got = bench.heard(agent)
    assert [item.kind for item in got] == [Kind.CAPS, Kind.THRESHOLDS, Kind.POLL]
    assert got[0].header["gen"] == 2
    assert got[2].header["lease"] is True
    sent = [item.header for item in bench.box.to("services", Kind.CAPS_STATE)]
    assert [(item["gen"], item["state"]) for item in sent] == [(2, "sent")]
    agent.send(frame.encode(Kind.CAPS_ACK, {"gen": 2, "ok": False, "reason": "no such volume"}))
    bench.step()
    last = bench.box.to("services", Kind.CAPS_STATE)[-1].header
    assert (last["state"], last["reason"]) == ("refused", "no such volume")


def test_lease_is_not_renewed_once_services_is_silent(bench: Bench) -> None:
    bench.marks()
    agent = bench.up()
    bench.tell(Kind.LEASE)
    leases = []
    for _ in range(5):
        bench.pass_time(1)
        for poll in bench.polls(agent):
            leases.append(poll.header["lease"])
            agent.answer(poll)
    assert leases[:2] == [True, True]
    assert leases[-1] is False


def test_orders_for_a_gateway_that_is_not_there_wait_for_it(bench: Bench) -> None:
    bench.tell(Kind.SET_CAPS, gw=GATEWAY, gen=4, lease_us=1, caps=[])
    assert bench.box.to("services", Kind.CAPS_STATE) == []
    agent = bench.up()
    assert [item.kind for item in bench.heard(agent)] == [Kind.CAPS]
    assert bench.box.to("services", Kind.CAPS_STATE)[-1].header["gen"] == 4


def test_a_late_reply_is_kept_and_counted_and_shifts_nothing(bench: Bench) -> None:
    bench.marks()
    agent = bench.up()
    bench.pass_time(1.0)
    (poll,) = bench.polls(agent)
    sent_ns = poll.header["sent_ns"]
    bench.pass_time(1.5)  # later than the interval, earlier than stalled
    assert bench.counters["late_replies"] == 0
    agent.answer(poll)
    bench.step()
    assert bench.counters["late_replies"] == 1
    assert bench.counters["replies"] == 1
    bench.pass_time(1.0)
    assert bench.box.cuts_to("dbmanager") == [(1, False)]
    (following,) = bench.polls(agent)
    # On its phase, a whole number of intervals later, whatever the late one did.
    assert round((following.header["sent_ns"] - sent_ns) / SECOND, 1) % 1.0 == 0
    agent.answer(following)
    bench.step()
    assert bench.counters["late_replies"] == 1


def test_many_due_are_served_shard_by_shard_and_mail_does_not_wait_for_all(bench: Bench) -> None:
    bench.marks()
    names = [f"6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f{index:04}" for index in range(3 * MANY_DUE)]
    agents = {name: bench.up(name) for name in names}
    bench.clock.advance(5)  # the process slept: all are due at once
    taken: list[int] = []
    take = bench.box.take
    sent = bench.counters
    bench.box.take = lambda *limits: taken.append(sent["polls"]) or take(*limits)  # type: ignore[method-assign]
    bench.outbound.step()
    assert [count - taken[0] for count in taken] == [0, MANY_DUE, 2 * MANY_DUE, 3 * MANY_DUE]
    assert all(len(bench.polls(agent)) == 1 for agent in agents.values())


def test_stalled_then_recovered(bench: Bench) -> None:
    bench.marks()
    agent = bench.up()
    other = bench.up(OTHER)
    bench.pass_time(1)
    (poll,) = bench.polls(agent)
    answered = 0
    for _ in range(5):
        for other_poll in bench.polls(other):
            other.answer(other_poll)
            answered += 1
        bench.pass_time(1)
    assert answered == 5  # the stalled one delays no other
    assert bench.box.states().count((GATEWAY, "stalled")) == 1
    again = bench.polls(agent)
    assert len(again) == 1
    agent.answer(poll)
    bench.step()
    assert bench.box.states()[-1] == (GATEWAY, "recovered")
    agent.answer(again[0])
    bench.step()
    bench.pass_time(0.1)
    assert bench.box.cuts_to("dbmanager").count((1, False)) == 2  # once for each gateway


def test_silent_for_ten_seconds_is_lost_and_closed(bench: Bench) -> None:
    bench.marks()
    agent = bench.up()
    bench.pass_time(9)
    assert (GATEWAY, "lost") not in bench.box.states()
    bench.pass_time(3)
    assert bench.box.states()[-1] == (GATEWAY, "lost")
    assert "nothing arrived" in bench.box.to("services", Kind.GATEWAY)[-1].header["reason"]
    bench.heard(agent)
    assert agent.sock.recv(1) == b""
    assert bench.inbound.connections == 0


@pytest.mark.parametrize(
    ("interval_s", "stalled_s", "lost_s"), [(0.1, 2, 10), (1, 3, 10), (5, 15, 17), (60, 180, 182)]
)
def test_patience(interval_s: float, stalled_s: float, lost_s: float) -> None:
    patience = TimeoutPolicy.for_interval(round(interval_s * SECOND))
    assert patience.stalled_after_ns == stalled_s * SECOND
    assert patience.lost_after_ns == lost_s * SECOND


def test_connection_that_never_registers_is_closed(bench: Bench) -> None:
    agent = bench.dial()
    agent.send(hello())
    bench.step()
    bench.pass_time(HANDSHAKE_NS / SECOND + 1)
    assert bench.inbound.connections == 0
    assert bench.counters["refusal_slow"] == 1
    bench.heard(agent)
    assert agent.sock.recv(1) == b""


@pytest.mark.parametrize("registered", [False, True], ids=["stranger", "gateway"])
def test_an_end_in_the_middle_of_a_frame_says_so_and_posts_nothing_of_it(
    bench: Bench, registered: bool
) -> None:
    bench.marks()
    good = bench.up(OTHER)
    bad = bench.up() if registered else bench.dial()
    bench.pass_time(1)
    bad.send((make_cut() if registered else hello())[:-5])
    bench.step()
    with structlog.testing.capture_logs() as lines:
        bad.close()
        bench.step()
    assert bench.counters["refusal_cut_short"] == 1
    [line] = [line for line in lines if line.get("code") == "cut-short"]
    assert line["address"] == "127.0.0.1:5001"
    assert "bytes into a frame" in line["error"]
    assert bench.box.states()[-1] == ((GATEWAY, "lost") if registered else (OTHER, "up"))
    assert bench.counters["lost_sessions"] == registered
    good.answer(bench.polls(good)[0])
    bench.step()
    bench.pass_time(0.1)
    assert bench.box.cuts_to("dbmanager") == [(1, False)]


def test_a_gateway_that_trickles_is_stalled_and_holds_no_more_than_a_frame(bench: Bench) -> None:
    bench.marks()
    slow, good = bench.up(), bench.up(OTHER)
    answered = 0
    for byte in make_cut(rows=4)[:300]:  # a byte each 100 ms: never silent, never whole
        slow.send(bytes([byte]))
        bench.pass_time(0.1)
        for poll in bench.polls(good):
            good.answer(poll)
            answered += 1
    assert (GATEWAY, "stalled") in bench.box.states()
    assert answered >= 29, "one a second for the other, whatever this one does"
    [conn] = [item for item in bench.inbound._connections if item.gateway.gateway_id == GATEWAY]
    assert conn.session.pending_bytes == 300
    assert len(bench.polls(slow)) <= 16, "polled again only when it was called stalled"


def test_a_flood_of_strangers_without_tls_is_bounded_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.marks()
    good = bench.up()
    monkeypatch.setattr(bench.inbound._door, "strangers", UnregisteredConnections(limit=8))
    for _ in range(40):
        bench.dial()
    assert bench.inbound.connections == 1 + 8
    assert bench.counters["strangers_turned_away"] == 32
    near, far = socket.socketpair()
    with near.dup(), far:
        assert bench.inbound.adopt(near, "dialled") is None
        assert far.recv(1) == b"", "ended for good, though the parent has a duplicate"
    bench.pass_time(2.1)
    late = bench.up(OTHER)
    assert bench.counters["strangers_evicted"] == 1
    bench.pass_time(1)
    for agent in (good, late):
        agent.answer(bench.polls(agent)[-1])
    bench.pass_time(0.1)
    assert bench.counters["replies"] == 2


def test_newer_session_wins_and_is_not_a_loss(bench: Bench) -> None:
    bench.marks()
    older = bench.up()
    bench.pass_time(1)
    newer = bench.up(epoch=8)
    told = bench.heard(older)
    assert told[-1].kind == Kind.ERROR
    assert told[-1].header["code"] == "superseded"
    bench.pass_time(2)
    assert (GATEWAY, "lost") not in bench.box.states()
    assert [item.header["from"] for item in bench.polls(newer)] == [[8, 1]]
    assert bench.inbound.connections == 1
    older.close()
    bench.step()
    assert (GATEWAY, "lost") not in bench.box.states()


BAD = [
    (b"\xff" * 64, "too-large"),
    (b"\x00" * 64, "malformed"),
    (frame.encode(Kind.POLL, {}), "violation"),
    (frame.encode(Kind.HELLO, {"gw": GATEWAY}), "violation"),
    (frame.encode(Kind.REPLY, {"poll": 99, "wall_us": 1, "dropped": 0}), "violation"),
    (frame.encode(Kind.REPLY, {"poll": "x"}), "malformed"),
    (make_cut(gateway_id=OTHER), "bad-cut"),
    (make_cut(epoch=99), "bad-cut"),
    (frame.encode(Kind.CUT, {"gw": b"x"}), "bad-cut"),
    (
        frame.encode(Kind.STREAMS, {"streams": [{"id": 1, "volume": "v", "client": "c", "backend": "b"}]}),
        "malformed",
    ),
    (frame.encode(Kind.REGISTER, {"exports": 5, "spool": []}), "malformed"),
    (frame.encode(Kind.CAPS_ACK, {"gen": -1}), "malformed"),
    (frame.encode(Kind.ALERT, {"kind": "x", "text": "y", "severity": "fatal"}), "malformed"),
]


@pytest.mark.parametrize(("data", "code"), BAD)
def test_malformed_peer_is_closed_with_the_reason_and_others_untouched(
    bench: Bench, data: bytes, code: str
) -> None:
    bench.marks()
    bad, good = bench.up(), bench.up(OTHER)
    bench.pass_time(1)
    bench.heard(bad)
    bad.send(data)
    bench.step()
    (told,) = bench.heard(bad)
    assert told.kind == Kind.ERROR
    assert told.header["code"] == code
    assert told.header["text"].startswith("127.0.0.1:5000: ")
    assert bench.box.states()[-1] == (GATEWAY, "lost")
    assert bench.box.to("services", Kind.GATEWAY)[-1].header["reason"].startswith(code)
    good.answer(bench.polls(good)[0])
    bench.step()
    bench.pass_time(1)
    assert bench.box.cuts_to("dbmanager") == [(1, False)]
    assert len(bench.polls(good)) == 1
    bad.close()
    bench.step()
    assert bench.inbound.connections == 1


def test_refused_version_is_news(bench: Bench) -> None:
    agent = bench.dial()
    agent.send(hello(proto_min=7, proto_max=8))
    bench.step()
    assert bench.heard(agent)[0].kind == Kind.ERROR
    refused = bench.box.to("services", Kind.GATEWAY)[-1].header
    assert (refused["gw"], refused["state"]) == (GATEWAY, "refused")
    assert "7..8" in refused["reason"]


def test_register_without_schema_is_refused(bench: Bench) -> None:
    agent = bench.dial()
    agent.send(hello(), register())
    bench.step()
    assert "SCHEMA" in bench.heard(agent)[-1].header["text"]


def test_another_schema_is_refused_and_says_which_key(bench: Bench) -> None:
    agent = bench.dial()
    agent.send(hello(), frame.encode(Kind.SCHEMA, cut.schema_header() | {"columns": ["t"]}), register())
    bench.step()
    told = bench.heard(agent)[-1]
    assert told.kind == Kind.ERROR
    assert "columns" in told.header["text"]
    assert bench.box.states() == [(GATEWAY, "refused")]


def test_unknown_kind_is_answered_unsupported(bench: Bench) -> None:
    agent = bench.up()
    agent.send(frame.encode(60, {}))
    bench.step()
    (answer,) = bench.heard(agent)
    assert (answer.kind, answer.header) == (Kind.UNSUPPORTED, {"kind": 60})
    assert bench.inbound.connections == 1


def test_exports_may_change_within_a_session(bench: Bench) -> None:
    agent = bench.up()
    agent.send(register(volumes=("vol-0", "vol-new")), streams(volumes=("vol-0", "vol-new")))
    bench.step()
    assert [item.kind for item in bench.heard(agent)] == [Kind.REGISTERED]
    assert [item["volume"] for item in bench.box.to("services", Kind.GATEWAY)[-1].header["exports"]] == [
        "vol-0",
        "vol-new",
    ]
    assert [item["volume"] for item in bench.box.to("services", Kind.STREAMS_SEEN)[-1].header["streams"]] == [
        "vol-new"
    ]


def test_dropped_cuts_of_the_agent_are_announced(bench: Bench) -> None:
    bench.marks()
    agent = bench.up()
    bench.pass_time(11)
    agent = bench.up()
    bench.pass_time(1)
    poll = bench.polls(agent)[0].header
    reply = {"poll": poll["poll"], "wall_us": 1, "dropped": 17, "cuts": 0}
    agent.send(frame.encode(Kind.REPLY, reply))
    bench.step()
    bench.box.posts.clear()
    bench.pass_time(11)
    assert 17 in [item.header["dropped"] for item in bench.box.to("services", Kind.GATEWAY)]


def test_alert_is_passed_on_with_its_gateway(bench: Bench) -> None:
    agent = bench.up()
    alert: dict[str, Any] = {
        "kind": "plane-died",
        "severity": "warning",
        "text": "nbd-0",
        "details": {"a": 1},
    }
    alert["at_us"] = bench.clock.unix_us() - 5
    agent.send(frame.encode(Kind.ALERT, alert))
    bench.step()
    assert bench.box.to("services", Kind.GATEWAY_ALERT)[0].header == {**alert, "gw": GATEWAY}


@pytest.mark.parametrize(
    "header", [{"inc": "x"}, {"inc": 1, "hw": [[1]]}], ids=["no incarnation", "a row of another form"]
)
def test_bad_mail_is_counted_and_nothing_stops(bench: Bench, header: dict[str, Any]) -> None:
    agent = bench.up()
    bench.tell(Kind.WATERMARKS, **header)
    bench.tell(Kind.SNAPSHOT)
    assert bench.counters["bad_orders"] == 2
    bench.marks()
    bench.pass_time(1)
    assert len(bench.polls(agent)) == 1


def test_t_ptmax_is_the_thread_time_of_a_read_by_its_messages(bench: Bench) -> None:
    looks: list[int] = []

    def thread_time_ns() -> int:
        looks.append(400_000 * len(looks))
        return looks[-1]

    bench.inbound._thread_time_ns = thread_time_ns
    agent = bench.up()
    unknown = frame.encode(60, {})
    for _ in range(2 * TIMED_READS):
        agent.send(unknown * 4)
        bench.inbound.step(0)
    assert len(looks) == 4, "one read in 32 is timed, and its start and end looked at"
    assert bench.inbound.t_ptmax.value_us == 100, "400 us for 4 messages"


def test_backlog_of_one_gateway_is_read_a_share_at_a_time(bench: Bench) -> None:
    bench.marks()
    greedy, modest = bench.up(), bench.up(OTHER)
    bench.pass_time(1)
    bench.polls(greedy)
    modest_poll = bench.polls(modest)[0]
    greedy.sock.setblocking(False)
    data = b"".join(make_cut(seq=seq, rows=100) for seq in range(1, 60))
    assert greedy.sock.send(data) > 150_000
    modest.answer(modest_poll)
    bench.inbound.step(0)
    # After one round the modest one is served whole, the greedy one not yet.
    assert bench.registry.get(OTHER).record.behind_cuts == 1
    assert 0 < bench.registry.get(GATEWAY).record.behind_cuts < 59


def test_reader_that_stopped_is_disconnected(bench: Bench) -> None:
    agent = bench.up()
    large = [{"volume": f"v{index}", "ops_per_s": 1.0} for index in range(1500)]
    for gen in range(200):
        bench.tell(Kind.SET_CAPS, gw=GATEWAY, gen=gen, lease_us=1, caps=large)
        if bench.inbound.connections == 0:
            break
    assert bench.counters["doomed_connections"] == 1
    assert "unread" in bench.box.to("services", Kind.GATEWAY)[-1].header["reason"]
    agent.close()


def test_end_of_connection_is_a_loss(bench: Bench) -> None:
    bench.up().close()
    bench.step()
    assert bench.box.states()[-1] == (GATEWAY, "lost")
    agent = bench.up()
    agent.send(frame.encode(Kind.BYE, {"reason": "upgrade"}))
    bench.step()
    assert "upgrade" in bench.box.to("services", Kind.GATEWAY)[-1].header["reason"]


def test_stop_tells_agents_and_posts_what_is_batched() -> None:
    bench = Bench()
    bench.marks()
    agent = bench.up()
    bench.pass_time(1)
    agent.answer(bench.polls(agent)[0])
    bench.inbound.step(0)
    assert bench.box.cuts_to("dbmanager") == []
    bench.inbound.shut("maintenance")
    assert bench.box.cuts_to("dbmanager") == [(1, False)]
    assert bench.box.states()[-1] == (GATEWAY, "detached")  # the gateway is well: nobody is to be alarmed
    farewell = bench.heard(agent)[-1]
    assert farewell.kind == Kind.BYE
    assert "maintenance" in farewell.header["reason"]
    agent.close()
    bench.hints.close()
    bench.registered.close()
    bench.box.close()


def test_poll_that_cannot_leave_yet_is_not_awaited(bench: Bench) -> None:
    """A gateway dials anew: known to the schedule, but its session has not been told REGISTERED yet."""
    bench.marks()
    bench.up().close()
    bench.step()
    agent = bench.dial()
    agent.send(hello(), schema())
    bench.inbound.step(0)
    (conn,) = (item for item in bench.inbound._connections if item.gateway is None)
    assert conn.hello is not None
    bench.registry.register(conn, conn.hello, Registration([], []))
    bench.clock.advance(1)
    bench.outbound.step()
    gateway = bench.registry.get(GATEWAY)
    assert gateway is not None
    assert gateway.awaiting_since_ns is None
    assert gateway.record.oldest_poll_sent_ns is None
    gateway.end()


class NotedSleep:
    """What ``Outbound.sleep`` waits with; notes how long."""

    def __init__(self) -> None:
        self.waited_ms: list[int] = []

    def poll(self, limit_ms: int) -> list[tuple[int, int]]:
        self.waited_ms.append(limit_ms)
        return []


def test_polls_wait_for_those_due_soon_after_the_first_whatever_wakes_the_thread(bench: Bench) -> None:
    bench.marks()
    agent = bench.up()
    due_ns = bench.schedule.next_due_ns()
    assert due_ns is not None
    noted, left = NotedSleep(), []
    for left_ms in (10, 0, -10, -49, -50):
        bench.clock.advance((due_ns - left_ms * 1_000_000 - bench.clock.monotonic_ns()) / 1e9)
        bench.outbound.sleep(noted)  # type: ignore[arg-type]
        bench.outbound.step()
        left.append(len(bench.polls(agent)))
    assert noted.waited_ms == [MAX_SLEEP_MS, 50, 40, 1, 0]
    assert left == [0, 0, 0, 0, 1]


def test_a_damaged_message_of_the_mailbox_is_passed_by(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(*_limits: int) -> list[object]:
        raise MessageDamaged("lane of dbmanager", 1)

    with monkeypatch.context() as patch:
        patch.setattr(bench.box, "take", torn)
        bench.outbound.step()
    bench.outbound.step()
    assert bench.outbound._counters["mail_discarded"] == 1
