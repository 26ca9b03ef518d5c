"""The snapshot of a large installation: rows of what needs a look, and the state of every other promise."""

from __future__ import annotations

from typing import Any

import pytest

from pmdaemon.wire.messages.api import OTHER_KEYS
from sla_server.agreements.compliance import Counts, ObjectiveStatus, error_budget
from sla_server.services import snapshot
from sla_server.services.snapshot import Shown


def view(count: int, rows: int, state: str = "ok") -> dict[str, Any]:
    """The controller's view of ``count`` promises, of which the first ``rows`` have a row."""
    keys = [(f"s{number:04}", "latency") for number in range(count)]
    slas = [{"name": name, "objective": objective, "state": state} for name, objective in keys[:rows]]
    totals = {"slas": {state: count}}
    return {"slas": slas, "promises": keys, "states": [state] * count, "totals": totals}


def status(
    name: str, objective: str, *, bad: int = 0, shown: dict[str, Any] | None = None
) -> ObjectiveStatus:
    return ObjectiveStatus(
        name=name,
        objective=objective,
        period_start_us=0,
        period_end_us=1,
        counts=Counts(good=100 - bad, bad=bad),
        compliance=1 - bad / 100,
        coverage=1.0,
        budget=error_budget(10 * 60_000_000, bad * 60_000_000),
        burn_1h=0.0,
        consecutive_bad=0,
        alerts=frozenset({"fast"}),
        target=0.9,
        judged_us=(3_600_000_000, bad * 60_000_000),
        shown=shown,
    )


def compose(shown: Shown, view: dict[str, Any], *standings: ObjectiveStatus) -> dict[str, Any]:
    return shown.compose(view, "observe", {each.key: each for each in standings}, None, 7)


def test_every_promise_has_a_row_or_a_state() -> None:
    found = compose(Shown((), 0), view(300, 200), status("s0250", "latency", bad=5))
    keys = {(row["name"], row["objective"]) for row in found["slas"]} | {
        tuple(row[:2]) for row in found["others"]
    }
    assert len(keys) == len(found["slas"]) + len(found["others"]) == 300
    judged = [0.95, 1.0, pytest.approx(0.5), pytest.approx(5.0), 0.9, 0.0, ["fast"], 3600, 300]
    assert found["others"][50] == ["s0250", "latency", "ok", *judged]
    assert found["others"][51] == ["s0251", "latency", "ok", *[None] * 6, [], None, None]
    assert {len(row) for row in found["others"]} == {len(OTHER_KEYS)}
    assert not {"promises", "states"} & set(found)
    assert compose(Shown((), 0), view(200, 200))["others"] == []


def test_very_many_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "OTHERS_ROWS", 40)
    shown, seen = Shown((), 0), set[tuple[str, ...]]()
    for turn in range(3):
        others = compose(shown, view(100, 10))["others"]
        assert len(others) == (30, 40, 20)[turn]
        seen |= {tuple(row[:2]) for row in others}
    assert len(seen) == 90
    assert len(compose(shown, view(100, 10))["others"]) == 30, "and begin again"


def test_of_objectives_judged_by_slices_those_that_are_violated_have_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshot, "BY_SLICES_ROWS", 2)
    standings = [
        status(name, "rate", shown={"name": name, "objective": "rate", "metric": "iops", "state": state})
        for name, state in (("a", "ok"), ("b", "ok"), ("c", "violating"))
    ]
    found = compose(Shown((), 0), view(0, 0), *standings)
    assert [row["name"] for row in found["slas"]] == ["a", "c"]
    assert [row[:3] for row in found["others"]] == [["b", "rate", "ok"]]
    assert found["totals"]["slas"] == {"ok": 2, "violating": 1}
