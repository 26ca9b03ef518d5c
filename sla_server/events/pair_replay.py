"""Taking over the partner's events: from the store into the queue of events here.

They enter behind what waits here, in the order in which the partner has recorded them in all its queues: the
end of a condition may be in the one of the initialization period, or in that of events, and the beginning in
another one. A *run* is what comes next of all these queues, ``TAKE`` events at most, under one sync.

Events stay in the store: they leave it when the partner says that no recipient needs them. Each is taken over
once; when the partner is lost again, only what a lane has left to it meanwhile is taken over again. None is
taken over while the queue is fuller than ``ROOM_RATIO``, so the partner's backlog leaves room for our own
events. An event of a queue that the partner has lost with its disk is taken over at once, and leaves the
store when a queue here has it on disk: that of events, or the one of what is due later, which the main loop
fills.

What a crash leaves: taking over begins again from the store.

Thread: ``ev-pair``; ``copies_behind`` any.
"""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import structlog

from pmdaemon.diskqueue.errors import QueueFull
from pmdaemon.runtime.clock import Clock
from sla_server.events.pair_ledger import PartnerLedger
from sla_server.events.pair_session import Reached
from sla_server.events.pair_store import MirrorStore
from sla_server.events.queue import CHUNK_BYTES, EventQueue, QueuedEvent, decode, origin_of

log = structlog.get_logger("pair")
TAKE: Final = 256
TAKE_BYTES: Final = 256 << 10
"""A run is no larger, unless it is one event: so it does not fill the queue far beyond ``ROOM_RATIO``."""
ROOM_RATIO: Final = 0.4
"""The partner's events fill our queue so far: half of what it holds before recipients give up events."""
AGAIN_NS: Final = 1_000_000_000


class _Kept(NamedTuple):
    """An event in the store; without ``item`` it is unreadable."""

    queue_id: str
    seq: int
    size_bytes: int
    item: QueuedEvent | None
    problem: str = ""


class PartnerReplay:
    """See the module.

    Args:
        queues: ours, in the order of a replay; the last one takes what is taken over.
        later: ours of what is due later.
        store: the partner's events.
        ledger: shared with the main loop.
        clock: for the time of acceptance.
        arrived: called when something was taken over.

    Attributes:
        later_items: what the partner has held back, or has to remind of; the main loop takes it over.
        taken_over: how many events since the partner was lost.
    """

    def __init__(
        self,
        queues: Sequence[EventQueue],
        later: EventQueue,
        store: MirrorStore,
        ledger: PartnerLedger,
        clock: Clock,
        arrived: Callable[[], None],
    ) -> None:
        self._own = [*queues, later]
        self._main = queues[-1]
        self._store = store
        self._ledger = ledger
        self._clock = clock
        self._arrived = arrived
        self._through: dict[str, int] = {}
        self._before: dict[str, int] = {}  # up to here only what is in _left is taken over
        self._left: dict[str, set[int]] = {}
        self._is_again_due = False
        self._copies = _copies(self._main, self._current())  # numbers here of what the partner has, too
        self._not_before_ns = self._recorded_us = self.taken_over = 0
        self.later_items: deque[QueuedEvent] = deque()

    def lost(self) -> None:
        """The partner was not heard for too long."""
        self._is_again_due = True
        self._not_before_ns = self.taken_over = 0

    def queue_gone(self, queue_id: str) -> None:
        """The partner has lost this queue: what was left to it is needed after all."""
        self._through.pop(queue_id, None)
        self._before.pop(queue_id, None)
        self._not_before_ns = 0

    def set_back(self, queue_id: str, through: int) -> None:
        """The partner gives the numbers behind this one again."""
        for known in (self._through, self._before):
            known[queue_id] = min(known.get(queue_id, 0), through)
        self._not_before_ns = 0

    def step(self, now_ns: int, reached: Reached | None) -> bool:
        """Take over a run, if it is time to; whether there may be more.

        Args:
            now_ns: monotonic.
            reached: how far our recipients have come; None while it is not known.
        """
        if self._is_again_due and self._ledger.is_lost:
            self._take_again(reached)
        if now_ns < self._not_before_ns:
            return False
        if self._take_over():
            return True
        self._not_before_ns = now_ns + AGAIN_NS
        return False

    def copies_behind(self, seq: int) -> int:
        """How many events behind a number of our queue the partner has, too."""
        return len(self._copies) - bisect.bisect_right(self._copies, seq)

    def prune(self) -> None:
        """Forget copies that are deleted."""
        del self._copies[: bisect.bisect_right(self._copies, self._main.done_seq)]

    def _current(self) -> list[str]:
        return [queue.queue_id for queue in self._ledger.queues]

    def _take_again(self, reached: Reached | None) -> None:
        """What was taken over before waits here still, but for what lanes have left to the partner since.

        With it comes what was missing in the store then.
        """
        left = self._ledger.take_left(reached.noticed, reached.passed) if reached is not None else None
        if left is None:  # the lanes do not know yet that it is lost
            return
        self._is_again_due, self._not_before_ns = False, 0
        known, self._left = self._left, {}
        for queue_id in self._current():
            seqs = {*known.get(queue_id, ()), *(seq for where, seq in left if where == queue_id)}
            seqs |= self._store.take_late(queue_id)
            before = max(self._through.get(queue_id, 0), self._before.get(queue_id, 0))
            wanted = {seq for seq in seqs if seq <= before and self._store.has(queue_id, seq)}
            self._left[queue_id] = wanted
            self._before[queue_id] = before
            self._through[queue_id] = min(wanted, default=before + 1) - 1

    def _take_over(self) -> bool:
        known, kept = self._current(), self._store.queue_ids
        gone = [queue_id for queue_id in kept if queue_id not in known] if known else []
        wanted = (known or kept) if self._ledger.is_lost else []
        for queue_ids in (gone, wanted):
            if self._main.fullness_ratio >= ROOM_RATIO:
                return False
            run = self._next_run(queue_ids)
            if not run:
                continue
            if not self._take(run):
                return False
            self._discard_taken(gone)
            return True
        self._discard_taken(gone)
        return False

    def _next_run(self, queue_ids: Sequence[str]) -> list[_Kept]:
        """What the partner has recorded next in these queues."""
        run, size = list[_Kept](), 0
        for each in heapq.merge(*map(self._records, queue_ids), key=_order):
            size += each.size_bytes
            if run and size > TAKE_BYTES:
                break
            run.append(each)
            if len(run) == TAKE:
                break
        return run

    def _records(self, queue_id: str) -> Iterator[_Kept]:
        before, left = self._before.get(queue_id, 0), self._left.get(queue_id, set())
        after_seq = self._through.get(queue_id, 0)
        for seq, data in self._store.each(queue_id, after_seq, lambda seq: seq > before or seq in left):
            try:
                yield _Kept(queue_id, seq, len(data), decode(seq, data))
            except (ValueError, RecursionError) as exc:
                yield _Kept(queue_id, seq, len(data), None, str(exc))

    def _discard_taken(self, gone: Sequence[str]) -> None:
        """Forget what no other server has, once it is on disk here: also what the main loop has to keep."""
        if not self.later_items:
            for queue_id in gone:
                self._store.discard_through(queue_id, self._through.get(queue_id, 0))

    def _take(self, run: Sequence[_Kept]) -> bool:
        """Under one sync; False if there is no room for it."""
        own = {queue.queue_id for queue in self._own}
        # Behind all of before, see EventIntake; a beginning may be in the queue of what is due later alone.
        newest_us = max(self._recorded_us, *(queue.newest_us + 1 for queue in self._own))
        now_us = max(self._clock.unix_us(), newest_us)
        items, later = list[QueuedEvent](), list[QueuedEvent]()
        for queue_id, seq, _size, item, problem in run:
            if item is None:
                log.error("event-unreadable", queue=queue_id, seq=seq, problem=problem)
                continue
            position = queue_id, seq
            if item.origin in own or (item.recipient and self._ledger.is_done(item.recipient, position)):
                continue
            event = replace(item.event, recorded_us=now_us + len(items) + len(later))
            taken = replace(
                item, event=event, seq=0, later_seq=0,
                origin=queue_id, origin_seq=seq, origin_us=item.event.recorded_us,
            )  # fmt: skip
            (later if item.purpose else items).append(taken)
        self._recorded_us = now_us + len(items) + len(later)
        self._ledger.take([*items, *later])
        try:
            seqs = self._main.append(items)
        except QueueFull:
            return False
        self.later_items.extend(later)  # at once: an end that was added may have its beginning here
        for each in run:
            self._through[each.queue_id] = each.seq
            self._left.get(each.queue_id, set()).discard(each.seq)
        current = set(self._current())
        self._copies.extend(seq for seq, item in zip(seqs, items, strict=True) if item.origin in current)
        self.taken_over += len(items) + len(later)
        if items or later:
            self._arrived()
        return True


def _order(kept: _Kept) -> tuple[int, int]:
    """By when the partner has recorded it; what it accepted together, by when that was noticed."""
    return (kept.item.event.recorded_us, kept.item.event.at_us) if kept.item is not None else (0, 0)


def _copies(queue: EventQueue, origins: Collection[str]) -> list[int]:
    """Numbers of what was taken over from these queues of the partner."""
    found, after = list[int](), queue.done_seq
    while after < queue.newest_seq:
        records, after = queue.records(after, CHUNK_BYTES)
        found += [seq for seq, data in records if origin_of(seq, data) in origins]
    return found
