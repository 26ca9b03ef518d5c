"""The memory of identities: what another server has sent, and every recipient has confirmed here.

A server posts again what it does not know to be confirmed: a kill there between our answer and its record of
it is enough. What is in our queue is known from there; what has left it, from here. The memory is a lane of
the engine like any recipient's, the one that is always there: an event leaves the queue only after its
identity was recorded, so there is no moment at which neither has it.

On disk it is a disk queue of its own whose oldest records go when there are more than ``identities``. A
record is the identities of a batch, a line each. In memory they are in the intake alone.

Durability: identities are on disk before their batch is confirmed.

Thread: ``record`` by the lane's thread; ``step`` by the main loop.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import structlog

from pmdaemon.diskqueue import DiskQueue, QueueSettings
from pmdaemon.diskqueue.errors import DiskQueueError, QueueFull, RecordDamaged
from pmdaemon.diskqueue.storage import Storage
from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.files import make_directory
from sla_server.events.queue import ENTRY_BYTES
from sla_server.events.recipients.base import CONFIRMED, Answer, Notice, Recipient, retry
from sla_server.events.sql_link import NAME

log = structlog.get_logger("relay")
READ_BYTES: Final = 1 << 20
IDENTITY_BYTES: Final = 512
"""Of one in a record of its own: twice a unit of the disk queue."""


class IdentityMemory:
    """See the module.

    Args:
        directory: made if missing.
        most: identities that are kept; the oldest go.
        storage: the two files, for tests.

    Attributes:
        known: what was recorded before this start, the oldest first; the owner clears it when it was read.
        damaged: records that cannot be read.

    Raises:
        DiskQueueError, OSError: it cannot be opened.
    """

    def __init__(self, directory: Path, most: int, storage: tuple[Storage, Storage] | None = None) -> None:
        make_directory(directory, 0o700)
        self._most = most
        self._count = 0
        self._lock = threading.Lock()  # guards count and records: after a call that hangs comes another
        self._records: deque[tuple[int, int]] = deque()  # number in the queue, identities in it
        data, index = storage or (None, None)
        self._queue = DiskQueue(
            QueueSettings(
                data_path=directory / "identities",
                data_bytes=max(1 << 20, most * IDENTITY_BYTES),
                entries=max(1024, most),
            ),
            data=data,
            index=index,
            helper=storage is None,
        )
        self.damaged = len(self._queue.report.extents)
        self.known = self._read()

    def record(self, identities: Sequence[str]) -> None:
        """Keep these; on disk on return.

        Raises:
            QueuePoisoned: the disk fails.
        """
        content = "\n".join(identities).encode("utf-8", "replace")
        with self._lock:
            while True:
                try:
                    seq = self._queue.put(content)
                    break
                except QueueFull:
                    if not self._records:
                        raise
                    self._forget()
            self._records.append((seq, len(identities)))
            self._count += len(identities)
            while self._count > self._most and len(self._records) > 1:
                self._forget()

    def close(self) -> None:
        """Let go of the files."""
        self._queue.close()

    def _forget(self) -> int:
        """Delete the oldest record; how many identities it had."""
        seq, count = self._records.popleft()
        self._count -= count
        self._queue.delete_through(seq)
        return count

    def _read(self) -> list[str]:
        found, after = list[str](), 0
        while True:
            try:
                messages = self._queue.peek(after, READ_BYTES)
            except RecordDamaged as exc:
                self.damaged += 1
                log.error("identities-damaged", seq=exc.seq)
                self._queue.discard([exc.seq])
                continue
            if not messages:
                break
            for message in messages:
                identities = message.data.decode("utf-8", "replace").split("\n")
                self._records.append((message.seq, len(identities)))
                self._count += len(identities)
                found += identities
            after = messages[-1].seq
        while self._count > self._most and len(self._records) > 1:  # a kill has undone their deletion
            del found[: self._forget()]
        return found


class IdentityRecipient:
    """Confirms what is in the memory; see ``recipients.base.Recipient``."""

    name = NAME
    kind = "record"
    timeout_s = 30.0
    most_notices = 1000

    def __init__(self, memory: IdentityMemory, failed: Callable[[str], None]) -> None:
        self._memory = memory
        self._failed = failed

    def deliver(self, notices: Sequence[Notice], _deadline: Deadline) -> Answer:
        """See ``Recipient``."""
        try:
            self._memory.record([notice.delivery_id for notice in notices])
        except DiskQueueError as exc:
            self._failed(f"the memory of identities: {exc}")
            return retry("its disk fails")
        return CONFIRMED

    def close(self) -> None:
        """See ``Recipient``; the memory stays open."""


class RelayRecords:
    """What a relay has instead of SQL; see ``events.sql_link.EventRecords``.

    Args:
        memory: of identities.
        queue_bytes: of the queue of events, of which each identity is kept in mind, too.
        most: identities beside those.
        failed: ends the process.
        each_step: called by the main loop after each step of the engine.
    """

    def __init__(
        self,
        memory: IdentityMemory,
        queue_bytes: int,
        most: int,
        failed: Callable[[str], None],
        each_step: Callable[[], None],
    ) -> None:
        self._memory = memory
        self._failed = failed
        self._each_step = each_step
        self.most_ids = most + max(1024, queue_bytes // ENTRY_BYTES)

    @property
    def known(self) -> Iterable[str]:
        """See ``EventRecords``."""
        return self._memory.known

    def recipient(self) -> Recipient:
        """See ``EventRecords``."""
        return IdentityRecipient(self._memory, self._failed)

    def store(self, _rows: Sequence[dict[str, Any]], _deadline: Deadline) -> str:
        """See ``EventRecords``: documents of a relay have no inbox."""
        return "a relay has no inbox"

    def report(self, rows: Iterable[dict[str, Any]]) -> None:
        """See ``EventRecords``: without SQL, dead letters are in the log."""
        for row in rows:
            if row["state"] == "dead-letter":
                log.error("dead-letter", **{key: row[key] for key in ("recipient", "delivery_id", "answer")})

    def step(self) -> None:
        """See ``EventRecords``."""
        self._each_step()

    def close(self) -> None:
        """See ``EventRecords``."""
        with contextlib.suppress(DiskQueueError):
            self._memory.close()
