"""What a recipient gets next: the events behind its cursor, through the stages in their order.

A lane reads a chunk at a time. What is skipped moves its cursor, what is held back is made durable in the
queue of later events before the cursor passes it, and the first run of events that it gets becomes a batch.
Where the queue of later events has no room, the lane stays before what it would hold back (``Lane.no_room``):
an event says so, and when the queue of events is nearly full, that is given up (``unheld``).

The queue of the initialization period comes first (E6): a lane begins with the other one when it has nothing
there, or a batch that was handed over before: that comes again first, with the same numbers.

What comes after a notice are reminders, from its confirmation on, and escalations, also without one.

Reads no clock but the one given and sends nothing.

Thread: the main loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import structlog

from pmdaemon.diskqueue.errors import QueueFull
from pmdaemon.runtime.clock import Clock
from sla_server.events import catalogue
from sla_server.events.ended import EndedConditions, ends_one_of
from sla_server.events.lane import DeliveryBatch, Firing, Lane
from sla_server.events.later import LaterQueue
from sla_server.events.order import ReadOrder
from sla_server.events.queue import EventQueue, QueuedEvent
from sla_server.events.recipients.base import Held, Notice, Routed, Router, Status
from sla_server.events.stages.base import StageDecision, StageReason, StageVerdict
from sla_server.events.stages.deduplicate import deduplicate, known_after
from sla_server.events.stages.elsewhere import Elsewhere, nowhere
from sla_server.events.stages.group import wait_us
from sla_server.events.stages.inhibit import inhibit
from sla_server.events.trouble import HELD_BACK_FULL, REMINDERS_DROPPED, RecipientTrouble

log = structlog.get_logger("delivery")
MOST_ROUTES: Final = 10_000
"""Routes of events that are kept for the other lanes."""


class BatchComposer:
    """See the module.

    Args:
        queues: in the order in which lanes read them.
        later: takes what is held back.
        order: keeps the events of one condition in their order.
        ended: conditions that have ended.
        router: routes and silences.
        clock: both time bases.
        trouble: what could not be held back.
        runbook_url: page with an entry for each kind of event.

    Attributes:
        skipped: reasons for which events did not go to a recipient, counted.
        elsewhere: whether the partner of a cooperating pair has to do with it; the first stage.
    """

    def __init__(
        self,
        queues: Sequence[EventQueue],
        later: LaterQueue,
        order: ReadOrder,
        ended: EndedConditions,
        router: Router,
        clock: Clock,
        trouble: RecipientTrouble,
        runbook_url: str = catalogue.PAGE,
    ) -> None:
        self._runbook_url = runbook_url
        self._queues = {queue.name: queue for queue in queues}
        self._later = later
        self._order = order
        self._ended = ended
        self._router = router
        self._clock = clock
        self._trouble = trouble
        self._routes: dict[tuple[str, int], dict[str, Routed]] = {}
        self.skipped: Counter[StageReason] = Counter()
        self.elsewhere: Elsewhere = nowhere

    def set_router(self, router: Router) -> None:
        """Route by this from now on."""
        self._router = router
        self._routes.clear()

    def compose(self, lane: Lane, now_us: int) -> DeliveryBatch | None:
        """The next batch of a lane, None without one; moves its cursors over what it does not get."""
        try:
            batch = self._next(lane, now_us)
        except QueueFull:  # for what is held back: later, or it is given up
            return None
        lane.no_room = ""
        return batch

    def unheld(self, lane: Lane, now_us: int) -> DeliveryBatch | None:
        """What a lane without room to hold more back gives up: all before the first event that can be sent.

        What is held back already stays so. An end takes the beginning that is held back with it: delivered
        alone, the beginning would never end.
        """
        queue = self._queues[lane.no_room]
        entries: list[tuple[Notice, QueuedEvent, Routed]] = []
        through = lane.cursors[queue.name]
        for item in queue.read(through)[0]:
            routed, decision = self._check(lane, queue, item, lane.firing, now_us)
            if decision is None or len(entries) >= lane.settings.most_notices:
                break
            if decision.verdict is StageVerdict.HOLD and _held(item, lane.name, 0) not in self._later:
                assert routed is not None  # else it is skipped
                is_end = catalogue.status_of(item.event) is Status.RESOLVED
                held = self._later.take_held(lane.name, item.event) if is_end else []
                for each in (*held, item):
                    entries.append((self._notice(each, routed, lane.number + len(entries) + 1), each, routed))
            through = item.seq
        is_some = through > lane.cursors[queue.name]
        return DeliveryBatch(queue.name, through, entries, 0, lane.firing) if is_some else None

    def routed(self, queue: str, item: QueuedEvent, recipient: str) -> Routed | None:
        """Whether and how an event of a queue goes to a recipient, by its address or by the routes.

        What was held back goes as the routes say now, with its reminders and escalation.
        """
        if item.recipient and item.recipient != recipient:
            return None
        if item.recipient and not item.is_caught_up:
            return Routed(recipient, "addressed")
        found = self._routes.get((queue, item.seq))
        if found is None:
            found = {each.recipient: each for each in self._router.route(item.event)}
            if len(self._routes) >= MOST_ROUTES:
                self._routes.clear()
            self._routes[queue, item.seq] = found
        return found.get(recipient) or (Routed(recipient, "addressed") if item.recipient else None)

    def waiting(self, lane: Lane, most: int) -> tuple[list[QueuedEvent], int]:
        """Events behind a lane's cursors that go to it, of some ``most``; and the count of the others."""
        found, unread = list[QueuedEvent](), 0
        for queue in self._queues.values():
            after = lane.cursors[queue.name]
            while most > 0:
                items, through = queue.read(after)
                if through == after:
                    break
                after, most = through, most - len(items)
                found += [item for item in items if self._goes_to(lane, queue, item)]
            unread += queue.newest_seq - after
        return found, unread

    def _goes_to(self, lane: Lane, queue: EventQueue, item: QueuedEvent) -> bool:
        is_end_of_known = not item.recipient and ends_one_of(item.event, lane.firing)
        return is_end_of_known or self.routed(queue.name, item, lane.name) is not None

    def _next(self, lane: Lane, now_us: int) -> DeliveryBatch | None:
        before = -1
        while before:  # what had to go first is passed: from the beginning
            before = 0
            for queue, last in self._turns(lane):
                while True:
                    items, through, first = self._order.chunk(queue, lane.cursors, last or before)
                    before = before if last else first
                    if through == lane.cursors[queue.name]:
                        break
                    batch, lane.cursors[queue.name] = self._of_chunk(lane, queue, items, through, now_us)
                    if batch is not None:
                        return batch
        return None

    def _turns(self, lane: Lane) -> list[tuple[EventQueue, int]]:
        """Queues as a lane reads them, each with the number up to which it does; 0: all of it.

        What was handed over of the main queue comes first, but nothing behind it: the queue of the
        initialization period may have got what is older than that.
        """
        turns = [(queue, 0) for queue in self._queues.values()]
        main = turns[-1][0]
        return [(main, lane.sent[1]), *turns] if lane.has_sent(main.name) else turns

    def _of_chunk(
        self, lane: Lane, queue: EventQueue, items: Sequence[QueuedEvent], through: int, now_us: int
    ) -> tuple[DeliveryBatch | None, int]:
        """A batch of a chunk, if any, and how far the cursor may go without it.

        Raises:
            QueueFull: there is no room for what is held back; the cursor stays where it is.
        """
        entries: list[tuple[Notice, QueuedEvent, Routed]] = []
        held: list[QueuedEvent] = []
        taken_over = set[tuple[str, bool]]()  # a partner that is lost again is taken over again
        firing, start = dict(lane.firing), lane.cursors[queue.name]
        limit, passed, reached = lane.limit(queue.name), start, start
        for item in items:
            if held and catalogue.status_of(item.event) is not Status.INFO:
                self._keep(lane, queue, held)  # what ends a condition must find its beginning among it
            routed, decision = self._check(lane, queue, item, firing, now_us)
            place = item.identity, item.escalated
            if decision is None and item.origin and place in taken_over:
                text = "it was taken over twice, and is in this batch already"
                decision = StageDecision(StageVerdict.SKIP, StageReason.PARTNER, text)
            if entries and decision is not None and decision.reason is StageReason.LEFT_TO_PARTNER:
                break  # the partner may be away again when the batch is confirmed: it must not pass this
            if decision is not None and decision.reason is StageReason.SENT_BY_PARTNER:
                self._sent_by_partner(lane, queue.name, item, routed, firing, is_first=not entries)
            if decision is None:
                assert routed is not None  # else it is skipped
                if len(entries) >= limit:
                    break
                if not entries:
                    passed = reached
                entries.append((self._notice(item, routed, lane.number + len(entries) + 1), item, routed))
                known_after(item.event, firing)
                taken_over.add(place)
            elif decision.verdict is StageVerdict.HOLD:
                if entries:  # what is held must be durable before the cursor passes it: in the next batch
                    break
                held.append(_held(item, lane.name, decision.until_us))
            if decision is not None:
                self.skipped[decision.reason] += 1
            reached = item.seq
        else:
            reached = through
        self._keep(lane, queue, held)
        if not entries:
            return None, reached
        due_ns = self._due_ns(lane, entries, now_us, is_full=len(entries) >= limit)
        return DeliveryBatch(queue.name, reached, entries, due_ns, firing), passed

    def _due_ns(
        self,
        lane: Lane,
        entries: Sequence[tuple[Notice, QueuedEvent, Routed]],
        now_us: int,
        *,
        is_full: bool,
    ) -> int:
        """When a batch may go: its groups may wait for others."""
        wait = wait_us(((item.event, routed) for _, item, routed in entries), now_us)
        due_ns = 0 if is_full or not wait else self._clock.monotonic_ns() + wait * 1000
        if lane.batch is not None and lane.batch.entries[0][1] == entries[0][1]:
            return min(due_ns, lane.batch.due_ns)  # it waits already; the wall clock may have been set since
        return due_ns

    def _keep(self, lane: Lane, queue: EventQueue, held: list[QueuedEvent]) -> None:
        """Make durable what is held back.

        Raises:
            QueueFull: there is no room for it; the lane is marked, and an event says so.
        """
        try:
            self._later.add(held)
        except QueueFull:
            if lane.no_room != queue.name:
                lane.no_room = queue.name
                ids = [item.event.event_id for item in held]
                self._trouble.add(HELD_BACK_FULL, lane.name, ids, "the queue of later events is full")
            raise
        held.clear()

    def keep_follow_ups(
        self,
        lane: Lane,
        queue: str,
        open_ones: Iterable[tuple[QueuedEvent, Routed]],
        now_us: int,
        *,
        is_confirmed: bool = True,
    ) -> None:
        """Keep escalations of what a recipient has or does not take, and reminders of what it has."""
        later = list[QueuedEvent]()
        for item, routed in open_ones:
            later += _reminder(item, routed, now_us) if is_confirmed else ()
            later += () if lane.is_escalated(queue, item) else _escalations_after(item, routed, now_us)
        self._add_later(lane.name, later)

    def escalate_waiting(self, lane: Lane, now_us: int) -> bool:
        """Keep escalations of what waits for a recipient that does not confirm; whether there is more.

        Its queues are read ahead of its cursors, a chunk of each at a time, since what waits behind a failing
        batch is in no batch. The time begins when an event is read, or at the end of the silence that holds
        it back.
        """
        if not self._router.escalates(lane.name):
            return False
        is_more = False
        after = {name: max(seq, lane.escalated.get(name, 0)) for name, seq in lane.cursors.items()}
        if lane.ahead is None or after == lane.cursors:
            lane.ahead = dict(lane.firing)
        for name, queue in self._queues.items():
            items, through = queue.read(after[name])
            if through == after[name]:
                continue
            later = [
                each for item in items for each in self._escalations(lane, queue, item, lane.ahead, now_us)
            ]
            self._add_later(lane.name, later)
            lane.escalated[name] = through
            is_more = True
        return is_more

    def _escalations(
        self, lane: Lane, queue: EventQueue, item: QueuedEvent, ahead: Firing, now_us: int
    ) -> list[QueuedEvent]:
        """Of an event that a lane has not passed; the partner's are escalated when they are confirmed."""
        if item.origin:
            return []
        routed, decision = self._check(lane, queue, item, ahead, now_us)
        if decision is None:
            known_after(item.event, ahead)
        is_left_out = decision is not None and decision.verdict is StageVerdict.SKIP
        if routed is None or is_left_out or self._ended.has(item.event):
            return []
        return _escalations_after(item, routed, max(now_us, decision.until_us if decision is not None else 0))

    def _add_later(self, recipient: str, later: list[QueuedEvent]) -> None:
        """Keep these, if there is room for them; else an event says so."""
        try:
            self._later.add(later)
        except QueueFull:
            log.error("no-room-for-reminders", recipient=recipient, reminders=len(later))
            ids = list(dict.fromkeys(item.event.event_id for item in later))
            self._trouble.add(REMINDERS_DROPPED, recipient, ids, "the queue of later events is full")

    def _sent_by_partner(
        self,
        lane: Lane,
        queue: str,
        item: QueuedEvent,
        routed: Routed | None,
        firing: Firing,
        *,
        is_first: bool,
    ) -> None:
        """The recipient has it: what it knows, and what follows, is as if we had sent it."""
        known_after(item.event, firing)
        if is_first:
            lane.firing = dict(firing)
        if routed is not None and not self._ended.has(item.event):
            self.keep_follow_ups(lane, queue, [(item, routed)], self._clock.unix_us())

    # The stages.

    def _check(
        self, lane: Lane, queue: EventQueue, item: QueuedEvent, firing: Firing, now_us: int
    ) -> tuple[Routed | None, StageDecision | None]:
        """How an event goes to a lane, and what the stages decide; without a decision it is sent."""
        routed = self.routed(queue.name, item, lane.name)
        if routed is None and not item.recipient and ends_one_of(item.event, firing):
            routed = Routed(lane.name, "it got the beginning")
        decision = self._decide(item, routed, lane.name, firing, now_us)
        # That it knows the condition to be so may be ended by what comes now.
        is_open = decision is None or decision.reason is StageReason.ALREADY_FIRING
        if is_open and self._order.is_ahead(queue, item, lane.cursors, lane.name):
            text = "an earlier event of the same condition was held back and comes now"
            decision = StageDecision(StageVerdict.HOLD, StageReason.BEHIND_HELD, text, now_us)
        return routed, decision

    def _decide(
        self,
        item: QueuedEvent,
        routed: Routed | None,
        recipient: str,
        firing: Mapping[tuple[str, ...], tuple[int, int]],
        now_us: int,
    ) -> StageDecision | None:
        """The stages in their order; None: it is sent."""
        if routed is None:
            reason = StageReason.NOT_ADDRESSED if item.recipient else StageReason.NOT_ROUTED
            return StageDecision(StageVerdict.SKIP, reason, "")
        if decision := self.elsewhere(item, recipient):
            return decision
        if decision := self._silence(item, recipient, now_us):
            return decision
        if decision := inhibit(item.event, routed, firing):
            return decision
        if not (item.reminder or item.escalated):
            # Its server has seen to repeats; what is known here of its conditions may be old.
            return None if item.origin else deduplicate(item.event, recipient, firing)
        if self._ended.has(item.event):
            text = "it has ended or was acknowledged meanwhile"
            return StageDecision(StageVerdict.SKIP, StageReason.OVER, text)
        return None

    def _silence(self, item: QueuedEvent, recipient: str, now_us: int) -> StageDecision | None:
        held: Held | None = self._router.held(item.event, recipient, now_us)
        if held is not None and held.until_us <= now_us:
            return StageDecision(StageVerdict.SKIP, StageReason.SILENCED, held.reason)
        until_us = None if item.is_caught_up else self._later.held_until(recipient, item.event)
        if held is not None:  # what was held back before the silence was made shorter comes first
            until_us = max(held.until_us, until_us or 0)
            return StageDecision(StageVerdict.HOLD, StageReason.QUIET, held.reason, until_us)
        if until_us is not None:
            text = "an earlier event of the same condition is held back"
            return StageDecision(StageVerdict.HOLD, StageReason.BEHIND_HELD, text, until_us)
        return None

    def _notice(self, item: QueuedEvent, routed: Routed, number: int) -> Notice:
        return Notice(
            item.event,
            routed.recipient,
            number,
            repeats=item.repeats,
            group_key=routed.group_key,
            status=catalogue.status_of(item.event),
            condition=catalogue.condition_of(item.event),
            reminder=item.reminder,
            escalated=item.escalated,
            is_caught_up=item.is_caught_up,
            action=catalogue.described(item.event.kind).action,
            runbook=catalogue.runbook(item.event.kind, self._runbook_url),
        )


def _held(item: QueuedEvent, recipient: str, until_us: int) -> QueuedEvent:
    return replace(item, seq=0, recipient=recipient, due_us=until_us, purpose="held")


def _reminder(item: QueuedEvent, routed: Routed, now_us: int) -> list[QueuedEvent]:
    """The next reminder of a confirmed notice, if there is to be one."""
    remind_s = item.remind_s or routed.remind_s
    if remind_s <= 0 or item.escalated or not _asks_for_action(item):
        return []
    return [
        replace(
            item, seq=0, is_caught_up=False, recipient=routed.recipient, reminder=item.reminder + 1,
            remind_s=remind_s, due_us=now_us + round(remind_s * 1e6), purpose="remind",
        )
    ]  # fmt: skip


def _escalations_after(item: QueuedEvent, routed: Routed, from_us: int) -> list[QueuedEvent]:
    """Escalations of a notice, sent unless a person acknowledges it within the time from ``from_us`` on."""
    if routed.escalate_s <= 0 or item.reminder or item.escalated or not _asks_for_action(item):
        return []
    due_us = from_us + round(routed.escalate_s * 1e6)
    return [
        replace(
            item, seq=0, is_caught_up=False, recipient=name, escalated=True, due_us=due_us, purpose="escalate"
        )
        for name in routed.escalate_to
    ]


def _asks_for_action(item: QueuedEvent) -> bool:
    """Not what is only information or an end: no person has to do anything about it."""
    status = catalogue.status_of(item.event)
    is_only_information = status is Status.INFO and item.event.severity == "info"
    return status is not Status.RESOLVED and not is_only_information
