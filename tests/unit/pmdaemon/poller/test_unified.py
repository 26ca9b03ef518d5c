"""Unified mode: whose turn it is, hand-over at the first reply, draining by the core, stop.

The rig has no threads: it reads and writes the two eventfds as the thread that is missing would.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from pmdaemon.poller.connection import AgentConnection
from pmdaemon.poller.unified import UnifiedCore
from pmdaemon.runtime.stop import Stop
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from tests.support.gateways import Agent, hello, register, schema, streams
from tests.support.pair import PairRig

GATEWAYS = [f"6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f1{index:03}" for index in range(5)]


class Unified(PairRig):
    """A rig whose two sides are driven by the core."""

    def __init__(self) -> None:
        super().__init__()
        self.core = UnifiedCore(self.inbound, self.outbound)
        self.stop = Stop()

    def close(self) -> None:
        super().close()
        self.core.close()

    def step(self) -> None:
        for _ in range(4):
            self.core.step()
            self.take_turn()

    def take_turn(self) -> None:
        """The inbound thread, if it would not have to wait."""
        if select.select([self.core._armed], [], [], 0)[0]:
            self.core._read(self.core._armed)
            if self.inbound.step(0):
                self.core.handovers += 1
                self.hand()
            else:
                self.arm()

    def hand(self) -> None:
        os.eventfd_write(self.core._handed, 1)

    def arm(self) -> None:
        os.eventfd_write(self.core._armed, 1)

    def all_up(self) -> list[Agent]:
        agents = []
        for name in GATEWAYS:
            agent = self.dial(name)
            agent.send(hello(name), schema(), register(), streams(name))
            self.step()
            agents.append(agent)
        return agents


@pytest.fixture
def rig() -> Iterator[Unified]:
    made = Unified()
    yield made
    made.close()


def test_polls_and_answers_as_in_a_pair(rig: Unified) -> None:
    rig.watermarks()
    agents = rig.all_up()
    rig.pass_time(1.0)
    for agent in agents:
        (poll,) = rig.polls(agent)
        agent.answer(poll)
    rig.step()
    rig.pass_time(0.1)
    assert rig.counters["replies"] == len(GATEWAYS)
    assert len(rig.mailbox.cuts_to("dbmanager")) == len(GATEWAYS)


def test_many_replies_cost_one_handover(rig: Unified) -> None:
    rig.watermarks()
    agents = rig.all_up()
    rig.pass_time(1.0)
    for agent in agents[1:]:
        agent.answer(rig.polls(agent)[0])
    before = rig.core.handovers
    rig.step()
    assert rig.counters["replies"] == len(GATEWAYS) - 1
    assert rig.core.handovers - before <= 1


def test_the_core_leaves_the_inbound_side_alone_while_it_is_armed(rig: Unified) -> None:
    agent = rig.dial()
    assert rig.core.step()  # nothing to drain: armed
    agent.send(hello())
    for _ in range(5):
        assert rig.core.step()
    assert rig.inbound.connections == 1
    assert rig.received(agent) == []  # the core has not read it
    rig.take_turn()
    assert [item.kind for item in rig.received(agent)] == [Kind.WELCOME]
    rig.core.step()


def test_both_threads_stop_and_agents_are_told(rig: Unified) -> None:
    agent = rig.up()
    core = threading.Thread(target=lambda: rig.core.run(rig.stop))
    inbound = threading.Thread(target=lambda: rig.core.run_inbound(rig.stop))
    # What the steps above left is taken over as it is: armed, or the core's turn.
    core.start()
    inbound.start()
    rig.stop.set("the test is over")
    core.join(60)
    inbound.join(60)
    assert not core.is_alive()
    assert not inbound.is_alive()
    assert Kind.BYE in [item.kind for item in rig.received(agent)]


def test_a_defect_of_ours_ends_one_connection_and_neither_thread() -> None:
    rig = Unified()
    try:
        rig.watermarks()
        agents = rig.all_up()
        original = rig.inbound._receive  # a defect of ours has to be put there

        def defect(conn: AgentConnection) -> None:
            if conn.gateway is not None and conn.gateway.gateway_id == GATEWAYS[0]:
                raise RecursionError("a defect")
            original(conn)

        with patch.object(rig.inbound, "_receive", defect):
            for agent in agents:
                agent.send(frame.encode(Kind.THRESHOLDS_ACK, {"version": 1}))
            rig.step()
        assert rig.counters["connection_faults"] == 1
        assert rig.inbound.connections == len(GATEWAYS) - 1
        rig.pass_time(1.1)
        assert all(rig.polls(agent) for agent in agents[1:])
    finally:
        rig.close()
