"""Changes that wait for a second person, as ``services`` record and carry them out."""

from __future__ import annotations

from typing import Any

import pytest

from sla_server.rows import Row
from tests.support.agreements import simple
from tests.support.services import Bench

HOUR_S = 3600.0


def ask(bench: Bench, op: str = "mode", **body: Any) -> Row:
    """The row of a change that waits."""
    asked = {"op": op, "body": body, "requested_as": "account ann", "lasts_s": HOUR_S}
    bench.request("approval_request", asked)
    rows = dict(bench.confirm())
    (answer,) = bench.answers()
    assert answer["code"] == 200
    assert answer["body"]["approval"] == rows["approvals"]
    assert (rows["audit"]["who"], rows["audit"]["action"]) == ("ann", "approval-request")
    assert rows["events"]["kind"] == "approval-requested"
    found: Row = rows["approvals"]
    return found


def decide(bench: Bench, row: Row, *, approves: bool = True, **more: Any) -> tuple[int, dict[str, list[Row]]]:
    """Status, and the recorded rows by table."""
    bench.request("approval_decide", {"row": row, "approves": approves, "note": "seen", **more}, req="r2")
    recorded: dict[str, list[Row]] = {}
    for table, stored in bench.confirm():
        recorded.setdefault(table, []).append(stored)
    (answer,) = bench.answers()
    return answer["code"], recorded


def test_a_change_waits_and_is_carried_out_once_with_both_names() -> None:
    bench = Bench()
    row = ask(bench, mode="enforce")
    assert bench.core.mode == "observe"
    assert row["text"] == "mode enforce on the server (now observe)"
    assert row["expires_us"] - row["requested_us"] == HOUR_S * 1e6
    row["requested_by"] = "ann"
    code, recorded = decide(bench, row)
    assert (code, bench.core.mode) == (200, "enforce")
    mode, word = recorded["audit"]
    assert (mode["action"], mode["who"]) == (
        "mode",
        "ann, approved by ann",
    )  # who may: the application server
    assert word["action"] == "approval-approved"
    assert word["after"]["note"] == "seen"
    assert word["before"]["digest"] == row["digest"]
    (stored,) = recorded["approvals"]
    assert (stored["state"], stored["decided_by"]) == ("approved", "ann")
    assert stored["changed_us"] > row["changed_us"]
    bench.request("mode", {"mode": "observe"})
    bench.confirm()
    bench.answers()
    assert decide(bench, row)[0] == 409, "SQL may still call it pending: it is carried out once"
    assert bench.core.mode == "observe"


@pytest.mark.parametrize(
    "changed",
    [
        {"body": '{"mode":"enforce","of":"policy"}'},
        {"basis": '{"mode":"enforce","own":null}'},
        {"op": "policy_rollback", "body": "{}"},
        {"requested_as": "account bob"},
        {"expires_us": 1 << 60},
        {"digest": "0" * 64},
    ],
)
def test_nothing_but_what_was_asked_is_carried_out(changed: Row) -> None:
    bench = Bench()
    row = ask(bench, mode="enforce")
    assert decide(bench, {**row, **changed}) == (409, {})
    assert bench.core.mode == "observe"


def test_a_change_whose_basis_has_changed_is_refused_and_ends() -> None:
    bench = Bench()
    row = ask(bench, mode="enforce", of="policy")
    before = bench.core.policy_mode
    bench.request("mode", {"mode": "enforce" if before == "observe" else "observe", "of": "policy"})
    bench.confirm()
    bench.answers()
    code, recorded = decide(bench, row)
    assert code == 409
    assert [stored["state"] for stored in recorded["approvals"]] == ["outdated"]
    assert [entry["action"] for entry in recorded["audit"]] == ["approval-outdated"]
    assert decide(bench, row)[0] == 409


def test_a_refused_or_expired_change_is_never_carried_out() -> None:
    bench = Bench()
    row = ask(bench, mode="enforce")
    code, recorded = decide(bench, row, approves=False)
    assert (code, bench.core.mode) == (200, "observe")
    assert [stored["state"] for stored in recorded["approvals"]] == ["refused"]
    assert decide(bench, row)[0] == 409
    late = ask(bench, mode="enforce")
    bench.clock.advance(HOUR_S)
    assert decide(bench, late) == (409, {})
    assert bench.core.mode == "observe"


def test_what_is_so_already_waits_for_nobody() -> None:
    bench = Bench()
    bench.request("mode", {"mode": "enforce"})
    bench.confirm()
    bench.answers()
    asked = {"op": "mode", "body": {"mode": "enforce"}, "requested_as": "account ann", "lasts_s": HOUR_S}
    bench.request("approval_request", asked)
    assert [table for table, _row in bench.confirm()] == ["audit"]
    assert [answer["body"] for answer in bench.answers()] == [{"mode": "enforce"}]


def test_a_rollback_that_cannot_be_carried_out_goes_on_waiting() -> None:
    bench = Bench()
    row = ask(bench, "policy_rollback")
    assert decide(bench, row) == (409, {})  # no policy is in force
    bench.request("access", {"action": "login-failed", "subject": "x"})
    assert [table for table, _row in bench.confirm()] == ["audit"], "no row of the approval is left over"


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"op": "mode", "body": {"mode": "enforce", "backend": "no-such"}}, 404),
        ({"op": "mode", "body": {"mode": "faster"}}, 422),
        ({"op": "delete", "body": {"name": "erp-gold"}}, 422),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_asked_for(asked: Row, code: int) -> None:
    bench = Bench()
    bench.request("approval_request", {**asked, "requested_as": "x", "lasts_s": HOUR_S})
    assert bench.confirm() == []
    assert [answer["code"] for answer in bench.answers()] == [code]


@pytest.mark.parametrize("op", ["mode", "policy_pin"])
def test_nothing_is_done_whose_record_cannot_be_written(op: str) -> None:
    """The disk is full, say: no act without its record; it goes on waiting, and is done once it can be."""
    bench = Bench()
    body: dict[str, Any] = {"mode": "enforce"} if op == "mode" else {"version": 3}
    row = ask(bench, op, **body)
    before = bench.core.mode, bench.sql_worker.orders
    bench.request("approval_decide", {"row": row, "approves": True, "note": ""}, req="r2")
    assert (bench.core.mode, bench.sql_worker.orders) == before, "its record is on its way"
    bench.confirm(ok=False, error="no space left on device")
    assert [answer["code"] for answer in bench.answers()] == [503]
    assert (bench.core.mode, bench.sql_worker.orders) == before
    assert decide(bench, row)[0] == 200
    after = bench.core.mode, bench.sql_worker.orders
    assert after != before


def test_a_refusal_that_cannot_be_recorded_can_be_tried_again() -> None:
    bench = Bench()
    row = ask(bench, mode="enforce")
    bench.request("approval_decide", {"row": row, "approves": False, "note": ""}, req="r2")
    bench.confirm(ok=False, error="no space left on device")
    (answer,) = bench.answers()
    assert (answer["code"], answer["body"]["errors"][0]["fix"]) == (503, "Try again")
    code, recorded = decide(bench, row, approves=False)
    assert (code, [stored["state"] for stored in recorded["approvals"]]) == (200, ["refused"])
    assert decide(bench, row)[0] == 409


def test_what_was_overtaken_while_its_record_was_written_is_not_done() -> None:
    """After a restart the newest record counts: it must be so before, too."""
    bench = Bench()
    row = ask(bench, mode="enforce")
    bench.request("approval_decide", {"row": row, "approves": True, "note": ""}, req="r2")
    bench.request("mode", {"mode": "observe"}, req="r3")
    rows = [stored for table, stored in bench.confirm() if table == "audit"]
    assert [each["action"] for each in rows] == ["mode", "approval-approved", "mode"]
    assert {answer["req"]: answer["code"] for answer in bench.answers()} == {"r2": 409, "r3": 200}
    assert bench.core.mode == "observe"


def test_where_the_mode_is_for_two_no_agreement_gets_enforce_from_one() -> None:
    """An operator could go around the second person by ``spec.control``."""
    bench = Bench()
    enforced, plain = (simple(extra=extra) for extra in ("  control: enforce\n", ""))
    for text, code in ((enforced, 422), (plain, 200), (enforced, 422)):
        bench.request("apply", {"documents": text, "may_enforce": False})
        bench.confirm()
        (answer,) = bench.answers()
        assert answer["code"] == code, answer
        if code == 422:
            (error,) = answer["body"]["errors"]
            assert (error["field"], error["document"], error["line"]) == ("spec.control", "gold", 1)
            assert "sla mode enforce" in error["fix"]
    bench.request("apply", {"documents": enforced, "may_enforce": False, "dry_run": True})
    assert [answer["code"] for answer in bench.answers()] == [422]
    bench.request("apply", {"documents": enforced})  # as without [api] approval, or before it
    bench.confirm()
    bench.answers()
    changed = simple(extra="  control: enforce\n", value_ms=13.0)
    bench.request("apply", {"documents": changed, "may_enforce": False})
    bench.confirm()
    assert [answer["code"] for answer in bench.answers()] == [200], "it has that already"
