"""Transactions against an engine that loses requests and answers, and programs that die at every step."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from sla_server.cluster import accounts
from sla_server.cluster.accounts import Account
from sla_server.cluster.messages import transaction_recovery
from sla_server.cluster.messages.errors import (
    AccessDenied,
    BadSettings,
    DestinationFull,
    MessagesError,
    MessageTaken,
    PayloadTooLarge,
    TransactionEnded,
    TransactionExists,
    TransactionInDoubt,
    TransactionRolledBack,
    TransactionTooLarge,
)
from sla_server.cluster.messages.feed import Received
from sla_server.cluster.messages.transaction import Transaction, TransactionPhase
from sla_server.cluster.messages.transaction_records import HELD_S, KEPT_S, MOST_BYTES, MOST_MESSAGES
from sla_server.cluster.messages.transaction_recovery import PassResult
from tests.support.message_engine import (
    Died,
    Engine,
    EngineSession,
    FakeReceived,
    Fault,
    Stream,
    no_fault,
)

LATER_S = 100.0
ALL = {"eu": [b"1", b"4"], "us": [b"2"], "log": [b"3"]}
NOTHING: dict[str, list[bytes]] = {"eu": [], "us": [], "log": []}


class World:
    """Three destinations in as many streams, and a message that the transaction acknowledges."""

    def __init__(self, *, has_batches: bool, fault: Callable[[int], Fault | None] = no_fault) -> None:
        self.engine = Engine(has_batches=has_batches)
        self.source = self.engine.add("source")
        for name in ALL:
            self.engine.add(name)
        self.session = EngineSession(self.engine, fault)
        self.received = self.hold(self.session)
        self.others: list[EngineSession] = []

    def hold(self, session: EngineSession, sequence: int = 1) -> FakeReceived:
        return FakeReceived(session.link, self.source, sequence)

    def other(self) -> EngineSession:
        self.others.append(EngineSession(self.engine))
        return self.others[-1]

    def begin(self, session: EngineSession | None = None, **options: object) -> Transaction:
        session = session or self.session
        transaction = session.transaction(**options)
        received = self.received if session is self.session else self.hold(session)
        transaction.acknowledge(cast(Received, received))
        for name, data in (("eu", b"1"), ("us", b"2"), ("log", b"3"), ("eu", b"4")):
            transaction.send(name, data)
        return transaction

    def seen(self, session: EngineSession) -> dict[str, list[bytes]]:
        return {name: session.visible(name) for name in ALL}

    def check(self, *, is_committed: bool | None) -> bool:
        """All of it is there, or nothing; and it stays so. Whether it is."""
        reader = self.other()
        found = self.seen(reader)
        assert found in (ALL, NOTHING)
        if is_committed is not None:
            assert found == (ALL if is_committed else NOTHING)
        assert (found == ALL) == (
            self.received.reply in self.engine.acknowledged or reader.is_taken(self.received)
        )
        self.engine.clock.advance(2 * KEPT_S)
        self.recover(reader)
        assert self.seen(self.other()) == found
        assert self.received.reply not in self.engine.acknowledged or found == ALL
        return found == ALL

    def recover(self, session: EngineSession) -> None:
        session.link.run(session.recovery.recover())

    def close(self) -> None:
        for session in (self.session, *self.others):
            session.close()


@pytest.fixture(params=[True, False], ids=["batches", "no-batches"])
def has_batches(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def make_world(*, has_batches: bool) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(fault: Callable[[int], Fault | None] = no_fault) -> World:
        worlds.append(World(has_batches=has_batches, fault=fault))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


MakeWorld = Callable[..., World]


def steps_of(make_world: MakeWorld) -> int:
    world = make_world()
    world.begin().commit()
    assert world.check(is_committed=True)
    return world.session.link.steps


def test_all_of_it_happens_in_the_order_of_the_calls(make_world: MakeWorld) -> None:
    world = make_world()
    with world.begin() as transaction:
        assert world.seen(world.other()) == NOTHING
    assert transaction.phase is TransactionPhase.COMMITTED
    assert set(world.session.flushed) == set(ALL)
    assert world.check(is_committed=True)


def test_nothing_of_it_happens_when_the_block_fails(make_world: MakeWorld) -> None:
    world = make_world()
    with pytest.raises(KeyError), world.begin() as transaction:
        raise KeyError
    assert transaction.phase is TransactionPhase.ROLLED_BACK
    assert not world.received.is_held
    assert world.session.link.steps == 0
    assert not world.check(is_committed=False)


@pytest.mark.parametrize("fault", [Fault.DIES_BEFORE, Fault.DIES_AFTER])
def test_a_program_that_dies_at_any_step_leaves_all_or_nothing(make_world: MakeWorld, fault: Fault) -> None:
    outcomes = []
    for place in range(steps_of(make_world)):
        world = make_world(lambda step, place=place: fault if step == place else None)
        with pytest.raises(Died):
            world.begin().commit()
        world.engine.clock.advance(LATER_S)
        outcomes.append(world.check(is_committed=None))
    assert outcomes == sorted(outcomes)  # nothing up to the decision, all from it on
    assert set(outcomes) == {False, True}


def test_two_lost_requests_or_answers_change_nothing(make_world: MakeWorld) -> None:
    for places in itertools.combinations(range(steps_of(make_world) + 1), 2):
        for faults in itertools.product((Fault.LOST, Fault.UNANSWERED), repeat=2):
            plan = dict(zip(places, faults, strict=True))
            world = make_world(plan.get)
            world.begin().commit()
            assert world.check(is_committed=True)


def test_an_outage_from_any_step_on_leaves_all_or_nothing(make_world: MakeWorld) -> None:
    """And the commit can be called again when it was left in doubt."""
    ends = set()
    for place in range(steps_of(make_world)):
        for fault in (Fault.LOST, Fault.UNANSWERED):
            out = [True]
            world = make_world(
                lambda step, place=place, fault=fault, out=out: fault if step >= place and out[0] else None
            )
            transaction = world.begin()
            with contextlib.suppress(MessagesError):
                transaction.commit()
            ends.add(transaction.phase)
            out[0] = False
            if transaction.phase is TransactionPhase.IN_DOUBT:
                transaction.commit()
            world.engine.clock.advance(LATER_S)
            assert world.check(is_committed=transaction.phase is TransactionPhase.COMMITTED) in (True, False)
    assert ends == {TransactionPhase.ROLLED_BACK, TransactionPhase.IN_DOUBT, TransactionPhase.COMMITTED}


def test_a_commit_repeated_in_the_same_outage_does_not_say_rolled_back(make_world: MakeWorld) -> None:
    """What the first try has decided no later failure of a repetition may deny."""
    for place in range(steps_of(make_world)):
        for fault in (Fault.LOST, Fault.UNANSWERED):
            for is_lost_again, is_given_back in itertools.product((True, False), repeat=2):
                out = [fault]
                world = make_world(
                    lambda step, place=place, out=out: out[-1] if step >= place and out else None
                )
                transaction = world.begin()
                with contextlib.suppress(MessagesError):
                    transaction.commit()
                if transaction.phase is TransactionPhase.IN_DOUBT and is_given_back:
                    world.received.give_back()
                if transaction.phase is TransactionPhase.IN_DOUBT and is_lost_again:
                    out.append(Fault.LOST)
                    with pytest.raises(TransactionInDoubt):
                        transaction.commit()
                out.clear()
                if transaction.phase is TransactionPhase.IN_DOUBT:
                    with contextlib.suppress(MessageTaken):
                        transaction.commit()
                world.engine.clock.advance(LATER_S)
                world.check(is_committed=transaction.phase is TransactionPhase.COMMITTED)


def test_a_commit_that_is_interrupted_can_be_called_again(make_world: MakeWorld) -> None:
    world = make_world(lambda step: Fault.DIES_AFTER if step == 4 else None)
    transaction = world.begin()
    with pytest.raises(Died):  # as KeyboardInterrupt is: no Exception
        transaction.commit()
    world.session.link.is_dead = False
    transaction.commit()
    assert world.check(is_committed=True)


def test_a_coordinator_that_was_only_slow_is_fenced(make_world: MakeWorld) -> None:
    """At each step others take it for dead: by a pass over all states, or by coming upon a message."""
    for place, how in itertools.product(range(steps_of(make_world)), ("recover", "receive", "taken")):
        world = make_world()
        other = world.other()

        def slow(
            step: int, world: World = world, other: EngineSession = other, place: int = place, how: str = how
        ) -> None:
            if step != place:
                return
            world.engine.clock.advance(LATER_S)
            if "SLA_TRANSACTIONS" in world.engine.streams and how == "recover":
                world.recover(other)
            elif how == "receive":
                world.seen(other)
            elif how == "taken":
                other.is_taken(world.received)

        world.session.link.fault = slow
        transaction = world.begin()
        with contextlib.suppress(TransactionRolledBack):
            transaction.commit()
        assert transaction.phase in (TransactionPhase.COMMITTED, TransactionPhase.ROLLED_BACK)
        world.check(is_committed=transaction.phase is TransactionPhase.COMMITTED)


def test_of_two_that_acknowledge_one_message_one_commits(make_world: MakeWorld) -> None:
    """The second begins at each step of the first, which may die there as well."""
    for place in range(steps_of(make_world)):
        for dies in (False, True):
            world = make_world()
            second = world.other()
            done = []

            def meanwhile(
                step: int,
                world: World = world,
                second: EngineSession = second,
                place: int = place,
                dies: bool = dies,
                done: list[bool] = done,
            ) -> Fault | None:
                if step != place:
                    return None
                if dies:
                    world.engine.clock.advance(LATER_S)
                transaction = second.transaction()
                transaction.acknowledge(cast(Received, world.hold(second)))
                transaction.send("us", b"second")
                try:
                    transaction.commit()
                    done.append(True)
                except MessageTaken:
                    done.append(False)
                return Fault.DIES_BEFORE if dies else None

            world.session.link.fault = meanwhile
            first = world.begin()
            with contextlib.suppress(TransactionRolledBack, Died):
                first.commit()
            world.engine.clock.advance(LATER_S)
            found = world.seen(world.other())
            second_seen = b"second" in found["us"]
            assert second_seen == done[0]
            found["us"] = [data for data in found["us"] if data != b"second"]
            assert found == (NOTHING if second_seen else found)
            assert found in (ALL, NOTHING)
            if not dies:
                assert (first.phase is TransactionPhase.COMMITTED) == (found == ALL) == (not second_seen)


def test_a_full_destination_ends_it(make_world: MakeWorld) -> None:
    world = make_world()
    world.engine.streams[world.engine.destinations["log"].stream].most = 0
    with pytest.raises(DestinationFull, match="'log'"):
        world.begin().commit()
    assert not world.received.is_held
    assert [world.engine.stored(name) for name in ALL] == [[], [], []]  # what was staged is removed
    assert not world.check(is_committed=False)


def test_one_domain_alone_is_one_step() -> None:
    engine = Engine(has_batches=True)
    engine.add("shop.eu", "shop")
    engine.add("shop.us", "shop")
    for fault in (None, Fault.UNANSWERED, Fault.LOST):
        session = EngineSession(engine, lambda step, fault=fault: fault if step == 2 else None)
        with session.transaction() as transaction:
            transaction.send("shop.eu", b"1")
            transaction.send("shop.us", b"2")
        session.close()
    assert "SLA_TRANSACTIONS" not in engine.streams
    reader = EngineSession(engine)
    assert (reader.visible("shop.eu"), reader.visible("shop.us")) == ([b"1"] * 3, [b"2"] * 3)
    assert all("Sla-Transaction" not in found.headers for found in engine.stored("shop.eu"))
    reader.close()


def test_a_batch_that_no_role_allows_is_refused_and_not_in_doubt() -> None:
    engine = Engine(has_batches=True)
    destination = engine.add("q")
    session = EngineSession(engine)
    session.link._account = "shop"

    def refuse(step: int) -> Fault | None:
        """The engine's refusal comes beside the answer that does not."""
        if not step:
            return None
        session.link._denied.add(destination.subject)
        return Fault.LOST

    session.link.fault = refuse
    transaction = session.transaction()
    transaction.send("q", b"1")
    with pytest.raises(AccessDenied, match="producer:q"):
        transaction.commit()
    assert transaction.phase is TransactionPhase.ROLLED_BACK
    session.close()


def test_a_batch_without_an_answer_is_in_doubt_and_can_be_repeated() -> None:
    engine = Engine(has_batches=True)
    engine.add("q")
    out = [True]
    session = EngineSession(engine, lambda step: Fault.UNANSWERED if step and out[0] else None)
    transaction = session.transaction()
    transaction.send("q", b"1")
    with pytest.raises(TransactionInDoubt):
        transaction.commit()
    out[0] = False
    transaction.commit()
    assert session.visible("q") == [b"1"]
    with pytest.raises(TransactionEnded, match="committed"):
        transaction.commit()
    session.close()


def test_a_program_goes_on_elsewhere_with_the_outcome(make_world: MakeWorld) -> None:
    """C1: at each step it dies, or is only slow; who goes on asks, which decides it."""
    for place, fault in itertools.product(range(steps_of(make_world) + 2), (Fault.DIES_AFTER, None)):
        world = make_world()
        heir = world.other()
        outcomes: list[bool] = []

        def ask(
            step: int,
            heir: EngineSession = heir,
            place: int = place,
            fault: Fault | None = fault,
            outcomes: list[bool] = outcomes,
        ) -> Fault | None:
            if step != place:
                return None
            if fault is None:
                outcomes.append(ask_outcome(heir, "move-17"))
            return fault

        world.session.link.fault = ask
        transaction = world.begin(identity="move-17")
        with contextlib.suppress(TransactionRolledBack, Died):
            transaction.commit()
        outcomes.append(ask_outcome(heir, "move-17"))
        assert len(set(outcomes)) == 1
        assert world.check(is_committed=outcomes[0]) == outcomes[0]


def ask_outcome(session: EngineSession, identity: str) -> bool:
    async def ask() -> bool:
        await session.register.make(5.0)
        record = await session.register.final(identity, 5.0, at_once=True)
        assert record is not None
        return record.state.value == "committed"

    return session.link.run(ask())


def test_an_identity_is_used_once(make_world: MakeWorld) -> None:
    world = make_world()
    world.begin(identity="once").commit()
    other = world.other()
    transaction = other.transaction("once")
    transaction.send("eu", b"again")
    with pytest.raises(TransactionExists, match="committed before"):
        transaction.commit()
    assert world.check(is_committed=True)
    for bad in ("a.b", "", "*", "x" * 121, "0" * 32):
        if bad:
            with pytest.raises(BadSettings, match="identity"):
                other.transaction(bad)


def test_states_and_locks_are_removed_once_all_is_consumed(make_world: MakeWorld) -> None:
    world = make_world()
    world.begin().commit()
    reader = world.other()
    states = world.engine.streams["SLA_TRANSACTIONS"].messages
    world.engine.clock.advance(2 * KEPT_S)
    world.recover(reader)
    assert len(states) == 2
    for name in ALL:
        stream = world.engine.streams[world.engine.destinations[name].stream]
        stream.messages.clear()
    world.recover(reader)
    assert not states


def test_old_states_go_however_many_young_ones_are_behind_them(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction_recovery, "MOST_STATES", 10)
    world = make_world()
    world.engine.add("other")
    session, reader = world.session, world.other()
    states = world.engine.streams.setdefault("SLA_TRANSACTIONS", Stream(world.engine.clock, is_one_each=True))

    def commit(name: str) -> None:
        transaction = session.transaction(name)
        transaction.send("other", b"")
        transaction.commit()

    for number in range(40):
        commit(f"old-{number}")
    for _ in range(2):
        world.recover(reader)
    world.engine.clock.advance(2 * KEPT_S)
    for number in range(40):
        commit(f"young-{number}")
    world.engine.streams[world.engine.destinations["other"].stream].messages.clear()
    for _ in range(4):
        world.recover(reader)
    assert sorted(found.subject[8:11] for found in states.messages.values()) == ["you"] * 40
    for _ in range(4):
        world.recover(reader)
    session.link.fault = lambda step: Fault.DIES_BEFORE if states.last_of("sla.t.s.left") else None
    with pytest.raises(Died):
        commit("left")
    world.recover(reader)  # while it has time left
    world.engine.clock.advance(LATER_S)
    assert reader.link.run(reader.recovery.recover()).rolled_back == 1


def test_room_is_that_of_the_stream_whatever_this_session_would_have_given_it(make_world: MakeWorld) -> None:
    """Else the decision on what is open would have none."""
    world = make_world()
    world.begin().commit()
    world.engine.max_bytes = 210  # two messages of 100 bytes are there
    other = world.other()
    transaction = other.transaction("second")
    transaction.send("eu", b"second")
    with pytest.raises(DestinationFull, match="take 200 of 210 bytes"):
        transaction.commit()


def test_passes_follow_each_other_soon_while_there_is_much_to_do() -> None:
    assert transaction_recovery.pause_s(PassResult(is_behind=True)) == transaction_recovery.BUSY_S
    assert transaction_recovery.pause_s(PassResult(read=9)) == transaction_recovery.RECOVER_S


def test_limits_are_said(make_world: MakeWorld) -> None:
    world = make_world()
    transaction = world.session.transaction()
    with pytest.raises(PayloadTooLarge):
        transaction.send("eu", bytes(1 << 20))
    for _ in range(8):
        transaction.send("eu", bytes((1 << 20) - 1000))
    with pytest.raises(TransactionTooLarge, match=f"bytes exceeds {MOST_BYTES}"):
        transaction.send("eu", bytes((1 << 20) - 1000))
    transaction.rollback()
    many = world.session.transaction()
    for _ in range(MOST_MESSAGES):
        many.send("eu", b"")
    with pytest.raises(TransactionTooLarge, match=f"1001 messages exceeds {MOST_MESSAGES}"):
        many.send("eu", b"")
    with pytest.raises(BadSettings, match="limit_s"):
        world.session.transaction(limit_s=301.0)
    with pytest.raises(TransactionEnded, match="rolled back"):
        transaction.send("eu", b"")


def test_what_is_not_held_cannot_be_acknowledged(make_world: MakeWorld) -> None:
    world = make_world()
    transaction = world.session.transaction()
    elsewhere = world.hold(world.other())
    with pytest.raises(MessageTaken, match="another session has it"):
        transaction.acknowledge(cast(Received, elsewhere))
    world.received.age_s = HELD_S + 1
    with pytest.raises(MessageTaken, match="held for longer than 1800 s"):
        transaction.acknowledge(cast(Received, world.received))
    world.received.age_s = 0
    transaction.acknowledge(cast(Received, world.received))
    world.received.is_held = False
    with pytest.raises(MessageTaken, match="given back"):
        transaction.commit()


def permitted(engine: Engine, *roles: str) -> Callable[[str], bool]:
    """Whether the engine lets an account of these roles publish to a subject."""
    allowed, _ = accounts.permissions(Account("shop", roles, ""), engine.destinations.values())
    patterns = [re.compile(re.escape(text).replace(r"\*", "[^.]+").replace(">", ".+")) for text in allowed]
    return lambda subject: any(pattern.fullmatch(subject) for pattern in patterns)


def test_roles_of_all_that_takes_part_suffice_for_a_transaction(make_world: MakeWorld) -> None:
    world = make_world()
    world.begin().commit()
    asked = world.session.link.asked
    is_permitted = permitted(world.engine, "consumer:source", "producer:eu", "producer:us", "producer:log")
    assert not sorted(subject for subject in asked if not is_permitted(subject))
    less = permitted(world.engine, "consumer:eu", "producer:us")
    refused = {subject.split(".")[3] for subject in asked if not less(subject) and subject[:4] == "sla."}
    assert refused == {"SLA_source", "eu", "log"}  # the lock of a message, and what goes elsewhere


def test_a_consumer_may_find_out_what_becomes_of_a_message(make_world: MakeWorld) -> None:
    """Also that it came again without any transaction, was left by a coordinator, or that none ever was."""
    world = make_world(lambda step: Fault.DIES_BEFORE if step == 6 else None)
    reader = world.other()
    assert not reader.is_taken(world.received)
    with pytest.raises(Died):
        world.begin().commit()
    world.engine.clock.advance(LATER_S)
    assert world.seen(reader) == NOTHING
    assert not reader.is_taken(world.received)
    assert reader.link.run(reader.register.final("never", 5.0)) is not None
    is_permitted = permitted(world.engine, "consumer:source")
    assert not sorted(subject for subject in reader.link.asked if not is_permitted(subject))


def test_roles_of_transactions_make_and_remove_nothing() -> None:
    engine = Engine(has_batches=True)
    engine.add("eu")
    is_permitted = permitted(engine, "consumer:>", "producer:>", "monitor")
    for call in ("CREATE", "UPDATE", "DELETE", "PURGE", "MSG.DELETE", "SNAPSHOT"):
        assert not is_permitted(f"$JS.API.STREAM.{call}.SLA_TRANSACTIONS")
    assert not is_permitted("$JS.API.CONSUMER.CREATE.SLA_TRANSACTIONS.x")
    assert not is_permitted("sla.t.l.SLA_us.queue-us.1")
    assert not permitted(engine, "monitor")("sla.t.s.x")
    assert not permitted(engine, "producer:nothing")("sla.t.s.x")
