"""The message system on three real nodes: nothing is lost, doubled or out of order, whoever dies."""

from __future__ import annotations

import io
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pmdaemon.runtime.clock import Deadline
from sla_server.cluster.messages import (
    BlockedBy,
    Consumer,
    Destination,
    DestinationKind,
    MessageSession,
    Received,
)
from sla_server.cluster.messages.errors import (
    BadName,
    DestinationDiffers,
    DestinationFull,
    DestinationMissing,
    FragmentsDamaged,
    NotConfirmed,
    PayloadTooLarge,
    SubscriberRefused,
)
from sla_server.cluster.messages.link import size_bytes
from sla_server.cluster.messages.producer import IDENTITY
from tests.support.cluster import LocalCluster

LIMIT_S = 240.0
SEND_S = 240.0
OpenSession = Callable[..., MessageSession]
_nodes = itertools.count(1)


@pytest.fixture
def open_session(cluster: LocalCluster, tmp_path: Path) -> Iterator[OpenSession]:
    sessions: list[MessageSession] = []

    def make(name: str = "test", workers: int = 4) -> MessageSession:
        node = next(_nodes)
        sessions.append(
            MessageSession(cluster.urls, name, node=node, directory=tmp_path / str(node), workers=workers)
        )
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


def small(name: str, kind: DestinationKind = DestinationKind.QUEUE, max_messages: int = -1) -> Destination:
    return Destination(name, kind, max_bytes=1 << 20, max_messages=max_messages)


def numbers(consumer: Consumer, count: int) -> list[int]:
    found: list[int] = []
    for _ in range(count):
        received = consumer.receive(LIMIT_S)
        assert received is not None, f"{len(found)} of {count} came"
        received.acknowledge(LIMIT_S)
        found.append(int(received.data))
    return found


def node_index(cluster: LocalCluster, session: MessageSession) -> int:
    return [url.rpartition("@")[2] for url in cluster.urls].index(session.connected_node)


def test_nothing_is_lost_or_doubled_when_both_nodes_die(
    cluster: LocalCluster, open_session: OpenSession
) -> None:
    """The node that the producer is connected to dies, then the consumer's; each while it works."""
    sending, receiving = open_session("sending"), open_session("receiving")
    sending.create(small("killed"))
    producer, consumer = sending.producer("killed"), receiving.consumer("killed", "reader")
    identities: list[str] = []
    sent = threading.Thread(
        target=lambda: identities.extend(producer.send(b"%d" % n, limit_s=SEND_S) for n in range(120))
    )
    sent.start()
    found = numbers(consumer, 20)
    cluster.kill(node_index(cluster, sending))
    found += numbers(consumer, 60)
    cluster.restore()
    cluster.kill(node_index(cluster, receiving))
    found += numbers(consumer, 40)
    sent.join(LIMIT_S)
    # What was under way to the consumer when its node died comes again after what was handed out meanwhile.
    assert sorted(found) == list(range(120))
    assert len(set(identities)) == 120
    assert consumer.receive(0.5) is None
    assert sending.resumptions + receiving.resumptions >= 2
    assert producer.confirmed == (120, identities[-1])
    assert consumer.acknowledged["killed"][0] == 120


def test_what_is_sent_together_stays_in_order(cluster: LocalCluster, open_session: OpenSession) -> None:
    session = open_session()
    session.create(small("together"))
    producer = session.producer("together")
    results = [producer.submit(b"%d" % n, limit_s=SEND_S) for n in range(150)]
    cluster.kill(node_index(cluster, session))
    results += [producer.submit(b"%d" % n, limit_s=SEND_S) for n in range(150, 300)]
    assert len({result.result(LIMIT_S) for result in results}) == 300
    assert numbers(session.consumer("together", "reader"), 300) == list(range(300))


def test_a_repeated_send_is_stored_once(open_session: OpenSession) -> None:
    session = open_session()
    session.create(small("repeated"))
    producer = session.producer("repeated")
    identity = producer.send(b"1")
    together = [producer.submit(b"1", identity=identity), producer.submit(b"2"), producer.submit(b"3")]
    assert {result.result(LIMIT_S) for result in together} > {identity}
    consumer = session.consumer("repeated", "reader")
    assert numbers(consumer, 3) == [1, 2, 3]
    assert consumer.receive(0.5) is None


def test_a_message_that_goes_on_under_its_identity_is_stored_in_the_same_domain_too(
    open_session: OpenSession,
) -> None:
    """So a program moves messages from queue to queue that nobody handles twice; a domain is one stream."""
    session = open_session()
    for name in ("way.raw", "way.checked"):
        session.create(Destination(name, domain="way", max_bytes=1 << 20))
    raw, checked = session.producer("way.raw"), session.producer("way.checked")
    identity = raw.send(b"1")
    assert raw.send(b"1", identity=identity) == identity
    received = session.consumer("way.raw", "checker").receive(LIMIT_S)
    assert received is not None
    assert received.identity == identity
    for _ in range(2):  # as after a death before the acknowledgement
        assert checked.send(received.data, identity=received.identity) == identity
    received.acknowledge()
    consumer = session.consumer("way.checked", "reader")
    moved = consumer.receive(5.0)
    assert moved is not None
    assert (moved.data, moved.identity) == (b"1", identity)
    moved.acknowledge()
    assert consumer.receive(0.5) is None


def test_what_was_given_up_is_not_stored_at_the_next_node(
    cluster: LocalCluster, open_session: OpenSession
) -> None:
    """However long that takes: the engine may have forgotten by then that it has stored it already."""
    session = open_session()
    session.create(small("given-up"))
    producer = session.producer("given-up")
    producer.send(b"0")
    for index in range(3):
        cluster.kill(index)
    with pytest.raises(NotConfirmed):
        producer.send(b"1", limit_s=1.0)
    cluster.restore()
    producer.send(b"2", limit_s=SEND_S)
    consumer = session.consumer("given-up", "reader")
    assert numbers(consumer, 2) == [0, 2]
    assert consumer.receive(0.5) is None


def test_a_session_goes_on_at_a_node_that_it_was_not_given(cluster: LocalCluster, tmp_path: Path) -> None:
    node = next(_nodes)
    with MessageSession(cluster.urls[:1], "one", node=node, directory=tmp_path) as session:
        session.create(small("learned"))
        session.producer("learned").send(b"0")
        cluster.kill(0)
        session.producer("learned").send(b"1", limit_s=SEND_S)
        assert session.resumptions == 1
        assert session.connected_node != cluster.urls[0].rpartition("@")[2]


def test_a_message_of_the_full_size_is_refused_and_the_session_goes_on(open_session: OpenSession) -> None:
    session = open_session()
    session.create(small("size"))
    producer = session.producer("size")
    with pytest.raises(PayloadTooLarge, match="send_large"):
        producer.send(bytes(1 << 20))
    producer.send(b"0")


def test_what_a_closed_session_held_goes_to_another(open_session: OpenSession) -> None:
    first, second = open_session("first"), open_session("second")
    first.create(small("held"))
    for number in range(3):
        first.producer("held").send(b"%d" % number)
    received = first.consumer("held", "reader").receive(LIMIT_S)
    assert received is not None
    first.close()
    assert sorted(numbers(second.consumer("held", "reader"), 3)) == [0, 1, 2]


def test_a_full_destination_refuses_and_goes_on(open_session: OpenSession) -> None:
    session = open_session()
    session.create(small("full", max_messages=2))
    producer = session.producer("full")
    producer.send(b"0")
    producer.send(b"1")
    with pytest.raises(DestinationFull, match="maximum messages exceeded"):
        producer.send(b"2")
    assert producer.blocked_by is BlockedBy.DESTINATION
    assert producer.try_send(b"2") is BlockedBy.DESTINATION
    session.create(small("beside"))
    session.producer("beside").send(b"0")  # it stops no other
    consumer = session.consumer("full", "reader")
    assert numbers(consumer, 2) == [0, 1]
    while True:
        try:
            producer.send(b"3")
            break
        except DestinationFull:
            continue
    assert numbers(consumer, 1) == [3]


def test_a_subscriber_that_does_not_come_back_is_ended_and_its_topic_goes_on(
    open_session: OpenSession,
) -> None:
    session = open_session()
    session.create(small("weather", DestinationKind.TOPIC, max_messages=3))
    session.create(small("a-queue"))
    reader, gone = session.consumer("weather", "reader"), session.consumer("weather", "gone.for-good")
    assert reader.wait_ready(1, LIMIT_S)
    assert gone.wait_ready(1, LIMIT_S)
    producer = session.producer("weather")
    for number in range(3):
        producer.send(b"%d" % number)
    assert numbers(reader, 3) == [0, 1, 2]
    with pytest.raises(SubscriberRefused, match="End it first"):
        session.end_subscriber("weather", "reader")
    gone.close()
    with pytest.raises(DestinationFull):
        producer.send(b"3")
    there = {row.name: row.waiting + row.held for row in session.subscribers_of("weather")}
    assert there == {"reader": 0, "gone.for-good": 3}
    for name, subscriber in (("weather", "other"), ("a-queue", "gone.for-good")):
        with pytest.raises(SubscriberRefused):
            session.end_subscriber(name, subscriber)

    def ended() -> bool:  # its last request may be open for some seconds
        try:
            session.end_subscriber("weather", "gone.for-good")
        except SubscriberRefused:
            return False
        return True

    deadline = Deadline(LIMIT_S)
    while not ended():
        assert not deadline.passed
        time.sleep(0.2)
    assert [row.name for row in session.subscribers_of("weather")] == ["reader"]

    def has_room() -> bool:
        try:
            producer.send(b"3", limit_s=SEND_S)
        except DestinationFull:  # for a second after a refusal nobody asks the engine
            return False
        return True

    while not has_room():
        assert not deadline.passed
        time.sleep(0.2)
    assert numbers(reader, 1) == [3]


def test_a_slow_consumer_has_its_credit_and_stops_no_other(open_session: OpenSession) -> None:
    session = open_session()
    session.create(small("news", DestinationKind.TOPIC))
    slow, quick = session.consumer("news", "slow", credit=5), session.consumer("news", "quick", credit=5)
    assert slow.wait_ready(1, LIMIT_S)
    assert quick.wait_ready(1, LIMIT_S)
    producer = session.producer("news")
    for number in range(30):
        producer.send(b"%d" % number)
    assert numbers(quick, 30) == list(range(30))
    held = [slow.receive(LIMIT_S) for _ in range(5)]
    assert slow.receive(0.5) is None
    assert slow.blocked_by == {"news": BlockedBy.CONSUMER}
    for received in held:
        assert received is not None
        received.acknowledge()
    assert numbers(slow, 25) == list(range(5, 30))


def test_credit_in_bytes(open_session: OpenSession) -> None:
    """Two of the first size fit, and what is larger than all credit comes alone."""
    session = open_session()
    session.create(Destination("heavy", max_bytes=8 << 20))
    producer = session.producer("heavy")
    for size in (3000, 3000, 3000, 20_000, 10):
        producer.send(bytes(size))
    consumer = session.consumer("heavy", "reader", credit_bytes=8000)
    sizes: list[int] = []
    held: list[Received] = []
    while len(sizes) < 5:
        received = consumer.receive(LIMIT_S if not held else 0.5)
        if received is not None:
            held.append(received)
            sizes.append(len(received.data))
            assert len(held) == 1 or sum(one.size_bytes for one in held) <= 8000
        elif held:
            assert consumer.blocked_by == {"heavy": BlockedBy.CONSUMER_BYTES}
            held.pop(0).acknowledge()
    assert sizes == [3000, 3000, 3000, 20_000, 10]
    for one in held:
        one.acknowledge()


def test_wildcards_take_in_destinations_of_later(open_session: OpenSession) -> None:
    session, other = open_session("receiving"), open_session("creating")
    other.create(small("shop.eu"))
    consumers = {
        text: session.consumer(text, "reader") for text in ("shop.*", "glob:sto?k.*", r"regex:depot\.(eu|us)")
    }
    for name in ("shop.us", "stock.eu", "depot.us", "depot.asia", "shop.eu.paid"):
        other.create(small(name))
        other.producer(name).send(b"1")
    other.producer("shop.eu").send(b"2")
    assert sorted(numbers(consumers["shop.*"], 2)) == [1, 2]
    assert numbers(consumers["glob:sto?k.*"], 1) == [1]
    assert numbers(consumers[r"regex:depot\.(eu|us)"], 1) == [1]
    assert consumers["shop.*"].destinations == ["shop.eu", "shop.us"]


def test_dead_messages_have_origin_and_reason(open_session: OpenSession) -> None:
    session = open_session()
    session.create(small("poison"))
    producer = session.producer("poison")
    identity = producer.send(b"1", {"Kind": "bad"})
    failing = session.consumer("poison", "reader", max_deliveries=2)
    for _ in range(2):
        received = failing.receive(LIMIT_S)
        assert received is not None
        received.give_back()
    producer.send(b"2")
    received = failing.receive(LIMIT_S)
    assert received is not None
    assert received.data == b"2"
    received.reject("cannot be read")
    dead = session.consumer("_DMQ", "undertaker")
    first, second = dead.receive(LIMIT_S), dead.receive(LIMIT_S)
    assert first is not None
    assert second is not None
    assert (first.data, first.headers["Kind"], first.headers["Sla-Identity"]) == (b"1", "bad", identity)
    assert first.headers["Sla-Origin"] == second.headers["Sla-Origin"] == "poison"
    assert first.headers["Sla-Reason"] == "handed out 2 times and never acknowledged"
    assert second.headers["Sla-Reason"] == "cannot be read"
    first.acknowledge()
    second.acknowledge()
    with pytest.raises(BadName, match="reserved"):
        session.producer("_DMQ")


def test_the_largest_message_can_be_dead_and_sent_again(open_session: OpenSession) -> None:
    session = open_session()
    session.create(Destination("heavy", max_bytes=8 << 20))
    most = bytes(session.link.limit_bytes - size_bytes(b"", {IDENTITY: "0" * 32}))
    with pytest.raises(PayloadTooLarge):
        session.producer("heavy").send(most + b"0")
    session.producer("heavy").send(most)
    consumer = session.consumer("heavy", "reader")
    received = consumer.receive(LIMIT_S)
    assert received is not None
    received.reject("cannot be read " + "y" * 1000)
    dead = session.consumer("_DMQ", "undertaker").receive(LIMIT_S)
    assert dead is not None
    assert dead.data == most
    assert dead.headers["Sla-Reason"].startswith("cannot be read")
    dead.acknowledge()
    assert consumer.receive(0.5) is None


def test_what_has_expired_is_dead(open_session: OpenSession) -> None:
    session = open_session()
    session.create(small("milk"))
    producer = session.producer("milk")
    producer.send(b"1", expires_s=1e-6)
    producer.send(b"2", expires_s=LIMIT_S * 10)
    assert numbers(session.consumer("milk", "reader"), 1) == [2]
    dead = session.consumer("_DMQ", "milkman").receive(LIMIT_S)
    assert dead is not None
    assert (dead.data, dead.headers["Sla-Reason"]) == (b"1", "expired")
    dead.acknowledge()


def test_handlers_run_in_order_and_failures_come_again(open_session: OpenSession) -> None:
    session = open_session(workers=3)
    found: dict[str, list[int]] = {"steps.a": [], "steps.b": []}
    all_found = threading.Semaphore(0)
    failures = iter([True])

    def handle(received: Received) -> None:
        if received.data == b"5" and received.destination == "steps.a" and next(failures, False):
            raise ValueError("once")
        found[received.destination].append(int(received.data))
        all_found.release()

    for name in found:
        session.create(small(name))
        for number in range(10):
            session.producer(name).send(b"%d" % number)
    session.subscribe("steps.*", "worker", handle)
    for _ in range(20):
        assert all_found.acquire(timeout=LIMIT_S)
    assert found["steps.b"] == list(range(10))
    assert sorted(found["steps.a"]) == list(range(10))


def test_mistakes_are_said(open_session: OpenSession) -> None:
    session = open_session()
    with pytest.raises(DestinationMissing, match="'nowhere'"):
        session.producer("nowhere")
    session.create(small("limits", max_messages=5))
    session.create(small("limits", max_messages=5))
    with pytest.raises(DestinationDiffers, match="max_msgs is 5, not 6"):
        session.create(small("limits", max_messages=6))


class Died(BaseException):
    """The program is gone: nothing of it runs on."""


STEPS = (
    *("opening", "opened", "locked", "staged SLA_move_deu", "staged SLA_move_dus", "decided", "finished"),
    *("kill opened", "kill locked", "kill decided", ""),
)


def test_transactions_are_whole_whoever_dies(cluster: LocalCluster, open_session: OpenSession) -> None:
    """Messages go from one queue to two others. The program dies at each step, or the node that it is at."""
    session = open_session("moving")
    for name in ("move.in", "move.eu", "move.us"):
        session.create(small(name))
    for number in range(len(STEPS)):
        session.producer("move.in").send(b"%d" % number)
    consumer = session.consumer("move.in", "mover")
    moved, plan = 0, iter(STEPS)
    while moved < len(STEPS):
        step = next(plan, "")
        identity = f"move-{step.replace(' ', '-')}-{moved}"

        def fault(name: str, step: str = step, at: MessageSession = session) -> None:
            if name == step:
                raise Died
            if f"kill {name}" == step:
                cluster.kill(node_index(cluster, at))

        received = consumer.receive(LIMIT_S)
        assert received is not None
        try:
            with session.transaction(identity, limit_s=SEND_S, fault=fault) as transaction:
                transaction.acknowledge(received)
                transaction.send("move.eu", received.data)
                transaction.send("move.us", received.data)
            is_committed = True
        except Died:
            is_committed = step in ("decided", "finished")
            session.close()
            session = open_session("moving")
            assert session.outcome(identity) == is_committed
            consumer = session.consumer("move.in", "mover")
        if step.startswith("kill"):
            cluster.restore()
            assert session.outcome(identity)
        moved += is_committed
    assert consumer.receive(0.5) is None
    for name in ("move.eu", "move.us"):
        reader = open_session().consumer(name, "reader")
        assert sorted(numbers(reader, len(STEPS))) == list(range(len(STEPS)))
        assert reader.receive(0.5) is None


def test_a_transaction_in_one_domain_is_one_batch(open_session: OpenSession) -> None:
    session = open_session()
    for name in ("mall.a", "mall.b"):
        session.create(Destination(name, domain="mall", max_bytes=1 << 20, max_messages=4))
    with session.transaction() as transaction:
        for number in range(4):
            transaction.send("mall.a" if number % 2 else "mall.b", b"%d" % number)
    with pytest.raises(DestinationFull), session.transaction() as transaction:
        transaction.send("mall.a", b"4")
    assert numbers(session.consumer("mall.a", "reader"), 2) == [1, 3]
    assert numbers(session.consumer("mall.b", "reader"), 2) == [0, 2]
    assert session.recover_transactions().rolled_back == 0


def test_a_large_message_travels_in_fragments(cluster: LocalCluster, open_session: OpenSession) -> None:
    sending, receiving = open_session("sending"), open_session("receiving")
    sending.create(small("films"))
    film = bytes(range(256)) * 20_000  # 5 MB, with the last fragment shorter
    identity = sending.send_large("films", io.BytesIO(film))
    consumer = receiving.consumer("films", "cinema")
    received = consumer.receive(LIMIT_S)
    assert received is not None
    assert (received.identity, received.data) == (identity, b"")
    pieces = receiving.read_large(received)
    start = next(pieces)
    cluster.kill(node_index(cluster, receiving))
    assert start + b"".join(pieces) == film
    cluster.restore()
    receiving.acknowledge_large(received)
    with pytest.raises(FragmentsDamaged, match="not stored"):
        next(receiving.read_large(received))
    assert consumer.receive(0.5) is None


class _HeldSource(io.BytesIO):
    """Has its last bytes only when it is let go."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.go = threading.Event()
        self._size = len(data)

    def read(self, size: int | None = -1, /) -> bytes:
        if self.tell() + (size or 0) >= self._size:
            assert self.go.wait(LIMIT_S)
        return super().read(size)


def test_a_large_message_is_consumed_before_the_last_of_it_has_come(open_session: OpenSession) -> None:
    sending, receiving = open_session("sending"), open_session("receiving")
    sending.create(small("early-films"))
    film = bytes(range(256)) * 20_000
    source, sent = _HeldSource(film), list[str]()
    thread = threading.Thread(
        target=lambda: sent.append(sending.send_large("early-films", source, early=True))
    )
    thread.start()
    received = receiving.consumer("early-films", "cinema").receive(LIMIT_S)
    assert received is not None
    pieces = receiving.read_large(received)
    start = next(pieces)
    assert sent == []
    source.go.set()
    assert start + b"".join(pieces) == film
    thread.join(LIMIT_S)
    assert sent == [received.identity]
    receiving.acknowledge_large(received)
