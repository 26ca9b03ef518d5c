"""``sla policy`` and ``sla get jobs`` in words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sla_server.cli import policy
from sla_server.db.queries.records import Wanted
from tests.support import api
from tests.support.cli import Terminal

REPORT = {
    "capacity": [
        {
            "backend": "disk-0",
            "sla": "erp-gold",
            "objective": "latency",
            "cost_per_s": 600.0,
            "reason": "largest load at which the promise was kept",
        }
    ],
    "back_test": {"publish": False, "reason": "it does not help: bad slices 4 with it", "notes": ["7 slots"]},
}


def test_show_has_report_and_caps(sla: Terminal) -> None:
    lines = sla("policy", "show", "3").output.splitlines()
    assert lines[0].startswith("policy version 3: in-force")
    assert "capacity of disk-0 for erp-gold/latency: 700 weighted IOPS" in lines
    [row] = [line.split() for line in lines if line.startswith("batch ") and " Mon " in line]
    assert row == ["batch", "300", "weighted", "IOPS", "Mon", "00", "UTC", "450", "1"]
    assert sla("policy", "show").output.splitlines() == lines, "the newest"
    assert json.loads(sla("policy", "show", "-o", "json").output)["version"] == 3


def test_show_says_who_hurt_whom_what_an_io_costs_and_how_volumes_burst(
    sla: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    harm = {"backend": "disk-0", "sla": "gold", "objective": "latency", "volume": "batch", "share": 0.7}
    harm |= {"avoided_bad": 5, "bad": 8, "likely_cause": True, "reason": ""}
    cost = {"backend": "disk-0", "cost_write": 1.5, "cost_bytes": 65536, "reason": "explains 90%"}
    burst = {"backend": "disk-0", "volume": "batch", "cost_per_s": 40.0, "burst_cost": 900.0, "days": 7}
    report = {"harms": [harm] * 21, "cost_model": [cost], "bursts": [burst]}
    row = {"version": 4, "created_us": 1, "state": "in-force", "job": {}, "report": report}
    monkeypatch.setattr(sla.source, "policies", lambda *_: [row])
    lines = sla("policy", "show", "4").output.splitlines()
    assert "cost of an I/O on disk-0: cost_read = 1, cost_write = 1.5, cost_bytes = 65536" in lines
    hurt = "batch hurt gold/latency on disk-0 (likely cause): 70% of the harm; without it 5 of 8"
    assert sum(line.startswith(hurt) for line in lines) == 20
    assert "and 1 more that hurt others: -o json" in lines
    assert "usual bursts of batch on disk-0: 40 weighted IOPS and 900 at once (learnt of 7 days)" in lines


def test_show_says_why_a_policy_was_rejected(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"version": 4, "created_us": 1, "state": "rejected", "job": {}, "report": REPORT}
    monkeypatch.setattr(sla.source, "policies", lambda *_: [row])
    lines = sla("policy", "show", "4").output.splitlines()
    assert "back-test: it does not help: bad slices 4 with it" in lines
    assert "  7 slots" in lines
    assert lines[-1] == "no volume is capped"


def test_a_version_that_is_not_there_is_named(sla: Terminal) -> None:
    told = sla("policy", "show", "77")
    assert told.exit_code == 1
    assert "no policy version 77" in told.output


def test_diff_names_volumes_and_capacities(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = sla.source.policies()[0]
    rows = [{**newest, "version": 4, "report": REPORT}, newest]
    monkeypatch.setattr(sla.source, "policies", lambda *_: rows)
    lines = sla("policy", "diff", "3", "4").output.splitlines()
    assert lines[0] == "capacity of disk-0 for erp-gold/latency: 700 -> 600 weighted IOPS"
    assert lines[-1].split() == ["batch", "2", "1", "0", "1", "0", "400", "300"]
    found = json.loads(sla("policy", "diff", "3", "4", "-o", "json").output)
    assert found["capacity"][0]["after"] == 600.0
    assert sla("policy", "diff", "3", "3").output == "versions 3 and 3 cap the same\n"


def test_each_step_of_a_curve_has_a_capacity_of_its_own(
    sla: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In what is shown, explained and compared."""
    newest = sla.source.policies()[0]
    (first,) = REPORT["capacity"]  # type: ignore[misc]
    steps = [{**first, "step": step, "cost_per_s": cost} for step, cost in ((0, 700.0), (1, 500.0))]
    before = {**newest, "version": 2, "report": {"capacity": [steps[0], {**steps[1], "cost_per_s": 400.0}]}}
    after = {**newest, "version": 3, "report": {"capacity": steps}}
    monkeypatch.setattr(sla.source, "policies", lambda *_: [after, before])
    told = sla("policy", "show", "3").output.splitlines()
    assert "capacity of disk-0 for erp-gold/latency: 700 weighted IOPS" in told
    assert "capacity of disk-0 for erp-gold/latency step 2: 500 weighted IOPS" in told
    explained = sla("policy", "explain", "batch", "--version", "3").output
    assert "500 weighted IOPS for erp-gold/latency step 2: " in explained
    lines = sla("policy", "diff", "2", "3").output.splitlines()
    assert lines[0] == "capacity of disk-0 for erp-gold/latency step 2: 400 -> 500 weighted IOPS"
    changes = json.loads(sla("policy", "diff", "2", "3", "-o", "json").output)["capacity"]
    assert [(row["step"], row["before"], row["after"]) for row in changes] == [(1, 400.0, 500.0)]


def test_the_version_in_force_is_asked_for_by_its_state(
    sla: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a list has of each report what it shows: all reports of some months are many megabytes."""
    newest = sla.source.policies()[0]
    tested = {"publish": True, "reason": "it helps", "backends": [{"backend": "disk-0"}]}
    rows = [
        {**newest, "version": 5, "state": "rejected", "report": {"back_test": tested, "curves": [1]}},
        {**newest, "version": 3, "state": "in-force"},
        {**newest, "version": 2, "state": "superseded"},
    ]
    monkeypatch.setattr(sla.source, "policies", lambda *_: rows)
    sla.source.asked.clear()
    assert sla("policy", "explain", "batch").output.startswith("policy version ")
    wanted = [asked[1] for asked in sla.source.asked if isinstance(asked[1], Wanted)]
    assert [(each.limit, each.values["state"]) for each in wanted] == [
        (1, ["in-force", "pinned", "rejected-pinned"])
    ]
    listed = json.loads(sla("get", "policies", "-o", "json").output)
    assert listed[0]["report"] == {"back_test": {"publish": True, "reason": "it helps"}}
    assert json.loads(sla("policy", "show", "5", "-o", "json").output)["report"]["curves"] == [1]


def test_explain_says_when_a_volume_is_capped_and_why(sla: Terminal) -> None:
    lines = sla("policy", "explain", "batch").output.splitlines()
    assert lines[0] == "policy version 3 (in-force) and volume batch on backend disk-0:"
    assert lines[-1] == (
        "  Mon 00 UTC: at most 300 weighted IOPS, 750 at once after a quiet time; "
        "its demand (p95) was up to 450"
    )
    assert (
        json.loads(sla("policy", "explain", "batch", "-o", "json").output)["hours"][0]["cost_per_s"] == 300.0
    )
    assert "says nothing of volume 'none'" in sla("policy", "explain", "none").output


def test_neighbouring_hours_with_the_same_cap_are_one_line() -> None:
    hours = [(8, 100.0, 300.0), (9, 100.2, 400.0), (10, 50.0, None), (12, 50.0, 90.0)]
    rows = [{"hour_of_week": h, "cost_per_s": cap, "demand_p95": demand} for h, cap, demand in hours]
    rows.append({**rows[-1], "hour_of_week": 13, "burst_s": 2.0})
    assert list(policy._ranges(rows)) == [
        (8, 9, 100.0, 400.0, 0.0),
        (10, 10, 50.0, None, 0.0),
        (12, 12, 50.0, 90.0, 0.0),
        (13, 13, 50.0, 90.0, 100.0),
    ]


@pytest.mark.parametrize(
    ("command", "op", "body", "answer", "text"),
    [
        (("pin", "3"), "policy_pin", {"version": 3}, {"pinned": 3}, "policy version 3 is pinned"),
        (("unpin",), "policy_pin", {"version": None}, {"pinned": None}, "no policy version is pinned"),
        (("rollback",), "policy_rollback", {}, {"rolled_back": 3}, "policy version 3 is rolled back"),
    ],
)
def test_versions_are_chosen(
    sla: Terminal, command: tuple[str, ...], op: str, body: Any, answer: Any, text: str
) -> None:
    answers = {op: answer, "policies_changed": {"version": 2}}
    sla.mailbox.answer = lambda header: (True, 200, answers[header["op"]])
    lines = sla("policy", *command).output.splitlines()
    assert lines == [text, "policy version 2 is in force"]
    assert sla.asked == [(op, body), ("policies_changed", {})]


def test_a_version_that_was_never_stored_cannot_be_pinned(sla: Terminal) -> None:
    told = sla("policy", "pin", "9").output
    assert "no policy version 9" in told
    assert "'sla get policies' lists the versions" in told


def test_jobs_are_listed(sla: Terminal) -> None:
    lines = sla("get", "jobs").output.splitlines()
    assert lines[0].split()[:5] == ["JOB", "STATE", "STARTED", "TOOK", "ROWS"]
    assert lines[-1].split()[:2] == ["policy", "done"]
    assert json.loads(sla("get", "jobs", "-o", "json").output)[0]["rows"] == 84_000


def test_the_stage_of_policies_is_shown_and_set(sla: Terminal) -> None:
    stage = {"stage": "observe", "stages": {"disk-0": "enforce"}, "would_hold": []}
    sla.context.live.put({**api.snapshot(), "policy_stage": stage})
    assert sla("mode").output.splitlines()[1:] == [
        "caps of policies: observe",
        "caps of policies: enforce on backend disk-0",
    ]
    assert sla("policy", "would-hold").output.startswith("no volume is above")
    done = sla("mode", "enforce", "--policy", "--backend", "disk-0")
    assert done.output == "caps of policies: enforce on backend disk-0\n"
    assert sla.asked == [("mode", {"mode": "enforce", "backend": "disk-0", "of": "policy"})]


def test_what_observed_caps_would_hold(sla: Terminal) -> None:
    row = {"volume": "batch", "backend": "disk-0", "cap_cost_per_s": 300.0, "cost_per_s": 450.0}
    row |= {"above_s": 90, "above_cost": 12_000, "watched_s": 3600}
    stage = {"stage": "observe", "stages": {}, "would_hold": [row]}
    sla.context.live.put({**api.snapshot(), "policy_stage": stage})
    line = sla("policy", "would-hold").output.splitlines()[-1].split()
    assert line[:6] == ["batch", "disk-0", "300", "weighted", "IOPS", "450"]
    assert line[-1] == "12,000"
    assert json.loads(sla("policy", "would-hold", "-o", "json").output) == [row]


def test_jobs_and_policies_are_filtered_and_sorted_by_the_server(sla: Any) -> None:
    assert (
        sla("get", "jobs", "--state", "done,failed", "--sort", "longest", "--about", "helps").exit_code == 0
    )
    wanted = sla.source.asked[-1][1]
    assert (wanted.values["state"], wanted.sort, wanted.match) == (["done", "failed"], "longest", "helps")
    assert sla("get", "policies", "--state", "rejected*").output == "No policy fits the filters asked for.\n"
    assert sla("get", "jobs", "--sort", "size").exit_code != 0
    assert "no use with volumes" in sla("get", "volumes", "--state", "done").output
    listed = sla("audit", "list", "--who", "token", "--limit", "5").output
    assert "mode" in listed
    assert sla.source.asked[-1][1].values["who"] == ["token"]
    assert sla("audit", "list", "--about", "nobody").output == "No entry fits what is asked for.\n"
