"""Headers of callers, and what errors of the engine mean."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import nats.errors
import nats.js.errors
import pytest

from pmdaemon.runtime.clock import Deadline
from sla_server.cluster.messages.batch import is_repeated, store_batch
from sla_server.cluster.messages.catalogue import Catalogue, Destination
from sla_server.cluster.messages.consumer import cause_of_death
from sla_server.cluster.messages.credit import BlockedBy
from sla_server.cluster.messages.errors import BadSettings
from sla_server.cluster.messages.identifiers import IdentifierSource
from sla_server.cluster.messages.link import EngineLink, Trouble, classify
from sla_server.cluster.messages.producer import (
    Outbox,
    Outgoing,
    Producer,
    SendWindows,
    checked_headers,
    expiry,
)


def test_headers() -> None:
    assert checked_headers(None) == {}
    assert checked_headers({"Kind": "x"}) == {"Kind": "x"}
    for bad in (
        {"Nats-Msg-Id": "1"},
        {"sla-reason": "x"},
        {"a": "b\nc"},
        {"": "x"},
        {"a b": "x"},
        {"a": "\udc80"},
    ):
        with pytest.raises(BadSettings, match="headers"):
            checked_headers(bad)


def test_expiry() -> None:
    assert expiry(None) == {}
    header = expiry(60.0)
    now_us = time.time_ns() // 1000
    assert cause_of_death(header, 1, 1, now_us) == ""
    assert cause_of_death(header, 1, 1, now_us + 60_000_001) == "expired"
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(BadSettings, match="expires_s"):
            expiry(bad)


def test_errors_of_the_engine() -> None:
    def refused(code: int, err_code: int, text: str) -> nats.js.errors.APIError:
        return nats.js.errors.APIError(code=code, err_code=err_code, description=text)

    assert classify(refused(503, 10077, "maximum bytes exceeded")) is Trouble.FULL
    assert classify(refused(503, 10077, "raft: could not store entry")) is Trouble.TRANSIENT
    assert classify(refused(503, 10008, "no suitable peers")) is Trouble.TRANSIENT
    assert classify(refused(409, 10158, "duplicate message id is in process")) is Trouble.TRANSIENT
    assert classify(refused(429, 10167, "too many requests")) is Trouble.TRANSIENT
    assert classify(refused(404, 10059, "stream not found")) is Trouble.TRANSIENT
    assert classify(refused(404, 10014, "consumer not found")) is Trouble.TRANSIENT
    assert classify(refused(400, 10058, "stream name already in use")) is Trouble.TRANSIENT
    assert classify(nats.js.errors.KeyNotFoundError()) is Trouble.TRANSIENT
    assert classify(refused(404, 10037, "no message found")) is Trouble.FINAL
    assert classify(refused(400, 10065, "subjects overlap")) is Trouble.FINAL
    assert classify(nats.errors.NoRespondersError()) is Trouble.TRANSIENT
    assert classify(TimeoutError()) is Trouble.TRANSIENT
    assert classify(nats.errors.MaxPayloadError()) is Trouble.FINAL
    assert is_repeated(refused(400, 10201, "duplicate"))
    assert not is_repeated(TimeoutError())


class FakeLink:
    """A primary that gives these answers to those who ask for one, and records what it is sent."""

    limit_bytes = 1 << 20

    def __init__(self, *answers: bytes) -> None:
        self.client = self
        self.answers = list(answers)
        self.sent: list[str] = []

    def check_size(self, _data: bytes, _headers: object) -> None:
        pass

    def forget_denial(self, _subject: str) -> None:
        pass

    async def request(self, subject: str, _data: bytes, **_options: object) -> SimpleNamespace:
        self.sent.append(subject)
        return SimpleNamespace(data=self.answers.pop(0))

    async def publish(self, subject: str, _data: bytes, **_options: object) -> None:
        self.sent.append(subject)


def test_a_primary_without_batches_gets_one_message_of_a_batch() -> None:
    link = FakeLink(b'{"stream": "S", "seq": 1}', b'{"stream": "S", "seq": 3}')
    with pytest.raises(nats.js.errors.APIError, match="no batches"):
        asyncio.run(store_batch(cast(EngineLink, link), [(subject, b"", {}) for subject in "abc"]))
    assert link.sent == ["a"]


class FailingLink:
    """The first message meets an error that is not of nats, the others are stored."""

    def __init__(self, batch: Exception | None = None) -> None:
        self.stored = 0
        self.batch = batch or ValueError("an answer that is no JSON")
        self.open: list[bool] = []

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self.task = asyncio.ensure_future(work)

    def call_soon(self, call: Callable[[], object]) -> None:
        call()

    async def store(
        self, _subject: str, data: bytes, *_more: object, is_open: bool, **_options: object
    ) -> int:
        self.stored += 1
        self.open.append(is_open)
        if self.stored == 1:
            raise AttributeError("of the library")
        return self.stored

    def check_size(self, *_what: object) -> None:
        raise self.batch

    async def retry(self, attempt: Callable[[], Awaitable[None]], *_what: object) -> None:
        await attempt()


async def sent(link: FailingLink, names: str, *, has_batches: bool) -> list[object]:
    """The result, or the error, of a message of each name, sent together."""
    outbox = Outbox(
        cast(EngineLink, link),
        cast(Catalogue, SimpleNamespace(has_batches=has_batches)),
        Destination("q"),
        SendWindows(10, 1000),
    )
    messages = [Outgoing(name, b"", {}, Deadline(60), 60) for name in names]
    for message in messages:
        outbox.add(message, wait=True)
    async with asyncio.timeout(60):
        results = await asyncio.gather(
            *(asyncio.wrap_future(message.done) for message in messages), return_exceptions=True
        )
    link.task.cancel()
    return list(results)


@pytest.mark.parametrize("has_batches", [False, True])
def test_no_error_ends_an_outbox(*, has_batches: bool) -> None:
    """A producer would wait for ever for a task that has ended."""

    async def run() -> list[object]:
        return await sent(FailingLink(), "abc", has_batches=has_batches)

    first, *others = asyncio.run(run())
    assert "message a to 'q' was not confirmed within 60 s: of the library" in str(first)
    assert others == ["b", "c"]


@pytest.mark.parametrize(
    ("problem", "is_open"),
    [(TimeoutError(), True), (nats.js.errors.APIError(code=503, description="maximum bytes"), False)],
)
def test_messages_of_a_batch_without_an_answer_may_still_be_on_their_way(
    problem: Exception, *, is_open: bool
) -> None:
    async def run() -> list[bool]:
        link = FailingLink(problem)
        await sent(link, "ab", has_batches=True)
        return link.open

    assert asyncio.run(run()) == [is_open, is_open]


def test_a_caller_that_gives_up_its_result_ends_no_outbox() -> None:
    message = Outgoing("1", b"", {}, Deadline(1), 1)
    assert not message.done.cancel()
    message.done.set_result("1")


def test_identities_are_no_patterns() -> None:
    """They are parts of subjects: the fragments of ``*`` are all fragments."""
    producer = Producer(cast(Outbox, None), cast(IdentifierSource, None))
    for bad in ("*", "a >", "a\r\nNats-Rollup: all", "\udc80", "x" * 256):
        with pytest.raises(BadSettings, match="identity"):
            producer.send(b"", identity=bad)


def test_headers_count_for_the_windows_as_the_payload_does() -> None:
    async def run() -> None:
        link = FailingLink()
        windows = SendWindows(10, 1000)
        catalogue = cast(Catalogue, SimpleNamespace(has_batches=False))
        outbox = Outbox(cast(EngineLink, link), catalogue, Destination("q"), windows)
        for name in "ab":
            message = Outgoing(name, b"", {"Long": "x" * 500}, Deadline(60), 60)
            assert outbox.add(message, wait=False) is (None if name == "a" else BlockedBy.SESSION_BYTES)
        outbox.close()
        link.task.cancel()

    asyncio.run(run())
