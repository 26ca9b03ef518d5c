"""Reads and writes the states and locks of transactions in the cluster (``transaction_records``).

Every write is one of compare-and-set, safe to repeat: its identity has the owner in it, so that a repetition
is known to the engine, and no other's write is taken for it. What a read says of an open transaction may be
old; that it is decided is final. That there is no state is believed only when "rolled back" was stored in its
place, which needs a majority: a primary that is behind cannot make a committed message disappear.

State: the outcomes that were read, of which the last ``KNOWN`` are remembered. Thread: the link's.
"""

from __future__ import annotations

import base64
import calendar
import dataclasses
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import nats.js.api
import nats.js.errors

from pmdaemon.runtime.clock import Clock, Deadline, SystemClock
from sla_server.cluster.messages.batch import store_batch
from sla_server.cluster.messages.catalogue import DUPLICATES_S, Catalogue
from sla_server.cluster.messages.errors import (
    DestinationFull,
    MessageTaken,
    NotConfirmed,
    TransactionExists,
)
from sla_server.cluster.messages.link import EngineLink, Trouble, classify
from sla_server.cluster.messages.producer import IDENTITY, SEND_LIMIT_S
from sla_server.cluster.messages.transaction_records import (
    MOST_OPEN_S,
    STATES,
    STREAM,
    SUBJECTS,
    LockedMessage,
    Mark,
    Record,
    State,
    state_subject,
)

KNOWN: Final = 10_000
DECIDE_S: Final = 2.0
ROOM_S: Final = 5.0
FULL_RATIO: Final = 0.75
"""Beyond it nothing is opened: decisions on what is open, and locks, must have room."""
_EXPECTED: Final = "Nats-Expected-Last-Subject-Sequence"
_WRONG_SEQUENCE: Final = 10071
_NO_MESSAGE: Final = 10037


class Stored(NamedTuple):
    """A message of the stream."""

    subject: str
    sequence: int
    data: bytes
    at_unix_us: int


class Bounds(NamedTuple):
    """First and last sequence of a stream, its bytes and their limit; -1: there is none."""

    first: int
    last: int
    bytes: int
    max_bytes: int


class TransactionRegister:
    """See the module.

    Args:
        link: of the session.
        session: its name, for those who read a state.
        replicas, max_bytes: of the stream, if it is made here.
        clock: which time of an open transaction is up.
    """

    def __init__(
        self,
        link: EngineLink,
        catalogue: Catalogue,
        session: str,
        replicas: int,
        max_bytes: int,
        clock: Clock | None = None,
    ) -> None:
        self.session = session
        self.clock = clock or SystemClock()
        self._link = link
        self._catalogue = catalogue
        self._replicas = replicas
        self._max_bytes = max_bytes
        self._known: OrderedDict[Mark, bool] = OrderedDict()
        self._atomic: dict[str, bool] = {}
        self._is_made = False
        self._room_checked = Deadline(0)

    async def open(self, mark: Mark, record: Record, limit_s: float) -> int:
        """Store an open transaction; its sequence.

        Raises:
            TransactionExists: the identity was used before.
            DestinationFull: there are too many transactions.
            NotConfirmed: perhaps it is open; it is rolled back by whoever finds it.
        """
        await self.make(limit_s)
        await self._check_room(limit_s)
        try:
            return await self._write(state_subject(mark.identity), record.encode(), mark.owner, 0, limit_s)
        except nats.js.errors.APIError as exc:
            if exc.err_code != _WRONG_SEQUENCE:
                raise
        found = await self.read(mark.identity, limit_s)
        if found is not None:
            sequence, there = found
            if there.owner == mark.owner and there.state is State.OPEN:
                return sequence
            raise TransactionExists(mark.identity, there.state.value)
        raise NotConfirmed(f"transaction {mark.identity}", limit_s, "the primary is behind")

    async def decide(self, mark: Mark, sequence: int, record: Record, limit_s: float) -> Record:
        """Store a decision over the state of this sequence, or find the one that came first; that counts.

        Raises:
            NotConfirmed: not known which.
        """
        deadline = Deadline(limit_s)
        identity = state_subject(mark.identity)
        try:
            by = f"{mark.owner}:{record.state.name}:{self.session}:{sequence}"
            await self._write(identity, record.encode(), by, sequence, limit_s)
            return record
        except nats.js.errors.APIError as exc:
            if exc.err_code != _WRONG_SEQUENCE:
                raise

        async def attempt() -> Record:
            found = await self.read(mark.identity, deadline.left_s())
            if found is None and sequence == 0:
                raise TimeoutError("the state is not stored, and was a moment ago")
            if found is None:  # rolled back, and removed since
                return record.decided(State.ROLLED_BACK)
            if found[1].state is State.OPEN:
                raise TimeoutError("the primary is behind")
            return found[1]

        return await self._link.retry(
            attempt, f"state of transaction {mark.identity}", max(1.0, deadline.left_s())
        )

    async def read(self, identity: str, limit_s: float) -> tuple[int, Record] | None:
        """Sequence and state of a transaction; None if there is none, or this primary has it not yet."""
        stored = await self.last(state_subject(identity), limit_s)
        return None if stored is None else (stored.sequence, record_of(stored))

    async def is_committed(self, mark: Mark, limit_s: float = SEND_LIMIT_S) -> bool:
        """Whether what has this mark is visible; waits for the decision, and takes it after the time is up.

        Raises:
            NotConfirmed: the cluster has no majority.
        """
        if (known := self._known.get(mark)) is not None:
            return known

        async def attempt() -> bool:
            record = await self.final(mark.identity, limit_s)
            if record is None:
                raise TimeoutError(f"transaction {mark.identity} is open")
            return record.is_visible(mark)

        found = await self._link.retry(attempt, f"outcome of transaction {mark.identity}", limit_s)
        self._known[mark] = found
        if len(self._known) > KNOWN:
            self._known.popitem(last=False)
        return found

    async def final(self, identity: str, limit_s: float, *, at_once: bool = False) -> Record | None:
        """The decision on a transaction, made here if its time is up, or ``at_once``; None: it is open."""
        found = await self.read(identity, limit_s)
        sequence, record = found or (0, Record(State.OPEN, "", self.session, 0))
        if record.state is not State.OPEN:
            return record
        if record.until_unix_us > self.clock.unix_us() and not at_once:
            return None
        decision = record.decided(State.ROLLED_BACK)
        try:
            return await self.decide(Mark(identity, record.owner), sequence, decision, min(limit_s, DECIDE_S))
        except NotConfirmed:  # what was read is old, or there is no majority: the caller reads again
            return None

    async def take(self, taken: Sequence[LockedMessage], mark: Mark, limit_s: float) -> None:
        """Lock received messages for a transaction.

        Raises:
            MessageTaken: another transaction acknowledges one of them.
            NotConfirmed: perhaps some are locked; the locks of what is rolled back mean nothing.
        """
        deadline = Deadline(limit_s)
        if len(taken) > 1 and await self.has_batches(STREAM, limit_s):
            rows = [
                (part.subject, str(mark).encode(), _headers(part.subject, mark.owner, 0)) for part in taken
            ]
            try:
                await self._link.retry(lambda: store_batch(self._link, rows), "locks", limit_s)
                return
            except nats.js.errors.APIError as exc:
                if classify(exc) is Trouble.FULL:
                    raise DestinationFull(STREAM, exc.description or "no room") from exc
        for part in taken:
            await self._take_one(part, mark, deadline)

    async def _take_one(self, part: LockedMessage, mark: Mark, deadline: Deadline) -> None:
        expected, what = 0, f"lock of {part.subject}"
        while True:
            try:
                by = mark.owner + (f":{expected}" if expected else "")
                await self._write(part.subject, str(mark).encode(), by, expected, deadline.left_s())
                return
            except nats.js.errors.APIError as exc:
                if exc.err_code != _WRONG_SEQUENCE:
                    raise
            there = await self.last(part.subject, deadline.left_s())
            if there is None:
                expected = 0
            elif (other := Mark.parse(text_of(there))) == mark:
                return
            else:
                record = await self.final(other.identity, deadline.left_s())
                if record is None or record.is_visible(other):
                    raise MessageTaken(part.stream, part.sequence, other.identity)
                expected = there.sequence
            if deadline.passed:
                raise NotConfirmed(what, 0, "others change it all the time")

    async def is_taken(self, stream: str, consumer: str, sequence: int) -> bool:
        """Whether a committed transaction has acknowledged this message; waits for one that is open."""
        part = LockedMessage(stream, consumer, sequence, "")
        if not await self.is_there():
            return False
        there = await self.last(part.subject, SEND_LIMIT_S)
        return there is not None and await self.is_committed(Mark.parse(text_of(there)))

    async def last(self, subject: str, limit_s: float) -> Stored | None:
        """What is stored under a subject."""
        return await self.get({"last_by_subj": subject}, limit_s)

    async def next_state(self, sequence: int, limit_s: float) -> Stored | None:
        """The first state from this sequence on."""
        return await self.get({"seq": max(1, sequence), "next_by_subj": STATES}, limit_s)

    async def get(self, wanted: dict[str, object], limit_s: float, stream: str = STREAM) -> Stored | None:
        """One message of a stream; None if its leader has none such."""

        async def attempt() -> Stored | None:
            try:
                answer = await self._link.ask(f"STREAM.MSG.GET.{stream}", wanted)
            except nats.js.errors.NotFoundError as exc:
                if exc.err_code == _NO_MESSAGE:
                    return None
                raise
            return _stored(answer["message"])

        return await self._link.retry(attempt, f"a message of stream {stream}", limit_s)

    async def delete(self, stream: str, sequence: int, limit_s: float) -> None:
        """Remove one message; nothing if it is gone."""

        async def attempt() -> None:
            try:
                await self._link.ask(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence, "no_erase": True})
            except nats.js.errors.APIError:
                if await self.get({"seq": sequence}, limit_s, stream) is not None:
                    raise

        await self._link.retry(attempt, f"removal of message {sequence} of stream {stream}", limit_s)

    async def has_batches(self, stream: str, limit_s: float) -> bool:
        """Whether a stream takes batches: it was made by an engine that has them."""
        if not self._catalogue.has_batches:
            return False
        if stream not in self._atomic:

            async def attempt() -> bool:
                config = (await self._link.ask(f"STREAM.INFO.{stream}", {}))["config"]
                return bool(config.get("allow_atomic"))

            self._atomic[stream] = await self._link.retry(attempt, f"settings of stream {stream}", limit_s)
        return self._atomic[stream]

    async def bounds(self, stream: str, limit_s: float) -> Bounds:
        """How much a stream has, and may have."""

        async def attempt() -> Bounds:
            found = await self._link.ask(f"STREAM.INFO.{stream}", {})
            state, config = found["state"], found["config"]
            return Bounds(
                int(state["first_seq"]),
                int(state["last_seq"]),
                int(state["bytes"]),
                int(config.get("max_bytes", -1)),
            )

        return await self._link.retry(attempt, f"state of stream {stream}", limit_s)

    async def _write(self, subject: str, data: bytes, by: str, expected: int, limit_s: float) -> int:
        try:
            return await self._link.store(
                subject,
                data,
                _headers(subject, by, expected),
                stream=STREAM,
                what=f"state {subject}",
                limit_s=limit_s,
            )
        except nats.js.errors.APIError as exc:
            if classify(exc) is Trouble.FULL:
                raise DestinationFull(STREAM, exc.description or "no room") from exc
            raise

    async def make(self, limit_s: float) -> None:
        """Make the stream if there is none."""
        if self._is_made:
            return
        config = nats.js.api.StreamConfig(
            name=STREAM,
            subjects=[SUBJECTS],
            retention=nats.js.api.RetentionPolicy.LIMITS,
            discard=nats.js.api.DiscardPolicy.NEW,
            max_msgs_per_subject=1,
            max_bytes=self._max_bytes,
            num_replicas=self._replicas,
            duplicate_window=DUPLICATES_S,
            allow_atomic=True if self._catalogue.has_batches else None,
        )
        await self._link.retry(
            lambda: self._link.make_stream(config), "the stream of transactions", max(limit_s, 1.0)
        )
        self._is_made = True

    async def is_there(self) -> bool:
        """Whether any session has had a transaction: only then there are states and locks."""
        if self._is_made:
            return True

        async def attempt() -> bool:
            # Of the leader of all nodes: one that has just started knows no stream.
            return bool((await self._link.ask("STREAM.NAMES", {"subject": SUBJECTS})).get("streams"))

        self._is_made = await self._link.retry(attempt, "names of streams", SEND_LIMIT_S)
        return self._is_made

    async def _check_room(self, limit_s: float) -> None:
        if not self._room_checked.passed:
            return
        found = await self.bounds(STREAM, limit_s)  # made by another session, it may have more or less
        if 0 < found.max_bytes * FULL_RATIO < found.bytes:
            raise DestinationFull(
                STREAM, f"states and locks of transactions take {found.bytes} of {found.max_bytes} bytes"
            )
        self._room_checked = Deadline(ROOM_S)


def record_of(stored: Stored) -> Record:
    """The state that is stored; one that is open is so no longer than a transaction can be. Pure.

    Raises:
        ValueError: it is none of ours, or of a later release.
    """
    found = Record.parse(stored.data)
    limit_us = stored.at_unix_us + int(MOST_OPEN_S * 1e6)
    return dataclasses.replace(found, until_unix_us=min(found.until_unix_us, limit_us))


def text_of(lock: Stored) -> str:
    """Of a lock; whoever stored it may have stored any bytes. Pure."""
    return lock.data.decode(errors="replace")


def _headers(subject: str, by: str, expected: int) -> dict[str, str]:
    return {IDENTITY: f"{subject}:{by}", _EXPECTED: str(expected)}


def _stored(message: dict[str, Any]) -> Stored:
    at_s = calendar.timegm(time.strptime(message["time"][:19], "%Y-%m-%dT%H:%M:%S"))
    return Stored(
        message["subject"], int(message["seq"]), base64.b64decode(message.get("data", "")), at_s * 1_000_000
    )
