"""The selector of the inbound thread: owners by descriptor, interest in both directions, level-triggered."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from selectors import EVENT_READ, EVENT_WRITE

import pytest
import structlog

from pmdaemon.poller import inbound
from pmdaemon.poller.inbound import READ, TIMED_READS, WRITE, Readiness
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from tests.support.gateways import GATEWAY, Agent, hello, make_cut
from tests.support.pair import OTHER, PairRig


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


@pytest.fixture
def readiness() -> Iterator[Readiness]:
    made = Readiness()
    yield made
    made.close()


def test_ready_until_it_is_read(readiness: Readiness, pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    readiness.register(near, EVENT_READ)
    assert readiness.wait(0, 8) == []
    far.send(b"12")
    for expected in (b"1", b"2"):
        assert readiness.wait(0, 8) == [(near.fileno(), READ)]
        assert readiness.owners[near.fileno()] is near
        assert near.recv(1) == expected
    assert readiness.wait(0, 8) == []


def test_interest_can_change(readiness: Readiness, pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    readiness.register(near, EVENT_READ | EVENT_WRITE)
    assert readiness.wait(0, 8) == [(near.fileno(), WRITE)]
    far.send(b"1")
    assert readiness.wait(0, 8) == [(near.fileno(), READ | WRITE)]
    readiness.modify(near, EVENT_READ)
    assert readiness.wait(0, 8) == [(near.fileno(), READ)]


def test_a_hang_up_is_more_than_reading(
    readiness: Readiness, pair: tuple[socket.socket, socket.socket]
) -> None:
    near, far = pair
    readiness.register(near, EVENT_READ)
    far.close()
    [(_, events)] = readiness.wait(0, 8)
    assert events & select.EPOLLHUP
    assert events & ~WRITE


def test_unregistered_is_forgotten_and_may_come_again(
    readiness: Readiness, pair: tuple[socket.socket, socket.socket]
) -> None:
    near, far = pair
    readiness.register(near, EVENT_READ)
    far.send(b"1")
    readiness.unregister(near)
    assert readiness.owners == {}
    assert readiness.wait(0, 8) == []
    readiness.register(near, EVENT_READ)
    assert readiness.wait(0, 8) == [(near.fileno(), READ)]


def test_services_that_missed_an_announcement_hear_of_everybody_again(
    rig: PairRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.publisher._news, "_limit_bytes", 1)  # keeps one; its 32 MiB hold thousands
    rig.mailbox.full = {"services"}
    rig.up()
    rig.up(OTHER)
    assert rig.publisher.dropped_news > 0
    rig.mailbox.full = set()
    rig.mailbox.posts.clear()
    rig.clock.advance(0.02)
    rig.step()
    assert {(GATEWAY, "up"), (OTHER, "up")} <= set(rig.mailbox.states("services"))
    assert rig.mailbox.states("dbmanager") == []
    rig.mailbox.posts.clear()
    rig.step()
    assert rig.mailbox.states("services") == []


@pytest.mark.parametrize("registered", [False, True], ids=["stranger", "gateway"])
def test_an_end_in_the_middle_of_a_frame_says_so_and_posts_nothing_of_it(
    rig: PairRig, registered: bool
) -> None:
    rig.watermarks()
    good = rig.up(OTHER)
    bad = rig.up() if registered else rig.dial()
    rig.pass_time(1)
    bad.send((make_cut() if registered else hello())[:-5])
    rig.step()
    with structlog.testing.capture_logs() as lines:
        bad.close()
        rig.step()
    assert rig.counters["refusal_cut_short"] == 1
    [line] = [line for line in lines if line.get("code") == "cut-short"]
    assert line["address"] == "127.0.0.1:5001"
    assert "bytes into a frame" in line["error"]
    assert rig.mailbox.states()[-1] == ((GATEWAY, "lost") if registered else (OTHER, "up"))
    assert rig.counters["lost_sessions"] == registered
    good.answer(rig.polls(good)[0])
    rig.step()
    rig.pass_time(0.1)
    assert rig.mailbox.cuts_to("dbmanager") == [(1, False)]


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
    (frame.encode(Kind.CAPS_ACK, {"gen": 1, "refused": "vol-1"}), "malformed"),
    (frame.encode(Kind.CAPS_ACK, {"gen": 1, "refused": ["no name"]}), "malformed"),
    (frame.encode(Kind.ALERT, {"kind": "x", "text": "y", "severity": "fatal"}), "malformed"),
]


@pytest.mark.parametrize(("data", "code"), BAD)
def test_malformed_peer_is_closed_with_the_reason_and_others_untouched(
    rig: PairRig, data: bytes, code: str
) -> None:
    rig.watermarks()
    bad, good = rig.up(), rig.up(OTHER)
    rig.pass_time(1)
    rig.received(bad)
    bad.send(data)
    rig.step()
    (told,) = rig.received(bad)
    assert told.kind == Kind.ERROR
    assert told.header["code"] == code
    assert told.header["text"].startswith("127.0.0.1:5000: ")
    assert rig.mailbox.states()[-1] == (GATEWAY, "lost")
    assert rig.mailbox.to("services", Kind.GATEWAY)[-1].header["reason"].startswith(code)
    good.answer(rig.polls(good)[0])
    rig.step()
    rig.pass_time(1)
    assert rig.mailbox.cuts_to("dbmanager") == [(1, False)]
    assert len(rig.polls(good)) == 1
    bad.close()
    rig.step()
    assert rig.inbound.connections == 1


def test_t_ptmax_is_the_thread_time_of_a_read_by_its_messages(rig: PairRig) -> None:
    looks: list[int] = []

    def thread_time_ns() -> int:
        looks.append(400_000 * len(looks))
        return looks[-1]

    rig.thread_time_ns = thread_time_ns
    agent = rig.up()
    unknown = frame.encode(60, {})
    for _ in range(2 * TIMED_READS):
        agent.send(unknown * 4)
        rig.inbound.step(0)
    assert len(looks) == 4, "one read in 32 is timed, and its start and end looked at"
    assert rig.inbound.t_ptmax.value_us == 100, "400 us for 4 messages"


def test_backlog_of_one_gateway_is_read_a_share_at_a_time(rig: PairRig) -> None:
    rig.watermarks()
    greedy, modest = rig.up(), rig.up(OTHER)
    rig.pass_time(1)
    rig.polls(greedy)
    modest_poll = rig.polls(modest)[0]
    greedy.sock.setblocking(False)
    data = b"".join(make_cut(seq=seq, rows=100) for seq in range(1, 60))
    assert greedy.sock.send(data) > 150_000
    modest.answer(modest_poll)
    rig.inbound.step(0)
    # After one round the modest one is served whole, the greedy one not yet.
    assert rig.registry.get(OTHER).record.behind_cuts == 1
    assert 0 < rig.registry.get(GATEWAY).record.behind_cuts < 59


def test_reader_that_stopped_is_disconnected(rig: PairRig) -> None:
    agent = rig.up()
    large = [{"volume": f"v{index}", "ops_per_s": 1.0} for index in range(1500)]
    for gen in range(200):
        rig.deliver(Kind.SET_CAPS, gw=GATEWAY, gen=gen, lease_us=1, caps=large)
        if rig.inbound.connections == 0:
            break
    assert rig.counters["doomed_connections"] == 1
    assert "unread" in rig.mailbox.to("services", Kind.GATEWAY)[-1].header["reason"]
    agent.close()


def test_end_of_connection_is_a_loss(rig: PairRig) -> None:
    rig.up().close()
    rig.step()
    assert rig.mailbox.states()[-1] == (GATEWAY, "lost")
    assert "planned" not in rig.mailbox.to("services", Kind.GATEWAY)[-1].header


@pytest.mark.parametrize(("kind", "planned"), [(Kind.BYE, True), (Kind.ERROR, None)])
def test_an_agent_that_says_goodbye_is_lost_as_planned(
    rig: PairRig, kind: Kind, planned: bool | None
) -> None:
    agent = rig.up()
    agent.send(frame.encode(kind, {"reason": "upgrade", "text": "upgrade"}))
    rig.step()
    said = rig.mailbox.to("services", Kind.GATEWAY)[-1].header
    assert (said["state"], said.get("planned")) == ("lost", planned)
    assert "upgrade" in said["reason"]
    assert rig.mailbox.to("dbmanager", Kind.GATEWAY)[-1].header == said
    assert rig.counters["lost_sessions"] == (0 if planned else 1)


@pytest.mark.parametrize("events", [READ, WRITE, READ | select.EPOLLHUP, select.EPOLLERR])
def test_what_was_said_of_an_ended_connection_does_no_harm_to_the_next_with_its_number(
    rig: PairRig, monkeypatch: pytest.MonkeyPatch, events: int
) -> None:
    """One that ends within a round may have an event left in it, and a new one its number."""
    rig.watermarks()
    new, registered = rig.dial(OTHER), rig.up()
    ready = [(conn.fileno(), events) for conn in rig.connections]
    with monkeypatch.context() as patched:
        patched.setattr(rig.inbound._readiness, "wait", lambda _limit_s, _most: ready)
        rig.inbound.step(0)
    assert len(rig.connections) == 2
    new.send(hello(OTHER))
    rig.step()
    assert [each.kind for each in rig.received(new)] == [Kind.WELCOME]
    rig.pass_time(1)
    assert rig.polls(registered)


def test_stop_tells_agents_and_posts_what_is_batched() -> None:
    rig = PairRig()
    rig.watermarks()
    agent = rig.up()
    rig.pass_time(1)
    agent.answer(rig.polls(agent)[0])
    rig.inbound.step(0)
    assert rig.mailbox.cuts_to("dbmanager") == []
    rig.inbound.shut("maintenance")
    assert rig.mailbox.cuts_to("dbmanager") == [(1, False)]
    assert rig.mailbox.states()[-1] == (GATEWAY, "detached")  # the gateway is well: nobody is to be alarmed
    farewell = rig.received(agent)[-1]
    assert farewell.kind == Kind.BYE
    assert "maintenance" in farewell.header["reason"]
    agent.close()
    rig.to_inbound.close()
    rig.to_outbound.close()
    rig.mailbox.close()


def test_a_stop_waits_a_moment_for_an_agent_that_has_output_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its BYE lies behind caps that the agent has not read; a thread of the test reads them meanwhile."""
    monkeypatch.setattr(inbound, "FAREWELL_S", 60.0)  # a loaded machine may not run the reader for a while
    rig = PairRig()
    rig.watermarks()
    agent = rig.up()
    large = [{"volume": f"v{index}", "ops_per_s": 1.0} for index in range(1500)]
    gen = 0
    while not agent_waits(rig):
        gen += 1
        rig.deliver(Kind.SET_CAPS, gw=GATEWAY, gen=gen, lease_us=1, caps=large)
    reader = ThreadPoolExecutor(1)
    kinds = reader.submit(read_all, agent)
    rig.inbound.shut("maintenance")
    assert kinds.result(60)[-2:] == [Kind.CAPS, Kind.BYE]
    reader.shutdown()
    agent.close()
    rig.to_inbound.close()
    rig.to_outbound.close()
    rig.mailbox.close()


def agent_waits(rig: PairRig) -> bool:
    conn = rig.registry.get(GATEWAY).conn
    return bool(conn.waiting_bytes)


def read_all(agent: Agent) -> list[int]:
    kinds = []
    with contextlib.suppress(EOFError):
        while True:
            kinds.append(agent.read().kind)
    return kinds
