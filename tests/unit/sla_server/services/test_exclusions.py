"""What promises nothing at present: known without asking those that always promise."""

from __future__ import annotations

from dataclasses import replace

from sla_server.agreements.document import Agreement
from sla_server.agreements.load import load_documents
from sla_server.agreements.promise import InForce
from sla_server.services import exclusions
from sla_server.services.exclusions import Exclusions
from tests.support.agreements import simple

MONDAY_US = 1_798_444_800_000_000  # 2026-12-28 08:00 UTC
HOUR_US = 3_600_000_000
HOURS = '  service_hours: {calendar: business, days: [mon], from: "09:00", to: "17:00"}\n'
WORK = '  maintenance: {windows: [{start: "2026-12-28T10:00", duration: 1h, reason: disks, author: ann}]}\n'


def in_force(name: str, extra: str = "") -> InForce:
    (loaded,) = load_documents(simple(name, extra=extra), 60)
    assert isinstance(loaded.agreement, Agreement)
    return InForce(loaded.agreement, 1, 0)


def test_service_hours_and_maintenance_come_and_go() -> None:
    made = Exclusions()
    made.set_items([in_force("always"), in_force("hours", HOURS), in_force("work", WORK)])
    found = [sorted(made.check(MONDAY_US + hour * HOUR_US)) for hour in range(10)]
    assert found == [["hours"], [], ["work"], *[[]] * 6, ["hours"]]
    assert made.check(MONDAY_US)["hours"] == "outside service hours"
    assert "disks" in made.check(MONDAY_US + 2 * HOUR_US)["work"]


def test_very_many_take_turns_and_all_are_asked(monkeypatch) -> None:
    monkeypatch.setattr(exclusions, "MOST_ASKED", 2)
    made = Exclusions()
    made.set_items([in_force(f"a{number}", HOURS) for number in range(5)])
    assert [len(made.check(MONDAY_US)) for _ in range(4)] == [2, 4, 5, 5]
    made.set_items([in_force("a1", HOURS)])
    assert list(made.check(MONDAY_US)) == ["a1"]


def test_all_are_asked_at_once_before_anything_is_decided_under_them(monkeypatch) -> None:
    """Else a restart in maintenance raises a violation of each that has not had its turn."""
    monkeypatch.setattr(exclusions, "MOST_ASKED", 2)
    made = Exclusions()
    made.set_items([in_force(f"a{number}", HOURS) for number in range(5)])
    assert len(made.check_all(MONDAY_US)) == 5
    assert len(made.check(MONDAY_US + HOUR_US)) == 3, "turns begin with the first again"


def test_versions_that_may_have_used_up_different_parts_of_a_period_are_asked_apart() -> None:
    limited = in_force("work", WORK.replace("{windows", "{max_per_period: 1h, windows"))
    later = replace(limited, applied_us=MONDAY_US)
    assert exclusions.key_of(limited) != exclusions.key_of(later)
    assert exclusions.key_of(later) != exclusions.key_of(replace(later, former=(limited,)))
    always = in_force("always")
    assert exclusions.key_of(always) == exclusions.key_of(replace(always, applied_us=MONDAY_US))
