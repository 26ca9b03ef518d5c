"""A pair without threads, processes or a real clock: both threads' work, one step at a time."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

from pmdaemon.poller.catch_up import CatchUp
from pmdaemon.poller.certificates import CertificateWorker
from pmdaemon.poller.channel import Channel
from pmdaemon.poller.connection import AgentConnection
from pmdaemon.poller.frame_handlers import FrameHandlers
from pmdaemon.poller.gateway import Registry
from pmdaemon.poller.inbound import Inbound, ToInbound
from pmdaemon.poller.migration import Ownership, ShardMigrator, ToOutbound
from pmdaemon.poller.outbound import Outbound
from pmdaemon.poller.publisher import CutPublisher
from pmdaemon.poller.schedule import Schedule
from pmdaemon.poller.standing_caps import StandingCaps
from pmdaemon.poller.timeouts import TimeoutPolicy
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.term import ALWAYS, Term
from pmdaemon.runtime.threads import ThreadInbox
from pmdaemon.wire.frame import Frame
from pmdaemon.wire.kinds import Kind
from tests.support.fake_mailbox import FakeMailbox
from tests.support.gateways import GATEWAY, Agent, hello, register, schema, streams

OTHER = "6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f0002"
SECOND = 10**9


class PairRig:
    """See the module.

    Args:
        clock: shared by several pairs of a test; one of its own otherwise.
        index: the pair's number.
        channel: its end of the channel to the parent; without one, shards do not move.
        certificate_worker: with it, connections must speak TLS.
    """

    def __init__(
        self,
        clock: FakeClock | None = None,
        *,
        index: int = 0,
        channel: Channel | None = None,
        certificate_worker: CertificateWorker | None = None,
        takes_labels: bool = True,
        term: Term = ALWAYS,
    ) -> None:
        self.clock = clock or FakeClock()
        self.mailbox = FakeMailbox()
        self.registry = Registry(CatchUp(1 << 40, SECOND))
        self.counters: Counter[str] = Counter()
        self.to_inbound: ThreadInbox[ToInbound] = ThreadInbox()
        self.to_outbound: ThreadInbox[ToOutbound] = ThreadInbox()
        self.ownership = Ownership(index)
        self.schedule = Schedule(SECOND)
        self.thread_time_ns: Callable[[], int] = lambda: 0
        self.agents: list[Agent] = []
        self.certificate_worker = certificate_worker
        self.publisher = CutPublisher(self.mailbox, index, self.registry.refused)
        standing_caps = StandingCaps()
        self.handlers = FrameHandlers(
            self.registry,
            self.publisher,
            self.clock,
            interval_us=1_000_000,
            on_registered=lambda gateway_id: self._registered(gateway_id),  # noqa: PLW0108  # set below
            counters=self.counters,
            certificate_worker=self.certificate_worker,
            takes_labels=takes_labels,
        )
        self.migrator: ShardMigrator | None = None
        if channel is not None:
            self.migrator = ShardMigrator(
                channel,
                self.ownership,
                self.registry,
                self.handlers,
                self.publisher.post_cuts,
                standing_caps,
                self.to_outbound,
                self.counters,
            )
        self._registered = self.migrator.registered if self.migrator else self.to_outbound.put
        self.inbound = Inbound(
            self.registry,
            self.handlers,
            self.publisher,
            self.clock,
            TimeoutPolicy.for_interval(SECOND),
            to_inbound=self.to_inbound,
            migrator=self.migrator,
            counters=self.counters,
            certificate_worker=self.certificate_worker,
            thread_time_ns=lambda: self.thread_time_ns(),  # noqa: PLW0108  # a test may replace it
        )
        self.outbound = Outbound(
            self.registry,
            self.mailbox,
            self.clock,
            self.schedule,
            to_inbound=self.to_inbound,
            to_outbound=self.to_outbound,
            counters=self.counters,
            standing_caps=standing_caps,
            ownership=self.ownership,
            unread=self.publisher.unread,
            term=term,
        )

    @property
    def connections(self) -> set[AgentConnection]:
        """Open connections, registered or not; private, because the product needs their number only."""
        return self.inbound._connections

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
        """An agent that has registered."""
        agent = self.dial(gateway_id, epoch)
        agent.send(hello(gateway_id, epoch), schema(), register(spool), streams(gateway_id))
        self.step()
        agent.expect(Kind.WELCOME)
        agent.expect(Kind.REGISTERED)
        return agent

    def deliver(self, kind: Kind, **header: Any) -> None:
        """A message of dbmanager or services."""
        sender = "dbmanager" if kind in (Kind.WATERMARKS, Kind.DURABLE) else "services"
        self.mailbox.deliver(sender, kind, header)
        self.step()

    def watermarks(self, inc: int = 1, *rows: Any) -> None:
        self.deliver(Kind.WATERMARKS, inc=inc, hw=[list(row) for row in rows])

    def received(self, agent: Agent) -> list[Frame]:
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
        return [item for item in self.received(agent) if item.kind == Kind.POLL]

    def close(self) -> None:
        self.inbound.shut("the test is over")
        for agent in self.agents:
            agent.close()
        if self.migrator is not None:
            self.migrator.channel.close()
        self.to_inbound.close()
        self.to_outbound.close()
        self.mailbox.close()
        if self.certificate_worker is not None:
            self.certificate_worker.close()
