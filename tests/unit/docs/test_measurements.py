"""Pages of measurements: which stored rows count against the goals of today."""

from __future__ import annotations

from typing import Any

from docs.measurements import compared, page


def _row(key: str, goal: str, value: float, target: float | None = 2.0) -> dict[str, Any]:
    met = None if target is None else value >= target
    return {"key": key, "goal": goal, "value": value, "target": target, "direction": "min", "met": met}


def _goal(words: str, target: float | None = 2.0) -> dict[str, Any]:
    return {"goal": words, "target": target, "direction": "min", "unit": "x"}


def test_a_row_whose_goal_is_gone_or_reworded_counts_nowhere() -> None:
    rows = [_row("kept", "as before", 3), _row("reworded", "checksums of ends", 9), _row("gone", "gone", 9)]
    goals = {"kept": _goal("as before"), "reworded": _goal("full checksums")}
    found = compared(rows, goals)
    assert [row["key"] for row in found.counted] == ["kept"]
    assert [row["key"] for row in found.former] == ["reworded", "gone"]
    assert found.unmeasured == ["full checksums"]


def test_a_figure_is_held_against_the_target_of_today() -> None:
    rows = [_row("new_target", "one", 1.7, None), _row("raised", "two", 2.5), _row("dropped", "three", 9)]
    goals = {"new_target": _goal("one"), "raised": _goal("two", 3.0), "dropped": _goal("three", None)}
    found = compared(rows, goals)
    assert [(row["key"], row["target"], row["met"]) for row in found.counted] == [
        ("new_target", 2.0, False),
        ("raised", 3.0, False),
        ("dropped", None, None),
    ]


def test_a_banned_name_that_a_stored_run_still_has_is_the_same_goal() -> None:
    found = compared([_row("cpu", "brain: CPU for a cut", 3)], {"cpu": _goal("controller: CPU for a cut")})
    assert [row["key"] for row in found.counted] == ["cpu"]
    assert found.former == []
    assert found.unmeasured == []


def test_figures_of_a_run_in_parts_have_each_its_day() -> None:
    row = _row("attempts", "connection attempts of a client that lost its node, most", 2) | {
        "unit": "attempts"
    }
    machine = {"memory_bytes": 1 << 34, "cores": 2, "cpu": "AMD EPYC", "python": "3.11.2"}
    result = {"rows": [row], "machine": machine, "finished_unix_s": 1_800_000_000, "options": {}}
    whole = page("cluster", result)
    assert "| met |\n" in whole
    assert "came after this run" in whole
    result["rows"] = [row | {"finished_unix_s": 1_700_000_000}]
    in_parts = page("cluster", result)
    assert "| yes | 2023-11-14 |" in in_parts
    assert "Goals that no run of a part has measured yet:" in in_parts
