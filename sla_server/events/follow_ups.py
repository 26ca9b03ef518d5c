"""What comes after a notice: reminders, from its confirmation on, and escalations, also without one. Pure."""

from __future__ import annotations

from dataclasses import replace

from sla_server.events import catalogue
from sla_server.events.queue import QueuedEvent
from sla_server.events.recipients.base import Routed, Status


def reminder(item: QueuedEvent, routed: Routed, now_us: int) -> list[QueuedEvent]:
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


def escalations(item: QueuedEvent, routed: Routed, from_us: int) -> list[QueuedEvent]:
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
