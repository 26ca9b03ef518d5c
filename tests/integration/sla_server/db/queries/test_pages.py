"""What the views of the page ask, on both databases."""

from __future__ import annotations

import json

import pytest

from sla_server.db.queries import pages as module
from sla_server.db.queries import records
from sla_server.services.store import SqlReads
from tests.support.samples import (
    T0,
    cuts_message,
    gateway_message,
    make_cut,
    record_message,
    streams_message,
)

HOUR_US = 3_600_000_000


def agreement(name, version=1, ended_us=None, **spec):
    row = {"name": name, "version": version, "document": "text", "spec": json.dumps({"spec": spec})}
    return "agreements", {
        **row,
        "priority": "gold",
        "applied_us": T0,
        "applied_by": "ann",
        "ended_us": ended_us,
    }


def judged(start_us, state, revision=0):
    row = {
        "name": "erp-gold",
        "objective": "latency",
        "start_us": start_us,
        "revision": revision,
        "version": 1,
    }
    return "slices", {**row, "length_us": 60_000_000, "state": state, "n": 10, "judged_us": start_us}


@pytest.fixture
def pages(rig):
    rig.feed(gateway_message(), streams_message(), cuts_message([make_cut(1, start_us=T0)]))
    begin = T0 // HOUR_US * HOUR_US
    episode = {"name": "erp-gold", "objective": "latency", "opened_us": T0, "worst_u": 2.0, "slices_bad": 3}
    rig.feed(
        record_message(
            [
                agreement("erp-gold", 1, T0 + 5),
                agreement("erp-gold", 2, labels={"a": 1}),
                agreement("old", 1, T0 + 9),
                agreement("a_b"),
                judged(begin, "good"),
                judged(begin + 60_000_000, "bad"),
                judged(begin + 60_000_000, "good", 1),
                judged(begin + HOUR_US, "bad"),
                ("episodes", {**episode, "episode_id": "e-1", "closed_us": T0 + 9}),
                ("episodes", {**episode, "episode_id": "e-2", "closed_us": None}),
            ]
        )
    )
    return rig.reader.pages


def test_names_of_agreements_in_force(pages):
    assert pages.agreement_names() == {"a_b": "gold", "erp-gold": "gold"}
    (row,) = pages.agreements_named(["erp-gold", "old", "none"])
    assert (row["version"], row["spec"]["spec"]) == (2, {"labels": {"a": 1}})
    assert "document" not in row


def test_violations_that_go_on(pages):
    assert [row["episode_id"] for row in pages.open_episodes(["erp-gold", "none"])] == ["e-2"]
    assert pages.open_episodes([]) == []


def test_all_violations_that_go_on_are_found_however_many_they_are(rig):
    """What services know after a restart: one that was missed would stay open for ever."""
    many = [
        (
            "episodes",
            {"episode_id": f"e-{n}", "name": f"sla-{n}", "objective": "latency", "opened_us": T0 + n},
        )
        for n in range(1_001)
    ]
    for first in range(0, len(many), 500):
        rig.feed(record_message(many[first : first + 500]))
    assert len(SqlReads(rig.reader).open_episodes()) == 1_001


def test_volumes_of_a_page_have_the_sums_of_all(pages, rig):
    whole = rig.reader.volumes()
    assert dict(pages.volume_names()) == {row["volume"]: row["backend"] for row in whole}
    names = list(pages.volume_names())
    assert pages.volumes_named(names) == whole
    assert pages.volumes_named(names[:1]) == whole[:1]


def test_names_are_asked_for_once_in_a_while(pages, rig, monkeypatch):
    assert "new" not in pages.agreement_names()
    rig.feed(record_message([agreement("new")]))
    assert "new" not in pages.agreement_names(), "those read a moment ago"
    monkeypatch.setattr(module, "NAMES_S", -1.0)
    assert "new" in pages.agreement_names()
    asked = []
    monkeypatch.setattr(pages, "_agreement_names", lambda: asked.append("names") or {})
    assert "new" in pages.agreement_names()
    assert asked == [], "the table has not changed: what is known is as good"
    rig.feed(record_message([agreement("newer")]))
    pages.agreement_names()
    assert asked == ["names"]


def test_slices_by_the_hour_are_of_the_newest_revision(pages):
    begin = T0 // HOUR_US * HOUR_US
    rows = pages.slice_hours("erp-gold", "latency", begin, begin + 2 * HOUR_US)
    assert [(row["hour_us"] - begin, row["state"], row["n"]) for row in rows] == [
        (0, "good", 2),
        (HOUR_US, "bad", 1),
    ]
    assert rows[0]["newest_us"] == begin + 60_000_000
    assert pages.slice_hours("erp-gold", "latency", begin + HOUR_US, begin + HOUR_US + 1)[0]["n"] == 1


def test_records_are_paged_in_every_order_and_what_had_ended_before_is_left_out(rig):
    entries = [
        {"audit_id": f"a{n:02}", "at_us": T0 + n // 2, "who": f"p{n % 3}", "action": f"act-{n % 2}"}
        for n in range(20)
    ]
    rig.feed(record_message([("audit", row) for row in entries]))
    newest = sorted(entries, key=lambda row: (row["at_us"], row["audit_id"]), reverse=True)
    for sort, expected in (
        ("newest", newest),
        ("oldest", newest[::-1]),
        ("who", sorted(newest, key=lambda row: row["who"])),
    ):
        found, before = [], None
        while page := rig.reader.pages.records(records.AUDIT, records.Wanted(7, before, sort=sort)):
            found += page
            before = page[-1]["cursor"]
        assert [row["audit_id"] for row in found] == [row["audit_id"] for row in expected]
    wanted = records.Wanted(match="P1", values={"action": ["act*", "x"]}, to_us=T0 + 5)
    assert {row["audit_id"] for row in rig.reader.pages.records(records.AUDIT, wanted)} == {
        "a01",
        "a04",
        "a07",
    }
    for listed in (records.JOBS, records.POLICIES):
        for sort in listed.order_names:
            assert rig.reader.pages.records(listed, records.Wanted(5, "1:1", match="x", sort=sort)) == []
    throttles = [{"throttle_id": f"t{n}", "requested_us": T0, "released_us": T0 + n} for n in (1, 2)]
    rig.feed(
        record_message(
            [("throttles", row) for row in (*throttles, {"throttle_id": "t3", "requested_us": T0})]
        )
    )
    assert {row["throttle_id"] for row in rig.reader.throttles(since_us=T0 + 2)} == {"t2", "t3"}
    assert len(rig.reader.throttles()) == 3


def test_a_server_that_starts_takes_over_refused_throttles_and_more_than_one_page_of_them(rig):
    """The oldest, an operator's, was left out where agreements have caps of very many volumes."""
    refused = {"throttle_id": "ann", "source": "manual", "state": "refused", "requested_us": T0}
    ended = {"throttle_id": "old", "state": "released", "requested_us": T0, "released_us": T0 + 1}
    many = [
        {"throttle_id": f"t{n}", "state": "seen", "requested_us": T0 + 1 + n, "volume": f"v{n}"}
        for n in range(10_500)
    ]
    for at in range(0, len(many), 500):
        rig.feed(record_message([("throttles", row) for row in many[at : at + 500]]))
    rig.feed(record_message([("throttles", refused), ("throttles", ended)]))
    found = SqlReads(rig.reader).throttles_in_force()
    assert [row["throttle_id"] for row in found] == ["ann", *(row["throttle_id"] for row in many)]
