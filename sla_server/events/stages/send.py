"""Send: the thread of one recipient, and what happens when it hangs.

The engine hands over one batch at a time and goes on; the answer comes as an item of its inbox. A call that
is not back ``GRACE_S`` after its deadline is left behind with its thread, and the recipient is made again
with a new thread. At most ``MOST_LEFT_BEHIND`` threads hang at a time; beyond that the recipient waits until
one returns. Whatever ``deliver`` raises is a mistake in the recipient and counts as RETRY, so that no
recipient ends the process.

Thread: methods by the main loop; ``_run`` is the thread ``ev-NAME``.
"""

from __future__ import annotations

import queue
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from pmdaemon.runtime import watchdog
from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.threads import ThreadGroup
from sla_server.events.recipients.base import Answer, Notice, Recipient, Reopening, retry

log = structlog.get_logger("delivery")
GRACE_S: Final = 2.0
MOST_LEFT_BEHIND: Final = 3


@dataclass(frozen=True, slots=True)
class SentBatch:
    """A batch that came back."""

    lane: str
    token: int
    answer: Answer


class BatchSender(Protocol):
    """What a lane needs; tests have one without threads."""

    def start(self, token: int, notices: Sequence[Notice], timeout_s: float) -> bool:
        """Hand over a batch; False: not now, too many threads hang."""

    def abandon(self) -> None:
        """The batch under way is late: leave its thread behind."""

    def close(self) -> None:
        """Ask the thread to end, and close the recipient."""


class ThreadSender:
    """See the module.

    Args:
        make: makes the recipient; called again after one was left behind.
        done: takes what came back; any thread.
        threads: starts them.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Recipient],
        done: Callable[[SentBatch], None],
        threads: ThreadGroup,
    ) -> None:
        self._name = name
        self._make = make
        self._done = done
        self._threads = threads
        self._worker: _Worker | None = None
        self._left_behind: list[_Worker] = []

    def start(self, token: int, notices: Sequence[Notice], timeout_s: float) -> bool:
        """See ``BatchSender``."""
        if self._worker is None:
            self._left_behind = [worker for worker in self._left_behind if worker.is_busy]
            if len(self._left_behind) >= MOST_LEFT_BEHIND:
                return False
            worker = _Worker(self._name, self._make(), self._done)
            self._threads.start(f"ev-{self._name}"[:15], worker.run)
            self._worker = worker
        self._worker.tasks.put((token, notices, timeout_s))
        return True

    def abandon(self) -> None:
        """See ``BatchSender``."""
        if self._worker is not None:
            log.error("recipient-hangs", recipient=self._name)
            self._left_behind.append(self._worker)
            self._worker.close()
            self._worker = None

    def reopen(self) -> None:
        """Let the recipient let go of its file, if it has one."""
        if self._worker is not None:
            self._worker.reopen()

    def close(self) -> None:
        """See ``BatchSender``."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


class _Worker:
    """One thread with one recipient; ``is_busy`` until it ends."""

    def __init__(self, name: str, recipient: Recipient, done: Callable[[SentBatch], None]) -> None:
        self._name = name
        self._recipient = recipient
        self._done = done
        self.tasks: queue.SimpleQueue[tuple[int, Sequence[Notice], float] | None] = queue.SimpleQueue()
        self.is_busy = True

    def run(self) -> None:
        try:
            while True:
                watchdog.rest()  # also during a call: what hangs is the engine's affair, and no reason to die
                task = self.tasks.get()
                if task is None:
                    return
                token, notices, timeout_s = task
                self._done(SentBatch(self._name, token, self._deliver(notices, timeout_s)))
        finally:
            self.is_busy = False
            self._recipient.close()

    def reopen(self) -> None:
        if isinstance(self._recipient, Reopening):
            self._recipient.reopen()

    def close(self) -> None:
        self.tasks.put(None)

    def _deliver(self, notices: Sequence[Notice], timeout_s: float) -> Answer:
        try:
            return self._recipient.deliver(notices, Deadline(timeout_s))
        except Exception as exc:  # noqa: BLE001 - not logged whole: its text may repeat a secret
            name = type(exc).__name__
            where = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(exc.__traceback__)]
            log.error("recipient-failed", recipient=self._name, problem=name, where=where)
            return retry(f"a fault of the server: {name}; its log says where (recipient-failed)")
