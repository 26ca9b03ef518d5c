"""When a message is dead, what a consumer remembers, and that nothing ends it but ``close``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import nats.js.errors
import pytest
from nats.js.api import ConsumerConfig

from pmdaemon.runtime.backoff import Backoff
from sla_server.cluster.messages.catalogue import Destination, DestinationKind
from sla_server.cluster.messages.consumer import (
    ACK_WAIT_S,
    ORIGIN,
    REASON,
    Consumer,
    cause_of_death,
    headers_of_copy,
    run_handler,
)
from sla_server.cluster.messages.credit import BlockedBy, ReceiveShares
from sla_server.cluster.messages.errors import DestinationFull, NotConfirmed
from sla_server.cluster.messages.feed import (
    PULL_S,
    DestinationFeed,
    Received,
    Seen,
    Visibility,
    engine_name,
    keep_s,
    refusal_of,
)
from sla_server.cluster.messages.link import ANSWER_S, BATCH_BYTES, HEADERS_BYTES, EngineLink, size_bytes
from sla_server.cluster.messages.mirror_streams import PROMOTED_LAST
from sla_server.cluster.messages.names import Selector
from sla_server.cluster.messages.producer import EXPIRES, IDENTITY
from sla_server.cluster.messages.transaction import DECISION_S
from sla_server.cluster.messages.transaction_records import Mark


def test_cause_of_death() -> None:
    assert cause_of_death({}, 3, 3, 0) == ""
    assert cause_of_death({}, 4, 3, 0) == "handed out 3 times and never acknowledged"
    assert cause_of_death({EXPIRES: "100"}, 1, 3, 99) == ""
    assert cause_of_death({EXPIRES: "100"}, 1, 3, 100) == "expired"
    assert cause_of_death({EXPIRES: "soon"}, 1, 3, 100) == ""


@pytest.mark.parametrize("destination", ["q", "q" * 120])
@pytest.mark.parametrize("identity", ["ab" * 16, "x" * 255])
@pytest.mark.parametrize("again", [False, True])
def test_a_dead_message_as_large_as_any_has_a_copy(destination: str, identity: str, again: bool) -> None:
    """Else it would be handed out and kept back for ever."""
    limit_bytes = 1 << 20
    headers = {IDENTITY: identity, "Kind": "bad"}
    data = bytes(limit_bytes - HEADERS_BYTES - size_bytes(b"", headers))
    if again:  # it was sent again from _DMQ, with the first one's identity beside a short one
        headers |= {"Sla-Identity": identity, IDENTITY: "again:SLA___DMQ:123456789"}
    alive = SimpleNamespace(destination=destination, identity=headers[IDENTITY], data=data, headers=headers)
    copies = [
        headers_of_copy(cast(Received, alive), "cannot be read: é" + "y" * more, limit_bytes - BATCH_BYTES)
        for more in (0, 0, 5000)
    ]
    for copy in copies:
        assert size_bytes(data, copy) <= limit_bytes - BATCH_BYTES
        assert (copy[ORIGIN], copy["Sla-Identity"], copy["Kind"]) == (destination, identity, "bad")
        assert copy[REASON].startswith("cannot be read: é")
        assert copy[IDENTITY].startswith("dead:")
    assert copies[0] == copies[1]


def test_a_small_dead_message_says_all_of_it() -> None:
    headers = {IDENTITY: "ab", "Nats-Expected-Stream": "S", "Sla-Transaction": "t", "Kind": "bad"}
    alive = SimpleNamespace(destination="q", identity="ab", data=b"1", headers=headers)
    copy = headers_of_copy(cast(Received, alive), "two\nlines", 1000)
    assert copy == {
        "Kind": "bad",
        ORIGIN: "q",
        REASON: "two lines",
        "Sla-Identity": "ab",
        IDENTITY: "dead:q:ab",
    }


def test_a_time_of_thousands_of_digits_ends_nothing_and_the_message_can_die() -> None:
    """Any program with an account can write it; an error there would come with each time it is handed out."""
    assert cause_of_death({EXPIRES: "9" * 5000}, 1, 3, 100) == ""
    assert cause_of_death({EXPIRES: "9" * 5000}, 4, 3, 100).startswith("handed out 3 times")


def test_the_oldest_identity_is_forgotten_first() -> None:
    seen = Seen(2)
    for identity in ("a", "b", "a", "c"):
        seen.add(identity)
    assert [identity in seen for identity in "abc"] == [True, False, True]


def test_consumers_of_a_queue_are_one_to_the_engine() -> None:
    queue, topic = Destination("orders.eu"), Destination("news", DestinationKind.TOPIC)
    assert engine_name(queue, "a") == engine_name(queue, "b") == "queue-orders_deu"
    assert engine_name(topic, "a.b") == "a_db-news" != engine_name(topic, "a_b")


class FakeLink:
    """An engine without a majority for so many tries; it is asked for messages and records that."""

    def __init__(
        self, failures: int = 0, there: ConsumerConfig | None = None, failure: Exception | None = None
    ) -> None:
        self.failure = failure
        self.client = self.stream = self
        self.failures = failures
        self.there = there
        self.made: list[tuple[object, object]] = []
        self.config: dict[str, Any] = {"subjects": ["sla.d.q.>"]}
        self.asked: asyncio.Queue[str] = asyncio.Queue()
        self.wanted: list[dict[str, int]] = []
        self.came: Callable[[Any], Awaitable[None]]

    async def retry(self, attempt: Callable[[], Awaitable[None]], what: str, limit_s: float) -> None:
        if self.failures:
            self.failures -= 1
            raise self.failure or NotConfirmed(what, limit_s, "no majority")
        await attempt()

    def new_inbox(self) -> str:
        return "_INBOX.1"

    async def subscribe(self, _subject: str, cb: Callable[[Any], Awaitable[None]]) -> FakeLink:
        self.came = cb
        return self

    async def unsubscribe(self) -> None:
        pass

    async def consumer_info(self, _stream: str, _name: str) -> SimpleNamespace:
        if self.there is None:
            raise nats.js.errors.NotFoundError
        return SimpleNamespace(config=self.there)

    async def ask(self, subject: str, body: dict[str, Any]) -> dict[str, Any]:
        if subject.startswith("STREAM.INFO."):
            return {"config": self.config}
        self.made.append((body["action"], body["config"]["ack_wait"]))
        return {}

    async def publish(self, _subject: str, data: bytes, reply: str = "") -> None:
        if reply:
            self.wanted.append(json.loads(data))
            self.asked.put_nowait(reply)


class FakeConsumer:
    credit = 5
    credit_bytes = 1000
    ack_wait_s = 30.0
    name = "reader"

    def __init__(self) -> None:
        self.ready_feeds = 0
        self.ready: list[str] = []

    def add_ready(self, received: Received) -> None:
        self.ready.append(received.identity)

    def add_ready_feed(self) -> None:
        self.ready_feeds += 1


def test_what_is_held_is_kept_over_a_failover() -> None:
    """The engine heard of it some time before, and hears of it again some time after the election."""
    assert 2 * keep_s(ACK_WAIT_S) + DECISION_S < ACK_WAIT_S
    assert keep_s(1.0) < 0.5  # some rounds may be late


def feed_of(link: FakeLink, consumer: FakeConsumer, visibility: object = None) -> DestinationFeed:
    feed = DestinationFeed(
        cast(Consumer, consumer),
        cast(EngineLink, link),
        Destination("q"),
        lambda *_: None,
        cast(Visibility, visibility),
        ReceiveShares(1000, 1 << 20),
    )
    feed._pause = Backoff(0.0, 0.0)  # no test waits
    return feed


def test_a_consumer_outlives_an_outage_and_the_loss_of_its_engine_side() -> None:
    link, consumer = FakeLink(failures=2), FakeConsumer()

    async def run() -> None:
        feed = feed_of(link, consumer)
        async with asyncio.timeout(60):
            assert await link.asked.get() == "_INBOX.1.1"
            await link.came(SimpleNamespace(subject="_INBOX.1.1", headers={"Status": "408"}))
            assert await link.asked.get() == "_INBOX.1.2"
            assert len(link.made) == 1
            await link.came(SimpleNamespace(subject="_INBOX.1.2", headers={"Status": "503"}))
            assert await link.asked.get() == "_INBOX.1.3"
        assert len(link.made) == 2
        await feed.close()

    asyncio.run(run())
    assert consumer.ready_feeds == 1


def ask_once(link: FakeLink) -> None:
    """Run a feed until it has asked for messages."""

    async def run() -> None:
        feed = feed_of(link, FakeConsumer())
        async with asyncio.timeout(60):
            await link.asked.get()
        await feed.close()

    asyncio.run(run())


def test_the_time_of_others_is_not_shortened() -> None:
    link = FakeLink(there=ConsumerConfig(ack_wait=90.0))
    ask_once(link)
    assert link.made == [("update", 90_000_000_000)]


def test_no_consumer_is_overwritten_by_one_that_did_not_find_it() -> None:
    """The node that says so may be behind; then the engine refuses to make it, and it is asked again."""
    link = FakeLink()
    ask_once(link)
    assert link.made == [("create", 30_000_000_000)]


def test_an_error_that_no_one_knows_ends_no_consumer() -> None:
    link = FakeLink(failures=1, failure=AttributeError("of the library"))

    async def run() -> None:
        feed = feed_of(link, FakeConsumer())
        async with asyncio.timeout(60):
            assert await link.asked.get() == "_INBOX.1.1"
        await feed.close()

    asyncio.run(run())


def test_what_ends_a_request() -> None:
    assert refusal_of({"Status": "408", "Description": "Request Timeout"}) == ""
    assert refusal_of({"Status": "404"}) == ""
    assert refusal_of({"Status": "409", "Description": "Batch Completed"}) == ""
    assert refusal_of({"Status": "409", "Description": "Consumer Deleted"}) == "409 Consumer Deleted"
    assert refusal_of({}) == "no status"


def test_a_message_that_is_larger_than_all_credit_comes_alone() -> None:
    link, consumer = FakeLink(), FakeConsumer()
    too_large = {"Status": "409", "Description": "Message Size Exceeds MaxBytes"}

    async def run() -> None:
        feed = feed_of(link, consumer, Decisions(is_committed=True))
        async with asyncio.timeout(60):
            await link.asked.get()
            await link.came(came(1))
            await link.came(SimpleNamespace(subject="_INBOX.1.1", headers=too_large))
            assert feed.blocked_by is BlockedBy.CONSUMER_BYTES
            await feed.give_back(feed._held["1"])  # as its consumer does
            await link.asked.get()
            await link.came(SimpleNamespace(subject="_INBOX.1.2", headers=too_large))
            await link.asked.get()
        await feed.close()

    asyncio.run(run())
    assert [(wanted["batch"], wanted.get("max_bytes")) for wanted in link.wanted] == [
        (5, 1000),
        (5, 1000),
        (1, None),
    ]


class Decisions:
    """A transaction that is open until ``decided``, and messages that another one has acknowledged."""

    def __init__(self, *, is_committed: bool, taken: int = 0) -> None:
        self.decided = asyncio.Event()
        self._is_committed = is_committed
        self._taken = taken

    async def is_committed(self, mark: Mark) -> bool:
        assert mark == Mark("t", "o")
        await self.decided.wait()
        return self._is_committed

    async def is_taken(self, _stream: str, _consumer: str, sequence: int) -> bool:
        return sequence == self._taken


def came(sequence: int, deliveries: int = 1, **headers: str) -> SimpleNamespace:
    return SimpleNamespace(
        subject="sla.d.q.q",
        data=b"%d" % sequence,
        reply=f"ack.{sequence}",
        headers={"Nats-Msg-Id": str(sequence)}
        | {key.replace("_", "-"): text for key, text in headers.items()},
        metadata=SimpleNamespace(num_delivered=deliveries, sequence=SimpleNamespace(stream=sequence)),
    )


@pytest.mark.parametrize("is_committed", [True, False])
def test_what_is_behind_an_open_transaction_waits_with_it(*, is_committed: bool) -> None:
    link, consumer = FakeLink(), FakeConsumer()

    async def run() -> None:
        decisions = Decisions(is_committed=is_committed, taken=4)
        feed = feed_of(link, consumer, decisions)
        async with asyncio.timeout(60):
            await link.asked.get()
            for message in (came(1), came(2, Sla_Transaction="t o"), came(3), came(4, 2), came(5, 2)):
                await link.came(message)
            await asyncio.sleep(0)
            assert consumer.ready == ["1"]
            decisions.decided.set()
            while "5" not in consumer.ready:
                await asyncio.sleep(0)
        await feed.close()

    asyncio.run(run())
    assert consumer.ready == (["1", "2", "3", "5"] if is_committed else ["1", "3", "5"])


class ReplaceableLink(FakeLink):
    """Its engine's consumer may be made again; acknowledgements of the former one have no answer."""

    created = "1"

    def __init__(self) -> None:
        super().__init__()
        self.acknowledged: list[str] = []

    async def ask(self, subject: str, body: dict[str, Any]) -> dict[str, Any]:
        if subject.startswith("CONSUMER."):
            return {"created": self.created}
        return await super().ask(subject, body)

    async def request(self, reply: str, _data: bytes, timeout: float) -> None:
        if not reply.startswith(self.created):
            raise TimeoutError(timeout)
        self.acknowledged.append(reply)


def came_of(created: str, sequence: int) -> SimpleNamespace:
    message = came(sequence)
    message.reply = f"{created}.{message.reply}"
    return message


def test_what_could_not_be_acknowledged_as_its_consumer_was_made_again_is_handed_out_again() -> None:
    """A program that undoes its work on ``NotConfirmed`` would lose it otherwise."""
    link, consumer = ReplaceableLink(), FakeConsumer()

    async def run() -> None:
        feed = feed_of(link, consumer, Decisions(is_committed=True))
        try:
            async with asyncio.timeout(60):
                await link.asked.get()
            for sequence in range(1, 6):  # all its credit
                await link.came(came_of("1", sequence))
            assert feed.blocked_by is BlockedBy.CONSUMER
            first = feed._held["1"]  # as its consumer does
            link.created = "2"
            for _ in range(2):
                with pytest.raises(NotConfirmed, match="made again"):
                    await feed.acknowledge(first, 1.0)
                assert not first.is_held
                assert feed.blocked_by is None
            await link.came(came_of("2", 1))
            async with asyncio.timeout(60):
                while consumer.ready != ["1", "2", "3", "4", "5", "1"]:
                    await asyncio.sleep(0)
            with pytest.raises(NotConfirmed):  # what came again is not acknowledged yet
                await feed.acknowledge(first, 1.0)
            await feed.acknowledge(feed._held["1"], 1.0)
            await feed.acknowledge(first, 1.0)
            assert link.acknowledged == ["2.ack.1"]
            # What comes again before it is acknowledged is the new consumer's from then on.
            second = feed._held["2"]
            await link.came(came_of("2", 2))
            await feed.acknowledge(second, 1.0)
            assert link.acknowledged == ["2.ack.1", "2.ack.2"]
            assert consumer.ready[6:] == []
        finally:
            await feed.close()

    asyncio.run(run())


def test_what_a_transaction_has_acknowledged_comes_from_no_promoted_mirror_again() -> None:
    """To the consumer that a promotion has made it comes for the first time."""
    link, consumer = FakeLink(), FakeConsumer()
    link.config["metadata"] = {PROMOTED_LAST: "2"}

    async def run() -> None:
        feed = feed_of(link, consumer, Decisions(is_committed=True, taken=1))
        try:
            async with asyncio.timeout(60):
                await link.asked.get()
                for sequence in (1, 2, 3):
                    await link.came(came(sequence))
                while "3" not in consumer.ready:
                    await asyncio.sleep(0)
        finally:
            await feed.close()

    asyncio.run(run())
    assert consumer.ready == ["2", "3"]


def test_what_a_transaction_has_acknowledged_is_dropped_when_its_consumer_was_made_again() -> None:
    """Its acknowledgement was not confirmed, so it comes again, and for the first time."""
    link, consumer = ReplaceableLink(), FakeConsumer()

    async def run() -> None:
        feed = feed_of(link, consumer, Decisions(is_committed=True, taken=1))
        try:
            async with asyncio.timeout(60):
                await link.asked.get()
                await link.came(came_of("1", 1))
                link.created = "2"
                with pytest.raises(NotConfirmed):
                    await feed.acknowledge(feed._held["1"], 1.0)
                await link.came(came_of("2", 1))
                while "1" in feed._held:
                    await asyncio.sleep(0)
                await link.came(came_of("2", 2))  # the former consumer never gave it out
        finally:
            await feed.close()

    asyncio.run(run())
    assert consumer.ready == ["1", "2"]


def test_a_feed_that_has_asked_for_nothing_for_long_sees_first_whether_a_mirror_was_promoted() -> None:
    """With all its credit in hand it hears nothing of the primary, nor of its end."""
    link, consumer = FakeLink(), FakeConsumer()

    async def run() -> None:
        feed = feed_of(link, consumer, Decisions(is_committed=True, taken=9))
        try:
            async with asyncio.timeout(60):
                await link.asked.get()
                for sequence in range(1, 6):
                    await link.came(came(sequence))
                link.config["metadata"] = {PROMOTED_LAST: "9"}
                feed._heard_at_s -= PULL_S + ANSWER_S  # no test waits
                await feed.give_back(feed._held["1"])  # as its consumer does
                await link.asked.get()
                await link.came(came(9))
                while "9" in feed._held:
                    await asyncio.sleep(0)
        finally:
            await feed.close()

    asyncio.run(run())
    assert "9" not in consumer.ready


def test_no_consumer_is_made_while_a_promotion_copies_the_messages_of_a_mirror() -> None:
    """It makes those of subscribers itself, where they were: made before, they would begin at the first."""
    link = FakeLink()
    link.config = {"mirror": {"name": "SLA_q_mn1"}}

    async def run() -> None:
        feed = feed_of(link, FakeConsumer())
        try:
            with pytest.raises(TimeoutError, match="is being promoted"):
                await feed._make_consumer()  # which ``retry`` repeats
            assert link.made == []
            link.config = {"subjects": ["sla.d.q.>"]}
            async with asyncio.timeout(60):
                await link.asked.get()
        finally:
            await feed.close()

    asyncio.run(run())
    assert len(link.made) == 1


class FakeReceived:
    identity = destination = "x"
    deliveries = 3
    is_held = True

    def __init__(self, problem: Exception | None = None) -> None:
        self.problem = problem
        self.steps: list[object] = []

    def acknowledge(self) -> None:
        self.steps.append("acknowledge")
        if self.problem is not None:
            raise self.problem

    def give_back(self, after_s: float = 0.0) -> None:
        self.steps.append(after_s)


class Living:
    def remove_if_dead(self, _received: object) -> bool:
        return False


def handled(received: FakeReceived, problem: Exception | None = None) -> list[object]:
    def handler(_received: object) -> None:
        if problem is not None:
            raise problem

    run_handler(cast(Consumer, Living()), cast(Received, received), handler)
    return received.steps


def test_a_handler_that_cannot_send_on_gives_the_message_back() -> None:
    """Else it is held for as long as the session lives, and its credit is gone."""
    assert handled(FakeReceived()) == ["acknowledge"]
    assert handled(FakeReceived(), DestinationFull("q", "maximum messages")) == [0.4]
    assert handled(FakeReceived(), ValueError("x")) == [0.4]
    assert handled(FakeReceived(NotConfirmed("x", 1, "no answer"))) == ["acknowledge", 0.4]


def test_what_was_given_back_meanwhile_is_not_handled() -> None:
    received = FakeReceived()
    received.is_held = False
    assert handled(received, AssertionError("it was handled")) == []


def test_what_cannot_be_buried_is_given_back() -> None:
    link = cast(EngineLink, SimpleNamespace(run=lambda work: work.close()))

    def full(*_: object) -> None:
        raise DestinationFull("_DMQ", "maximum bytes")

    nothing = cast(Any, None)
    consumer = Consumer(link, nothing, Selector("q"), "reader", full, nothing, nothing, max_deliveries=2)
    received = FakeReceived()
    received.headers, received.reject = {}, full  # type: ignore[attr-defined]
    assert consumer.remove_if_dead(cast(Received, received))
    assert received.steps == [5.0]
