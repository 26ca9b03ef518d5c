"""Ends what others have left of transactions: any session may, at any time, and several at once.

A pass reads the states of which the time is up, and ``MOST_STATES`` at most of those that are old, and of
those that it has not read before; so states that are young and decided are read once, however many there are:

    open and out of time     rolled back, unless its coordinator decides first
    committed, and old       acknowledged again; locks and state go once no stream has a message of it
    rolled back, and old     locks and state are removed

"Old" is ``KEPT_S``. A state is removed after its locks, so a crash leaves no lock without one. What a
transaction that was rolled back has staged and nobody has removed stays until a consumer comes upon it: that
there is no state means rolled back.

Time is that of this machine. A clock that is ahead rolls back what has time left, as a whole, and shortens
how long an outcome can be asked for; a state with a message that can still be received is never removed.

Thread: the link's.
"""

from __future__ import annotations

import asyncio
import random
from typing import Final, NamedTuple

import nats.errors
import structlog

from sla_server.cluster.errors import ClusterError
from sla_server.cluster.messages.link import ANSWER_S, EngineLink
from sla_server.cluster.messages.transaction_records import (
    KEPT_S,
    STREAM,
    Mark,
    Record,
    Staged,
    State,
    identity_of,
)
from sla_server.cluster.messages.transaction_register import (
    Stored,
    TransactionRegister,
    record_of,
    text_of,
)

log = structlog.get_logger("messages")
MOST_STATES: Final = 500
MOST_OPEN: Final = 10_000
"""Open states that are remembered; more are read when the time of these is up."""
RECOVER_S: Final = 30.0
BUSY_S: Final = 2.0
STEP_S: Final = 5.0


class PassResult(NamedTuple):
    """What one pass has done."""

    read: int = 0
    rolled_back: int = 0
    removed: int = 0
    is_behind: bool = False
    """Whether there is much left to do, so that the next pass should come soon."""


class TransactionRecovery:
    """See the module."""

    def __init__(self, link: EngineLink, register: TransactionRegister) -> None:
        self._link = link
        self._register = register
        self._next_old = 1
        self._next_new = 1
        self._open: dict[str, int] = {}  # subject of the state: until when
        self._chance = random.Random()  # noqa: S311 - spreads passes, hides nothing
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Run a pass from time to time, from the first call on."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def recover(self) -> PassResult:
        """One pass.

        Raises:
            NotConfirmed: the cluster has no majority; the next pass goes on there.
        """
        if not await self._register.is_there():
            return PassResult()
        old = await self._end_old()
        new = await self._read_new()
        return PassResult(
            old.read + new.read,
            old.rolled_back + new.rolled_back + await self._end_left_open(),
            old.removed,
            new.is_behind or old.is_behind,
        )

    async def _end_old(self) -> PassResult:
        """From the front, where the oldest are, to the first that is not old."""
        read = rolled_back = removed = 0
        now_unix_us = self._register.clock.unix_us()
        while read < MOST_STATES:
            stored = await self._register.next_state(self._next_old, STEP_S)
            if stored is None or stored.at_unix_us + KEPT_S * 1e6 > now_unix_us:
                self._next_old = 1
                break
            self._next_old, read = stored.sequence + 1, read + 1
            if (record := parsed(stored)) is None:
                continue
            if record.state is not State.OPEN:
                removed += await self._remove(stored, record)
            elif record.until_unix_us <= now_unix_us:
                rolled_back += await self._roll_back(stored, record)
        return PassResult(read, rolled_back, removed, removed > MOST_STATES / 2)

    async def _read_new(self) -> PassResult:
        """Each state once, on from where the last pass stopped; what is open is remembered until its time."""
        read = rolled_back = 0
        now_unix_us = self._register.clock.unix_us()
        while read < MOST_STATES and len(self._open) < MOST_OPEN:
            stored = await self._register.next_state(self._next_new, STEP_S)
            if stored is None:
                return PassResult(read, rolled_back)
            self._next_new, read = stored.sequence + 1, read + 1
            if (record := parsed(stored)) is None or record.state is not State.OPEN:
                continue
            if record.until_unix_us <= now_unix_us:
                rolled_back += await self._roll_back(stored, record)
            else:
                self._open[stored.subject] = record.until_unix_us
        return PassResult(read, rolled_back, is_behind=True)

    async def _end_left_open(self) -> int:
        now_unix_us = self._register.clock.unix_us()
        rolled_back = 0
        for subject in [subject for subject, until in self._open.items() if until <= now_unix_us]:
            stored = await self._register.last(subject, STEP_S)
            record = parsed(stored) if stored is not None else None
            if stored is not None and record is not None and record.state is State.OPEN:
                rolled_back += await self._roll_back(stored, record)
            del self._open[subject]
        return rolled_back

    async def _roll_back(self, stored: Stored, record: Record) -> bool:
        mark = Mark(identity_of(stored.subject), record.owner)
        wanted = record.decided(State.ROLLED_BACK)
        decided = await self._register.decide(mark, stored.sequence, wanted, STEP_S)
        log.info("transaction-recovered", transaction=mark.identity, state=decided.state.value)
        return decided.state is State.ROLLED_BACK

    async def _remove(self, stored: Stored, record: Record) -> bool:
        mark = Mark(identity_of(stored.subject), record.owner)
        if record.state is State.COMMITTED:
            for part in record.staged:
                if not await self._is_gone(part):
                    return False
            for taken in record.taken:
                await self._acknowledge(taken.reply)
        for taken in record.taken:
            lock = await self._register.last(taken.subject, STEP_S)
            if lock is not None and Mark.parse(text_of(lock)) == mark:
                await self._register.delete(STREAM, lock.sequence, STEP_S)
        await self._register.delete(STREAM, stored.sequence, STEP_S)
        return True

    async def _acknowledge(self, reply: str) -> None:
        async def attempt() -> None:
            await self._link.client.request(reply, b"+ACK", timeout=ANSWER_S)

        await self._link.retry(attempt, "an acknowledgement of a transaction", STEP_S)

    async def _is_gone(self, part: Staged) -> bool:
        """Whether all of these were consumed. A primary has what was stored so long ago."""
        there = await self._register.bounds(part.stream, STEP_S)
        if there.last < part.last:
            return False
        for sequence in range(max(there.first, part.first), part.last + 1):
            if await self._register.get({"seq": sequence}, STEP_S, part.stream) is not None:
                return False
        return True

    async def _run(self) -> None:
        result = PassResult()
        while True:
            await asyncio.sleep(pause_s(result) * self._chance.uniform(0.5, 1.5))  # sessions take turns
            result = PassResult()
            try:
                result = await self.recover()
            except (ClusterError, OSError, nats.errors.Error) as exc:
                log.debug("transactions-not-recovered", problem=str(exc))
            except Exception:
                log.exception("transactions-not-recovered")


def pause_s(result: PassResult) -> float:
    """To the next pass. Pure."""
    return BUSY_S if result.is_behind else RECOVER_S


def parsed(stored: Stored) -> Record | None:
    """None: it is of a later release, which ends it, or of no session of ours. Pure."""
    try:
        return record_of(stored)
    except ValueError:
        return None
