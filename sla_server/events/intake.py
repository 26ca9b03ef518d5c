"""Intake: from the reserves of all processes into the queues (E3, E6).

A pass takes what is new in the reserves, merges it in the order in which it was raised, adds it to the queue
(``BATCH`` events under one sync, fewer where they do not fit, or where one ends what another begins), and
releases it. So the order between processes is kept, also where the clock is set back between two events
(``reserve.moment``): that services lost a gateway comes before what its pair says of its return. A folded
record about a condition becomes two events, the first one and the others: its end may lie between them.
Reserves of the initialization period are taken first, into a queue of their own, which lanes read first; but
behind what begins or ends the same condition and was raised before it: a process and delivery may have died
at once. What was folded becomes an event with a count, what was only counted an event ``events-lost``.

An event whose identity was seen recently is dropped: a process that was restarted may raise it again, and a
crash between sync and release repeats what was taken. With the queue full nothing is released: events wait in
the reserves, are folded there, then counted.

Thread: ``ev-intake``, or whoever calls ``step``; ``accept`` by any.
"""

from __future__ import annotations

import heapq
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from pmdaemon.diskqueue.errors import QueueFull
from pmdaemon.reserve.moment import MOMENT, MomentOrder, Place
from pmdaemon.reserve.raising import SUFFIX
from pmdaemon.reserve.reader import ReserveReader, TakenCount, TakenRecord
from pmdaemon.runtime import watchdog
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.stop import Stop
from sla_server.events import catalogue
from sla_server.events.event import Event, EventUnreadable, from_row, row_in
from sla_server.events.first_reading import MOST_IDS
from sla_server.events.order import Key, in_runs
from sla_server.events.queue import EventQueue, QueuedEvent
from sla_server.events.recipients.base import Status

log = structlog.get_logger("events")
BATCH: Final = 512
LISTING_NS: Final = 1_000_000_000
INITIAL: Final = ".initial"
NAMESPACE: Final = uuid.UUID("c2e5a3b7-59a8-4a3c-8f3e-1f1d8f7b9b40")


class _Found(NamedTuple):
    """What a pass found: a record, what was folded into one, or counts.

    Attributes:
        item: None for a record that is no event.
        release: called when it is in the queue.
        place: where it belongs among all that a pass found.
        number: of its record in the reserve.
        is_late: it came while the pass was reading.
    """

    item: QueuedEvent | None
    release: Callable[[], None]
    place: Place
    number: int = 0
    is_late: bool = False

    @property
    def key(self) -> Key | None:
        """The condition that it begins or ends, if any."""
        if self.item is None or catalogue.status_of(self.item.event) is Status.INFO:
            return None
        return catalogue.condition_key(self.item.event)


class EventIntake:
    """See the module.

    Args:
        directory: of the reserves.
        initial, normal: the queues.
        clock: for the time of recording.
        arrived: called when something was added.
        probe: called at "queued" (synced, not released); crash tests die there.
        known: identities that were taken before and are in no queue any more.
        most_ids: so many identities are kept in mind.
        queued: identities of what is in the normal queue, if it was read already.
        later: the queue of what is due later; what is taken over from a partner may be there alone.

    Attributes:
        accepted: events that are in a queue. repeated: dropped by their identity. unreadable: dropped.
        fills: share in use of each reserve, by name, as of the last pass. passed_ns: when that began.
    """

    def __init__(
        self,
        directory: Path,
        initial: EventQueue,
        normal: EventQueue,
        clock: Clock,
        arrived: Callable[[], None] = lambda: None,
        probe: Callable[[str], None] = lambda _point: None,
        known: Iterable[str] = (),
        most_ids: int = MOST_IDS,
        queued: Iterable[str] | None = None,
        later: EventQueue | None = None,
    ) -> None:
        self._directory = directory
        self._queues = {True: initial, False: normal}
        self._clock = clock
        self._order = MomentOrder(clock)
        self._all_queues = [each for each in (initial, normal, later) if each is not None]
        self._arrived = arrived
        self._probe = probe
        self._readers: dict[Path, ReserveReader] = {}
        self._listed_ns = 0
        self._full_ns: dict[bool, int] = {}  # since when a queue takes nothing
        self._chunk = BATCH
        self._lock = threading.Lock()  # guards _ids and what accept counts: listeners accept, too
        self._ids: OrderedDict[str, None] = OrderedDict.fromkeys(known)
        self._most_ids = most_ids
        self.accepted = self.repeated = self.unreadable = 0
        self.passed_ns = clock.monotonic_ns()
        self.fills: dict[str, float] = {}
        if queued is None:
            self._remember(normal)
        else:
            self._add_ids(queued)
        self._remember(initial)  # last: what a crash repeats of it must not be behind a long backlog

    def run(self, stop: Stop, interval_s: float) -> None:
        """Until the stop."""
        while not stop.is_set():
            watchdog.beat()
            if not self.step():
                stop.wait(interval_s)
        self.step()  # what the last process to stop has raised

    def step(self) -> int:
        """One pass over all reserves; returns how many events were added.

        Raises:
            QueuePoisoned: the disk fails.
        """
        self._order.read_clock()  # once: places of both periods are compared with each other
        self._list()
        self.passed_ns = self._clock.monotonic_ns()
        initial = [reader for path, reader in self._readers.items() if INITIAL in path.name]
        normal = [reader for path, reader in self._readers.items() if INITIAL not in path.name]
        return self._take_all(self._found(initial), self._found(normal))

    def accept(self, items: Iterable[QueuedEvent], *, is_initial: bool = False) -> int:
        """Add events that were not seen recently; returns how many were new. Any thread.

        Durability: on disk on return, also those that another thread was adding.

        Raises:
            QueueFull: not all were added; those that were are repeats the next time.
            QueuePoisoned: the disk fails.
        """
        before = added = 0
        try:
            with self._lock:
                before = self.accepted
                try:
                    self._add(items, is_initial=is_initial)
                finally:
                    added = self.accepted - before
        finally:
            if added:
                self._arrived()
        return added

    def _add(self, items: Iterable[QueuedEvent], *, is_initial: bool) -> None:
        new, ids, repeated = list[QueuedEvent](), set[str](), 0
        for item in items:
            identity = item.identity
            if identity in self._ids or identity in ids:
                repeated += 1
                continue
            ids.add(identity)
            new.append(item)
        for number, run in enumerate(in_runs(new)):
            queue = self._queues[is_initial]
            queue.append(run, self._accepted_us(queue, is_behind=number > 0))
            self._add_ids(item.identity for item in run)
            self.accepted += len(run)
        self.repeated += repeated

    def _accepted_us(self, queue: EventQueue, *, is_behind: bool) -> int:
        """Now; where the clock was set back, also while no server ran, behind all that was accepted before.

        What is held back keeps its order by it, and so do events in different queues.

        Args:
            queue: into which it goes.
            is_behind: not at the same time as what was accepted last into this queue.
        """
        newest_us = max(each.newest_us + (is_behind or each is not queue) for each in self._all_queues)
        now_us = self._clock.unix_us()
        return now_us if now_us >= newest_us else newest_us + 1

    @property
    def silent_ns(self) -> int:
        """For how long it has not looked at the reserves, or could take nothing from them."""
        since_ns = list(self._full_ns.values())
        return self._clock.monotonic_ns() - min([self.passed_ns, *since_ns])

    def close(self) -> None:
        """Let go of the reserves."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _take_all(self, initial: list[_Found], normal: list[_Found]) -> int:
        """Add what is new of both periods; as much of it as there is room for."""
        added, full = 0, set[bool]()
        for is_initial, found in _in_turns(initial, normal):
            if is_initial not in full:
                added += self._take(found, is_initial=is_initial)
            if found:
                full.add(is_initial)
        return added

    def _take(self, found: list[_Found], *, is_initial: bool) -> int:
        """Add these; what there is no room for stays in the list."""
        added = 0
        while found:
            now = found[: self._chunk]
            try:
                added += self.accept((each.item for each in now if each.item), is_initial=is_initial)
            except QueueFull as exc:
                if self._chunk > 1:
                    self._chunk = min(self._chunk, len(now)) // 2 or 1
                    continue
                if is_initial not in self._full_ns:
                    log.error("queue-of-events-full", problem=str(exc))
                    self._full_ns[is_initial] = self._clock.monotonic_ns()
                break
            self._full_ns.pop(is_initial, None)
            self._chunk = min(BATCH, 2 * self._chunk)
            self._probe("queued")
            for each in now:
                each.release()
            del found[: len(now)]
        return added

    def _found(self, readers: list[ReserveReader]) -> list[_Found]:
        """What is new, in the order in which it was raised.

        What is raised while the reserves are read waits for the next pass: something that was raised before
        it may lie in a reserve that was read already.
        """
        tails, streams = [reader.tail() for reader in readers], list[list[_Found]]()
        for reader, tail in zip(readers, tails, strict=True):
            name = reader.name
            more, counts, records = reader.take_more(), reader.take_counts(), reader.take(reader.slots)
            self.fills[name] = len(records) / reader.slots
            if counts:
                lost = QueuedEvent(self._lost(name, counts))
                place = self._order.place_of(lost.event.at_us)
                streams.append([_Found(lost, partial(reader.release_counts, counts), place)])
            folded = [self._found_more(reader, each) for each in more]
            single = list[_Found]()
            for record in records:
                first, others = self._found_record(reader, record, is_late=record.number > tail)
                single.append(first)
                folded += others
            streams += _before_what_follows(folded, single), single
        found = list(heapq.merge(*streams, key=lambda each: each.place))
        while found and found[-1].is_late:
            found.pop()
        return found

    def _found_more(self, reader: ReserveReader, record: TakenRecord) -> _Found:
        item, _ = self._item(record, reader.name, is_more=True)
        place = self._order.place_of(record.last_us)
        return _Found(item, partial(reader.release_more, [record]), place, record.number)

    def _found_record(
        self, reader: ReserveReader, record: TakenRecord, *, is_late: bool
    ) -> tuple[_Found, list[_Found]]:
        """A record, and apart from it what was folded into it, if that begins or ends a condition."""
        item, place = self._item(record, reader.name, is_more=False)
        found = _Found(item, partial(reader.release, [record]), place, record.number, is_late)
        if record.events == 1 or item is None or found.key is None:
            return found, []
        others = self._found_more(reader, record._replace(events=record.events - 1))
        behind = place[0], place[1] + 1  # whatever the clock said
        others = others._replace(place=max(behind, others.place), is_late=is_late)
        release = partial(reader.release, [record._replace(events=1)])
        return found._replace(item=replace(item, repeats=1), release=release), [others]

    def _item(self, record: TakenRecord, name: str, *, is_more: bool) -> tuple[QueuedEvent | None, Place]:
        try:
            row = row_in(record.payload)
            event = from_row(row)
        except EventUnreadable as exc:
            self.unreadable += 1
            log.error("event-unreadable", reserve=name, problem=str(exc))
            return None, self._order.place_of(record.last_us)
        place = self._order.place(row.get(MOMENT), event.at_us)
        if is_more:  # the event itself was delivered before: this is another delivery, of those folded since
            event_id = folded_identity(event.event_id, record.last_us, record.events)
            event = replace(event, event_id=event_id, at_us=record.last_us)
        return QueuedEvent(event, repeats=record.events), place

    def _lost(self, name: str, counts: list[TakenCount]) -> Event:
        total = sum(count.events for count in counts)
        first_us, last_us = min(c.first_us for c in counts), max(c.last_us for c in counts)
        by_kind = {count.kind: count.events for count in counts}
        process = name.partition(".")[0]
        return Event(
            event_id=str(uuid.uuid5(NAMESPACE, f"{name}/{last_us}/{sorted(by_kind.items())}")),
            at_us=last_us,
            kind="events-lost",
            severity="critical",
            element="server",
            subject=process,
            text=f"{total} events of {process} were counted, but not kept: its reserve was full. "
            "Those that reached SQL are in `sla get events`",
            details={"counts": by_kind, "first_us": first_us, "last_us": last_us},
            source="delivery",
        )

    def _list(self) -> None:
        now_ns = self._clock.monotonic_ns()
        if self._listed_ns and now_ns - self._listed_ns < LISTING_NS:
            return
        self._listed_ns = now_ns
        for path, reader in list(self._readers.items()):
            if not reader.is_current():
                self._take(self._found([reader]), is_initial=INITIAL in path.name)
                reader.close()
                del self._readers[path]
        for path in sorted(self._directory.glob(f"[!.]*{SUFFIX}")):
            if path in self._readers:
                continue
            try:
                self._readers[path] = reader = ReserveReader(path)
            except (OSError, ValueError) as exc:
                log.warning("reserve-not-read", path=str(path), problem=str(exc))
                continue
            if reader.damaged:
                log.error("reserve-damaged", path=str(path), records=reader.damaged)

    def _remember(self, queue: EventQueue) -> None:
        after = 0
        while True:
            items, through = queue.read(after)
            if through == after:
                return
            self._add_ids(item.identity for item in items if not item.recipient)
            after = through

    def _add_ids(self, event_ids: Iterable[str]) -> None:
        for event_id in event_ids:
            self._ids[event_id] = None
            if len(self._ids) > self._most_ids:
                self._ids.popitem(last=False)


def folded_identity(event_id: str, last_us: int, events: int) -> str:
    """Identity of the event for so many that were folded into another one, the newest at that time."""
    return str(uuid.uuid5(NAMESPACE, f"{event_id}/{last_us}/{events}"))


def _before_what_follows(folded: list[_Found], single: list[_Found]) -> list[_Found]:
    """What was folded, in order: each before the next record of its reserve about the same condition."""
    following: dict[Key, list[_Found]] = {}
    for each in single:
        if (key := each.key) is not None:
            following.setdefault(key, []).append(each)
    found = list[_Found]()
    for each in folded:
        behind = following.get(each.key or (), ())
        first = next((other.place for other in behind if other.number > each.number), each.place)
        found.append(each._replace(place=min(each.place, first)))
    return sorted(found, key=lambda each: each.place)


def _in_turns(initial: list[_Found], normal: list[_Found]) -> list[tuple[bool, list[_Found]]]:
    """What is taken after what, of the initialization period or not; of one condition as it was raised."""
    waiting: dict[bool, list[_Found]] = {True: [], False: []}
    keys: dict[bool, set[Key]] = {True: set(), False: set()}
    turns = list[tuple[bool, list[_Found]]]()
    streams = (
        [(is_initial, each) for each in found] for is_initial, found in ((True, initial), (False, normal))
    )
    for is_initial, each in heapq.merge(*streams, key=lambda one: one[1].place):
        if (key := each.key) is not None:
            if key in keys[not is_initial]:
                turns.append((not is_initial, waiting[not is_initial]))
                waiting[not is_initial], keys[not is_initial] = [], set()
            keys[is_initial].add(key)
        waiting[is_initial].append(each)
    return [*turns, (True, waiting[True]), (False, waiting[False])]
