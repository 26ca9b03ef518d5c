"""An engine in memory, with what transactions need of it, and links to it that lose requests and answers.

``Engine`` has streams with one message a subject or many, identities, compare-and-set, batches and removal.
``EngineSession`` is what a transaction sees of a session; its link asks the engine one thing after the other.
Each of its requests is a step, and ``fault`` says what becomes of it: lost before the engine has it, lost on
its way back, or the program dies before or after it. Nothing waits.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import itertools
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from datetime import UTC, datetime
from enum import Enum
from types import SimpleNamespace
from typing import Any, Final, TypeVar, cast

import nats.errors
import nats.js.errors

from pmdaemon.runtime.clock import FakeClock
from sla_server.cluster.messages.catalogue import Catalogue, Destination, engine_name
from sla_server.cluster.messages.errors import NotConfirmed
from sla_server.cluster.messages.link import EngineLink, Trouble, classify
from sla_server.cluster.messages.session import MessageSession
from sla_server.cluster.messages.transaction import Transaction
from sla_server.cluster.messages.transaction_records import Mark
from sla_server.cluster.messages.transaction_recovery import TransactionRecovery
from sla_server.cluster.messages.transaction_register import TransactionRegister

Result = TypeVar("Result")
TRIES: Final = 40
BATCHES = {"allow_atomic": True}


class Fault(Enum):
    """What becomes of a request."""

    LOST = "it does not come to the engine"
    UNANSWERED = "its answer is lost"
    DIES_BEFORE = "the program dies before it"
    DIES_AFTER = "the program dies when the engine has done it"


class Died(BaseException):
    """The program is gone: no handler of errors runs on."""


@dataclasses.dataclass
class Message:
    """One stored message."""

    subject: str
    data: bytes
    headers: dict[str, str]
    at_unix_us: int


class Stream:
    """One stream of the engine."""

    def __init__(self, clock: FakeClock, *, is_one_each: bool = False, most: int = 10**6) -> None:
        self.clock = clock
        self.is_one_each = is_one_each
        self.most = most
        self.messages: dict[int, Message] = {}
        self.last = 0
        self.identities: dict[str, int] = {}
        self.batches: dict[str, list[tuple[str, bytes, dict[str, str]]]] = {}

    def last_of(self, subject: str) -> int:
        return max((seq for seq, found in self.messages.items() if found.subject == subject), default=0)

    def publish(self, subject: str, data: bytes, headers: dict[str, str]) -> dict[str, Any]:
        if (batch := headers.get("Nats-Batch-Id")) is None:
            return self._store([(subject, data, headers)], {})
        rows = self.batches.setdefault(batch, [])
        rows.append((subject, data, headers))
        if "Nats-Batch-Commit" not in headers:
            return {}
        del self.batches[batch]
        if int(headers["Nats-Batch-Sequence"]) != len(rows):
            return refusal(400, 10176, "batch publish is incomplete")
        return self._store(rows, {"batch": batch})

    def _store(self, rows: list[tuple[str, bytes, dict[str, str]]], more: dict[str, Any]) -> dict[str, Any]:
        for subject, _data, headers in rows:
            known = self.identities.get(headers["Nats-Msg-Id"])
            if known is not None and more:
                return refusal(400, 10201, "duplicate message id")
            if known is not None:
                return {"seq": known, "duplicate": True}
            expected = headers.get("Nats-Expected-Last-Subject-Sequence")
            if expected is not None and int(expected) != self.last_of(subject):
                return refusal(400, 10071, f"wrong last sequence: {self.last_of(subject)}")
        if len(self.messages) + len(rows) > self.most:
            return refusal(503, 10077, "maximum messages exceeded")
        for subject, data, headers in rows:
            if self.is_one_each:
                self.messages.pop(self.last_of(subject), None)
            self.last += 1
            self.messages[self.last] = Message(subject, data, headers, self.clock.unix_us())
            self.identities[headers["Nats-Msg-Id"]] = self.last
        return {"seq": self.last} | more


def refusal(code: int, err_code: int, text: str) -> dict[str, Any]:
    return {"error": {"code": code, "err_code": err_code, "description": text}}


class Engine:
    """Streams by name; ``acknowledged`` has the replies of what was."""

    def __init__(self, *, has_batches: bool) -> None:
        self.clock = FakeClock()
        self.has_batches = has_batches
        self.max_bytes = 1 << 20
        self.streams: dict[str, Stream] = {}
        self.destinations: dict[str, Destination] = {}
        self.acknowledged: set[str] = set()

    def add(self, name: str, domain: str = "", most: int = 10**6) -> Destination:
        destination = Destination(name, domain=domain)
        self.destinations[name] = destination
        self.streams.setdefault(destination.stream, Stream(self.clock, most=most))
        return destination

    def stored(self, name: str) -> list[Message]:
        """What a destination has, in order."""
        destination = self.destinations[name]
        messages = self.streams[destination.stream].messages
        return [found for _, found in sorted(messages.items()) if found.subject == destination.subject]

    def request(self, subject: str, data: bytes, headers: Mapping[str, str] | None) -> dict[str, Any]:
        if subject.startswith("$JS.ACK"):
            self.acknowledged.add(subject)
            return {}
        if subject.startswith("$JS.API."):
            return self._ask(subject.removeprefix("$JS.API."), json.loads(data or b"{}"))
        if subject.startswith("sla.t."):
            return self.streams["SLA_TRANSACTIONS"].publish(subject, data, dict(headers or {}))
        domain = subject.split(".")[2]
        return self.streams[f"SLA_{domain}"].publish(subject, data, dict(headers or {}))

    def _ask(self, what: str, wanted: dict[str, Any]) -> dict[str, Any]:
        action, _, name = what.rpartition(".")
        if what == "STREAM.NAMES":
            return {"streams": [found for found in self.streams if found == "SLA_TRANSACTIONS"]}
        if (stream := self.streams.get(name)) is None:
            return refusal(404, 10059, "stream not found")
        if action == "STREAM.INFO":
            sequences = stream.messages.keys()
            state = {"first_seq": min(sequences, default=stream.last + 1), "last_seq": stream.last}
            return {"state": state | {"bytes": 100 * len(sequences)}, "config": self._config()}
        if action == "STREAM.MSG.DELETE":
            found = stream.messages.pop(wanted["seq"], None)
            return {"success": True} if found else refusal(500, 10057, "no message found")
        assert action == "STREAM.MSG.GET"
        return self._get(stream, wanted)

    def _get(self, stream: Stream, wanted: dict[str, Any]) -> dict[str, Any]:
        if "last_by_subj" in wanted:
            sequence = stream.last_of(wanted["last_by_subj"])
        elif "next_by_subj" in wanted:
            prefix = wanted["next_by_subj"].removesuffix(">")
            later = (
                seq
                for seq, found in stream.messages.items()
                if seq >= wanted["seq"] and found.subject.startswith(prefix)
            )
            sequence = min(later, default=0)
        else:
            sequence = wanted["seq"]
        if sequence not in stream.messages:
            return refusal(404, 10037, "no message found")
        found = stream.messages[sequence]
        at = datetime.fromtimestamp(found.at_unix_us / 1e6, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "message": {
                "subject": found.subject,
                "seq": sequence,
                "data": base64.b64encode(found.data).decode(),
                "time": at,
            }
        }

    def _config(self) -> dict[str, Any]:
        return (BATCHES if self.has_batches else {}) | {"max_bytes": self.max_bytes}


def no_fault(_step: int) -> Fault | None:
    return None


class LossyLink(EngineLink):
    """A link to an ``Engine``; the real one's code, without its connection, thread and waiting."""

    def __init__(self, engine: Engine, fault: Callable[[int], Fault | None] = no_fault) -> None:
        self.engine = engine
        self.fault = fault
        self.connected_server_version = SimpleNamespace(major=2, minor=12 if engine.has_batches else 9)
        self.steps = 0
        self.is_dead = False
        self.asked: set[str] = set()
        self.max_payload = 1 << 20
        self.client = cast(Any, self)
        self.stream = cast(Any, SimpleNamespace(publish=self._publish_js, stream_info=self._info))
        self.loop = asyncio.new_event_loop()
        self._replaced = {}
        self._denied = set()
        self._account = ""

    @property
    def limit_bytes(self) -> int:
        return 1 << 20

    def jetstream(self, **_options: object) -> Any:
        """The keeper has its client of someone else."""
        return self.stream

    def run(self, work: Coroutine[Any, Any, Result], limit_s: float | None = None) -> Result:
        outer = asyncio._get_running_loop()  # a fault of one session is another one's work
        asyncio._set_running_loop(None)
        try:
            return self.loop.run_until_complete(work)
        finally:
            asyncio._set_running_loop(outer)

    def close(self, *_what: object) -> None:
        self.loop.close()

    async def retry(self, attempt: Callable[[], Awaitable[Result]], what: str, limit_s: float) -> Result:
        for _ in range(TRIES):
            try:
                return await attempt()
            except nats.errors.Error as exc:
                if classify(exc) is not Trouble.TRANSIENT:
                    raise
            except TimeoutError:
                continue
        raise NotConfirmed(what, limit_s, "no answer")

    async def request(
        self, subject: str, data: bytes, *, timeout: float, headers: Mapping[str, str] | None = None
    ) -> SimpleNamespace:
        return SimpleNamespace(data=json.dumps(self._step(subject, data, headers)).encode())

    async def publish(
        self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None, **_more: object
    ) -> None:
        with contextlib.suppress(TimeoutError):  # no one waits for an answer
            self._step(subject, data, headers)

    async def _publish_js(
        self, subject: str, data: bytes, *, headers: Mapping[str, str], **_more: object
    ) -> SimpleNamespace:
        answer = self._step(subject, data, headers)
        if "error" in answer:
            raise nats.js.errors.APIError.from_error(answer["error"])
        return SimpleNamespace(seq=answer["seq"])

    async def _info(self, name: str) -> None:
        self.engine.streams.setdefault(name, Stream(self.engine.clock, is_one_each=True))

    def _step(self, subject: str, data: bytes, headers: Mapping[str, str] | None) -> dict[str, Any]:
        if self.is_dead:
            raise Died
        self.asked.add(subject)
        fault = self.fault(self.steps)
        self.steps += 1
        if fault is Fault.DIES_BEFORE:
            self.is_dead = True
            raise Died
        if fault is Fault.LOST:
            raise TimeoutError
        answer = self.engine.request(subject, data, headers)
        if fault is Fault.DIES_AFTER:
            self.is_dead = True
            raise Died
        if fault is Fault.UNANSWERED:
            raise TimeoutError
        return answer


class FakeReceived:
    """A message of a queue that a session holds."""

    def __init__(self, link: LossyLink, destination: Destination, sequence: int) -> None:
        self.link = link
        self.stream = destination.stream
        self.engine_consumer = engine_name(destination, "x")
        self.sequence = sequence
        self.reply = f"$JS.ACK.{self.stream}.{self.engine_consumer}.1.{sequence}.1.1.0"
        self.is_held = True
        self.age_s = 0.0

    def held_s(self) -> float:
        return self.age_s

    async def acknowledge_in_link(self, limit_s: float) -> None:
        async def attempt() -> None:
            await self.link.request(self.reply, b"+ACK", timeout=1.0)

        await self.link.retry(attempt, "an acknowledgement", limit_s)
        self.is_held = False

    def give_back(self) -> None:
        self.is_held = False


class EngineSession:
    """What a transaction sees of a session, and what consumers ask."""

    _names = itertools.count(1)

    def __init__(self, engine: Engine, fault: Callable[[int], Fault | None] = no_fault) -> None:
        self.name = f"s{next(self._names)}"
        self.engine = engine
        self.link = LossyLink(engine, fault)
        self.catalogue = cast(Catalogue, SimpleNamespace(has_batches=engine.has_batches))
        self.register = TransactionRegister(
            self.link, self.catalogue, self.name, 3, 1 << 20, clock=engine.clock
        )
        self.recovery = TransactionRecovery(self.link, self.register)
        self.identifiers = self
        self._count = itertools.count(1)
        self.flushed: list[str] = []

    def make(self) -> str:
        return f"{self.name}-{next(self._count)}"

    def destination(self, name: str) -> Destination:
        return self.engine.destinations[name]

    def flush(self, name: str, _limit_s: float) -> None:
        self.flushed.append(name)

    def has_received(self, received: FakeReceived) -> bool:
        return received.link is self.link

    def transaction(self, identity: str = "", **options: Any) -> Transaction:
        return Transaction(
            cast(MessageSession, self), self.register, identity, options.pop("limit_s", 30.0), **options
        )

    def visible(self, name: str) -> list[bytes]:
        """What a consumer of a destination would be handed, in order."""

        async def read() -> list[bytes]:
            found = []
            for message in self.engine.stored(name):
                mark = message.headers.get("Sla-Transaction")
                if mark is None or await self.register.is_committed(Mark.parse(mark)):
                    found.append(message.data)
            return found

        return self.link.run(read())

    def is_taken(self, received: FakeReceived) -> bool:
        """What a consumer would find that is handed this message once more."""
        return self.link.run(
            self.register.is_taken(received.stream, received.engine_consumer, received.sequence)
        )

    def close(self) -> None:
        self.link.close()
