"""Judging from SQL: when a slice is due, what it becomes, revisions, restarts, and gaps that are ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sla_server.agreements.load import load_documents
from sla_server.agreements.maintenance import AnnouncedWork, MaintenanceDocument
from sla_server.agreements.promise import InForce
from sla_server.ownership import VolumeClaim
from sla_server.services.judging import judge, objectives
from sla_server.services.judging.judge import Judge, Judgement
from tests.support.agreements import agreement, in_force, maintenance_text, simple
from tests.support.services import GATEWAY, MINUTE_US, START_US, Away, FakeStore

SECOND_US = 1_000_000
OTHER = "99999999-2222-3333-4444-555555555555"


def at(minutes: float) -> int:
    return START_US + round(minutes * MINUTE_US)


class Scene:
    """A store, an agreement from START_US on, and a judge that may be restarted."""

    def __init__(self, *items: InForce) -> None:
        self.store = FakeStore()
        self.store.add_stream()
        self.items = items or (in_force(simple(), applied_us=START_US),)
        self.judge = self.restart(0)

    def restart(self, minutes: float) -> Judge:
        self.judge = Judge(self.store, judge_late_s=30)
        self.judge.set_agreements(self.items, at(minutes))
        return self.judge

    def run(self, minutes: float, keep: bool = True) -> Judgement:
        found = self.judge.run(at(minutes))
        if keep:
            self.store.keep(found.rows)
        return found

    def slices(self, minutes: float, **keys: Any) -> list[tuple[float, str, int]]:
        """(minute, state, revision) of what one pass judged."""
        rows = [row for table, row in self.run(minutes, **keys).rows if table == "slices"]
        return [((row["start_us"] - START_US) / MINUTE_US, row["state"], row["revision"]) for row in rows]


def test_a_slice_is_judged_once_when_its_gateway_has_passed_its_end() -> None:
    scene = Scene()
    scene.store.add_slot(at(0), missed=30)
    scene.store.progress_us[GATEWAY] = at(1) - 1
    assert scene.slices(1.01) == []
    scene.store.progress_us[GATEWAY] = at(1)
    assert scene.slices(1.02) == [(0, "good", 0)]
    assert scene.slices(1.03) == []
    assert scene.slices(1.5) == []


def test_while_the_server_is_behind_with_storing_what_came_its_slices_wait_and_are_judged_once() -> None:
    scene = Scene()
    scene.store.add_slot(at(0), missed=30)
    scene.store.progress_us[GATEWAY] = at(0.5)
    assert scene.judge.run(at(1.6), live_us=at(1.6)).rows == [], "30 s late, and the server is 66 s behind"
    assert scene.judge.run(at(2.2), live_us=at(2.2)).rows == []
    scene.store.progress_us[GATEWAY] = at(1)
    ((_, row),) = scene.judge.run(at(2.3), live_us=at(2.3)).rows
    assert (row["state"], row["revision"]) == ("good", 0)


def test_at_a_start_slices_wait_for_what_gateways_and_queue_have_kept_however_much_it_is() -> None:
    scene = Scene()
    scene.store.progress_us[GATEWAY] = at(0.5)
    assert scene.judge.run(at(60), start_until_us=at(60.5)).rows == [], "an hour's backlog is on its way"
    scene.store.add_slot(at(0), missed=30)
    scene.store.progress_us[GATEWAY] = at(1)
    ((_, row),) = scene.judge.run(at(60.1), live_us=at(60), start_until_us=at(60.5)).rows
    assert (row["start_us"], row["state"], row["revision"]) == (at(0), "good", 0)
    rows = scene.judge.run(at(60.5), start_until_us=at(60.5)).rows
    assert {row["state"] for table, row in rows if table == "slices"} == {"no_data"}, "nothing has come"


@pytest.mark.parametrize("live", [0, 0.6, 0.7])
def test_a_gateway_that_sends_nothing_any_more_is_not_waited_for(live: float) -> None:
    scene = Scene()
    scene.store.progress_us[GATEWAY] = at(0.5)
    ((_, row),) = scene.judge.run(at(1.6), live_us=at(live) if live else 0).rows
    assert row["state"] == "no_data"


def test_a_server_that_is_behind_for_a_quarter_of_an_hour_judges_by_what_there_is() -> None:
    scene = Scene()
    scene.store.progress_us[GATEWAY] = at(0.5)
    assert scene.judge.run(at(15.4), live_us=at(15.4)).rows == []
    rows = scene.judge.run(at(17), live_us=at(17)).rows
    assert [row["start_us"] for _, row in rows] == [at(0)]


def test_the_row_says_how_it_was_judged() -> None:
    scene = Scene()
    scene.store.add_slot(at(0), missed=31)
    found = scene.run(1.1)
    ((table, row),) = found.rows
    assert table == "slices"
    assert row == {
        "name": "gold", "objective": "latency", "start_us": at(0), "revision": 0, "version": 1,
        "length_us": MINUTE_US, "state": "bad", "n": 600, "missed": 31, "offered_iops": 10.0,
        "threshold_us": 12_000, "coverage_ratio": 1.0, "inexact": False, "ours": False, "judged_us": at(1.1),
        "reason": "slow", "measured": None, "failed": 0,
    }  # fmt: skip
    assert found.standings["gold", "latency"].counts.bad == 1


def test_the_first_slice_judged_begins_after_the_agreement() -> None:
    scene = Scene(in_force(simple(), applied_us=at(0.5)))
    for minute in range(3):
        scene.store.add_slot(at(minute))
    assert scene.slices(3.1) == [(1, "good", 0), (2, "good", 0)]


def test_a_missing_gateway_is_waited_for_thirty_seconds_and_its_backlog_revises() -> None:
    scene = Scene()
    scene.store.add_stream(2, gateway=OTHER)
    scene.store.add_slot(at(-1), stream_id=2, gateway=OTHER)
    scene.store.add_slot(at(0))
    assert scene.slices(1.49) == []
    assert scene.slices(1.5) == [(0, "no_data", 0)]
    assert scene.slices(1.6) == []
    scene.store.add_slot(at(0), missed=100, stream_id=2, gateway=OTHER)
    assert scene.slices(1.7) == [(0, "bad", 1)]
    assert scene.slices(1.8) == []


def test_late_data_for_a_recent_slice_make_a_revision() -> None:
    scene = Scene()
    scene.store.add_slot(at(0))
    assert scene.slices(1.1) == [(0, "good", 0)]
    scene.store.add_stream(2, client="d")
    scene.store.add_slot(at(0), missed=300, stream_id=2, covered_us=0)
    assert scene.slices(1.4) == [(0, "bad", 1)]
    assert scene.slices(2.0 - 0.1) == []


def test_after_a_restart_nothing_is_judged_twice_and_revisions_go_on() -> None:
    scene = Scene()
    scene.store.add_slot(at(0))
    assert scene.slices(1.1) == [(0, "good", 0)]
    scene.restart(1.2)
    assert scene.slices(1.2) == []
    scene.store.add_stream(2, client="d")
    scene.store.add_slot(at(0), missed=300, stream_id=2, covered_us=0)
    assert scene.slices(1.5) == [(0, "bad", 1)]
    scene.restart(1.6)
    assert scene.slices(1.6) == []
    assert scene.run(1.7).standings["gold", "latency"].counts.bad == 1


def test_a_judgement_lost_in_a_crash_is_made_again_with_the_same_key() -> None:
    scene = Scene()
    scene.store.add_slot(at(0))
    first = scene.run(1.1, keep=False).rows
    scene.restart(1.2)
    again = scene.run(1.1).rows
    assert again == first


def test_after_a_restart_a_gap_that_was_filled_meanwhile_is_revised() -> None:
    scene = Scene()
    scene.store.add_slot(at(-1))
    assert scene.slices(1.5) == [(0, "no_data", 0)]
    for minute in range(30):
        scene.store.add_slot(at(minute))
    scene.restart(30.1)
    found = scene.slices(30.1)
    assert found[0] == (0, "good", 1)
    assert found[1:] == [(minute, "good", 0) for minute in range(1, 30)]


@pytest.mark.parametrize(
    ("gap", "reason"),
    [({}, "no-samples"), ({"gap_cuts": 3}, "cuts-lost"), ({"gap_ios": 1}, "cuts-lost")],
    ids=["the host was gone", "its spool dropped cuts", "its counters moved"],
)
def test_a_gap_is_ours_if_the_agent_lived_through_it(gap: dict[str, int], reason: str) -> None:
    ours = reason == "cuts-lost"
    scene = Scene()
    scene.store.add_slot(at(-1))
    found = scene.run(2.6)
    assert [row["ours"] for _, row in found.rows] == [False, False]
    scene.store.add_slot(at(5), **gap)
    rows = [row for table, row in scene.run(6.1).rows if table == "slices" and row["start_us"] < at(5)]
    assert all(row["state"] == "no_data" for row in rows)
    newest = {row["start_us"]: row for row in rows}
    revised = newest.get(at(0))
    assert (revised is not None and revised["revision"] == 1) == ours
    assert all((row["ours"], row["reason"]) == (ours, reason) for row in rows)
    good, bad = scene.run(6.2).standings["gold", "latency"].counts.good, ours * 5
    counts = scene.run(6.3).standings["gold", "latency"].counts
    assert (counts.no_data, counts.no_data_ours) == (5, bad)
    assert good == 1


def test_a_gap_is_ours_if_the_server_was_down() -> None:
    scene = Scene()
    scene.store.tables["outages"] = [{"from_us": at(1.5), "to_us": at(3.5)}]
    for minute in (-1, 0, 4, 5):
        scene.store.add_slot(at(minute))
    rows = [row for table, row in scene.run(6.1).rows if table == "slices"]
    assert [(row["state"], row["reason"], row["ours"]) for row in rows] == [
        ("good", "", False),
        *([("no_data", "server-down", True)] * 3),
        *([("good", "", False)] * 2),
    ]


def test_late_data_that_change_slices_make_one_event_an_objective() -> None:
    scene = Scene()
    scene.store.add_slot(at(-1))
    assert scene.slices(2.5) == [(0, "no_data", 0), (1, "no_data", 0)]
    scene.store.add_slot(at(0))
    scene.store.add_slot(at(1), missed=100)
    events = [row for table, row in scene.run(2.6).rows if table == "events"]
    assert [(row["kind"], row["subject"], row["text"]) for row in events] == [
        (
            "slices-revised",
            "gold/latency",
            "gold/latency: late data changed 2 judged slices: 1 from no data to bad, 1 from no data to good",
        )
    ]
    changes = [[at(0), "no_data", "good"], [at(1), "no_data", "bad"]]
    assert events[0]["details"] == {"slices": changes, "count": 2}
    assert [table for table, _ in scene.run(2.7).rows] == []


def test_late_data_for_many_objectives_make_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objectives, "MOST_REVISED", 1)
    items = [in_force(simple(name=name), applied_us=START_US) for name in ("a", "b")]
    scene = Scene(*items)
    scene.store.add_slot(at(-1))
    scene.run(1.5)
    scene.store.add_slot(at(0))
    ((_, event),) = [row for row in scene.run(1.6).rows if row[0] == "events"]
    text = "late data changed 2 judged slices: 2 from no data to good, of 2 objectives"
    assert (event["subject"], event["text"]) == ("judging", text)


def test_a_hang_is_bad_to_its_end_and_leads_to_no_revision() -> None:
    """182 s from 0:58 on: 32 I/Os in flight, none completed."""
    scene = Scene()
    scene.store.add_slot(at(0), overdue=32, oldest_ms=2_000, stalled_ms=2_000)
    for minute in (1, 2, 3):
        stalled_ms = (minute * 60 + 2) * 1000
        scene.store.add_slot(at(minute), reads=0, arrived=0, oldest_ms=stalled_ms, stalled_ms=stalled_ms)
    scene.store.add_slot(at(4), missed=32, settled=32)
    found = [row for table, row in scene.run(5.1).rows if table == "slices"]
    assert [(row["state"], row["reason"], row["n"], row["missed"]) for row in found] == [
        ("bad", "slow", 632, 32),
        *([("bad", "hung", 0, 0)] * 3),
        ("good", "", 568, 0),
    ]


def test_an_idle_volume_is_not_applicable_and_a_dead_gateway_leaves_the_scope() -> None:
    scene = Scene(in_force(simple(slice_text="5m"), applied_us=START_US))  # two days have 576 of them
    for minute in range(5):
        scene.store.add_slot(at(minute), reads=0)
    assert scene.slices(5.1) == [(0, "not_applicable", 0)]
    two_days = 2 * 1440
    scene.store.add_stream(2, gateway=OTHER)
    for minute in range(two_days, two_days + 5):
        scene.store.add_slot(at(minute), stream_id=2, gateway=OTHER)
    found: list[tuple[float, str, int]] = []
    for step in range(30):
        found += scene.slices(two_days + 5.1 + step / 100)
    states = {minute: state for minute, state, _ in found}
    assert states[1440] == "no_data"
    assert states[two_days] == "good"


def test_before_its_volume_appears_nothing_is_judged() -> None:
    scene = Scene()
    scene.store.tables["streams"] = []
    assert scene.slices(100) == []
    scene.store.add_stream(first_us=at(100.5))
    scene.store.add_slot(at(101))
    assert scene.slices(102.1)[-1] == (101, "good", 0)


def test_each_slice_is_judged_by_the_version_of_its_start() -> None:
    old = InForce(agreement(simple(value_ms=3)), 1, START_US, ended_us=at(1.5))
    new = InForce(agreement(simple()), 2, at(1.5))
    scene = Scene(old, new)
    for minute in range(3):
        scene.store.add_slot(at(minute), threshold_us=12_000 if minute == 2 else 3_000)
    rows = [row for _, row in scene.run(3.1).rows]
    assert [(row["version"], row["threshold_us"]) for row in rows] == [(1, 3_000), (1, 3_000), (2, 12_000)]
    assert not any(row["inexact"] for row in rows)


def test_a_threshold_that_was_not_counted_makes_the_slice_inexact() -> None:
    scene = Scene()
    scene.store.add_slot(at(0), threshold_us=3_000)
    ((_, row),) = scene.run(1.1).rows
    assert (row["state"], row["inexact"]) == ("good", True)


def test_a_long_absence_is_caught_up_in_order() -> None:
    scene = Scene()
    for minute in range(600):
        scene.store.add_slot(at(minute))
    found: list[tuple[float, str, int]] = []
    for step in range(10):
        found += scene.slices(600.1 + step / 1000)
    assert found == [(minute, "good", 0) for minute in range(600)]


def test_the_database_going_away_loses_no_slice() -> None:
    scene = Scene()
    scene.store.add_slot(at(0))
    scene.store.away = {"progress"}
    with pytest.raises(Away):
        scene.judge.run(at(1.1))
    scene.store.away = {"slice_inputs"}
    found = scene.run(1.1)
    assert (found.rows, type(found.interrupted)) == ([], Away)
    scene.store.away = set()
    assert scene.slices(1.2) == [(0, "good", 0)]


def test_alerts_are_raised_once_over_restarts_and_end() -> None:
    scene = Scene()
    events: list[tuple[float, str, str]] = []
    for minute in range(40):
        scene.store.add_slot(at(minute), missed=600 if 5 <= minute < 20 else 0)
        if minute % 3 == 0:
            scene.restart(minute + 1.05)
        rows = scene.run(minute + 1.1).rows
        events += [(minute, r["kind"], r["details"]["alert"]) for table, r in rows if table == "events"]
    consecutive = [event for event in events if event[2] == "consecutive"]
    assert consecutive == [(14, "burn-rate", "consecutive"), (20, "burn-rate-ended", "consecutive")]
    kinds = [(kind, alert) for _, kind, alert in events]
    assert len(kinds) == len(set(kinds))


def burn_alerts_in(found: Judgement, kind: str) -> list[str]:
    return [row["details"]["alert"] for table, row in found.rows if table == "events" and row["kind"] == kind]


def test_alerts_of_an_agreement_that_is_ended_end_with_events() -> None:
    scene = Scene()
    begun: list[str] = []
    for minute in range(20):
        scene.store.add_slot(at(minute), missed=600 if minute >= 5 else 0)
        begun += burn_alerts_in(scene.run(minute + 1.1), "burn-rate")
    assert "consecutive" in begun
    (item,) = scene.items
    scene.judge.set_agreements([replace(item, ended_us=at(20.2))], at(20.2))
    assert burn_alerts_in(scene.run(20.3), "burn-rate-ended") == sorted(begun)
    assert burn_alerts_in(scene.run(20.4), "burn-rate-ended") == []


def test_a_deleted_agreement_has_no_standing_and_its_last_slices_are_judged() -> None:
    scene = Scene(InForce(agreement(simple()), 1, START_US, ended_us=at(1.5)))
    for minute in range(4):
        scene.store.add_slot(at(minute))
    found = scene.run(4.1)
    assert [row["start_us"] for _, row in found.rows] == [at(0), at(1)]
    assert found.standings == {}


def test_a_later_drop_does_not_make_an_earlier_gap_ours() -> None:
    scene = Scene()
    scene.store.add_slot(at(-1))
    scene.run(1.6)
    scene.store.add_slot(at(1))
    scene.store.add_slot(at(2), gap_cuts=3, covered_us=MINUTE_US // 2)
    rows = {row["start_us"]: row for table, row in scene.run(3.1).rows if table == "slices"}
    assert at(0) not in rows  # still no_data, still not ours: no revision
    assert (rows[at(1)]["state"], rows[at(2)]["state"], rows[at(2)]["ours"]) == ("good", "no_data", True)


def test_a_slice_may_lack_a_tenth_of_its_time() -> None:
    scene = Scene()
    for minute, seconds in enumerate((54, 53)):
        scene.store.add_slot(at(minute), covered_us=seconds * SECOND_US)
        scene.store.coverage[-1]["cuts"] = seconds
    assert scene.slices(2.1) == [(0, "good", 0), (1, "no_data", 0)]


def many(count: int) -> Scene:
    """As many agreements as volumes, two volumes behind one gateway."""
    items = []
    for number in range(count):
        item = in_force(simple(), applied_us=START_US)
        spec, meta = item.agreement.spec, item.agreement.metadata
        scope = spec.scope.model_copy(update={"volumes": [f"v{number}"]})
        update = {
            "metadata": meta.model_copy(update={"name": f"a{number}"}),
            "spec": spec.model_copy(update={"scope": scope}),
        }
        items.append(InForce(item.agreement.model_copy(update=update), 1, START_US))
    scene = Scene(*items)
    scene.store.tables["streams"] = []
    for number in range(count):
        scene.store.add_stream(number, volume=f"v{number}", gateway=f"g{number // 2}")
    return scene


def test_many_agreements_are_judged_in_small_reads_and_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "MOST_SLOTS", 3)
    monkeypatch.setattr(judge, "MOST_DUES", 4)
    scene = many(10)
    read: list[int] = []
    whole = scene.store.slice_inputs

    def counted(streams: Any, gateways: Any, from_us: int, to_us: int) -> Any:
        read.append(len(streams))
        return whole(streams, gateways, from_us, to_us)

    monkeypatch.setattr(scene.store, "slice_inputs", counted)
    for number in range(10):
        for minute in range(2):
            scene.store.add_slot(
                at(minute), stream_id=number, gateway=f"g{number // 2}", covered_us=30_000_000
            )
    found: list[tuple[str, int]] = []
    for step in range(9):
        rows = [row for table, row in scene.run(2.1 + step / 100).rows if table == "slices"]
        assert len(rows) <= 5  # the last track may bring two
        found += [(row["name"], (row["start_us"] - START_US) // MINUTE_US) for row in rows]
    assert sorted(found) == sorted((f"a{number}", minute) for number in range(10) for minute in range(2))
    assert max(read) <= 3


def test_others_may_go_first_after_every_few_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "BREATH_DUES", 3)
    scene = many(8)
    for number in range(8):
        scene.store.add_slot(at(0), stream_id=number, gateway=f"g{number // 2}", covered_us=MINUTE_US // 2)
    judged: list[int] = []
    made = Judge(scene.store, 30, lambda: judged.append(sum(bool(t.judged) for t in made._tracks.values())))
    made.set_agreements(scene.items, at(0))
    assert len(made.run(at(1.1)).rows) == 8
    assert judged == [0, 3, 6]


def test_standings_are_told_when_they_changed_and_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objectives, "MOST_STANDINGS", 2)
    scene = many(5)
    scene.store.add_slot(at(0), stream_id=4, gateway="g2", covered_us=MINUTE_US)
    found = scene.run(1.1)
    assert found.changed == {("a0", "latency"), ("a1", "latency"), ("a4", "latency")}
    assert [scene.run(1.2).changed, scene.run(1.3).changed, scene.run(1.31).changed] == [
        {("a2", "latency"), ("a3", "latency")},
        {("a4", "latency")},
        {("a0", "latency"), ("a1", "latency")},
    ]
    assert set(scene.run(1.4).standings) == {(f"a{number}", "latency") for number in range(5)}
    for number in (1, 2):
        scene.store.add_slot(at(1), stream_id=number, gateway=f"g{number // 2}", covered_us=MINUTE_US)
    judged = {(f"a{number}", "latency") for number in range(4)}
    assert scene.run(2.1).changed == judged  # enough for one pass
    assert scene.run(2.2).changed == {("a4", "latency")}


def test_after_a_start_slices_are_read_in_portions_and_nothing_is_judged_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = many(6)
    for number in range(6):
        scene.store.add_slot(at(0), stream_id=number, gateway=f"g{number // 2}", covered_us=MINUTE_US // 2)
    assert len(scene.slices(1.1)) == 6
    monkeypatch.setattr(judge, "MOST_LOADS", 2)
    scene.store.reads.clear()
    scene.restart(1.2)
    assert scene.store.reads.count("slices") == 4  # of two objectives: versions apart, and the period
    assert scene.slices(1.3) == []
    assert scene.slices(1.4) == []
    assert scene.store.reads.count("slices") == 12
    assert set(scene.run(1.5).standings) == {(f"a{number}", "latency") for number in range(6)}


def test_a_version_with_slices_of_another_length_has_no_standing_until_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene()
    scene.store.add_slot(at(0))
    assert scene.run(1.1).changed == {("gold", "latency")}
    old = InForce(agreement(simple()), 1, START_US, ended_us=at(1.5))
    monkeypatch.setattr(judge, "MOST_LOADS", 0)
    scene.judge.set_agreements([old, InForce(agreement(simple(slice_text="5m")), 2, at(1.5))], at(1.5))
    assert scene.run(1.6).changed == set()
    monkeypatch.setattr(judge, "MOST_LOADS", 1)
    assert scene.run(1.7).changed == {("gold", "latency")}


def test_streams_are_read_only_when_there_are_others() -> None:
    scene = Scene()
    scene.store.add_slot(at(0))
    scene.run(1.1)
    scene.store.reads.clear()
    scene.run(1.2)
    assert "streams" not in scene.store.reads
    scene.store.add_stream(2, client="d")
    scene.run(1.3)
    assert scene.store.reads.count("streams") == 1


def test_streams_of_a_fleet_that_registers_are_read_when_they_settle_and_nobody_is_judged_before() -> None:
    scene, second = Scene(), 1 / 60
    scene.run(0)
    scene.store.add_stream(2, client="d")
    scene.run(1.0)  # the first new one is read at once
    scene.store.add_slot(at(0))
    for number in range(3, 6):
        scene.store.add_stream(number, client="d")
        scene.store.reads.clear()
        assert scene.slices(1.0 + number * second) == []
        assert "streams" not in scene.store.reads
    assert scene.slices(1.0 + 6 * second) == [(0, "good", 0)]
    assert "streams" in scene.store.reads
    # A number that never settles is not waited for for ever.
    reads = 0
    for number in range(7, 47):
        scene.store.add_stream(number, client="d")
        scene.store.reads.clear()
        scene.run(1.0 + number * second)
        reads += scene.store.reads.count("streams")
    assert reads in (2, 3)


def test_what_a_clock_ahead_made_of_an_hour_is_judged_again_in_its_time() -> None:
    """The clock is an hour ahead from minute 2 on, and server time follows it; at minute 5 it goes back."""
    scene = Scene()
    for minute in (0, 1, 62, 63, 64):
        scene.store.add_slot(at(minute))
    ahead = scene.slices(65.1)
    assert [found for found in ahead if found[1] != "no_data"] == [
        (0, "good", 0),
        (1, "good", 0),
        (62, "good", 0),
        (63, "good", 0),
        (64, "good", 0),
    ]
    assert len(ahead) == 65
    assert scene.slices(5.1) == []  # progress and slices of the future are not believed
    for minute in range(5, 8):
        scene.store.add_slot(at(minute))
    scene.store.progress_us[GATEWAY] = at(8)  # dbmanager has put it right
    assert scene.slices(8.1) == [(minute, "good", 1) for minute in range(5, 8)]
    for minute in range(8, 66):
        scene.store.add_slot(at(minute))
    assert scene.slices(66.1) == [
        *((minute, "good", 1) for minute in range(8, 65)),  # three of them were filled twice
        (65, "good", 0),
    ]
    twice = [row for row in scene.store.tables["slices"] if row["inexact"]]
    assert [(row["start_us"], row["n"], row["coverage_ratio"]) for row in twice] == [
        (at(minute), 1200, 1.0) for minute in (62, 63, 64)
    ]


def test_a_restart_under_a_clock_that_is_right_again_goes_on_where_time_is() -> None:
    scene = Scene()
    scene.store.add_slot(at(0))
    scene.store.add_slot(at(60))
    assert len(scene.slices(61.1)) == 61
    scene.restart(2.0)
    assert scene.slices(2.0) == []
    assert scene.slices(3.4) == []  # not before it is late: nothing is known of how far the gateway got
    scene.store.add_slot(at(2))
    scene.store.progress_us[GATEWAY] = at(3)
    assert scene.slices(3.5) == [(2, "good", 1)]
    assert scene.run(3.6).standings["gold", "latency"].counts.no_data == 1  # minute 1; none of the future


def test_a_restart_under_a_clock_that_is_behind_judges_and_comes_back() -> None:
    scene = Scene()
    for minute in range(60):
        scene.store.add_slot(at(minute))
    assert len(scene.slices(60.1)) == 60
    scene.restart(10)
    assert scene.slices(10) == []
    assert scene.slices(11.5) == []  # what is there is as it was judged
    scene.store.add_slot(at(11))  # cuts of the wrong clock
    scene.store.progress_us[GATEWAY] = at(12)
    assert scene.slices(12.1) == [(11, "good", 1)]
    scene.store.add_slot(at(60))  # and it is right again
    assert scene.slices(61.1) == [(60, "good", 0)]


def test_an_agreement_and_a_stream_of_the_future_begin_now() -> None:
    scene = Scene(in_force(simple(), applied_us=at(60)))
    scene.store.tables["streams"][0]["first_seen_us"] = at(60)
    for minute in (1, 2):
        scene.store.add_slot(at(minute))
    scene.restart(1.0)
    assert scene.slices(1.0) == []
    assert scene.slices(3.1) == [(1, "good", 0), (2, "good", 0)]


def test_a_jump_of_years_is_not_made_up_for() -> None:
    scene = Scene()
    scene.store.add_slot(at(0))
    assert scene.slices(1.1) == [(0, "good", 0)]
    years_us = 3 * 365 * 1440
    scene.store.add_slot(at(years_us))
    found = scene.slices(years_us + 1.1)
    assert found[0][0] == years_us + 1 - 7 * 1440


def test_maintenance_beside_the_agreement_excludes_slices_from_when_it_was_applied() -> None:
    (loaded,) = load_documents(maintenance_text(when='start: "2026-12-31T23:00", duration: 63m'), 60)
    assert isinstance(loaded.document, MaintenanceDocument)
    scene = Scene(in_force(simple(), applied_us=START_US))
    scene.store.add_slot(at(0), missed=600)
    assert scene.slices(1.02) == [(0, "bad", 0)]
    scene.store.add_slot(at(1), missed=600)
    scene.store.add_slot(at(2), missed=600)
    work = AnnouncedWork(loaded.document, 1, at(1.5))
    scene.judge.set_agreements([replace(scene.items[0], work=(work,))], at(1.6))
    assert scene.slices(3.02) == [(1, "bad", 0), (2, "excluded", 0)], "the first had begun before"


def test_a_plane_that_stopped_hides_behind_no_other_one() -> None:
    """Its gateway goes on sending the cuts of its host and of another plane."""
    for planes, state in (("", "no_data"), ("nbd-0", "no_data"), ("nbd-0 nbd-1", "no_data"),
                          ("nbd-1", "good"), ("-", "good")):  # fmt: skip
        scene = Scene()
        scene.store.add_slot(at(0))
        scene.store.plane_gaps.append(
            {"slot_us": at(0), "gateway_id": GATEWAY, "plane": "nbd-0", "missing_us": 10 * SECOND_US}
        )
        scene.store.planes = {1: planes} if planes else {}
        (row,) = [row for table, row in scene.run(1.1).rows if table == "slices"]
        assert (row["state"], row["coverage_ratio"] < 0.9) == (state, state == "no_data"), planes


def test_a_late_cut_of_a_plane_that_covers_a_judged_slice_revises_it() -> None:
    """Coverage of the slot grows, though no cut begins in it."""
    scene = Scene()
    scene.store.add_slot(at(0), covered_us=30 * SECOND_US)
    assert scene.slices(1.1) == [(0, "no_data", 0)]
    scene.store.coverage[-1]["covered_us"] = MINUTE_US
    scene.store.add_late(at(0))
    assert scene.slices(1.4) == [(0, "good", 1)]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_late_cuts_of_a_plane_revise_slices_of_hours_ago(is_restarted: bool) -> None:
    """They fill the time in which it was missing; what a track has forgotten is read first."""
    scene = Scene()
    scene.store.planes = {1: "nbd-0"}
    gap = {"gateway_id": GATEWAY, "plane": "nbd-0", "missing_us": MINUTE_US}
    for minute in range(200):
        scene.store.add_slot(at(minute), reads=0)
        if 10 <= minute < 20:
            scene.store.plane_gaps.append({"slot_us": at(minute), **gap})
    states = {minute: state for minute, state, _ in scene.slices(200.1)}
    assert [minute for minute, state in states.items() if state == "no_data"] == list(range(10, 20))
    for minute in range(10, 20):
        scene.store.add_slot(at(minute), missed=600 * (minute < 15))
    if is_restarted:
        scene.restart(200.4)
    found = scene.slices(200.5)
    assert found == [(minute, "bad" if minute < 15 else "good", 1) for minute in range(10, 20)]
    assert scene.slices(200.8) == []
    scene.restart(201)
    assert [each for each in scene.slices(201) if each[0] < 200] == []


def test_a_late_cut_of_a_slice_that_was_not_judged_is_no_news() -> None:
    scene = Scene(in_force(simple(), applied_us=at(5)))
    for minute in range(8):
        scene.store.add_slot(at(minute))
    scene.store.add_slot(at(2))
    scene.restart(7.2)
    assert scene.slices(7.5) == [(5, "good", 0), (6, "good", 0)]
    assert scene.slices(7.8) == []


def test_a_gateway_that_comes_back_after_days_revises_what_was_judged_without_it() -> None:
    """Its volume has moved, so it leaves the scope after a day; then it hands over 30 h of slow I/O."""
    item = in_force(simple(volumes="vol-1", slice_text="15m"), applied_us=START_US)
    scene, hour = Scene(item), 60
    scene.store.add_stream(2, volume="vol-1", gateway=OTHER)
    for minute in range(30 * hour):
        scene.store.add_slot(at(minute), stream_id=2, gateway=OTHER)
    scene.store.add_slot(at(0))
    found: dict[float, tuple[str, int]] = {}

    def go(minutes: float) -> None:
        for turn in range(4):
            rows = scene.slices(minutes + turn / 4)
            found.update({minute: (state, revision) for minute, state, revision in rows})

    go(30 * hour + 1)
    assert [found[h * hour][0] for h in (1, 23, 26, 29)] == ["no_data", "no_data", "good", "good"]
    for minute in range(1, 30 * hour):
        scene.store.add_slot(at(minute), missed=600)
        if minute > 24 * hour:
            scene.store.add_late(at(minute))
    go(30 * hour + 2)
    assert [found[h * hour] for h in (1, 23, 26, 29)] == [("bad", 1)] * 4


def test_a_gap_of_two_days_is_ours_if_the_first_cut_behind_it_says_so() -> None:
    item = in_force(simple(slice_text="15m"), applied_us=START_US)
    scene, hour = Scene(item), 60
    scene.store.add_slot(at(-1))
    for turn in range(4):
        scene.run(40 * hour + turn / 4)
    scene.store.add_slot(at(40 * hour), gap_cuts=90_000)
    for turn in range(4):
        scene.run(40 * hour + 2 + turn / 4)
    rows = scene.store.slices("gold", "latency", 0, 1 << 62)
    ours = {(row["start_us"] - START_US) // MINUTE_US // hour: row["ours"] for row in rows}
    assert [ours[h] for h in (0, 1, 14, 20, 39)] == [True] * 5


def test_a_gateway_that_is_gone_for_days_is_no_data_to_its_last_slice() -> None:
    item = in_force(simple(slice_text="15m"), applied_us=START_US)
    scene = Scene(item)
    scene.store.add_slot(at(0))
    found: dict[float, str] = {}
    for hour in range(1, 60):
        found |= {minute: state for minute, state, _ in scene.slices(hour * 60 + 1)}
    assert sorted(found) == list(range(0, 59 * 60, 15))
    assert set(found.values()) == {"no_data"}


def test_an_excluded_slice_says_what_excuses_it() -> None:
    window = (
        "  maintenance:\n"
        "    windows: [{start: 2027-01-01T00:01, duration: 1m, reason: new disks, author: ann}]\n"
    )
    scene = Scene(in_force(simple(extra=window), applied_us=START_US))
    for minute in range(3):
        scene.store.add_slot(at(minute))
    rows = [row for table, row in scene.run(3.1).rows if table == "slices"]
    assert [(row["state"], row["reason"]) for row in rows] == [
        ("good", ""), ("excluded", "maintenance: new disks"), ("good", ""),
    ]  # fmt: skip


def test_a_slice_knows_the_step_of_the_one_before() -> None:
    """In minute 0 demand meets the loose step; what it left outstanding is missed in minute 1, once."""
    text = simple().replace("demand_curve: [", "demand_curve: [{up_to_iops: 20, value_ms: 3}, ")
    scene = Scene(in_force(text, applied_us=START_US))
    for minute, (reads, strict, loose) in enumerate((
        (3000, (3000, 0, 60, 0), (3000, 0, 0, 0)), (600, (600, 60, 0, 60), (600, 60, 60, 60)),
    )):  # fmt: skip
        scene.store.add_slot(at(minute), reads)
        entry = scene.store.missed.pop()
        for limit_us, counts in ((3_000, strict), (12_000, loose)):
            names = zip(("counted", "missed", "overdue", "settled"), counts, strict=True)
            scene.store.missed.append({**entry, "threshold_us": limit_us, **dict(names)})
    rows = [row for table, row in scene.run(2.1).rows if table == "slices"]
    assert [(row["threshold_us"], row["n"], row["missed"], row["state"]) for row in rows] == [
        (12_000, 3000, 0, "good"), (3_000, 600, 60, "bad"),
    ]  # fmt: skip


# -- Volumes that are not their gateway's own


def claim(state: str, minutes: float, gateway: str = OTHER, volume: str = "vol-1") -> VolumeClaim:
    """Decided then, by ann."""
    return VolumeClaim(volume, gateway, "gw-b", state, "disk", "disk", "ann", at(0), at(minutes), 1)


def two_gateways(minutes: int, missed: int = 300) -> Scene:
    """One volume; what is shown through the second one is bad all the time."""
    scene = Scene()
    scene.store.add_stream(2, gateway=OTHER, client="d")
    for minute in range(minutes):
        both_have(scene, minute, missed)
    return scene


def both_have(scene: Scene, minute: int, missed: int = 300) -> None:
    scene.store.add_slot(at(minute))
    scene.store.add_slot(at(minute), missed=missed, stream_id=2, gateway=OTHER)


def events_of(found: Judgement) -> list[dict[str, Any]]:
    return [row for table, row in found.rows if table == "events" and row["kind"] == "judged-without"]


@pytest.mark.parametrize("restarts", [False, True])
def test_from_the_revocation_on_slices_are_judged_without_the_gateway(restarts: bool) -> None:
    scene = two_gateways(2)
    assert scene.slices(2.1) == [(0, "bad", 0), (1, "bad", 0)]
    revoked = [claim("revoked", 2.5)]
    if restarts:
        scene.restart(3.0)
    scene.judge.set_claims(revoked)
    both_have(scene, 2)
    found = scene.run(3.1)
    slices = [row for table, row in found.rows if table == "slices"]
    assert [(row["state"], row["n"]) for row in slices] == [("good", 600)], "also the half of it before that"
    (event,) = events_of(found)
    assert (event["subject"], event["at_us"], event["details"]["volumes"]) == ("gold", at(2.5), ["vol-1"])
    assert event["text"] == (
        "gold is judged without gateway gw-b from now on: vol-1 is not its own (revoked by ann). "
        "What was judged before stays"
    )
    both_have(scene, 3)
    found = scene.run(4.1)
    assert [row["state"] for table, row in found.rows if table == "slices"] == ["good"]
    assert events_of(found) == []


@pytest.mark.parametrize("restarts", [False, True])
def test_what_was_judged_before_the_revocation_stays_when_it_is_judged_again(restarts: bool) -> None:
    scene = two_gateways(2)
    assert scene.slices(2.1) == [(0, "bad", 0), (1, "bad", 0)]
    if restarts:
        scene.restart(2.6)
    scene.judge.set_claims([claim("revoked", 2.5)])
    scene.store.add_stream(3, gateway=OTHER, client="e")
    scene.store.add_slot(at(1), missed=300, stream_id=3, gateway=OTHER, covered_us=0)
    found = [row for table, row in scene.run(2.7).rows if table == "slices" and row["start_us"] == at(1)]
    assert [(row["revision"], row["state"], row["missed"]) for row in found] == [(1, "bad", 600)]


def test_a_slice_that_was_not_judged_yet_is_judged_without_it_though_it_ended_before() -> None:
    scene = two_gateways(1)
    scene.store.progress_us[OTHER] = at(0.5)
    assert scene.slices(1.1) == []
    scene.judge.set_claims([claim("revoked", 1.05)])
    found = scene.run(1.2)
    assert [row["state"] for table, row in found.rows if table == "slices"] == ["good"]
    assert len(events_of(found)) == 1


@pytest.mark.parametrize(
    ("state", "why"), [("revoked", "revoked by ann"), ("pending", "waiting for approval")]
)
def test_without_any_gateway_there_is_no_data_because_the_volume_is_not_its_own(state: str, why: str) -> None:
    scene = Scene()
    scene.store.add_slot(at(0))
    assert scene.slices(1.1) == [(0, "good", 0)]
    scene.judge.set_claims([claim(state, 1.2, GATEWAY)])
    scene.store.add_slot(at(1))
    found = scene.run(2.6)
    assert [(row["state"], row["reason"], row["ours"]) for t, row in found.rows if t == "slices"] == [
        ("no_data", "not-owned", False)
    ]
    assert [why in event["text"] for event in events_of(found)] == [True]
    scene.judge.set_claims([claim("approved", 2.7, GATEWAY)])
    scene.store.add_slot(at(2))
    assert scene.slices(3.1)[-1] == (2, "good", 0)


def test_a_claim_to_another_volume_or_of_a_gateway_without_streams_changes_nothing() -> None:
    scene = two_gateways(2, missed=0)
    scene.judge.set_claims([claim("revoked", 0.5, volume="vol-9"), claim("pending", 0.5, "g-3")])
    found = scene.run(2.1)
    assert [(row["state"], row["n"]) for _, row in found.rows] == [("good", 1200), ("good", 1200)]


# Volumes that labels choose.


BY_LABEL = simple().replace("volumes: [vol-1]", "volume_labels: tier=gold")


class Labelled(Scene):
    """An agreement that chooses by labels; streams 1 and 2 of vol-1 and vol-2 are on one gateway."""

    def __init__(self, *volumes: str) -> None:
        super().__init__(replace(in_force(BY_LABEL, applied_us=START_US), labelled=volumes))
        self.store.add_stream(2, volume="vol-2")

    def choose(self, minutes: float, *volumes: str) -> None:
        self.items = (replace(self.items[0], labelled=volumes),)
        self.judge.set_agreements(self.items, at(minutes))

    def add_minute(self, minute: float) -> None:
        """Of stream 1 all is well, stream 2 misses."""
        self.store.add_slot(at(minute), reads=300)
        self.store.add_slot(at(minute), reads=300, missed=300, stream_id=2)


def test_a_volume_that_gets_the_labels_counts_from_the_next_slice_on() -> None:
    scene = Labelled("vol-1")
    scene.add_minute(0)
    assert scene.slices(1.1) == [(0, "good", 0)]
    scene.choose(1.5, "vol-1", "vol-2")
    scene.add_minute(1)
    scene.store.add_late(at(0))
    assert scene.slices(2.2) == [(1, "bad", 0)], "and what was judged before stays, on late data, too"


def test_a_volume_that_loses_the_labels_counts_in_the_slices_before() -> None:
    scene = Labelled("vol-1", "vol-2")
    scene.add_minute(0)
    assert scene.slices(1.1) == [(0, "bad", 0)]
    scene.choose(1.5, "vol-1")
    scene.add_minute(1)
    scene.store.add_late(at(0))
    found = scene.run(2.2)
    assert [(row["start_us"], row["state"]) for table, row in found.rows if table == "slices"] == [
        (at(1), "good")
    ], "the slice before is as bad as it was"
    assert "judged-without" not in [row.get("kind") for _, row in found.rows], "it was nobody's claim"


def test_while_labels_choose_nothing_there_is_nothing_to_judge() -> None:
    scene = Labelled()
    scene.add_minute(0)
    assert scene.slices(1.6) == []
    scene.choose(1.7, "vol-1")
    scene.add_minute(1)
    assert scene.slices(2.2) == [(1, "good", 0)]
    scene.choose(2.5)
    scene.add_minute(2)
    assert scene.slices(3.6) == []
    scene.choose(3.7, "vol-1")
    scene.add_minute(3)
    assert scene.slices(4.2) == [(3, "good", 0)]
