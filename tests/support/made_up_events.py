"""Events of the made-up world of the page's tests and pictures: kinds and texts as a server has them.

They tell one story, the newest first: ``batch`` is slowed down for ``erp-gold``, as it was in the night
before. Every second one needs a person.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

STORY: Final[tuple[tuple[str, str, str, str, str], ...]] = (
    (
        "violation-closed",
        "info",
        "sla",
        "erp-gold/latency",
        "erp-gold/latency is kept again: p95 of 9.2 ms, 12 ms allowed, at 80 IOPS",
    ),
    (
        "throttle-set",
        "warning",
        "volume",
        "batch",
        "erp-gold/latency at 15.1 ms of 12 ms allowed (2.40 times the misses allowed): "
        "batch from 581 to 290 weighted IOPS",
    ),
    (
        "client-new",
        "info",
        "gateway",
        "gateway-a",
        "gateway-a: client 10.0.0.31 uses erp-db for the first time",
    ),
    (
        "violation-opened",
        "critical",
        "sla",
        "erp-gold/latency",
        "erp-gold/latency is violated: in 3 of the last 3 windows, p95 15.1 ms of 12 ms, at 81 IOPS",
    ),
    ("policy-applied", "info", "policy", "3", "policy version 3 is in force: caps for 1 volume"),
    (
        "process-restarted",
        "warning",
        "process",
        "dbmanager",
        "dbmanager was restarted: it was stopped by signal 9; restart 1",
    ),
    ("gateway-recovered", "info", "gateway", "gateway-b", "gateway-b: it answers polls again"),
    ("gateway-stalled", "warning", "gateway", "gateway-b", "gateway-b: no answer to 3 polls"),
    ("agreement-applied", "info", "sla", "erp-gold", "SLA erp-gold version 2 is in force"),
    (
        "space-low",
        "warning",
        "pool",
        "gateway-a/data",
        "pool gateway-a/data is 81 % full, 80 % is its level to warn",
    ),
    ("throttle-released", "info", "volume", "batch", "crm is idle: batch is free again"),
    (
        "space-forecast",
        "warning",
        "pool",
        "gateway-a/data",
        "pool gateway-a/data will be full in 19 days, 17 to 22, at 1.0 GiB a day",
    ),
    (
        "report-issued",
        "info",
        "sla",
        "erp-gold",
        "report erp-gold-2026-12 was issued: 99.4 % of its slices kept",
    ),
    (
        "burn-rate",
        "critical",
        "sla",
        "erp-gold/latency",
        "erp-gold/latency: the error budget was spent too fast over the last 6 h; 94 % of it is left, "
        "which at the pace of the last hour (7.2 times what is allowed) lasts 3 d 21 h",
    ),
    (
        "burn-rate-ended",
        "info",
        "sla",
        "erp-gold/latency",
        "erp-gold/latency: the error budget is no longer spent too fast, over 6 h; 93 % of it is left",
    ),
    (
        "unattributed",
        "warning",
        "backend",
        "disk-0",
        "reports/latency is at risk and nobody can be slowed down: no other volume uses this backend",
    ),
    ("mode-changed", "info", "server", "services", "mode enforce, was observe"),
    (
        "clock-skew",
        "warning",
        "gateway",
        "gateway-b",
        "the clock of gateway-b is 2.4 s ahead of the server's",
    ),
    ("maintenance-applied", "info", "maintenance", "disks", "maintenance disks version 1 is in force"),
    (
        "volume-pending",
        "warning",
        "volume",
        "erp-db",
        "evil-gw shows erp-db, which belongs to gateway-a: its statistics wait for a person",
    ),
    ("volume-new", "info", "gateway", "gateway-b", "gateway-b: batch was seen for the first time"),
    (
        "throttle-not-effective",
        "critical",
        "volume",
        "batch",
        "batch does 612 weighted IOPS, its cap is 290: I/O goes past the gateway",
    ),
    ("gateway-enrolled", "info", "gateway", "gateway-b", "gateway-b has its certificate"),
    ("certificate-expires", "critical", "gateway", "gateway-a", "its certificate ends in 6 days"),
    ("services-started", "info", "server", "services", "services were started"),
)


AGES_S: Final = (20, 42, 55, 61, 600, *(2_400 + 660 * number for number in range(len(STORY) - 5)))
"""How long ago each was, where they tell what led to what is so now."""


def events(count: int, now_us: int, ages_s: Sequence[int] = range(len(STORY))) -> list[dict[str, Any]]:
    """The newest ``count`` of them, newest first."""
    return [
        {
            "event_id": f"e{number:04}",
            "at_us": now_us - 1_000_000 * ages_s[number],
            "kind": kind,
            "severity": severity,
            "element": element,
            "subject": subject,
            "text": text,
            "details": {"throttle_id": "t-1"} if number == 1 else {},
            "cursor": f"{now_us - 1_000_000 * ages_s[number]}:e{number:04}",
        }
        for number, (kind, severity, element, subject, text) in enumerate(STORY[:count])
    ]
