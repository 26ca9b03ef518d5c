"""Ends what others have left of transactions: any session may, at any time, and several at once.

A pass reads states, from where the last one stopped, ``MOST_STATES`` at most:

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
from sla_server.cluster.messages.transaction_register import Stored, TransactionRegister

log = structlog.get_logger("messages")
MOST_STATES: Final = 500
RECOVER_S: Final = 30.0
STEP_S: Final = 5.0


class PassResult(NamedTuple):
    """What one pass has done."""

    read: int = 0
    rolled_back: int = 0
    removed: int = 0


class TransactionRecovery:
    """See the module."""

    def __init__(self, link: EngineLink, register: TransactionRegister) -> None:
        self._link = link
        self._register = register
        self._next = 1
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
        read = rolled_back = removed = 0
        if not await self._register.is_there():
            return PassResult()
        now_unix_us = self._register.clock.unix_us()
        while read < MOST_STATES:
            stored = await self._register.next_state(self._next, STEP_S)
            if stored is None:
                self._next = 1
                break
            self._next, read = stored.sequence + 1, read + 1
            try:
                record = Record.parse(stored.data)
            except (ValueError, KeyError, TypeError):  # of a later release, which ends it
                continue
            if record.state is State.OPEN:
                if record.until_unix_us <= now_unix_us:
                    rolled_back += await self._roll_back(stored, record)
            elif stored.at_unix_us + KEPT_S * 1e6 <= now_unix_us:
                removed += await self._remove(stored, record)
        return PassResult(read, rolled_back, removed)

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
            if lock is not None and Mark.parse(lock.data.decode()) == mark:
                await self._register.delete(STREAM, lock.sequence, STEP_S)
        await self._register.delete(STREAM, stored.sequence, STEP_S)
        return True

    async def _acknowledge(self, reply: str) -> None:
        async def attempt() -> None:
            await self._link.client.request(reply, b"+ACK", timeout=ANSWER_S)

        await self._link.retry(attempt, "an acknowledgement of a transaction", STEP_S)

    async def _is_gone(self, part: Staged) -> bool:
        """Whether all of these were consumed. A primary has what was stored so long ago."""
        first, last, _bytes = await self._register.bounds(part.stream, STEP_S)
        if last < part.last:
            return False
        for sequence in range(max(first, part.first), part.last + 1):
            if await self._register.get({"seq": sequence}, STEP_S, part.stream) is not None:
                return False
        return True

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(RECOVER_S * self._chance.uniform(0.5, 1.5))  # sessions take turns
            try:
                await self.recover()
            except (ClusterError, OSError, nats.errors.Error) as exc:
                log.debug("transactions-not-recovered", problem=str(exc))
            except Exception:
                log.exception("transactions-not-recovered")
