"""Transactions: sends and acknowledgements over several destinations, all or nothing (C10).

::

    with session.transaction() as transaction:
        transaction.acknowledge(received)
        transaction.send("orders.eu", b"...")
        transaction.send("invoices", b"...")

Nothing of a transaction is in the cluster before ``commit``, which leaving the block calls. What goes to
destinations of one domain alone is stored as one batch, in one step (engine 2.12 or newer). All else takes
two phases; a crash between any two steps leaves what the step before has left:

    1  open      the state is stored as open, with a time limit; from here on anyone may end it
    2  take      a lock for each received message; one that another transaction has ends this one
    3  stage     messages are stored at their destinations with a mark. A consumer that comes upon one asks
                 for the state and waits, so that order is kept; a full destination ends the transaction
    4  decide    the state becomes committed, in place of the open one and of no other. This is the commit:
                 a majority has it. Who was only slow finds "rolled back" there, and is refused
    5  finish    what was received is acknowledged. What a crash leaves of it the locks tell consumers

Who finds an open state after its time stores "rolled back" in its place: a consumer, a pass of
``transaction_recovery``, or who asks for the outcome.

Order: a destination has the messages of a transaction behind all that the session sent there before the
commit, and before all that is sent after it. Thread: one at a time; the commit runs in the link's.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple

import nats.errors
import nats.js.errors
import structlog

from pmdaemon.runtime.clock import Deadline
from sla_server.cluster.errors import ClusterError
from sla_server.cluster.messages.batch import is_repeated, store_batch
from sla_server.cluster.messages.catalogue import DUPLICATES_S, Destination
from sla_server.cluster.messages.errors import (
    AccessDenied,
    BadSettings,
    DestinationFull,
    MessagesError,
    MessageTaken,
    NotConfirmed,
    PayloadTooLarge,
    SessionClosed,
    TransactionEnded,
    TransactionInDoubt,
    TransactionRolledBack,
    TransactionTooLarge,
)
from sla_server.cluster.messages.feed import ACK_LIMIT_S, Received
from sla_server.cluster.messages.link import NOT_SENT, EngineLink, Trouble, classify, size_bytes
from sla_server.cluster.messages.producer import IDENTITY, checked_headers, expiry
from sla_server.cluster.messages.transaction_records import (
    HELD_S,
    MARK,
    MOST_BYTES,
    MOST_MESSAGES,
    LockedMessage,
    Mark,
    Record,
    Staged,
    State,
    check_identity,
    ranges,
)
from sla_server.cluster.messages.transaction_register import TransactionRegister

if TYPE_CHECKING:
    from sla_server.cluster.messages.session import MessageSession

log = structlog.get_logger("messages")
LIMIT_S: Final = 30.0
MOST_LIMIT_S: Final = DUPLICATES_S / 2
DECISION_S: Final = 12.0
"""The decision may take so long beyond the limit: one failover."""
CLEAN_S: Final = 5.0
ACKS_AT_ONCE: Final = 64


class TransactionPhase(Enum):
    """What a program may still do with a transaction."""

    OPEN = "open"
    COMMITTING = "committing"
    IN_DOUBT = "in doubt"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"


class TransactionMessage(NamedTuple):
    """A message that waits for the commit."""

    destination: Destination
    data: bytes
    headers: dict[str, str]


def no_fault(_step: str) -> None:
    """What happens between two steps: nothing. Tests put a crash here."""


class Transaction:
    """See the module; ``MessageSession.transaction`` makes it.

    Attributes:
        identity: of the program, to ask for the outcome with after a crash; else a made one.
        phase: see ``TransactionPhase``.
    """

    def __init__(
        self,
        session: MessageSession,
        register: TransactionRegister,
        identity: str,
        limit_s: float,
        fault: Callable[[str], None] = no_fault,
    ) -> None:
        if not 0 < limit_s <= MOST_LIMIT_S:
            raise BadSettings("limit_s", limit_s, f"it must be above 0 and at most {MOST_LIMIT_S:g} s")
        if identity:
            check_identity(identity)
        self._is_named = bool(identity)
        self.identity = identity or str(session.identifiers.make())
        self.phase = TransactionPhase.OPEN
        self._mark = Mark(self.identity, secrets.token_hex(8))
        self._session = session
        self._link: EngineLink = session.link
        self._register = register
        self._limit_s = limit_s
        self._deadline = Deadline(limit_s)
        self._repeatable = Deadline(DUPLICATES_S - 2 * DECISION_S)
        self._fault = fault
        self._sent: list[TransactionMessage] = []
        self._received: dict[str, Received] = {}
        self._size_bytes = 0
        self._is_open_batch = False
        self._is_repeated = False
        self._is_decided_against = False

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _exc: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self.phase is not TransactionPhase.OPEN:
            return
        if kind is None:
            self.commit()
        else:
            self.rollback()

    def send(
        self,
        name: str,
        data: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        expires_s: float | None = None,
    ) -> str:
        """Send a message to a destination with the commit; its identity.

        Raises:
            TransactionTooLarge, PayloadTooLarge: it is not in the transaction, which goes on without it.
            DestinationMissing, BadSettings: likewise.
        """
        self._check_open()
        destination = self._session.destination(name)
        identity = str(self._session.identifiers.make())
        own = checked_headers(headers) | expiry(expires_s)
        own |= {IDENTITY: destination.engine_identity(identity), MARK: str(self._mark)}
        size = size_bytes(data, own)
        if size > self._link.limit_bytes:
            raise PayloadTooLarge(size, self._link.limit_bytes)
        self._add(size)
        self._sent.append(TransactionMessage(destination, bytes(data), own))
        return identity

    def acknowledge(self, received: Received) -> None:
        """Acknowledge a received message with the commit; a rollback gives it back.

        Raises:
            TransactionTooLarge: as of ``send``.
            MessageTaken: it is not held any more, or for too long; it comes again.
        """
        self._check_open()
        if received.reply in self._received:
            return
        self._check_held(received)
        self._add(0)
        self._received[received.reply] = received

    def commit(self) -> None:
        """All of it happens, or nothing. After ``TransactionInDoubt`` it may be called again.

        Durability: a majority of the copies has the decision, and each destination's of its messages.

        Raises:
            TransactionInDoubt: not known which. Call it again, or ask ``outcome`` by its identity.
            DestinationFull: rolled back.
            TransactionRolledBack: rolled back; see its kinds.
            NotConfirmed: rolled back, as the cluster gave no answer in time.

        A call after one in doubt says "rolled back" only if that was decided: the first may have committed.
        """
        if self.phase not in (TransactionPhase.OPEN, TransactionPhase.IN_DOUBT):
            raise TransactionEnded(self.identity, self.phase.value)
        if self._repeatable.passed:
            raise TransactionInDoubt(
                self.identity, DUPLICATES_S, "the engine may have forgotten the first try"
            )
        self._is_repeated = self.phase is TransactionPhase.IN_DOUBT
        self.phase = TransactionPhase.COMMITTING
        if not self._is_repeated and self._deadline.passed:
            self._end_rolled_back()
            raise TransactionRolledBack(
                self.identity, f"it took longer than its limit_s of {self._limit_s:g} s"
            )
        if self._is_repeated:
            self._deadline = Deadline(self._limit_s)
        try:
            for destination in {sent.destination.name: sent.destination for sent in self._sent}.values():
                self._session.flush(destination.name, self._deadline.left_s())
            self._link.run(self._commit())
        except TransactionInDoubt:
            self.phase = TransactionPhase.IN_DOUBT
            raise
        except SessionClosed as exc:
            self.phase = TransactionPhase.IN_DOUBT
            raise TransactionInDoubt(self.identity, self._limit_s, str(exc)) from exc
        except Exception as exc:
            if self._is_repeated and not self._is_decided_against:
                self.phase = TransactionPhase.IN_DOUBT
                raise TransactionInDoubt(self.identity, self._limit_s, str(exc)) from exc
            self._end_rolled_back()
            raise
        except BaseException:  # of the calling thread alone: the link's may go on
            self.phase = TransactionPhase.IN_DOUBT
            raise
        self.phase = TransactionPhase.COMMITTED

    def rollback(self) -> None:
        """Nothing of it happens; what was received is given back.

        Raises:
            TransactionEnded: it is committed, or that is in doubt.
        """
        self._check_open()
        self._end_rolled_back()

    def _end_rolled_back(self) -> None:
        self.phase = TransactionPhase.ROLLED_BACK
        with contextlib.suppress(SessionClosed):  # which gives back all that is held
            for received in self._received.values():
                received.give_back()

    def _check_open(self) -> None:
        if self.phase is not TransactionPhase.OPEN:
            raise TransactionEnded(self.identity, self.phase.value)

    def _check_held(self, received: Received) -> None:
        problem = ""
        if not self._session.has_received(received):
            problem = "another session has it"
        elif not received.is_held:
            problem = "it was acknowledged or given back"
        elif received.held_s() > HELD_S:
            problem = f"it is held for longer than {HELD_S:g} s; give it back"
        if problem:
            raise MessageTaken(received.stream, received.sequence, self.identity, problem)

    def _check_all_held(self) -> None:
        for received in self._received.values():
            self._check_held(received)

    def _add(self, more_bytes: int) -> None:
        count = len(self._sent) + len(self._received) + 1
        if count > MOST_MESSAGES:
            raise TransactionTooLarge("messages", count, MOST_MESSAGES)
        if self._size_bytes + more_bytes > MOST_BYTES:
            raise TransactionTooLarge("bytes", self._size_bytes + more_bytes, MOST_BYTES)
        self._size_bytes += more_bytes

    async def _commit(self) -> None:
        by_stream: dict[str, list[TransactionMessage]] = {}
        for sent in self._sent:
            by_stream.setdefault(sent.destination.stream, []).append(sent)
        if not self._sent and not self._received:
            return
        is_single = len(by_stream) == 1 and not self._received and not self._is_named
        if is_single and await self._register.has_batches(next(iter(by_stream)), self._deadline.left_s()):
            await self._commit_at_once(self._sent)
        else:
            await self._commit_in_phases(by_stream)

    async def _commit_at_once(self, sent: list[TransactionMessage]) -> None:
        rows = [
            (part.destination.subject, part.data, {k: v for k, v in part.headers.items() if k != MARK})
            for part in sent
        ]

        async def attempt() -> None:
            was_open = self._is_open_batch
            self._is_open_batch = True
            try:
                await store_batch(self._link, rows)
            except (nats.js.errors.APIError, AccessDenied, *NOT_SENT) as exc:
                if not is_repeated(
                    exc
                ):  # repeated: an earlier try was stored, as identities are of this alone
                    self._is_open_batch = was_open
                    raise

        self._fault("storing the batch")
        problem: Exception
        try:
            await self._link.retry(attempt, f"transaction {self.identity}", self._deadline.left_s())
        except (NotConfirmed, AccessDenied) as exc:
            problem = exc
        except nats.js.errors.APIError as exc:
            problem = exc
            if not self._is_open_batch:
                raise self._refused(exc, sent[0].destination.name) from exc
        else:
            self._fault("batch stored")
            return
        if not self._is_open_batch:
            raise problem
        raise TransactionInDoubt(self.identity, self._limit_s, str(problem)) from problem

    async def _commit_in_phases(self, by_stream: Mapping[str, list[TransactionMessage]]) -> None:
        if not self._is_repeated:
            self._check_all_held()
        taken = tuple(
            LockedMessage(received.stream, received.engine_consumer, received.sequence, received.reply)
            for received in self._received.values()
        )
        until_unix_us = self._register.clock.unix_us() + int((self._deadline.left_s() + DECISION_S) * 1e6)
        record = Record(State.OPEN, self._mark.owner, self._session.name, until_unix_us, (), taken)
        self._fault("opening")
        opened = await self._opened(record)
        if opened is None:
            await self._finish()
            return
        staged: list[Staged] = []
        try:
            self._fault("opened")
            self._check_all_held()
            await self._register.take(taken, self._mark, self._deadline.left_s())
            self._fault("locked")
            for stream, sent in by_stream.items():
                await self._stage(stream, sent, staged)
                self._fault(f"staged {stream}")
        except Exception as exc:
            if await self._roll_back(opened, record, staged) is State.COMMITTED:  # by an earlier ``commit``
                await self._finish()
                return
            if isinstance(exc, nats.js.errors.APIError):
                raise self._refused(exc, "") from exc
            raise
        decided = record.decided(State.COMMITTED, staged)
        try:
            decided = await self._register.decide(
                self._mark, opened, decided, self._deadline.left_s() + DECISION_S
            )
        except MessagesError as exc:
            if isinstance(exc, DestinationFull):
                await self._roll_back(opened, record, staged)
                raise
            raise TransactionInDoubt(self.identity, self._limit_s, str(exc)) from exc
        except (nats.errors.Error, OSError) as exc:
            raise TransactionInDoubt(self.identity, self._limit_s, str(exc)) from exc
        if not decided.is_visible(self._mark):
            self._is_decided_against = True
            await self._remove(staged)
            raise TransactionRolledBack(self.identity, "another session decided so, as its time was up")
        self._fault("decided")
        await self._finish()
        self._fault("finished")

    async def _opened(self, record: Record) -> int | None:
        """The sequence of the open state; None: an earlier ``commit`` of this transaction was stored."""
        if (
            self._is_repeated and await self._register.is_there()
        ):  # a decision needs no room for an open state
            found = await self._register.read(self.identity, self._deadline.left_s())
            if found is not None and found[1].is_visible(self._mark):
                return None
        try:
            return await self._register.open(self._mark, record, self._deadline.left_s())
        except TransactionRolledBack:
            found = await self._register.read(self.identity, CLEAN_S)
            if found is not None and found[1].is_visible(self._mark):
                return None
            self._is_decided_against = True
            raise
        except nats.js.errors.APIError as exc:
            raise self._refused(exc, "") from exc

    async def _stage(self, stream: str, sent: list[TransactionMessage], staged: list[Staged]) -> None:
        """Store messages of one stream with their mark; where they are is added to ``staged``."""
        if len(sent) > 1 and await self._register.has_batches(stream, self._deadline.left_s()):
            rows = [(part.destination.subject, part.data, part.headers) for part in sent]
            try:
                last = await self._link.retry(
                    lambda: store_batch(self._link, rows),
                    f"messages of {self.identity}",
                    self._deadline.left_s(),
                )
                staged.append(Staged(stream, last - len(sent) + 1, last))
                return
            except nats.js.errors.APIError as exc:
                if classify(exc) is Trouble.FULL:
                    raise self._refused(exc, sent[0].destination.name) from exc
                # Repeated, or no batches: one by one, each is stored once, and says where.
        sequences: list[int] = []
        try:
            for part in sent:
                sequences.append(await self._stage_one(stream, part))
        finally:
            staged += ranges(stream, sequences)

    async def _stage_one(self, stream: str, part: TransactionMessage) -> int:
        try:
            return await self._link.store(
                part.destination.subject,
                part.data,
                part.headers,
                stream=stream,
                what=f"a message of transaction {self.identity}",
                limit_s=self._deadline.left_s(),
            )
        except nats.js.errors.APIError as exc:
            raise self._refused(exc, part.destination.name) from exc

    async def _roll_back(self, opened: int, record: Record, staged: list[Staged]) -> State:
        """As well as it can be done: what is left is rolled back by whoever finds it. What it is now."""
        try:
            found = await self._register.decide(
                self._mark, opened, record.decided(State.ROLLED_BACK), CLEAN_S
            )
            if found.state is State.ROLLED_BACK:
                self._is_decided_against = True
                await self._remove(staged)
            return found.state
        except (ClusterError, nats.errors.Error, OSError) as exc:
            log.info("transaction-left-open", transaction=self.identity, problem=str(exc))
            return State.OPEN

    async def _remove(self, staged: list[Staged]) -> None:
        if self._link.has_account:  # which may remove nothing: consumers do when they come upon it
            return
        try:
            for part in staged:
                for sequence in range(part.first, part.last + 1):
                    await self._register.delete(part.stream, sequence, CLEAN_S)
        except (ClusterError, nats.errors.Error, OSError) as exc:
            log.info("messages-left-staged", transaction=self.identity, problem=str(exc))

    async def _finish(self) -> None:
        """Acknowledge what was received; a failure is mended by its lock, and by ``recover``."""
        left = list(self._received.values())
        while left:
            group, left = left[:ACKS_AT_ONCE], left[ACKS_AT_ONCE:]
            work: list[Awaitable[None]] = [received.acknowledge_in_link(ACK_LIMIT_S) for received in group]
            for problem in await asyncio.gather(*work, return_exceptions=True):
                if isinstance(problem, BaseException) and not isinstance(problem, Exception):
                    raise problem
                if problem is not None:
                    log.warning("message-not-acknowledged", transaction=self.identity, problem=str(problem))

    def _refused(self, exc: nats.js.errors.APIError, name: str) -> MessagesError:
        problem = exc.description or str(exc)
        if classify(exc) is Trouble.FULL and name:
            return DestinationFull(name, problem)
        return TransactionRolledBack(self.identity, f"the engine refuses it: {problem}")
