"""Leases against a store in memory and clocks that the test moves: one holder at a time, fences that rise."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.runtime.clock import FakeClock
from sla_server.cluster.errors import ClusterRefused
from sla_server.cluster.giving_up import GivingUp, Offer, Situation
from sla_server.cluster.leases import MARGIN_RATIO, ClusterLease, LeaseKeeper, LeaseRecord, LeaseTask

LEASE_S: Final = 6.0
NAME: Final = "gateways"


class MemoryStore:
    """Stores as the engine does: only in place of the revision that the writer has read."""

    def __init__(self) -> None:
        self.record: LeaseRecord | None = None
        self.revision = 0
        self.loses_answers = False
        self.is_away = False

    async def read(self, _name: str) -> tuple[LeaseRecord | None, int]:
        if self.is_away:
            raise TimeoutError
        return self.record, self.revision

    async def write(self, _name: str, record: LeaseRecord, revision: int) -> int | None:
        if self.is_away:
            raise TimeoutError
        if revision != self.revision:
            return None
        self.record, self.revision = LeaseRecord.parse(record.encode()), revision + 1
        if self.loses_answers:
            raise TimeoutError
        return self.revision


class Server:
    """One that wants the lease; ``published`` is what it said of it after each round."""

    def __init__(self, name: str, store: MemoryStore, clock: FakeClock) -> None:
        self.store = store
        self.clock = clock
        self.lease = ClusterLease(name, LEASE_S)
        self.published: list[bool] = []
        self.keeper = LeaseKeeper(
            NAME,
            self.lease,
            clock,
            lambda lease: self.published.append(lease.is_held(clock.monotonic_ns())),
            clock.monotonic_ns,
        )

    def round(self) -> None:
        asyncio.run(self.keeper.round(self.store))

    @property
    def holds(self) -> bool:
        return self.lease.is_held(self.clock.monotonic_ns())


def _fence(store: MemoryStore) -> int:
    assert store.record is not None
    return store.record.fence


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def first(store: MemoryStore, clock: FakeClock) -> Server:
    server = Server("n1", store, clock)
    server.round()
    return server


@pytest.fixture
def second(first: Server, store: MemoryStore, clock: FakeClock) -> Server:
    server = Server("n2", store, clock)
    server.round()
    return server


def test_the_first_gets_it_and_renews_it_and_the_second_waits(
    first: Server, second: Server, store: MemoryStore, clock: FakeClock
) -> None:
    assert (first.holds, second.holds) == (True, False)
    assert first.lease.wait_s() < LEASE_S / 2
    fence = first.lease.record
    for _ in range(20):
        clock.advance(first.lease.wait_s())
        first.round()
        second.round()
    assert (first.holds, second.holds) == (True, False)
    assert store.record == fence


def test_a_holder_that_does_not_renew_loses_it_and_the_next_one_has_a_higher_fence(
    first: Server, second: Server, store: MemoryStore, clock: FakeClock
) -> None:
    fence = _fence(store)
    clock.advance(LEASE_S)
    assert not first.holds
    second.round()
    assert not second.holds  # not yet: the margin
    clock.advance(LEASE_S * MARGIN_RATIO)
    second.round()
    assert second.holds
    assert _fence(store) > fence
    first.round()
    assert (first.holds, second.holds) == (False, True)


def test_what_is_given_up_is_taken_at_once(
    first: Server, second: Server, store: MemoryStore, clock: FakeClock
) -> None:
    asyncio.run(first.keeper.give_up(store))
    assert (first.holds, first.published[-1]) == (False, False)
    second.round()
    assert second.holds
    asyncio.run(first.keeper.give_up(store))  # of another one: nothing
    clock.advance(1)
    second.round()
    assert second.holds


def test_a_renewal_without_an_answer_counts_from_when_it_is_read(
    first: Server, store: MemoryStore, clock: FakeClock
) -> None:
    clock.advance(LEASE_S / 2)
    store.loses_answers = True
    with pytest.raises(TimeoutError):
        first.round()
    assert first.holds  # by the one before
    clock.advance(LEASE_S / 2)
    assert not first.holds
    store.loses_answers = False
    first.round()
    assert first.holds
    assert first.published[-2:] == [True, True]


def test_a_cluster_that_is_away_ends_it_when_it_lapses(
    first: Server, second: Server, store: MemoryStore, clock: FakeClock
) -> None:
    store.is_away = True
    for _ in range(3):
        clock.advance(LEASE_S / 2)
        for server in (first, second):
            with pytest.raises(TimeoutError):
                server.round()
    assert (first.holds, second.holds) == (False, False)
    store.is_away = False
    first.round()  # nobody else has had it meanwhile
    assert first.holds


def test_fences_rise_also_when_the_cluster_has_lost_its_record(
    first: Server, store: MemoryStore, clock: FakeClock
) -> None:
    fence = _fence(store)
    store.record, store.revision = None, 7
    clock.advance(LEASE_S + 1)
    first.round()
    assert first.holds
    assert _fence(store) > fence


def test_what_is_no_record_is_refused() -> None:
    for text in (b"", b"[]", b'{"holder": "n1"}'):
        with pytest.raises(ValueError, match=r"no record of a lease|Expecting value"):
            LeaseRecord.parse(text)


@dataclass
class Walker:
    """A server whose requests take any time: each step begins or ends one of them."""

    name: str
    rate: float
    lease: ClusterLease = field(init=False)
    reading: tuple[LeaseRecord | None, int] | None = None
    writing: tuple[LeaseRecord, int, int] | None = None
    answer: int | None = None

    def __post_init__(self) -> None:
        self.lease = ClusterLease(self.name, LEASE_S)

    def now_ns(self, true_s: float) -> int:
        return round((1000 + true_s * self.rate) * 1e9)

    def step(self, kind: str, store: MemoryStore, true_s: float) -> None:
        now_ns = self.now_ns(true_s)
        if kind == "die":
            self.__post_init__()
            self.reading = self.writing = self.answer = None
        elif kind == "read":
            self.reading = store.record, store.revision
        elif kind == "saw" and self.reading is not None:
            if self.reading[1] >= self.lease.revision:
                self.lease.saw(*self.reading, now_ns)
            self.reading = None
        elif kind == "send":
            record = self.lease.next_record(now_ns, 0)
            self.writing = None if record is None else (record, self.lease.revision, now_ns)
            self.answer = None
        elif kind == "back":  # it gives it up, to any or to the next one
            given_up = self.lease.given_up("n2" if self.name == "n1" else "", "cannot act")
            self.writing = None if given_up is None else (given_up, self.lease.revision, now_ns)
            self.answer = None
        elif kind == "store" and self.writing is not None:
            record, revision, _sent_ns = self.writing
            if revision == store.revision:
                store.record, store.revision = record, revision + 1
                self.answer = store.revision
        elif kind == "answer" and self.writing is not None and self.answer is not None:
            record, revision, sent_ns = self.writing
            if self.lease.revision == revision:
                self.lease.stored(record, self.answer, sent_ns)
            self.writing = self.answer = None


ROUND: Final = ("read", "saw", "send", "store", "answer")
BACK: Final = ("read", "saw", "back", "store", "answer")
PARTS: Final = (
    BACK,
    BACK[:4],
    ROUND,
    ROUND,
    ROUND[:3],
    ROUND[3:],
    ROUND[:1],
    ROUND[1:],
    ROUND[:4],
    ROUND[4:],
    ("die",),
)
STEPS: Final = st.tuples(
    st.integers(0, 2), st.sampled_from(PARTS), st.sampled_from([0, 0.1, 1, 3, 5.9, 7, 7.6])
)


@given(steps=st.lists(STEPS, min_size=10, max_size=60))
def test_never_two_hold_it_whatever_is_late_or_dies(
    steps: list[tuple[int, tuple[str, ...], float]],
) -> None:
    store, true_s, holders = MemoryStore(), 0.0, dict[int, str]()
    servers = [Walker("n1", 1.0), Walker("n2", 1.01), Walker("n3", 0.99)]
    for number, kinds, passed_s in steps:
        true_s += passed_s
        for kind in kinds:
            servers[number].step(kind, store, true_s)
            holding = [each for each in servers if each.lease.is_held(each.now_ns(true_s))]
            assert len(holding) <= 1
            for each in holding:
                assert each.lease.record is not None
                assert holders.setdefault(each.lease.record.fence, each.name) == each.name
    assert list(holders) == sorted(holders)


def test_the_page_of_the_holder_is_in_the_record_and_what_a_former_release_wrote_has_none() -> None:
    lease = ClusterLease("n1", LEASE_S, "https://sla-1")
    record = lease.next_record(0, 100)
    assert record is not None
    assert LeaseRecord.parse(record.encode()).page == "https://sla-1"
    former = b'{"holder": "n1", "fence": 7, "lease_s": 6.0, "is_given_up": false}'
    assert LeaseRecord.parse(former) == LeaseRecord("n1", 7, 6.0)
    lease.saw(LeaseRecord("n1", 7, 6.0), 1, 5)  # as after the upgrade of its own server
    assert (lease.next_record(6, 100), lease.heard_ns) == (LeaseRecord("n1", 7, 6.0, page="https://sla-1"), 5)


def test_what_keeps_a_server_from_its_lease_is_said_once_and_when_it_lasts(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    monkeypatch.setattr("sla_server.cluster.leases.boot_ns", clock.monotonic_ns)
    task = LeaseTask(
        LeaseKeeper(NAME, ClusterLease("n1", LEASE_S), clock, lambda _: None),
        ClusterLease("n1", LEASE_S),
        3,
        LEASE_S,
    )
    with structlog.testing.capture_logs() as said:
        for exc in (
            TimeoutError(),
            TimeoutError(),
            ClusterRefused("Delete the key"),
            ClusterRefused("Delete the key"),
        ):
            task.failed(exc)
        assert [line["problem"] for line in said] == ["Delete the key"]  # that one ends by no waiting
        clock.advance(LEASE_S + 1)
        task.failed(TimeoutError())
        task.failed(TimeoutError())
        assert [line["problem"] for line in said[1:]] == ["TimeoutError"]
        for exc in (OSError("no majority"), TimeoutError(), OSError("no majority")):  # by turns, for hours
            task.failed(exc)
        assert [line["problem"] for line in said[2:]] == ["no majority"]


class _Rounds:
    """Instead of a keeper: how each round ends."""

    is_due = False

    def __init__(self, *ends: Exception | None) -> None:
        self._ends = list(ends)

    async def round(self, _store: object) -> None:
        if (end := self._ends.pop(0)) is not None:
            raise end


def test_what_keeps_a_server_from_its_lease_is_said_again_after_a_round_that_was_in_order() -> None:
    class Client:
        def jetstream(self, *, timeout: float) -> None:
            pass

    refused = ClusterRefused("Delete the key")
    rounds: Any = _Rounds(refused, refused, None, refused)
    client: Any = Client()
    task = LeaseTask(rounds, ClusterLease("n1", 0.01), 3, LEASE_S)
    with structlog.testing.capture_logs() as said:
        for expected in (1, 1, 2):
            with pytest.raises(ClusterRefused):
                asyncio.run(task.run(client))
            assert len(said) == expected


def _giving_up() -> tuple[GivingUp, Situation]:
    return GivingUp(30.0), Situation(is_held=True, away_s=30.0, problem="connection refused")


def test_a_server_that_gives_it_up_renews_until_its_parts_have_ended_and_only_the_successor_takes_it(
    store: MemoryStore, clock: FakeClock
) -> None:
    first, second, third = (Server(name, store, clock) for name in ("n1", "n2", "n3"))
    giving_up, away = _giving_up()
    first.keeper._giving_up = giving_up  # what NodeProcess hands in
    for server in (first, second, third):
        server.round()
    fence = _fence(store)
    assert giving_up.decide(away, [Offer("n2", 60.0)], clock.monotonic_ns())
    for _ in range(6):
        clock.advance(LEASE_S / 3)
        for server in (first, second, third):
            server.round()
        assert (first.holds, second.holds, third.holds) == (True, False, False)
    giving_up.follow(replace(away, has_ended=True), clock.monotonic_ns())
    assert first.keeper.is_due
    first.round()
    assert store.record is not None
    assert (store.record.is_given_up, store.record.successor) == (True, "n2")
    third.round()
    first.round()
    assert (first.holds, third.holds) == (False, False)
    second.round()
    assert second.holds
    assert _fence(store) > fence
    assert (store.record.gave_up, store.record.why) == (
        "n1",
        "has not reached the database for 30 s (limit 30 s): connection refused",
    )
    clock.advance(LEASE_S / 3)
    second.round()  # a renewal says it, too
    assert store.record.gave_up == "n1"
    assert not giving_up.may_take
    asyncio.run(second.keeper.give_up(store))  # it is stopped, and could act
    assert (store.record.gave_up, store.record.why) == ("", "")
    first.round()
    assert not first.holds  # it rests, though the lease is free
    third.round()
    assert third.holds


def test_what_its_successor_does_not_take_others_take_later(
    first: Server, second: Server, store: MemoryStore, clock: FakeClock
) -> None:
    giving_up, away = _giving_up()
    first.keeper._giving_up = giving_up
    assert giving_up.decide(away, [Offer("n3", 60.0)], clock.monotonic_ns())
    giving_up.follow(replace(away, has_ended=True), clock.monotonic_ns())
    first.round()
    second.round()
    assert not second.holds
    clock.advance(LEASE_S * (1 + MARGIN_RATIO))
    second.round()
    assert second.holds


def test_what_nobody_takes_for_ten_leases_is_taken_by_the_server_that_rests(
    first: Server, store: MemoryStore, clock: FakeClock
) -> None:
    giving_up, away = _giving_up()
    first.keeper._giving_up = giving_up
    assert giving_up.decide(away, [Offer("n2", 60.0)], clock.monotonic_ns())
    giving_up.follow(replace(away, has_ended=True), clock.monotonic_ns())
    first.round()  # n2 dies before it takes it
    for _ in range(9):
        clock.advance(LEASE_S)
        first.round()
        assert not first.holds
    clock.advance(LEASE_S)
    first.round()
    assert first.holds
    assert not giving_up.may_take


def test_a_lease_that_lapses_while_it_is_given_up_is_the_others(
    first: Server, second: Server, store: MemoryStore, clock: FakeClock
) -> None:
    giving_up, away = _giving_up()
    first.keeper._giving_up = giving_up
    assert giving_up.decide(away, [Offer("n2", 60.0)], clock.monotonic_ns())
    clock.advance(LEASE_S * (1 + MARGIN_RATIO))
    second.round()
    assert second.holds
    giving_up.follow(replace(away, has_ended=True), clock.monotonic_ns())
    first.round()
    assert second.holds
    assert (first.holds, giving_up.reason, giving_up.may_take) == (False, "", False)
    clock.advance(LEASE_S * 2)
    first.round()
    assert not first.holds
