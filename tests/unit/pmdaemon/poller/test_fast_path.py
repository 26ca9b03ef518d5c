"""The short way of a usual answer: taken when it may be, and then with the effect of the long one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pmdaemon.poller.fast_path import LESSONS_AT
from pmdaemon.poller.gateway import Gateway, GatewayState
from pmdaemon.wire import frame
from pmdaemon.wire.frame import FLAG_LIVE
from pmdaemon.wire.kinds import Kind
from tests.support.gateways import GATEWAY, Agent, make_cut
from tests.support.slots import values_of
from tests.unit.pmdaemon.poller.test_pair_steps import OTHER, Bench


class Ways(Bench):
    """A bench that counts the answers by the way they took."""

    def __init__(self, is_short_open: bool = True) -> None:
        super().__init__()
        self.short = self.long = 0
        reception = self.inbound._reception
        take, handle = reception.usual.take, reception.handle

        def counting_take(conn: Any, data: memoryview, size: int, *, is_placed: bool) -> bool:
            done = is_short_open and take(conn, data, size, is_placed=is_placed)
            self.short += done
            return done

        def counting_handle(conn: Any, received: frame.Frame) -> None:
            self.long += received.kind == Kind.REPLY
            handle(conn, received)

        reception.usual.take = counting_take  # type: ignore[method-assign]
        reception.handle = counting_handle  # type: ignore[method-assign]

    def polled(self) -> Agent:
        """An agent that has taught the shape of its answers with a first one."""
        self.clock.advance(10)  # beyond 2^32 ns: ``sent_ns`` does not grow wider in a test
        self.marks()
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
def bench() -> Iterator[Ways]:
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


def test_the_first_answer_teaches_and_the_second_takes_the_short_way(bench: Ways) -> None:
    agent = bench.polled()
    assert (bench.short, bench.long) == (0, 1)
    for _ in range(3):
        bench.exchange(agent)
    assert (bench.short, bench.long) == (3, 1)
    bench.pass_time(0.1)
    assert [seq for seq, _ in bench.box.cuts_to("dbmanager")] == [1, 2, 3, 4]
    assert bench.box.cuts_to("services") == bench.box.cuts_to("dbmanager")


def test_another_shape_is_learned_after_some_answers(bench: Ways) -> None:
    agent = bench.polled()
    for _ in range(LESSONS_AT + 1):
        poll = bench.poll(agent)
        agent.make()
        agent.send(agent.cuts[7, agent.next_seq - 1], reply(poll, news=70_000))  # a header never seen
        bench.step()
    assert (bench.short, bench.long) == (1, LESSONS_AT + 1)


@pytest.mark.parametrize("first_bytes", [4, 50, 100, 250])
@pytest.mark.parametrize("behind", [b"", frame.encode(Kind.ALERT, {})[:20]])
def test_a_split_answer_of_unknown_shape_teaches_nothing(
    bench: Ways, first_bytes: int, behind: bytes
) -> None:
    bench.clock.advance(10)
    bench.marks()
    agent = bench.up()
    poll = bench.poll(agent)
    agent.make()
    data = agent.cuts[7, 1] + reply(poll) + behind
    for part in (data[:first_bytes], data[first_bytes:]):
        agent.send(part)
        bench.step()
    assert bench.counters["replies"] == 1
    assert not bench.inbound._reception.usual._shapes._by_header_bytes


def test_a_whole_answer_with_more_behind_it_teaches_nothing(bench: Ways) -> None:
    bench.clock.advance(10)
    bench.marks()
    agent = bench.up()
    poll = bench.poll(agent)
    agent.make()
    agent.send(agent.cuts[7, 1] + reply(poll) + bytes(4))
    bench.step()
    assert bench.counters["replies"] == 1
    assert not bench.inbound._reception.usual._shapes._by_header_bytes


def usually(bench: Ways, agent: Agent) -> None:
    bench.exchange(agent)


def late(bench: Ways, agent: Agent) -> None:
    poll = bench.poll(agent)
    bench.clock.advance(1.5)
    agent.answer(poll)
    bench.step()


def after_a_rewind(bench: Ways, agent: Agent) -> None:
    poll = bench.poll(agent)
    bench.gateway().record.rewind()
    agent.answer(poll)
    bench.step()
    bench.exchange(agent)


def while_stalled(bench: Ways, agent: Agent) -> None:
    poll = bench.poll(agent)
    bench.pass_time(4)
    assert bench.gateway().condition is GatewayState.STALLED
    agent.answer(poll)
    bench.step()


def in_two_reads(bench: Ways, agent: Agent) -> None:
    poll = bench.poll(agent)
    agent.make()
    data = agent.cuts[7, agent.next_seq - 1] + reply(poll)
    for part in (data[:50], data[50:]):
        agent.send(part)
        bench.step()


def with_a_live_cut(bench: Ways, agent: Agent) -> None:
    poll = bench.poll(agent)
    agent.make()
    seq = agent.next_seq - 1
    live = bytearray(make_cut(GATEWAY, 7, seq + 5))
    live[7] = FLAG_LIVE
    agent.send(agent.cuts[7, seq], bytes(live), reply(poll))
    bench.step()
    bench.exchange(agent)


def without_cuts(bench: Ways, agent: Agent) -> None:
    bench.exchange(agent, cuts=False)


def with_durable_cuts(bench: Ways, agent: Agent) -> None:
    bench.tell(Kind.DURABLE, inc=1, hw=[[GATEWAY, 7, 1]])
    bench.exchange(agent)
    bench.exchange(agent, wall_us=1_800_000_007_000_000)


@pytest.mark.parametrize(
    ("scenario", "shorts"),
    [
        (usually, 1),
        (late, 1),
        (after_a_rewind, 0),
        (while_stalled, 0),
        (in_two_reads, 0),
        (with_a_live_cut, 0),
        (without_cuts, 0),
        (with_durable_cuts, 2),
    ],
)
def test_both_ways_have_the_same_effect(scenario: Callable[[Ways, Agent], None], shorts: int) -> None:
    found = []
    for is_short_open in (True, False):
        bench = Ways(is_short_open)
        try:
            agent = bench.polled()
            scenario(bench, agent)
            assert bench.short == (shorts if is_short_open else 0)
            assert bench.counters["replies"] >= 2
            bench.pass_time(0.1)
            gateway = bench.gateway()
            found.append(
                {
                    "posts": bench.box.posts,
                    "counters": dict(bench.counters),
                    "record": values_of(gateway.record),
                    "offset": gateway.offset.best,
                    "awaiting": gateway.awaiting_since_ns,
                    "dropped": gateway.dropped,
                }
            )
        finally:
            bench.close()
    assert found[0] == found[1]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(1, 330), max_size=3), min_size=1, max_size=6))
def test_wherever_answers_are_split_both_ways_have_the_same_effect(splits: list[list[int]]) -> None:
    found = []
    for is_short_open in (True, False):
        bench = Ways(is_short_open)
        try:
            bench.clock.advance(10)
            bench.marks()
            agent = bench.up()
            for places in splits:
                poll = bench.poll(agent)
                data = agent.cuts[7, agent.make()] + reply(poll)
                bounds = [0, *sorted(place for place in places if place < len(data)), len(data)]
                for start, end in pairwise(bounds):
                    agent.send(data[start:end])
                    bench.step()
            bench.pass_time(0.1)
            assert bench.counters["replies"] == len(splits)
            assert [seq for seq, _ in bench.box.cuts_to("dbmanager")] == list(range(1, len(splits) + 1))
            found.append((bench.box.posts, dict(bench.counters), values_of(bench.gateway().record)))
        finally:
            bench.close()
    assert found[0] == found[1]


def test_a_late_answer_is_counted_on_the_short_way(bench: Ways) -> None:
    agent = bench.polled()
    late(bench, agent)
    assert bench.short == 1
    assert bench.counters["late_replies"] == 1


@pytest.mark.parametrize(
    ("cut", "over", "code"),
    [
        (make_cut(OTHER, 7, 2), {}, "bad_cut"),
        (make_cut(GATEWAY, 8, 2), {}, "bad_cut"),
        (make_cut(GATEWAY, 7, 2), {"poll": 99}, "violation"),
    ],
)
def test_what_only_looks_usual_is_refused(bench: Ways, cut: bytes, over: dict[str, Any], code: str) -> None:
    agent = bench.polled()
    poll = bench.poll(agent)
    agent.send(cut, reply(poll, **over))
    bench.step()
    assert bench.short == 0
    assert bench.counters[f"refusal_{code}"] == 1
