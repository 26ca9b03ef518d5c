"""Announced work that is not excused for want of notice, out of stored rows."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from sla_server.agreements.load import load_documents
from sla_server.agreements.unexcused import asks_for_notice, unexcused_work
from tests.support.agreements import maintenance_text, simple

DAY_US = 86_400_000_000


def at(text: str) -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1e6)


def agreed(notice: str) -> dict[str, Any]:
    (loaded,) = load_documents(simple(extra=f"  maintenance: {{{notice}}}\n" if notice else ""), 60)
    return {"name": "gold", "version": 1, "spec": loaded.document.spec_json()}


def stored(applied_us: int, ended_us: int | None = None, version: int = 1, **over: str) -> dict[str, Any]:
    (loaded,) = load_documents(maintenance_text(**over), 60)
    row = {"kind": "Maintenance", "name": loaded.document.name, "version": version, "applied_by": "ann"}
    return {**row, "spec": loaded.document.spec_json(), "applied_us": applied_us, "ended_us": ended_us}


START_US, END_US = at("2026-02-03T10:00"), at("2026-02-03T14:00")


@pytest.mark.parametrize(
    ("announced_days", "asked_at", "excused_from"),
    [
        (3, START_US, START_US + 4 * DAY_US),
        (3, START_US - DAY_US // 2, START_US + 4 * DAY_US),
        (6.9, START_US, START_US + DAY_US // 10),
        (3, START_US - 2 * DAY_US, None),
        (8, START_US, None),
        (3, END_US, None),
    ],
    ids=["under way", "due today", "in part", "due in two days", "in time", "over"],
)
def test_work_counts_until_the_notice_agreed_has_passed(announced_days, asked_at, excused_from):
    announced_us = round(START_US - announced_days * DAY_US)
    found = unexcused_work(agreed("notice: 7d"), [stored(announced_us)], ["vol-1"], asked_at)
    if excused_from is None:
        assert found == []
        return
    (row,) = found
    assert (row["maintenance"], row["reason"], row["sla"]) == ("move", "new disks", "gold")
    assert (row["from_us"], row["to_us"]) == (START_US, END_US)
    assert (row["announced_us"], row["notice_s"]) == (announced_us, 7 * 86_400)
    assert row["excused_from_us"] == excused_from


def test_what_was_not_known_then_what_others_do_and_what_cannot_be_read_is_left_out():
    known = stored(START_US - DAY_US)
    others = [
        stored(START_US + 1),
        stored(START_US - DAY_US, scope="agreements: [silver]"),
        stored(START_US - DAY_US, ended_us=START_US - 1),
        {**known, "spec": {"kind": "Maintenance"}},
    ]
    assert unexcused_work(agreed("notice: 7d"), others, ["vol-1"], START_US) == []
    ended_later = stored(START_US - DAY_US, ended_us=START_US + 1)
    assert len(unexcused_work(agreed("notice: 7d"), [*others, ended_later], ["vol-1"], START_US)) == 1


def test_an_edit_of_the_reason_begins_no_other_notice():
    first = stored(START_US - 8 * DAY_US, ended_us=START_US - DAY_US)
    second = stored(START_US - DAY_US, version=2, reason="newer disks")
    assert unexcused_work(agreed("notice: 7d"), [first, second], ["vol-1"], START_US) == []


def test_an_agreement_that_asks_for_no_notice_has_none():
    assert [asks_for_notice(agreed(text)) for text in ("notice: 7d", "max_per_period: 8h", "")] == [
        True,
        False,
        False,
    ]
    assert unexcused_work(agreed(""), [stored(START_US - 1)], ["vol-1"], START_US) == []
    assert unexcused_work({"name": "old", "spec": {}}, [stored(START_US - 1)], ["vol-1"], START_US) == []
