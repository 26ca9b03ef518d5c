"""What a registry knows to be durable, whichever of record and watermarks holds it: against a plain map."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from pmdaemon.poller.catch_up import CatchUp
from pmdaemon.poller.connection import AgentConnection
from pmdaemon.poller.gateway import Gateway, Registry
from pmdaemon.wire.messages.agent import Hello, Registration

GATEWAY = "00000000-0000-4000-8000-000000000001"
STRANGER = "00000000-0000-4000-8000-000000000002"
EPOCHS = st.integers(1, 4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("durable"), EPOCHS, st.integers(1, 20)),
        st.tuples(st.just("stale"), EPOCHS, st.integers(1, 20)),
        st.tuples(st.just("register"), EPOCHS, st.sets(EPOCHS, max_size=3)),
        st.tuples(st.just("reopen"), EPOCHS, st.integers(1, 20)),
        st.tuples(st.just("another"), EPOCHS, st.integers(1, 20)),
        st.tuples(st.just("poll"), st.just(0), st.just(0)),
        st.tuples(st.just("move"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


class Agent:
    """Of a connection, all that a registry looks at."""

    address = "127.0.0.1:1"
    credential = None


class World:
    """A registry with one gateway, and the map it must agree with."""

    def __init__(self) -> None:
        self.registry = Registry(CatchUp(1 << 40, 10**9))
        self.incarnation = 1
        self.polls = 0
        self.high: dict[int, int] = {}
        self.registry.open(1, [], 0)

    def learn(self, epoch: int, seq: int) -> None:
        self.high[epoch] = max(seq, self.high.get(epoch, 0))

    def durable(self, epoch: int, seq: int) -> None:
        rows = [[GATEWAY, epoch, seq], [STRANGER, epoch, seq]]
        assert self.registry.advance(self.incarnation, rows, 0)
        self.learn(epoch, seq)

    def stale(self, epoch: int, seq: int) -> None:
        assert not self.registry.advance(self.incarnation + 1, [[GATEWAY, epoch, seq]], 0)

    def register(self, epoch: int, spooled: set[int]) -> None:
        hello = Hello.of(GATEWAY, "g", epoch, "s")
        registration = Registration([], [(number, 1, 10) for number in sorted(spooled - {epoch})])
        self.registry.register(cast(AgentConnection, Agent()), hello, registration)

    def reopen(self, epoch: int, seq: int) -> None:
        assert not self.registry.open(self.incarnation, [[GATEWAY, epoch, seq]], 0)
        self.learn(epoch, seq)

    def another(self, epoch: int, seq: int) -> None:
        self.incarnation += 1
        assert self.registry.open(self.incarnation, [[GATEWAY, epoch, seq]], 0)
        self.high = {epoch: seq}

    def poll(self, *_: int) -> None:
        """Asked and answered: an old epoch that was acknowledged as a whole is over."""
        if (gateway := self.registry.get(GATEWAY)) is not None:
            self.polls += 1
            gateway.record.poll(self.polls, 0, self.registry.catch_up)
            gateway.record.answered(self.polls)

    def move(self, *_: int) -> None:
        """It leaves for another pair; later steps bring it back."""
        incarnation, rows = self.registry.forget(GATEWAY)
        assert (incarnation, sorted(map(tuple, rows))) == (self.incarnation, self.rows())

    def rows(self) -> list[tuple[str, int, int]]:
        return sorted((GATEWAY, epoch, seq) for epoch, seq in self.high.items())


@settings(max_examples=400, deadline=None)
@given(STEPS)
def test_what_is_durable_is_never_forgotten_or_made_up(steps: list[Any]) -> None:
    world = World()
    for name, first, second in steps:
        getattr(world, name)(first, second)
        gateway: Gateway | None = world.registry.get(GATEWAY)
        if gateway is not None:
            assert all(seq <= world.high[epoch] for epoch, seq in gateway.record.high_water())
    world.move()
    world.register(5, {1, 2, 3, 4})
    gateway = world.registry.get(GATEWAY)
    assert gateway is not None
    assert dict(gateway.record.high_water()) == world.high
