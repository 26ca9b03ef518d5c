"""What comes after a confirmed notice: reminders and escalations. Pure."""

from __future__ import annotations

from dataclasses import replace

from sla_server.events import catalogue
from sla_server.events.queue import QueuedEvent
from sla_server.events.recipients.base import Routed, Status


def follow_ups(item: QueuedEvent, routed: Routed, now_us: int) -> list[QueuedEvent]:
    """What comes after a confirmed notice: its next reminder, and its escalation.

    None for what is only information or an end: no person has to do anything about it.
    """
    status = catalogue.status_of(item.event)
    if (
        status is Status.RESOLVED
        or item.escalated
        or (status is Status.INFO and item.event.severity == "info")
    ):
        return []
    found = []
    remind_s = item.remind_s or routed.remind_s
    plain = replace(item, seq=0, is_caught_up=False)
    if remind_s > 0:
        due = now_us + round(remind_s * 1e6)
        found.append(
            replace(
                plain, recipient=routed.recipient, reminder=item.reminder + 1, remind_s=remind_s, due_us=due,
                purpose="remind",
            )
        )  # fmt: skip
    if routed.escalate_s > 0 and not item.reminder:
        due = now_us + round(routed.escalate_s * 1e6)
        found += [
            replace(plain, recipient=name, escalated=True, due_us=due, purpose="escalate")
            for name in routed.escalate_to
        ]
    return found
