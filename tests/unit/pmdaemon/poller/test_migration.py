"""Shards that move between two pairs, step by step in one thread: new connections, sessions, orders."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest

from pmdaemon.poller import channel, migration
from pmdaemon.poller.balance import SHARDS, shard_of
from pmdaemon.poller.channel_messages import (
    Mail,
    MovedConnection,
    NewConnection,
    Refused,
    RegisteredElsewhere,
    ShardMap,
)
from pmdaemon.poller.migration import ENDS_A_STEP
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from tests.support.gateways import GATEWAY, Agent, hello, register, schema, streams
from tests.support.pair import PairRig

SECOND = 10**9


class Side(PairRig):
    """One of two pairs, and its parent's end of the channel."""

    def __init__(self, index: int, clock: FakeClock) -> None:
        parent, pair = channel.make()
        self.parent = channel.Channel(parent)
        super().__init__(clock, index=index, channel=channel.Channel(pair))
        self.mailbox.deliver("dbmanager", Kind.WATERMARKS, {"inc": 1, "hw": []})

    def step(self) -> None:
        self.inbound.step(0)
        self.outbound.step()

    def close(self) -> None:
        super().close()
        self.parent.close()


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
        self.refused: list[Refused] = []
        self.set_owner(0)

    def set_owner(self, owner: int, *shards: int) -> None:
        for shard in shards or range(SHARDS):
            self.owners[shard] = owner
        for side in self.sides:
            side.parent.send(ShardMap(self.owners))

    def step(self) -> None:
        for _ in range(4):
            for side in self.sides:
                side.step()
            if not self.hold:
                self.pass_on()

    def pass_on(self) -> None:
        for side in self.sides:
            for message in side.parent.take():
                self.passed.append(message.op)
                if isinstance(message.body, Refused):
                    self.refused.append(message.body)
                if isinstance(message.body, MovedConnection | Mail):
                    owner = self.owners[message.body.shard]
                    self.sides[owner].parent.send(message.body, message.descriptors)
                    message.descriptors = []

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.clock.advance(0.1)
            self.step()

    def dial(self, side: int, gateway_id: str = GATEWAY) -> Agent:
        near, far = socket.socketpair()
        assert self.sides[side].parent.offer(NewConnection("127.0.0.1:5000", self.dialled), near)
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

    def move(self, agent: Agent, owner: int) -> Agent:
        """The gateway's shard moves: the agent is told to dial again, and does so with all it holds."""
        self.set_owner(owner, shard_of(agent.gateway_id))
        self.step()
        return self.redial(agent)

    def redial(self, agent: Agent) -> Agent:
        assert "connect again" in agent.expect(Kind.BYE).header["reason"]
        agent.close()
        self.step()
        again = self.dial(0, agent.gateway_id)
        again.cuts, again.next_seq = agent.cuts, agent.next_seq
        gateway_id = agent.gateway_id
        again.send(hello(gateway_id), schema(), register(again.spool()), streams(gateway_id))
        self.step()
        again.expect(Kind.WELCOME)
        again.expect(Kind.REGISTERED)
        return again

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
    assert world.sides[0].mailbox.posts == []
    assert world.sides[1].mailbox.states() == [(GATEWAY, "up")]
    agent.answer(world.poll(agent))
    world.pass_time(0.2)
    assert world.sides[1].mailbox.cuts_to("dbmanager") == [(1, False)]


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
    world.sides[0].mailbox.deliver("dbmanager", Kind.DURABLE, {"inc": 1, "hw": [[GATEWAY, 7, 1]]})
    world.step()
    agent = world.move(agent, 1)
    assert world.sides[0].registry.get(GATEWAY) is None
    assert world.sides[0].inbound.connections == 0
    assert world.sides[0].counters["moves_by_reconnect"] == 1
    assert world.sides[0].mailbox.states() == [(GATEWAY, "up"), (GATEWAY, "detached")]  # and not lost
    assert world.sides[1].mailbox.states() == [(GATEWAY, "up")]
    assert world.sides[1].mailbox.to("services", Kind.STREAMS_SEEN)
    second = world.poll(agent)
    assert second.header["ack"] == [[7, 1]]
    assert second.header["from"] == [7, 2]
    agent.answer(second)
    world.pass_time(0.2)
    assert world.sides[1].mailbox.cuts_to("dbmanager") == [(2, False)]


def test_half_a_frame_stays_behind_and_comes_whole_to_the_new_owner(world: World) -> None:
    agent = world.up()
    poll = world.poll(agent).header
    agent.make()
    whole = agent.cuts[7, 1] + frame.encode(
        Kind.REPLY, {"poll": poll["poll"], "wall_us": 1_800_000_000_000_000, "dropped": 0}
    )
    agent.sock.sendall(whole[:100])
    world.step()
    world.set_owner(1)
    world.step()
    agent.sock.sendall(whole[100:])  # it has not read BYE yet
    world.step()
    agent = world.redial(agent)
    assert [side.counters["refused_sessions"] for side in world.sides] == [0, 0]
    agent.answer(world.poll(agent))
    world.pass_time(0.2)
    assert world.sides[0].counters["cuts"] == 0
    assert world.sides[1].mailbox.cuts_to("dbmanager") == [(1, False), (2, False)]
    assert world.sides[1].mailbox.cuts_to("services") == [(1, False), (2, False)]


def test_what_was_batched_is_posted_before_the_session_leaves(world: World) -> None:
    agent = world.up()
    agent.answer(world.poll(agent))
    world.sides[0].inbound.step(0)  # read and batched, not yet 20 ms old
    assert world.sides[0].mailbox.cuts_to("dbmanager") == []
    world.set_owner(1)
    world.step()
    assert world.sides[0].mailbox.cuts_to("dbmanager") == [(1, False)]
    assert world.sides[0].counters["moves_by_reconnect"] == 1


def test_sessions_leave_a_bounded_number_a_round(world: World) -> None:
    names = [f"6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f2{number:03}" for number in range(ENDS_A_STEP + 5)]
    for name in names:
        agent = world.dial(0, name)
        agent.send(hello(name), schema(), register(), streams(name))
        world.step()
    world.set_owner(1)
    world.sides[0].inbound.step(0)
    assert world.sides[0].counters["moves_by_reconnect"] == ENDS_A_STEP
    world.sides[0].inbound.step(0)
    assert world.sides[0].counters["moves_by_reconnect"] == len(names)


def gen_of(received: frame.Frame) -> int:
    """Of a set of caps, folded or not."""
    found: int = frame.unfold(received).header["gen"]
    return found


@pytest.mark.parametrize("count", [0, 600])
def test_caps_move_with_the_gateway_and_orders_for_it_are_passed_on_once(world: World, count: int) -> None:
    agent = world.up()
    caps = [{"volume": f"v{number}" + "x" * 120, "cost_per_s": 5.0} for number in range(count)]
    order = {"gw": GATEWAY, "gen": 3, "lease_us": 1, "caps": caps}
    world.sides[0].mailbox.deliver("services", Kind.SET_CAPS, order)
    world.step()
    assert gen_of(agent.expect(Kind.CAPS)) == 3
    agent = world.move(agent, 1)
    assert gen_of(agent.expect(Kind.CAPS)) == 3  # said again: the first may not have left in time
    ahead = world.passed.count("mail")
    assert ahead == 1
    world.sides[0].mailbox.deliver("services", Kind.SET_CAPS, order | {"gen": 4})
    world.step()
    assert gen_of(agent.expect(Kind.CAPS)) == 4
    assert world.passed.count("mail") == ahead + 1
    # A map that has changed meanwhile: the message is not passed on a second time.
    agent.close()
    world.step()
    world.hold = True
    world.sides[0].mailbox.deliver("services", Kind.SET_CAPS, order | {"gen": 5})
    world.step()
    world.hold = False
    world.sides[1].parent.send(ShardMap([0] * SHARDS))
    world.step()
    assert world.passed.count("mail") == ahead + 2
    assert world.sides[1].counters["mail_dropped"] == 1


def test_thresholds_for_a_gateway_that_has_left_reach_it(world: World) -> None:
    agent = world.move(world.up(), 1)
    order = {"gw": GATEWAY, "version": 3, "entries": []}
    world.sides[0].mailbox.deliver("services", Kind.SET_THRESHOLDS, order)
    world.step()
    assert agent.expect(Kind.THRESHOLDS).header == {"version": 3, "entries": []}
    assert world.passed.count("mail") == 1


def test_a_durable_notice_for_a_gateway_that_has_left_reaches_it(world: World) -> None:
    agent = world.up()
    agent.answer(world.poll(agent))
    world.pass_time(0.1)
    agent = world.move(agent, 1)
    world.sides[0].mailbox.deliver("dbmanager", Kind.DURABLE, {"inc": 1, "hw": [[GATEWAY, 7, 1]]})
    world.step()
    assert world.poll(agent).header["ack"] == [[7, 1]]


def test_a_gateway_of_very_many_epochs_moves_with_all_its_watermarks(world: World) -> None:
    rows = [[GATEWAY, epoch, 200_000] for epoch in range(1, 2001)]  # more than one frame header holds
    for first in range(0, len(rows), 900):
        notice = {"inc": 1, "hw": rows[first : first + 900]}
        kind = Kind.DURABLE if first else Kind.WATERMARKS
        world.sides[0].mailbox.deliver("dbmanager", kind, notice)
    agent = world.up()
    world.move(agent, 1)
    assert world.passed.count("mail") == 3
    assert world.sides[0].counters["mail_not_passed_on"] == world.sides[1].counters["mail_dropped"] == 0
    assert world.sides[1].registry.get(GATEWAY) is not None


def no_descriptor(_payload: bytes) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


def test_without_descriptors_a_message_is_dropped_and_the_session_moves_all_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = world.up()
    order = {"gw": GATEWAY, "gen": 3, "lease_us": 1, "caps": []}
    world.sides[0].mailbox.deliver("services", Kind.SET_CAPS, order)
    world.step()
    with monkeypatch.context() as patch:
        patch.setattr(migration, "memory_file", no_descriptor)
        world.set_owner(1)
        world.step()
    world.redial(agent)
    assert world.sides[0].counters["mail_not_passed_on"] == 1
    assert world.passed.count("mail") == 0


def test_without_descriptors_a_new_connection_of_another_pair_is_closed_and_nothing_else_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.set_owner(1)
    agent = world.dial(0, GATEWAY)
    with monkeypatch.context() as patch:
        patch.setattr(migration, "memory_file", no_descriptor)
        agent.send(hello(GATEWAY), schema(), register(), streams(GATEWAY))
        world.step()
    assert world.sides[0].counters["mail_not_passed_on"] == 1
    assert agent.sock.recv(1) == b""
    agent.close()
    world.up()


def test_another_dbmanager_seen_by_the_new_pair_only(world: World) -> None:
    agent = world.up()
    agent.answer(world.poll(agent))
    world.sides[0].mailbox.deliver("dbmanager", Kind.DURABLE, {"inc": 1, "hw": [[GATEWAY, 7, 1]]})
    world.step()
    world.sides[1].mailbox.deliver("dbmanager", Kind.WATERMARKS, {"inc": 2, "hw": []})
    world.step()
    agent = world.move(agent, 1)
    poll = world.poll(agent)
    assert poll.header["ack"] == []
    assert poll.header["from"] == [7, 1]


def test_there_and_back_again(world: World) -> None:
    agent = world.up()
    for owner in (1, 0, 1, 0):
        agent = world.move(agent, owner)
        agent.answer(world.poll(agent))
        world.pass_time(0.1)
    assert [side.registry.get(GATEWAY) is not None for side in world.sides] == [True, False]
    assert {state for side in world.sides for _, state in side.mailbox.states()} == {"up", "detached"}


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
    world.move(agent, 1)
    assert [side.registry.get(other) is not None for side in world.sides] == [False, True]
    assert [side.registry.get(GATEWAY) is not None for side in world.sides] == [True, False]


def test_the_same_gateway_elsewhere_ends_the_older_session(world: World) -> None:
    agent = world.up()
    world.sides[0].parent.send(RegisteredElsewhere(GATEWAY, "127.0.0.1:9"))
    world.step()
    told = agent.read()
    assert (told.kind, told.header["code"]) == (Kind.ERROR, "superseded")
    assert (GATEWAY, "lost") not in world.sides[0].mailbox.states()


def test_lost_descriptors_are_counted_and_nothing_else_happens(world: World) -> None:
    world.sides[0].parent.send(NewConnection("x", dialled=False))
    world.sides[0].parent.send(ShardMap([0, 1]))
    world.step()
    assert world.sides[0].counters["bad_parcels"] == 2
    assert world.refused == []
    world.up()
    assert world.sides[0].counters["bad_parcels"] == 2


def test_the_parent_hears_why_what_it_dialled_ends_also_after_a_move(world: World) -> None:
    world.sides[0].parent.send(NewConnection("x", dialled=True))
    world.step()
    [told] = world.refused
    assert (told.address, told.is_over) == ("x", True)
    world.dialled = True
    world.set_owner(1)
    agent = world.up()
    assert "moved" in world.passed
    agent.send(frame.encode(Kind.REPLY, {"poll": "junk"}))
    world.step()
    told = world.refused[-1]
    assert (told.address, told.is_over) == ("127.0.0.1:5000", False)
    assert told.reason.startswith("violation: ")
