"""How recipients are and what they have not confirmed yet, as rows of ``delivery_state``.

All that waits for a recipient counts: its batch, what is behind that in the queues, and what silences hold
back. Of a long backlog the oldest events are looked at; the rest counts as if all of it went to the
recipient, and ``waiting_is_at_most`` says so.

Thread: the main loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pmdaemon.runtime.clock import Clock
from sla_server.events.delivery_state import MOST_UNDELIVERED
from sla_server.events.engine import DeliveryEngine
from sla_server.events.lane import Lane
from sla_server.events.later import LaterQueue
from sla_server.events.queue import QueuedEvent
from sla_server.events.recipients.base import Outcome
from sla_server.events.sql_link import NAME
from sla_server.rows import Row

MOST_READ: Final = 2 * MOST_UNDELIVERED
"""Events that are looked at for all recipients together, once a second; some 40 ms if none is in memory."""


def rows_of(
    engine: DeliveryEngine, later: LaterQueue, kind_of: Callable[[str], str], clock: Clock
) -> tuple[list[Row], list[Row]]:
    """Rows of the recipients, and of what they have not confirmed, the oldest first."""
    recipients, undelivered = list[Row](), list[Row]()
    lanes = {name: lane for name, lane in engine.lanes.items() if name != NAME}
    behind = sum(engine.is_behind(name) for name in lanes)
    for name, lane in lanes.items():
        queued, unread = engine.waiting(name, MOST_READ // max(1, behind))
        held = later.held_for(name)
        is_failing = _is_failing(lane)
        recipients.append(
            {
                "name": name,
                "kind": kind_of(name),
                "state": "failing" if is_failing else "held" if held and not queued else "ok",
                "waiting": len(queued) + unread + len(held),
                "waiting_is_at_most": bool(unread),
                "waiting_since_us": min((item.event.recorded_us for item in (*queued, *held)), default=0),
                **_answers(lane, clock),
            }
        )
        tried = {_key(each) for _, each, _ in lane.batch.entries} if lane.batch is not None else set()
        for item in queued:
            undelivered.append(_row(lane, item, is_tried=_key(item) in tried, is_failing=is_failing))
        undelivered += [_held_row(name, item) for item in held]
    return recipients, sorted(undelivered, key=lambda row: row["since_us"])


def _is_failing(lane: Lane) -> bool:
    """Whether its newest answer was no confirmation; without one, whether it failed in the run before."""
    if lane.last_answer:
        return lane.last_answer != Outcome.CONFIRMED.value
    return lane.is_failing or (lane.tries is not None and lane.tries.attempt > 1)


def _answers(lane: Lane, clock: Clock) -> Row:
    """Its tries and answers; a batch that is made again goes on with the tries of the one before."""
    now_us, now_ns = clock.unix_us(), clock.monotonic_ns()
    tries = lane.tried()
    since_ns = tries.failing_ns if tries is not None and _is_failing(lane) else 0
    next_ns = tries.not_before_ns if tries is not None and not lane.token else 0
    return {
        "attempt": tries.attempt if tries is not None else 0,
        "is_trying": lane.token != 0,
        "failing_since_us": now_us - (now_ns - since_ns) // 1000 if since_ns else None,
        "next_try_us": now_us + (next_ns - now_ns) // 1000 if next_ns > now_ns else None,
        "last_answer": lane.last_answer,
        "last_confirmed_us": lane.confirmed_us,
        "confirmed": lane.confirmed,
        "dead_letters": lane.dead_letters,
    }


def _key(item: QueuedEvent) -> tuple[int, str]:
    return item.seq, item.event.event_id


def _row(lane: Lane, item: QueuedEvent, *, is_tried: bool, is_failing: bool) -> Row:
    """What waits in a queue: in the batch under way, or behind it."""
    reason = lane.last_answer if is_tried else f"behind what fails: {lane.last_answer}"
    return {
        "event_id": item.event.event_id,
        "recipient": lane.name,
        "state": "failing" if is_tried and is_failing else "waiting",
        "attempt": lane.batch.attempt if is_tried and lane.batch is not None else 0,
        "since_us": item.event.recorded_us,
        "reason": reason if is_failing else "",
    }


def _held_row(name: str, item: QueuedEvent) -> Row:
    return {
        "event_id": item.event.event_id,
        "recipient": name,
        "state": "held",
        "attempt": 0,
        "since_us": item.event.recorded_us,
        "reason": "",
    }
