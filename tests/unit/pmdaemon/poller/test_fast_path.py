"""The short way of a usual answer: taken when it may be, and then with the effect of the long one.

Whether a template was learned is read directly: an answer taken the long way has the same effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pmdaemon.poller.fast_path import LEARN_EVERY
from pmdaemon.poller.gateway import Gateway, GatewayState
from pmdaemon.wire import frame
from pmdaemon.wire.frame import FLAG_LIVE
from pmdaemon.wire.kinds import Kind
from tests.support.gateways import GATEWAY, Agent, make_cut
from tests.support.pair import OTHER, SECOND, PairRig
from tests.support.slots import values_of


class Ways(PairRig):
    """A rig that counts the answers by the way they took."""

    def __init__(self, is_short_open: bool = True) -> None:
        super().__init__()
        self.short = self.long = 0
        handlers = self.handlers
        take, handle = handlers.fast_path.take, handlers.handle

        def counting_take(conn: Any, data: memoryview, size: int, *, is_placed: bool) -> bool:
            done = is_short_open and take(conn, data, size, is_placed=is_placed)
            self.short += done
            return done

        def counting_handle(conn: Any, received: frame.Frame) -> None:
            self.long += received.kind == Kind.REPLY
            handle(conn, received)

        handlers.fast_path.take = counting_take  # type: ignore[method-assign]
        handlers.handle = counting_handle  # type: ignore[method-assign]

    def polled(self) -> Agent:
        """An agent that has taught the shape of its answers with a first one."""
        self.clock.advance(10)  # beyond 2^32 ns: ``sent_ns`` does not grow wider in a test
        self.watermarks()
        agent = self.up()
        self.exchange(agent)
        return agent

    def poll(self, agent: Agent) -> frame.Frame:
        self.clock.advance(1)
        self.step()
        return self.polls(agent)[-1]

    def exchange(self, agent: Agent, **answer: Any) -> None:
        agent.answer(self.poll(agent), **answer)
        self.step()

    def gateway(self, name: str = GATEWAY) -> Gateway:
        gateway = self.registry.get(name)
        assert gateway is not None
        return gateway


@pytest.fixture
def rig() -> Iterator[Ways]:
    made = Ways()
    yield made
    made.close()


def reply(to: frame.Frame, **over: Any) -> bytes:
    header = {
        "poll": to.header["poll"],
        "sent_ns": to.header["sent_ns"],
        "wall_us": 1_800_000_000_000_000,
        "cuts": 1,
        "first": None,
        "last": None,
        "dropped": 0,
    }
    return frame.encode(Kind.REPLY, header | over)


def test_the_first_answer_teaches_and_the_second_takes_the_short_way(rig: Ways) -> None:
    agent = rig.polled()
    assert (rig.short, rig.long) == (0, 1)
    for _ in range(3):
        rig.exchange(agent)
    assert (rig.short, rig.long) == (3, 1)
    rig.pass_time(0.1)
    assert [seq for seq, _ in rig.mailbox.cuts_to("dbmanager")] == [1, 2, 3, 4]
    assert rig.mailbox.cuts_to("services") == rig.mailbox.cuts_to("dbmanager")


def test_without_room_at_dbmanager_answers_take_the_short_way_too(rig: Ways) -> None:
    agent = rig.polled()
    in_a_pause(rig, agent)  # its shape is learned once
    assert (rig.short, rig.long) == (2, 1 + LEARN_EVERY)
    for _ in range(20):
        rig.exchange(agent)
    assert (rig.short, rig.long) == (22, 1 + LEARN_EVERY)
    rig.pass_time(0.1)
    assert rig.mailbox.cuts_to("dbmanager") == [(1, False)]
    assert rig.mailbox.cuts_to("services") == [(1, False), *((seq, True) for seq in range(2, agent.next_seq))]


def test_another_shape_is_learned_after_some_answers(rig: Ways) -> None:
    agent = rig.polled()
    for _ in range(LEARN_EVERY + 1):
        poll = rig.poll(agent)
        agent.make()
        agent.send(agent.cuts[7, agent.next_seq - 1], reply(poll, news=70_000))  # a header never seen
        rig.step()
    assert (rig.short, rig.long) == (1, LEARN_EVERY + 1)


@pytest.mark.parametrize("first_bytes", [4, 50, 100, 250])
@pytest.mark.parametrize("behind", [b"", frame.encode(Kind.ALERT, {})[:20]])
def test_a_split_answer_of_unknown_shape_teaches_nothing(rig: Ways, first_bytes: int, behind: bytes) -> None:
    rig.clock.advance(10)
    rig.watermarks()
    agent = rig.up()
    poll = rig.poll(agent)
    agent.make()
    data = agent.cuts[7, 1] + reply(poll) + behind
    for part in (data[:first_bytes], data[first_bytes:]):
        agent.send(part)
        rig.step()
    assert rig.counters["replies"] == 1
    assert not rig.handlers.fast_path._templates._by_header_bytes


def test_a_whole_answer_with_more_behind_it_teaches_nothing(rig: Ways) -> None:
    rig.clock.advance(10)
    rig.watermarks()
    agent = rig.up()
    poll = rig.poll(agent)
    agent.make()
    agent.send(agent.cuts[7, 1] + reply(poll) + bytes(4))
    rig.step()
    assert rig.counters["replies"] == 1
    assert not rig.handlers.fast_path._templates._by_header_bytes


def usually(rig: Ways, agent: Agent) -> None:
    rig.exchange(agent)


def late(rig: Ways, agent: Agent) -> None:
    poll = rig.poll(agent)
    rig.clock.advance(1.5)
    agent.answer(poll)
    rig.step()


def after_a_rewind(rig: Ways, agent: Agent) -> None:
    poll = rig.poll(agent)
    rig.gateway().record.rewind()
    agent.answer(poll)
    rig.step()
    rig.exchange(agent)


def while_stalled(rig: Ways, agent: Agent) -> None:
    poll = rig.poll(agent)
    rig.pass_time(4)
    assert rig.gateway().condition is GatewayState.STALLED
    agent.answer(poll)
    rig.step()


def in_two_reads(rig: Ways, agent: Agent) -> None:
    poll = rig.poll(agent)
    agent.make()
    data = agent.cuts[7, agent.next_seq - 1] + reply(poll)
    for part in (data[:50], data[50:]):
        agent.send(part)
        rig.step()


def with_a_live_cut(rig: Ways, agent: Agent) -> None:
    poll = rig.poll(agent)
    agent.make()
    seq = agent.next_seq - 1
    live = bytearray(make_cut(GATEWAY, 7, seq + 5))
    live[7] = FLAG_LIVE
    agent.send(agent.cuts[7, seq], bytes(live), reply(poll))
    rig.step()
    rig.exchange(agent)


def in_a_pause(rig: Ways, agent: Agent) -> None:
    """dbmanager has no room: the newest cut alone is asked for, and the one before it never came."""
    with rig.gateway().lock:
        rig.gateway().record.refused(rig.clock.monotonic_ns(), 0.9, 7, 2)
    rig.gateway().record._pause.until_ns += 1000 * SECOND  # type: ignore[union-attr]  # a long one, at once
    for _ in range(LEARN_EVERY + 2):
        rig.exchange(agent)


def without_cuts(rig: Ways, agent: Agent) -> None:
    rig.exchange(agent, cuts=False)


def with_durable_cuts(rig: Ways, agent: Agent) -> None:
    rig.deliver(Kind.DURABLE, inc=1, hw=[[GATEWAY, 7, 1]])
    rig.exchange(agent)
    rig.exchange(agent, wall_us=1_800_000_007_000_000)


@pytest.mark.parametrize(
    ("scenario", "shorts"),
    [
        (usually, 1),
        (late, 1),
        (after_a_rewind, 0),
        (while_stalled, 0),
        (in_two_reads, 0),
        (with_a_live_cut, 0),
        (in_a_pause, 2),
        (without_cuts, 0),
        (with_durable_cuts, 2),
    ],
)
def test_both_ways_have_the_same_effect(scenario: Callable[[Ways, Agent], None], shorts: int) -> None:
    found = []
    for is_short_open in (True, False):
        rig = Ways(is_short_open)
        try:
            agent = rig.polled()
            scenario(rig, agent)
            assert rig.short == (shorts if is_short_open else 0)
            assert rig.counters["replies"] >= 2
            rig.pass_time(0.1)
            gateway = rig.gateway()
            found.append(
                {
                    "posts": rig.mailbox.posts,
                    "counters": dict(rig.counters),
                    "record": values_of(gateway.record),
                    "offset": gateway.offset.best,
                    "awaiting": gateway.awaiting_since_ns,
                    "dropped": gateway.dropped,
                }
            )
        finally:
            rig.close()
    assert found[0] == found[1]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(1, 330), max_size=3), min_size=1, max_size=6))
def test_wherever_answers_are_split_both_ways_have_the_same_effect(splits: list[list[int]]) -> None:
    found = []
    for is_short_open in (True, False):
        rig = Ways(is_short_open)
        try:
            rig.clock.advance(10)
            rig.watermarks()
            agent = rig.up()
            for places in splits:
                poll = rig.poll(agent)
                data = agent.cuts[7, agent.make()] + reply(poll)
                bounds = [0, *sorted(place for place in places if place < len(data)), len(data)]
                for start, end in pairwise(bounds):
                    agent.send(data[start:end])
                    rig.step()
            rig.pass_time(0.1)
            assert rig.counters["replies"] == len(splits)
            assert [seq for seq, _ in rig.mailbox.cuts_to("dbmanager")] == list(range(1, len(splits) + 1))
            found.append((rig.mailbox.posts, dict(rig.counters), values_of(rig.gateway().record)))
        finally:
            rig.close()
    assert found[0] == found[1]


def test_a_late_answer_is_counted_on_the_short_way(rig: Ways) -> None:
    agent = rig.polled()
    late(rig, agent)
    assert rig.short == 1
    assert rig.counters["late_replies"] == 1


@pytest.mark.parametrize(
    ("cut", "over", "code"),
    [
        (make_cut(OTHER, 7, 2), {}, "bad_cut"),
        (make_cut(GATEWAY, 8, 2), {}, "bad_cut"),
        (make_cut(GATEWAY, 7, 2), {"poll": 99}, "violation"),
    ],
)
def test_what_only_looks_usual_is_refused(rig: Ways, cut: bytes, over: dict[str, Any], code: str) -> None:
    agent = rig.polled()
    poll = rig.poll(agent)
    agent.send(cut, reply(poll, **over))
    rig.step()
    assert rig.short == 0
    assert rig.counters[f"refusal_{code}"] == 1
