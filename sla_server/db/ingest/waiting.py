"""Rows that were read while a window was being committed: they wait for it, and reading goes on.

Inventory, events and RECORD rows have a transaction of their own, and only one transaction is under way at a
time (``writer``). So what is read of them during a commit is kept here, in order, and stored by the
transaction that follows it, before the next window's: that one moves the cursor ``records`` beyond them.

State: batches without their cuts, oldest first, each from behind the one before. All of it is still in the
ingest queue, behind the cursor ``sql``: it may be dropped at any moment if the queue is read again from
there. Bounded by ``WAITING_BYTES``, after which the reader waits for the commit as it would without it.

Thread: the writer's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from sla_server.db.ingest.batch import DecodedBatch, IngestedCut
from sla_server.db.ingest.inventory import SKEW_LIMIT_US
from sla_server.db.ingest.queue import STEP_BYTES

WAITING_BYTES: Final = STEP_BYTES  # of messages, as maps some ten times as much
REFUSED_BYTES: Final = 512  # what a refused part of a record takes, with its text


class WaitingRows:
    """See the module."""

    def __init__(self) -> None:
        self._parts: list[DecodedBatch] = []
        self._size_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._parts)

    @property
    def parts(self) -> Sequence[DecodedBatch]:
        """What waits, oldest first."""
        return self._parts

    @property
    def last_seq(self) -> int:
        """queue_seq of the newest record of the newest part; there must be one."""
        return self._parts[-1].last_seq

    @property
    def has_room(self) -> bool:
        """Whether another batch may wait."""
        return self._size_bytes < WAITING_BYTES

    def add(self, parts: Iterable[DecodedBatch]) -> None:
        """Keep the rows of some batches, which follow what waits; one that waits already counts once."""
        for part in parts:
            if self._parts and part.last_seq <= self.last_seq:
                continue  # what followed it failed, and it came again
            self._parts.append(_without_columns(part))
            self._size_bytes += part.row_bytes + REFUSED_BYTES * len(part.refused)

    def clear(self) -> None:
        """They are stored, or will be read again."""
        self._parts, self._size_bytes = [], 0


def _without_columns(batch: DecodedBatch) -> DecodedBatch:
    """The batch with one cut an agent start at most, without its rows: all that inventory looks at.

    A cut's columns lie in the message it came with, which would stay in memory with it.
    """
    first: dict[tuple[str, int], IngestedCut] = {}
    for item in batch.cuts:
        if abs(item.offset_us) > SKEW_LIMIT_US:
            first.setdefault((item.cut.gateway_id, item.cut.epoch), item)
    cuts = []
    for item in first.values():
        cut = item.cut
        none = cut.counters[:, :0].copy(), cut.hist[:0].copy(), cut.missed[:0].copy()
        bare = replace(cut, counters=none[0], hist=none[1], missed=none[2], extra={})
        cuts.append(replace(item, cut=bare))
    return replace(batch, cuts=cuts, marks={}, _columns=None)
