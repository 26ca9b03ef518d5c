"""Maintenance with less notice than was agreed, in words."""

from __future__ import annotations

from sla_server.explanation import Times, evidence, explain
from tests.support.api import NOW_US

HOUR_US = 3_600_000_000
WORK = {
    "sla": "erp-gold",
    "maintenance": "move",
    "reason": "new disks",
    "from_us": NOW_US - HOUR_US,
    "to_us": NOW_US + HOUR_US,
    "announced_us": NOW_US - 24 * HOUR_US,
    "notice_s": 7 * 86_400,
    "excused_from_us": NOW_US + 144 * HOUR_US,
}


def test_it_is_said_to_count_all_of_it_or_a_part() -> None:
    assert evidence.unexcused_lines({"unexcused": [WORK]}, Times(NOW_US)) == [
        "Maintenance move, from 07:00:00 to 09:00:00, new disks: erp-gold excuses nothing of it. It was "
        "announced at 2027-01-14 08:00:00, and 7 days of notice are agreed."
    ]
    part = {**WORK, "excused_from_us": NOW_US + 60_000_000}
    (line,) = evidence.unexcused_lines({"unexcused": [part]}, Times(NOW_US))
    assert "erp-gold excuses nothing before 08:01:00 of it" in line
    assert evidence.unexcused_lines({}, Times(NOW_US)) == []


def test_volumes_and_agreements_have_a_section_of_it() -> None:
    facts = {"name": "x", "at_us": NOW_US, "now_us": NOW_US, "is_now": True, "unexcused": [WORK]}
    for kind in ("volume", "sla"):
        found = explain({**facts, "kind": kind, "in_force": True, "decisions_from_us": None})
        assert "Maintenance" in [section.title for section in found.sections]
