"""Sessions that move between two pairs, step by step in one thread: every state, both directions, orders."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator

import pytest

from pmdaemon.poller import channel
from pmdaemon.poller.balance import SHARDS, shard_of
from pmdaemon.poller.catch_up import CatchUp
from pmdaemon.poller.connection import AgentConnection
from pmdaemon.poller.frame_handlers import FrameHandlers
from pmdaemon.poller.inbound import Hint, Inbound
from pmdaemon.poller.migration import Ownership, ShardMigrator, ToOutbound
from pmdaemon.poller.outbound import Outbound
from pmdaemon.poller.publisher import CutPublisher
from pmdaemon.poller.registry import Registry
from pmdaemon.poller.schedule import Schedule
from pmdaemon.poller.standing_caps import StandingCaps
from pmdaemon.poller.timeouts import TimeoutPolicy
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.threads import ThreadInbox
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
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

SECOND = 10**9


class Side:
    """One pair without threads."""

    def __init__(self, index: int, clock: FakeClock) -> None:
        parent, pair = channel.make()
        self.parent = channel.Channel(parent)
        self.box = FakeMailbox()
        self.registry = Registry(CatchUp(1 << 40, 10**9))
        self.counters: Counter[str] = Counter()
        self.hints: ThreadInbox[Hint] = ThreadInbox()
        self.inbox: ThreadInbox[ToOutbound] = ThreadInbox()
        self.ownership = Ownership(index)
        book = StandingCaps()
        self.courier = CutPublisher(self.box, index, self.registry.refused)
        self.reception = FrameHandlers(
            self.registry,
            self.courier,
            clock,
            interval_us=1_000_000,
            on_registered=lambda gateway_id: self.mover.registered(gateway_id),  # noqa: PLW0108  # made below
            counters=self.counters,
        )
        self.mover = ShardMigrator(
            channel.Channel(pair),
            self.ownership,
            self.registry,
            self.reception,
            self.courier.post_cuts,
            book,
            self.inbox,
            self.counters,
        )
        self.inbound = Inbound(
            self.registry,
            self.reception,
            self.courier,
            clock,
            TimeoutPolicy.for_interval(SECOND),
            hints=self.hints,
            mover=self.mover,
            counters=self.counters,
            thread_time_ns=lambda: 0,
        )
        self.outbound = Outbound(
            self.registry,
            self.box,
            clock,
            Schedule(SECOND),
            hints=self.hints,
            registered=self.inbox,
            counters=self.counters,
            book=book,
            ownership=self.ownership,
        )
        self.box.deliver("dbmanager", Kind.WATERMARKS, {"inc": 1, "hw": []})

    def step(self) -> None:
        self.inbound.step(0)
        self.outbound.step()

    def close(self) -> None:
        self.inbound.shut("the test ends")
        self.mover.channel.close()
        self.parent.close()
        self.hints.close()
        self.inbox.close()
        self.box.close()


class World:
    """Two pairs and a parent that passes everything to the owner."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.sides = [Side(index, self.clock) for index in (0, 1)]
        self.owners = [0] * SHARDS
        self.passed: list[str] = []
        self.agents: list[Agent] = []
        self.hold = False
        self.dialled = False
        self.refused: list[dict[str, object]] = []
        self.set_owner(0)

    def set_owner(self, owner: int, *shards: int) -> None:
        for shard in shards or range(SHARDS):
            self.owners[shard] = owner
        for side in self.sides:
            side.parent.send({"op": "map", "owners": self.owners})

    def step(self) -> None:
        for _ in range(4):
            for side in self.sides:
                side.step()
            if not self.hold:
                self.pass_on()

    def pass_on(self) -> None:
        for side in self.sides:
            for parcel in side.parent.take():
                self.passed.append(parcel.op)
                if parcel.op == "refused":
                    self.refused.append(parcel.header)
                if parcel.op in ("moved", "mail"):
                    self.sides[self.owners[parcel.header["shard"]]].parent.send(
                        parcel.header, parcel.descriptors
                    )
                    parcel.descriptors = []

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.clock.advance(0.1)
            self.step()

    def dial(self, side: int, gateway_id: str = GATEWAY) -> Agent:
        near, far = socket.socketpair()
        header = {"op": "new", "address": "127.0.0.1:5000", "dialled": self.dialled}
        assert self.sides[side].parent.offer(header, near)
        near.close()
        agent = Agent(far, gateway_id)
        self.agents.append(agent)
        return agent

    def up(self, side: int = 0) -> Agent:
        agent = self.dial(side)
        agent.send(hello(), schema(), register(), streams())
        self.step()
        agent.expect(Kind.WELCOME)
        agent.expect(Kind.REGISTERED)
        return agent

    def poll(self, agent: Agent) -> frame.Frame:
        """Let time pass until the agent is polled."""
        agent.sock.settimeout(0.001)
        for _ in range(40):
            self.pass_time(0.1)
            try:
                return agent.expect(Kind.POLL)
            except TimeoutError:
                continue
        raise AssertionError("no poll within 4 s")

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        for side in self.sides:
            side.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    made.step()
    yield made
    made.close()


def test_hello_at_the_wrong_pair_is_answered_by_the_owner(world: World) -> None:
    world.set_owner(1)
    agent = world.up(side=0)
    assert world.sides[0].counters["registrations"] == 0
    assert world.sides[1].counters["registrations"] == 1
    assert world.sides[0].box.posts == []
    assert world.sides[1].box.states() == [(GATEWAY, "up")]
    agent.answer(world.poll(agent))
    world.pass_time(0.2)
    assert world.sides[1].box.cuts_to("dbmanager") == [(1, False)]


def test_a_pipelined_hello_split_anywhere_arrives_whole(world: World) -> None:
    world.set_owner(1)
    said = hello() + schema() + register() + streams()
    for cut_at in (1, 7, 8, 40, len(hello()) - 1, len(hello()), len(hello()) + 5, len(said) - 1):
        agent = world.dial(0)
        agent.sock.sendall(said[:cut_at])
        world.step()
        agent.sock.sendall(said[cut_at:])
        world.step()
        agent.expect(Kind.WELCOME)
        agent.expect(Kind.REGISTERED)
    assert world.sides[0].counters["refused_sessions"] == 0
    assert world.sides[1].counters["refused_sessions"] == 0


def test_a_polled_session_moves_and_goes_on_where_it_was(world: World) -> None:
    agent = world.up()
    first = world.poll(agent)
    agent.answer(first)
    world.step()
    world.sides[0].box.deliver("dbmanager", Kind.DURABLE, {"inc": 1, "hw": [[GATEWAY, 7, 1]]})
    world.step()
    world.set_owner(1)
    world.step()
    assert world.sides[0].registry.get(GATEWAY) is None
    assert world.sides[0].inbound.connections == 0
    assert world.sides[0].box.states() == [(GATEWAY, "up")]  # and not lost
    assert world.sides[1].box.states() == [(GATEWAY, "up")]
    assert world.sides[1].box.to("services", Kind.STREAMS_SEEN)
    second = world.poll(agent)
    assert second.header["ack"] == [[7, 1]]
    assert second.header["from"] == [7, 2]
    agent.answer(second)
    world.pass_time(0.2)
    assert world.sides[1].box.cuts_to("dbmanager") == [(2, False)]


def test_half_a_frame_moves_with_its_connection(world: World) -> None:
    agent = world.up()
    poll = world.poll(agent).header
    whole = make_cut(epoch=7, seq=1) + frame.encode(
        Kind.REPLY, {"poll": poll["poll"], "wall_us": 1_800_000_000_000_000, "dropped": 0}
    )
    agent.sock.sendall(whole[:100])
    world.step()
    world.set_owner(1)
    world.step()
    agent.sock.sendall(whole[100:])
    world.step()
    assert world.sides[1].counters["cuts"] == 1
    assert world.sides[1].counters["replies"] == 1
    # It was asked for by the other pair, whose last post may come later: judged now, kept when asked again.
    world.pass_time(0.1)
    assert world.sides[1].box.cuts_to("services") == [(1, False)]
    assert world.sides[1].box.cuts_to("dbmanager") == []
    agent.cuts[7, 1] = make_cut(epoch=7, seq=1)
    agent.next_seq = 2
    agent.answer(world.poll(agent))
    world.pass_time(0.2)
    assert world.sides[1].box.cuts_to("dbmanager") == [(1, False), (2, False)]
    assert world.sides[1].box.cuts_to("services") == [(1, False), (2, False)]


def test_what_was_batched_is_posted_before_the_session_leaves(world: World) -> None:
    agent = world.up()
    agent.answer(world.poll(agent))
    world.sides[0].inbound.step(0)  # read and batched, not yet 20 ms old
    assert world.sides[0].box.cuts_to("dbmanager") == []
    world.set_owner(1)
    world.step()
    assert world.sides[0].box.cuts_to("dbmanager") == [(1, False)]
    assert world.sides[1].counters["moved_in"] == 1


def test_unsent_output_moves_too(world: World) -> None:
    agent = world.up()
    conn = next(iter(world.sides[0].inbound._connections))
    big = frame.encode(Kind.UNSUPPORTED, {"kind": 9}, os.urandom(600_000))
    conn.send((Kind.UNSUPPORTED, big))
    assert conn.waiting_bytes > 0
    world.set_owner(1)
    world.step()
    agent.sock.settimeout(0.001)
    got = b""
    while len(got) < len(big):
        world.step()
        try:
            got += agent.sock.recv(1 << 20)
        except TimeoutError:
            continue
    assert got[: len(big)] == big


def test_caps_move_with_the_gateway_and_orders_for_it_are_passed_on_once(world: World) -> None:
    agent = world.up()
    order = {"gw": GATEWAY, "gen": 3, "lease_us": 1, "caps": []}
    world.sides[0].box.deliver("services", Kind.SET_CAPS, order)
    world.step()
    assert agent.expect(Kind.CAPS).header["gen"] == 3
    world.set_owner(1)
    world.step()
    assert agent.expect(Kind.CAPS).header["gen"] == 3  # said again: the first may not have left in time
    world.sides[0].box.deliver("services", Kind.SET_CAPS, order | {"gen": 4})
    world.step()
    assert agent.expect(Kind.CAPS).header["gen"] == 4
    assert world.passed.count("mail") == 1
    # A map that has changed meanwhile: the message is not passed on a second time.
    world.hold = True
    world.sides[0].box.deliver("services", Kind.SET_CAPS, order | {"gen": 5})
    world.step()
    world.hold = False
    world.sides[1].parent.send({"op": "map", "owners": [0] * SHARDS})
    world.step()
    assert world.passed.count("mail") == 2
    assert world.sides[1].counters["mail_dropped"] == 1


def test_thresholds_for_a_gateway_that_has_left_reach_it(world: World) -> None:
    agent = world.up()
    world.set_owner(1)
    world.step()
    order = {"gw": GATEWAY, "version": 3, "entries": []}
    world.sides[0].box.deliver("services", Kind.SET_THRESHOLDS, order)
    world.step()
    assert agent.expect(Kind.THRESHOLDS).header == {"version": 3, "entries": []}
    assert world.passed.count("mail") == 1


def test_a_durable_notice_for_a_gateway_that_has_left_reaches_it(world: World) -> None:
    agent = world.up()
    agent.answer(world.poll(agent))
    world.pass_time(0.1)
    world.set_owner(1)
    world.step()
    world.sides[0].box.deliver("dbmanager", Kind.DURABLE, {"inc": 1, "hw": [[GATEWAY, 7, 1]]})
    world.step()
    assert world.poll(agent).header["ack"] == [[7, 1]]


def test_another_dbmanager_seen_by_the_new_pair_only(world: World) -> None:
    agent = world.up()
    agent.answer(world.poll(agent))
    world.sides[0].box.deliver("dbmanager", Kind.DURABLE, {"inc": 1, "hw": [[GATEWAY, 7, 1]]})
    world.step()
    world.sides[1].box.deliver("dbmanager", Kind.WATERMARKS, {"inc": 2, "hw": []})
    world.step()
    world.set_owner(1)
    world.step()
    poll = world.poll(agent)
    assert poll.header["ack"] == []
    assert poll.header["from"] == [7, 1]


def test_there_and_back_again(world: World) -> None:
    agent = world.up()
    for owner in (1, 0, 1, 0):
        world.set_owner(owner)
        world.step()
        agent.answer(world.poll(agent))
        world.pass_time(0.1)
    assert [side.registry.get(GATEWAY) is not None for side in world.sides] == [True, False]
    assert {state for side in world.sides for _, state in side.box.states()} == {"up"}


def test_only_the_shard_that_moves_moves(world: World) -> None:
    other = next(
        name
        for name in (f"6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f1{index:03}" for index in range(100))
        if shard_of(name) != shard_of(GATEWAY)
    )
    world.up()
    agent = world.dial(0, other)
    agent.send(hello(other), schema(), register(), streams(other))
    world.step()
    world.set_owner(1, shard_of(other))
    world.step()
    assert [side.registry.get(other) is not None for side in world.sides] == [False, True]
    assert [side.registry.get(GATEWAY) is not None for side in world.sides] == [True, False]


def test_a_session_that_cannot_be_packed_is_told_to_dial_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = world.up()
    monkeypatch.setattr(AgentConnection, "is_movable", False)
    world.set_owner(1)
    world.step()
    assert "connect again" in agent.expect(Kind.BYE).header["reason"]
    assert world.sides[0].counters["moves_by_reconnect"] == 1


def test_the_same_gateway_elsewhere_ends_the_older_session(world: World) -> None:
    agent = world.up()
    world.sides[0].parent.send({"op": "elsewhere", "gw": GATEWAY, "address": "127.0.0.1:9"})
    world.step()
    told = agent.read()
    assert (told.kind, told.header["code"]) == (Kind.ERROR, "superseded")
    assert (GATEWAY, "lost") not in world.sides[0].box.states()


def test_lost_descriptors_are_counted_and_nothing_else_happens(world: World) -> None:
    world.sides[0].parent.send({"op": "new", "address": "x"})
    world.sides[0].parent.send({"op": "map", "owners": [0, 1]})
    world.step()
    assert world.sides[0].counters["bad_parcels"] == 2
    assert world.refused == []
    world.up()
    assert world.sides[0].counters["bad_parcels"] == 2


def test_the_parent_hears_why_what_it_dialled_ends_also_after_a_move(world: World) -> None:
    world.sides[0].parent.send({"op": "new", "address": "x", "dialled": True})
    world.step()
    [told] = world.refused
    assert (told["address"], told["is_over"]) == ("x", True)
    world.dialled = True
    agent = world.up()
    world.set_owner(1)
    world.step()
    assert "moved" in world.passed
    agent.send(frame.encode(Kind.REPLY, {"poll": "junk"}))
    world.step()
    told = world.refused[-1]
    assert (told["address"], told["is_over"]) == ("127.0.0.1:5000", False)
    assert str(told["reason"]).startswith("violation: ")
