"""Decisions become rows: what they rested on, when they were confirmed, and how many a backend may have."""

from __future__ import annotations

from datetime import UTC
from typing import Any

import pytest

from pmdaemon.wire.rates import Rates
from sla_server.agreements.promise import Priority
from sla_server.explanation import evidence
from sla_server.explanation.words import Times
from sla_server.services.control import decision_log
from sla_server.services.control.backend_loop import BackendControl
from sla_server.services.control.decision_log import DecisionLog, LoopBefore, loop_figures
from sla_server.services.control.decisions import DecisionKind, RecordDecision
from sla_server.services.control.scopes import PromiseScope
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.signal import SignalTable
from sla_server.services.control.victims import Need, Victim
from tests.support.worlds import KEY, A, Feeder, caps_of, controller, promise, volume_class

CALM = {"gold": (60, 2.0), "greedy": (400, 2.0)}
HARMED = {"gold": (60, 30.0), "greedy": (400, 30.0)}


def noted(decisions: list[Any], kind: str = "") -> list[dict[str, Any]]:
    return [d.row for d in decisions if isinstance(d, RecordDecision) and (not kind or d.row["kind"] == kind)]


def world(mode: str = "enforce", **settings: Any) -> Feeder:
    return Feeder(controller(mode=mode, **settings), (A, ("gold", "greedy")))


def throttled(made: Feeder) -> tuple[list[dict[str, Any]], int]:
    """Until the first cap is set; returns its tick's rows and the generation."""
    for _ in range(10):
        decisions = made.step((A, HARMED, 0))
        if rows := noted(decisions):
            return rows, caps_of(decisions, A).gen
    raise AssertionError("nothing was decided")


def test_a_first_step_is_kept_with_what_it_rested_on() -> None:
    made = world()
    (start, cap), _ = throttled(made)
    assert (start["kind"], start["backend"], start["victim"]) == ("start", "disk", "gold/latency")
    assert (start["reason"], start["mode"], start["at_us"]) == ("promise-violated", "enforce", made.unix_us)
    figures = start["figures"]
    assert figures["c_before"] == pytest.approx(425, rel=0.01)
    assert figures["c_after"] == pytest.approx(figures["c_before"] / 2, rel=0.1)
    assert [row["volume"] for row in figures["use"]] == ["greedy", "gold"]
    assert [row["throttled"] for row in figures["use"]] == [True, False]
    assert sum(row["share_ratio"] for row in figures["use"]) == pytest.approx(1, abs=0.01)
    promised = figures["promise"]
    assert (promised["percentile"], promised["threshold_us"], promised["volumes"]) == (95, 12_000, ["gold"])
    assert promised["u"] > 1
    assert promised["windows"] >= 2
    assert (cap["kind"], cap["volume"], cap["victim"]) == ("cap-set", "greedy", "gold/latency")
    assert cap["figures"]["before"] is None
    assert cap["figures"]["after"] == {"cost_per_s": figures["use"][0]["cap_cost_per_s"]}
    assert cap["figures"]["gateways"] == [A[:4]]


def test_a_cap_is_completed_when_confirmed_and_seen_and_never_repeated() -> None:
    made = world()
    (_, cap), gen = throttled(made)
    rows = [row for _ in range(2) for row in noted(made.step((A, {**CALM, "greedy": (150, 2.0)}, gen)))]
    rows = [row for row in rows if row["decision_id"] == cap["decision_id"]]
    assert [(bool(row.get("confirmed_us")), bool(row.get("seen_us"))) for row in rows][-1] == (True, True)
    assert all(row["figures"] == cap["figures"] for row in rows)
    quiet = [made.step((A, {**CALM, "greedy": (150, 2.0)}, gen)) for _ in range(1)]
    assert noted(quiet[0], "cap-set") == []


def test_a_release_says_for_whom_it_was() -> None:
    made = world()
    _, gen = throttled(made)
    rows: list[dict[str, Any]] = []
    for _ in range(12):
        rows += noted(made.step((A, {"gold": (0, 0), "greedy": (150, 2.0)}, gen)))
    (released,) = [row for row in rows if row["kind"] == "release"]
    assert (released["reason"], released["victim"]) == ("victim-idle", "gold/latency")
    assert (released["figures"]["c_after"], released["figures"]["throttled"]) == (None, ["greedy"])
    (ended,) = [row for row in rows if row["kind"] == "cap-released"]
    assert (ended["volume"], ended["figures"]["after"]) == ("greedy", None)
    assert ended["figures"]["before"]["cost_per_s"] > 0


def test_observe_keeps_what_it_would_do_once() -> None:
    made = world("observe")
    rows = [row for _ in range(8) for row in noted(made.step((A, HARMED, 0)))]
    assert [(row["kind"], row["volume"], row["mode"]) for row in rows] == [
        ("start", "", "observe"),
        ("observed", "greedy", "observe"),
    ]


def test_a_finding_is_kept_with_the_promise_that_asked() -> None:
    made = Feeder(
        controller(
            (promise(), promise("other")),
            (volume_class(), volume_class("other", Priority.GOLD)),
        ),
        (A, ("gold", "other")),
    )
    rows: list[dict[str, Any]] = []
    for _ in range(20):
        rows += noted(made.step((A, {"gold": (60, 30.0), "other": (60, 2.0)}, 0)))
    assert [(row["kind"], row["victim"]) for row in rows] == [("infeasible", "gold/latency")]
    assert "other" in rows[0]["text"]
    assert rows[0]["figures"]["promise"]["u"] > 1


def test_a_step_lists_all_promises_that_it_helps() -> None:
    golds = ("gold", "gold2")
    made = Feeder(
        controller([promise(g) for g in golds], [volume_class(g) for g in golds]), (A, (*golds, "greedy"))
    )
    late = {"gold": (60, 30.0), "gold2": (60, 30.0), "greedy": (400, 30.0)}
    rows: list[dict[str, Any]] = []
    shown: list[list[str]] = []
    for ios in (late, late, late, late, late, {**late, "gold": (60, 2.0)}, CALM):
        rows += noted(made.step((A, ios, made.controller.policy.gateways[A].gen)))
        shown.append(made.controller.snapshot(made.unix_us)["backends"][0]["victims"])
    assert shown[0] == []
    assert ["gold/latency", "gold2/latency"] in shown, "the live view names them, too"
    steps = [row for row in rows if row["kind"] in ("start", "decrease")]
    assert {row["victim"] for row in steps} == {"gold/latency"}, "one of them leads"
    assert [row["figures"]["victims"] for row in steps] == [["gold/latency", "gold2/latency"]] * len(steps)
    made.controller.set_agreement_modes({"gold2": "observe"})
    rows = []
    for _ in range(40):
        rows += noted(made.step((A, late, made.controller.policy.gateways[A].gen)))
    later = [row for row in rows if row["mode"] == "enforce" and row["kind"] in ("decrease", "unattributed")]
    assert {tuple(row["figures"]["victims"]) for row in later} == {("gold/latency",)}


def test_a_promise_without_a_curve_has_no_end_of_it() -> None:
    rate = promise(metric="iops", curve=(), promised=10.0)
    row = SignalTable(ControlSettings()).allot(rate, "g", "disk", 0.95)
    lead = Victim(KEY, Priority.GOLD, 0.0, Need.AT_RISK, row.signal(), frozenset({"gold"}))
    control = BackendControl(ControlSettings(), "disk")
    before = LoopBefore.of(control)
    found = loop_figures(before, control, {}, {}, lead, PromiseScope(rate, "disk", row))
    assert found["promise"]["curve_end_iops"] is None


def test_a_manual_throttle_has_its_rows_and_the_floor() -> None:
    made = world("observe")
    made.step((A, CALM, 0))
    made.controller.manual_set("t", "greedy", ops_per_s=10, who="ann", reason="a test")
    (row,) = noted(made.step((A, CALM, 0)))
    assert (row["kind"], row["reason"], row["text"]) == ("cap-set", "manual", "a test")
    figures = row["figures"]
    assert (figures["source"], figures["who"]) == ("manual", "ann")
    assert figures["after"] == figures["in_force"] == {"ops_per_s": 10}
    made.controller.manual_release("greedy", None, "bob")
    (row,) = noted(made.step((A, CALM, 0)))
    assert (row["kind"], row["reason"], row["text"]) == ("cap-released", "manual-release", "released by bob")


def test_caps_found_in_force_are_not_decided_again() -> None:
    made = world()
    made.controller.restore(
        [
            {"throttle_id": "t", "volume": "greedy", "backend": "disk", "source": "manual", "ops_per_s": 9.0,
             "reason": "manual", "text": "", "state": "seen", "gen": 5, "requested_us": 1},
        ]
    )  # fmt: skip
    assert noted(made.step((A, CALM, 5))) == []


def test_a_refusal_is_kept_once() -> None:
    made = world()
    _, gen = throttled(made)
    for _ in range(2):
        made.controller.caps_state(A, gen, "refused", "no such volume", made.unix_us)
    (row,) = noted(made.step((A, HARMED, 0)), "not-effective")
    assert (row["volume"], "no such volume" in row["text"]) == ("greedy", True)


def test_too_many_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_log, "BURST_ROWS", 3)
    log = DecisionLog()
    made: list[str] = []

    def figures() -> dict[str, Any]:
        made.append("figures")
        return {"throttle_id": len(made)}

    kept = [log.add(DecisionKind.CAP_SET, 1_000_000, backend="b", figures=figures) for _ in range(5)]
    assert [row is not None for row in kept] == [True, True, True, False, False]
    assert log.add(DecisionKind.CAP_SET, 1_000_000, backend="other", figures=figures) is not None
    assert (len(made), log.left_out) == (4, 2)
    later = log.add(DecisionKind.CAP_SET, 2_000_000, backend="b", figures=figures)
    assert later is not None
    assert later["figures"]["left_out"] == 2
    assert len({entry.row["decision_id"] for entry in log.take()}) == 5
    assert log.take() == []


def test_a_confirmation_of_the_rate_before_is_none_of_this_one() -> None:
    log = DecisionLog()
    row = log.add(DecisionKind.CAP_CHANGED, 1_000_000, figures=dict)
    assert row is not None
    log.take()
    log.confirm(row, 999_999, None)
    assert log.take() == []
    for _ in range(2):
        log.confirm(row, 1_000_001, None)
    assert [entry.row["confirmed_us"] for entry in log.take()] == [1_000_001]


def test_a_text_that_names_thousands_of_volumes_is_cut() -> None:
    row = DecisionLog().add(DecisionKind.DECREASE, 1, text="v" * 5_000, figures=dict)
    assert row is not None
    assert (len(row["text"]), row["text"][-1]) == (600, "\u2026")


def test_rates_that_are_free_are_no_figures() -> None:
    assert decision_log.rates_figures(Rates(ops_per_s=5.04)) == {"ops_per_s": 5.0}
    assert decision_log.rates_figures(None) is None


def test_a_decision_of_one_of_several_servers_says_which_one_decided_it() -> None:
    alone = DecisionLog().add(DecisionKind.DECREASE, 1, figures=dict)
    row = DecisionLog(server="n2").add(DecisionKind.DECREASE, 1, figures=dict)
    assert alone is not None
    assert row is not None
    assert (alone["figures"], row["figures"]) == ({}, {"server": "n2"})
    times = Times(2, UTC)
    assert evidence.decision_line(row, times).endswith(" Server n2 decided it.")
    assert "decided it" not in evidence.decision_line(alone, times)
