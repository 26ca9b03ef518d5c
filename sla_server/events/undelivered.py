"""What recipients have not confirmed yet, as rows of ``delivery_state``.

All that waits for a recipient is listed: its batch, what is behind that in the queues, and what silences
hold back; of a long backlog the oldest. How many wait is counted by ``recipient_state``.

Thread: the main loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from pmdaemon.runtime.clock import Clock
from sla_server.events.delivery_state import MOST_UNDELIVERED
from sla_server.events.engine import DeliveryEngine
from sla_server.events.lane import Lane
from sla_server.events.queue import LaterQueue, QueuedEvent
from sla_server.events.recipient_state import Waiting, is_failing, recipient_row
from sla_server.events.sql_link import NAME

MOST_READ: Final = 2 * MOST_UNDELIVERED
"""Events that are looked at for all recipients together, once a second; some 40 ms if none is in memory."""
Row = dict[str, Any]


def rows_of(
    engine: DeliveryEngine,
    later: LaterQueue,
    waiting: Mapping[str, Waiting],
    kind_of: Callable[[str], str],
    clock: Clock,
) -> tuple[list[Row], list[Row]]:
    """Rows of the recipients, and of what they have not confirmed, the oldest first.

    Args:
        engine: its lanes.
        later: what is held back.
        waiting: how many events wait for each recipient.
        kind_of: the kind of a recipient's document.
        clock: both time bases.
    """
    recipients, undelivered = list[Row](), list[Row]()
    lanes = {name: lane for name, lane in engine.lanes.items() if name != NAME}
    behind = sum(engine.is_behind(name) for name in lanes)
    for name, lane in lanes.items():
        queued = engine.waiting(name, MOST_READ // max(1, behind))
        held = later.held_for(name)
        counted = waiting.get(name, Waiting())
        counted = replace(
            counted, count=max(counted.count, len(queued))
        )  # ends of what it knows have no route
        since_us = min((item.event.recorded_us for item in (*queued, *held)), default=0)
        row = recipient_row(lane, kind_of(name), counted, len(held), clock)
        recipients.append({**row, "waiting_since_us": since_us})
        tried = {_key(each) for _, each, _ in lane.batch.entries} if lane.batch is not None else set()
        for item in queued:
            undelivered.append(_row(lane, item, is_tried=_key(item) in tried, is_failing=is_failing(lane)))
        undelivered += [_held_row(name, item) for item in held]
    return recipients, sorted(undelivered, key=lambda row: row["since_us"])


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
