"""Distribution and confirmation: from the queues to the lanes, and from answers to cursors (E4).

One step looks at every lane once. A lane without a batch gets the next one (``composer``), which goes to the
recipient's thread when it is due. A lane with a batch under way waits for the answer, nothing else: lanes
never wait for each other.

Order of what is made durable in a step: later events (held back, reminders) before the cursor that passes
them; which batches are handed over, with one write for all lanes, before the recipients have them; the state
file with all cursors before the deletion behind them. A crash anywhere repeats, never loses.

Reads no clock but the one given, starts no thread and sends nothing itself (``stages.send``).

Thread: the main loop.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import structlog

from pmdaemon.runtime.clock import Clock
from sla_server.events import catalogue
from sla_server.events.composer import BatchComposer
from sla_server.events.ended import ACKNOWLEDGED, EndedConditions
from sla_server.events.first_reading import FirstReading
from sla_server.events.lane import (
    FAILING_ATTEMPTS,
    DeliveryBatch,
    DeliveryState,
    Lane,
    LaneSettings,
    Raise,
)
from sla_server.events.later import LaterQueue
from sla_server.events.queue import EventQueue, QueuedEvent
from sla_server.events.recipients.base import Answer, Notice, Router, Status, retry
from sla_server.events.stages.confirm import RetryRules, Step, confirm
from sla_server.events.stages.elsewhere import Elsewhere
from sla_server.events.stages.send import GRACE_S, SentBatch
from sla_server.events.trouble import RecipientTrouble

log = structlog.get_logger("delivery")
FULL_RATIO: Final = 0.8
VERY_FULL_RATIO: Final = 0.9
"""Below it a first try under way is waited for before its batch is given up."""
OBSERVER: Final = ""
"""The lane of the engine itself: it sees each event once, to end reminders of what is resolved or known."""
FOLLOW_UPS: Final = ("remind", "escalate")
"""Purposes of later events that end with their condition, and when a person acknowledges."""
MOVE_PAUSE_NS: Final = 100_000_000  # the lanes need time to make room
Report = Callable[[Iterable[dict[str, Any]]], None]
"""Takes rows of what became of notices, for people to read; must not block or raise."""


def no_report(_rows: Iterable[dict[str, Any]]) -> None:
    """Rows are not wanted."""


class NoSender:
    """Of the observer: it gets nothing."""

    def start(self, _token: int, _notices: Sequence[Notice], _timeout_s: float) -> bool:
        """Never called with a notice."""
        return False

    def abandon(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine works on.

    Attributes:
        queues: in the order in which lanes read them.
        later: what comes at a certain time; due items enter the last of ``queues``.
        state_path: of the state file.
        reading: of the last of ``queues``, if that was read already.
    """

    queues: Sequence[EventQueue]
    later: LaterQueue
    state_path: Path
    queue_ids: Mapping[str, str]
    reading: FirstReading | None = None


class DeliveryEngine:
    """See the module.

    Args:
        parts: queues and files.
        router: routes and silences.
        rules: of retries.
        clock: both time bases.
        raise_event: for trouble with a recipient.
        report: rows of what became of notices.
        chance: for jitter.
        runbook_url: page with an entry for each kind of event, for links.

    Attributes:
        skipped: reasons for which events did not go to a recipient, counted.
    """

    def __init__(
        self,
        parts: EngineParts,
        router: Router,
        rules: RetryRules,
        clock: Clock,
        raise_event: Raise,
        report: Report = no_report,
        chance: random.Random | None = None,
        runbook_url: str = catalogue.PAGE,
    ) -> None:
        self._queues = {queue.name: queue for queue in parts.queues}
        self._main = parts.queues[-1]
        self._later = parts.later
        reading = parts.reading or FirstReading(self._main, self._later)
        self._order = reading.order
        self._order.leave_out(self._later.repeat_moves(self._main, reading.moves))
        self._rules = rules
        self._clock = clock
        self._raise = raise_event
        self._trouble = RecipientTrouble(raise_event)
        self._state = DeliveryState(parts.state_path, parts.queue_ids, self._trouble)
        self._report = report
        self._chance = chance or random.Random()  # noqa: S311 - spreads retries, keeps no secret
        self._lanes: dict[str, Lane] = {}
        self._token = 0
        self._move_ns = 0
        self._is_dirty = True
        self._is_routed = False
        self._add(LaneSettings(OBSERVER, NoSender()), from_start=True)
        self._ended = EndedConditions(self._lanes[OBSERVER].firing)
        self._later.cancel(lambda item: item.purpose in FOLLOW_UPS and self._ended.has(item.event))
        self._composer = BatchComposer(
            parts.queues, parts.later, self._order, self._ended, router, clock, self._trouble, runbook_url
        )
        self.skipped = self._composer.skipped

    @property
    def lanes(self) -> Mapping[str, Lane]:
        """By recipient, without the observer."""
        return {name: lane for name, lane in self._lanes.items() if name != OBSERVER}

    def is_behind(self, name: str) -> bool:
        """Whether a recipient has not passed all that is in the queues."""
        cursors = self._lanes[name].cursors
        return any(cursors[queue.name] < queue.newest_seq for queue in self._queues.values())

    def waiting(self, name: str, most: int) -> tuple[list[QueuedEvent], int]:
        """What waits in the queues for a recipient; see ``BatchComposer.waiting``."""
        return self._composer.waiting(self._lanes[name], most)

    def set_partner(self, decide: Elsewhere) -> None:
        """Ask the partner of a cooperating pair first: it may have delivered an event, or will."""
        self._composer.elsewhere = decide

    def done_through(self, without: str) -> dict[str, int]:
        """Up to where no recipient but ``without`` needs a queue; 0 before any document was read."""
        if not self._is_routed:
            return dict.fromkeys(self._queues, 0)
        lanes = [lane for lane in self._lanes.values() if lane.name != without]
        return {
            name: min([lane.cursors[name] for lane in lanes] + self._state.needed(name))
            for name in self._queues
        }

    def set_recipients(
        self,
        settings: Iterable[LaneSettings],
        from_start: Iterable[str] = (),
        unknown: Collection[str] | None = (),
    ) -> None:
        """These recipients from now on; a new one gets what no step has read yet, or all that is still there.

        What was made ready by former settings or routes is made again, unless it is under way; what failed
        waits on, and is tried at once if its own recipient has changed.

        Args:
            settings: all recipients.
            from_start: names of those that get all that is there, when they are new.
            unknown: what waits for these waits on: their documents cannot be read. None: no document was
                read yet, and nothing is deleted.
        """
        wanted = {each.name: each for each in settings}
        first = set(from_start)
        for name in [name for name in self._lanes if name != OBSERVER and name not in wanted]:
            lane = self._lanes.pop(name)
            lane.settings.sender.close()
            self._state.keep(lane)
        for name, each in wanted.items():
            if name not in self._lanes:
                self._add(each, from_start=name in first)
                continue
            lane = self._lanes[name]
            if each.sender is not lane.settings.sender:
                lane.settings.sender.close()
                lane.drop()
                if lane.tries is not None:
                    lane.tries = replace(lane.tries, not_before_ns=0)
            elif not lane.token:
                lane.drop()
            lane.settings = each
        if unknown is not None:
            for name in self._state.keep_only(unknown):
                self._say_recovered(name, f"recipient {name}, which did not confirm, is no longer in force")
            self._is_routed = True
        self._is_dirty = True

    def set_router(self, router: Router) -> None:
        """Route by this from now on; what is held back longer than silences say now comes when they end."""
        self._composer.set_router(router)
        now_us = self._clock.unix_us()

        def until_us(item: QueuedEvent) -> int:
            found = router.held(item.event, item.recipient, now_us)
            return 0 if found is None else found.until_us

        self._later.hold_until(until_us)
        for lane in self._lanes.values():
            if not lane.token:
                lane.drop()

    def acknowledge(self, event_id: str) -> int:
        """A person knows: no reminder or escalation of this event any more; returns how many there were."""
        self._ended.acknowledged(event_id, self._clock.unix_us())
        return self._later.cancel(lambda item: item.event.event_id == event_id and item.purpose in FOLLOW_UPS)

    def answered(self, sent: SentBatch) -> None:
        """An answer; of a batch that was left behind meanwhile it means nothing."""
        lane = self._lanes.get(sent.lane)
        if lane is not None and lane.token == sent.token and lane.batch is not None:
            self._confirm(lane, lane.batch, sent.answer)

    def step(self) -> float:
        """One look at everything; returns the seconds after which there may be more to do."""
        now_us, now_ns = self._clock.unix_us(), self._clock.monotonic_ns()
        self._move_due(now_us, now_ns)
        self._observe()
        ready: list[Lane] = []
        waits_s = [self._advance(lane, now_us, now_ns, ready) for lane in self.lanes.values()]
        wait_s = min([60.0, *waits_s, *self._hand_over(ready, now_ns)])
        if self._escalate_waiting(now_us):
            wait_s = 0.0
        self._keep_state()
        if self._relieve(now_us):
            wait_s = 0.0
        has_raised, trouble_s = self._trouble.raise_due(now_ns)
        self._is_dirty = self._is_dirty or has_raised
        wait_s = min(wait_s, trouble_s)
        if self._is_dirty and self._is_routed:
            wait_s = min(wait_s, max(0.0, (self._state.due_ns - now_ns) / 1e9))
        if (due := self._later.next_due_us()) is not None:
            wait_s = min(wait_s, max(0.0, (due - now_us) / 1e6, (self._move_ns - now_ns) / 1e9))
        return wait_s

    def close(self) -> None:
        """Keep the state and close the recipients; what is under way comes again after the next start."""
        self._is_dirty, self._state.due_ns = True, 0
        self._keep_state()  # with what is raised now, which a kill may keep from it
        self._trouble.raise_all()
        self._is_dirty, self._state.due_ns = True, 0
        self._keep_state()
        for lane in self._lanes.values():
            lane.settings.sender.close()

    # One lane.

    def _add(self, settings: LaneSettings, *, from_start: bool) -> None:
        start = {name: queue.newest_seq for name, queue in self._queues.items()}
        if (seen := self._lanes.get(OBSERVER)) is not None:
            start = dict(seen.cursors)
        is_new = settings.name not in self._state.names
        lane = self._state.lane(settings, start)
        if is_new and from_start:
            lane.cursors = dict.fromkeys(start, 0)
        self._lanes[settings.name] = lane
        self._is_dirty = True

    def _advance(self, lane: Lane, now_us: int, now_ns: int, ready: list[Lane]) -> float:
        """Seconds until a lane needs another look; one whose batch may go now is added to ``ready``."""
        if lane.token:
            left_s = (lane.deadline_ns - now_ns) / 1e9
            if left_s > 0:
                return left_s
            lane.settings.sender.abandon()
            if lane.batch is not None:
                said = f"no answer within {lane.settings.timeout_s:g} s"
                self._confirm(lane, lane.batch, retry(said))
            return 0.0
        if lane.batch is None or (lane.batch.attempt == 0 and lane.batch.due_ns > now_ns):
            before = dict(lane.cursors)
            lane.take(self._composer.compose(lane, now_us))
            self._is_dirty = self._is_dirty or lane.cursors != before
        batch = lane.batch
        if batch is None:
            return 60.0
        wait_s = max(
            (batch.due_ns - now_ns) / 1e9,
            (batch.not_before_ns - now_ns) / 1e9,
            _pace_s(lane, now_ns),
        )
        if wait_s <= 0:
            ready.append(lane)
        return wait_s if wait_s > 0 else 60.0

    def _hand_over(self, lanes: Sequence[Lane], now_ns: int) -> list[float]:
        """Give these lanes' batches to their recipients; returns seconds until each is looked at again."""
        batches = [(lane, lane.batch) for lane in lanes if lane.batch is not None]
        is_new = False
        for lane, batch in batches:
            batch.attempt += 1
            if not lane.has_sent(batch.queue) or lane.sent[1] < batch.through:
                lane.sent = batch.queue, batch.through
                is_new = True
        if is_new:
            self._keep_handed_over()
        return [self._send(lane, batch, now_ns) for lane, batch in batches]

    def _send(self, lane: Lane, batch: DeliveryBatch, now_ns: int) -> float:
        self._token += 1
        notices = [replace(notice, attempt=batch.attempt) for notice in batch.notices()]
        if not lane.settings.sender.start(self._token, notices, lane.settings.timeout_s):
            self._confirm(lane, batch, retry("too many of its calls hang"))
            return 0.0
        lane.token = self._token
        lane.deadline_ns = now_ns + round((lane.settings.timeout_s + GRACE_S) * 1e9)
        if lane.settings.per_minute:
            each_ns = round(60e9 / lane.settings.per_minute)
            lane.paced_ns = max(now_ns, lane.paced_ns) + each_ns
        return lane.settings.timeout_s + GRACE_S

    # Confirmation.

    def _confirm(self, lane: Lane, batch: DeliveryBatch, answer: Answer) -> None:
        lane.token = 0
        lane.last_answer = (
            f"{answer.outcome.value}: {answer.reason}" if answer.reason else answer.outcome.value
        )
        now_us, now_ns = self._clock.unix_us(), self._clock.monotonic_ns()
        if batch.failing_ns == 0:
            batch.failing_ns = now_ns - batch.failed_ns
        batch.failed_ns = now_ns - batch.failing_ns
        failing_s = batch.failed_ns / 1e9
        found = confirm(answer, batch.attempt, failing_s, len(batch.entries), self._rules, self._chance)
        match found.step:
            case Step.NEXT:
                self._has_confirmed(lane, batch, now_us)
            case Step.AGAIN:
                batch.not_before_ns = now_ns + round(found.wait_s * 1e9)
                self._say_failing(lane, batch, answer)
                self._is_dirty = True
            case Step.SINGLY:
                lane.singly, lane.batch = (batch.queue, batch.through), None
            case Step.DEAD_LETTER:
                self._keep_follow_ups(lane, batch, now_us, is_confirmed=False)
                self._give_up(lane, batch, answer.reason, now_us)

    def _keep_follow_ups(
        self, lane: Lane, batch: DeliveryBatch, now_us: int, *, is_confirmed: bool = True
    ) -> None:
        self._observe()  # the end of what is in the batch may be in the queue already
        open_ones = [(item, routed) for _, item, routed in batch.entries if not self._ended.has(item.event)]
        self._composer.keep_follow_ups(lane, batch.queue, open_ones, now_us, is_confirmed=is_confirmed)

    def _has_confirmed(self, lane: Lane, batch: DeliveryBatch, now_us: int) -> None:
        self._keep_follow_ups(lane, batch, now_us)
        lane.firing = batch.firing
        self._pass(lane, batch)
        lane.confirmed += len(batch.entries)
        lane.confirmed_us = now_us
        self._record(lane, batch, "confirmed", now_us)
        if lane.is_failing or lane.may_owe_end:
            lane.is_failing = lane.may_owe_end = False
            self._say_recovered(lane.name, f"recipient {lane.name} confirms again", attempts=batch.attempt)

    def _say_recovered(self, name: str, text: str, **details: int) -> None:
        self._raise("recipient-recovered", "info", name, text, details)

    def _pass(self, lane: Lane, batch: DeliveryBatch) -> None:
        lane.cursors[batch.queue] = batch.through
        lane.number += len(batch.entries)
        lane.batch = None
        self._is_dirty = True

    def _say_failing(self, lane: Lane, batch: DeliveryBatch, answer: Answer) -> None:
        if batch.attempt == 1:
            self._record(lane, batch, "failing", self._clock.unix_us())
        if batch.attempt >= FAILING_ATTEMPTS and not lane.is_failing:
            lane.is_failing = True
            text = f"recipient {lane.name} has not confirmed {batch.attempt} times: {answer.reason}"
            details = {"attempts": batch.attempt, "waiting": len(batch.entries), "answer": answer.reason}
            self._raise("recipient-failing", "warning", lane.name, text, details)

    def _give_up(self, lane: Lane, batch: DeliveryBatch, reason: str, now_us: int) -> None:
        """Dead letters: reported, counted, and an event to the others."""
        lane.dead_letters += len(batch.entries)
        self._trouble.gave_up(
            lane.name, batch.notices(), reason
        )  # before a state is written that passes them
        self._pass(lane, batch)
        self._record(lane, batch, "dead-letter", now_us)

    def _record(self, lane: Lane, batch: DeliveryBatch, state: str, now_us: int) -> None:
        self._report(
            {
                "delivery_id": notice.delivery_id,
                "recipient": lane.name,
                "event_id": notice.event.event_id,
                "number": notice.number,
                "state": state,
                "attempts": batch.attempt,
                "answer": lane.last_answer[:500],
                "at_us": now_us,
            }
            for notice in batch.notices()
        )

    # All lanes together.

    def _move_due(self, now_us: int, now_ns: int) -> None:
        if now_ns >= self._move_ns and not self._later.move_due(now_us, self._main):
            self._move_ns = now_ns + MOVE_PAUSE_NS

    def _escalate_waiting(self, now_us: int) -> bool:
        """What waits for recipients that do not confirm goes to others in time; whether there is more."""
        failing = [lane for lane in self.lanes.values() if lane.does_not_confirm]
        read_on = [self._composer.escalate_waiting(lane, now_us) for lane in failing]
        self._is_dirty = self._is_dirty or any(read_on)
        return any(read_on)

    def _observe(self) -> None:
        """See each routed event once: what is resolved or acknowledged is reminded of no more."""
        self._order.read_on()
        lane = self._lanes[OBSERVER]
        for queue in self._queues.values():
            while True:
                items, through = queue.read(lane.cursors[queue.name])
                if through == lane.cursors[queue.name]:
                    break
                for item in items:
                    if item.recipient:
                        continue
                    self._ended.saw(item.event)
                    if catalogue.status_of(item.event) is Status.RESOLVED:
                        self._end_reminders(catalogue.condition_key(item.event))
                    elif item.event.kind == ACKNOWLEDGED:
                        self.acknowledge(str(item.event.details.get("event_id", "")))
                lane.cursors[queue.name] = through
                self._is_dirty = self._is_dirty or not self.lanes  # else it is written with what they pass

    def _end_reminders(self, key: tuple[str, ...]) -> None:
        self._later.cancel(
            lambda item: item.purpose in FOLLOW_UPS and catalogue.condition_key(item.event) == key
        )

    def _relieve(self, now_us: int) -> bool:
        """A queue is nearly full: the lane furthest behind gives up its oldest batch; whether one did.

        None does while what was passed waits for the state file: to give up would free nothing.
        """
        if self._is_dirty and self._is_routed:
            return False
        relieved = False
        for queue in self._queues.values():
            if queue.fullness_ratio < FULL_RATIO:
                continue
            behind = [lane for lane in self.lanes.values() if lane.cursors[queue.name] < queue.newest_seq]
            oldest = min((lane.cursors[queue.name] for lane in behind), default=queue.newest_seq)
            self._is_routed = True  # without any documents the lanes that are known have to do
            if self._state.relieve(queue, oldest, self._raise):
                relieved = self._is_dirty = True
            elif behind:
                lane = min(behind, key=lambda each: each.cursors[queue.name])
                is_under_way = lane.batch is not None and lane.batch.attempt == 1 and lane.token
                if not is_under_way or queue.fullness_ratio >= VERY_FULL_RATIO:
                    relieved = self._give_up_oldest(lane, now_us) or relieved
        return relieved

    def _give_up_oldest(self, lane: Lane, now_us: int) -> bool:
        """A lane gives up its batch, whichever queue that is from, or what it has no room to hold back."""
        if lane.batch is None and lane.no_room:
            lane.batch = self._composer.unheld(lane, now_us)
        if lane.batch is None:
            return False
        if lane.token:
            lane.settings.sender.abandon()
            lane.token = 0
        lane.batch.attempt = max(lane.batch.attempt, 1)
        reason = f"the queue of events is {FULL_RATIO:.0%} full"
        lane.last_answer = lane.last_answer or reason
        self._give_up(lane, lane.batch, reason, now_us)
        return True

    def _keep_handed_over(self) -> None:
        """Which batches are under way, before the recipient has them; on a full disk they go all the same."""
        try:
            self._state.write(self._lanes, synced=False)
        except OSError:
            self._is_dirty = True  # what is wrong is said where it is written next

    def _keep_state(self) -> None:
        if not self._is_dirty or not self._is_routed:
            return
        if not self._state.is_written(self._lanes, self._clock, self._raise):
            return
        self._is_dirty, is_idle = False, not self._later.holds_events
        self._later.sync_moves()
        for name, queue in self._queues.items():
            cursors = [lane.cursors[name] for lane in self._lanes.values()]
            through = min(cursors + self._state.needed(name))
            queue.delete_through(through)
            if queue is self._main:
                self._order.forget_through(through)
            is_idle = is_idle and through >= queue.newest_seq
        if is_idle and self._ended.knows_any:
            self._later.sync_removals()  # a crash must not bring reminders of it back
            self._ended.forget()


def _pace_s(lane: Lane, now_ns: int) -> float:
    """Seconds until the rate limit lets another call pass: a minute's worth passes at once."""
    if not lane.settings.per_minute:
        return 0.0
    cost_s = min(60.0, 60.0 / lane.settings.per_minute)
    return (lane.paced_ns - now_ns) / 1e9 + cost_s - 60.0
