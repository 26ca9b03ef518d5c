"""The demonstration's figures, from made-up records whose answers are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.demonstration import bad_seconds_ratio, rate, time_to_restore
from benchmarks.load import Load, Timed, percentile_ms


def load_with(latency_ms_by_second: list[float], per_second: int = 20) -> Load:
    load = Load(Path("unused"), "unused", seed=1)
    for second, latency_ms in enumerate(latency_ms_by_second):
        for number in range(per_second):
            due_s = second + number / per_second
            load.done.append(Timed(due_s, due_s + latency_ms / 1000))
    return load


def test_percentile_is_the_nearest_rank() -> None:
    records = [Timed(0.0, n / 1000) for n in range(1, 101)]
    assert percentile_ms(records, 95) == pytest.approx(95.0)
    assert percentile_ms([], 95) is None


def test_restore_counts_from_enforcing_to_the_end_of_the_first_good_second() -> None:
    load = load_with([60, 60, 60, 5, 5, 5])
    assert time_to_restore(load, 1.0, 6.0) == pytest.approx(3.0)


def test_never_restored_is_none() -> None:
    assert time_to_restore(load_with([60] * 6), 1.0, 6.0) is None


def test_bad_seconds() -> None:
    assert bad_seconds_ratio(load_with([5, 5, 60, 5]), 0.0, 4.0) == pytest.approx(0.25)
    assert bad_seconds_ratio(load_with([]), 0.0, 4.0) == 1.0


def test_rate_counts_completions() -> None:
    assert rate(load_with([1, 1, 1, 1]), 1.0, 3.0) == pytest.approx(20.0, rel=0.06)


def test_a_goal_is_met_on_its_own_side() -> None:
    rows = {row["key"]: row for row in harness.rows_for("demo", {"violation_ratio": 3.5, "restore_s": 12.0})}
    assert rows["violation_ratio"]["met"]
    assert not rows["restore_s"]["met"]
    assert not rows["neighbour_kept_ratio"]["met"], "a missing value is not a met goal"


def test_what_has_no_target_is_shown_and_not_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "HERE", tmp_path)
    (tmp_path / "targets.toml").write_text(
        '[x.a]\ngoal = "a"\ntarget = 2.0\ndirection = "min"\nunit = "x"\n'
        '[x.b]\ngoal = "b"\ndirection = "min"\nunit = "x"\n'
    )
    assert harness.run("x", lambda: harness.Sample({"a": 2.5, "b": 0.1})) == 0
    assert "goals met: 1 of 1" in capsys.readouterr().out
    assert [row["met"] for row in json.loads((tmp_path / "results/x.json").read_text())["rows"]] == [
        True,
        None,
    ]


def test_the_table_fits_80_columns() -> None:
    text = harness.table(harness.rows_for("gateway", {"proxy_qd16_vs_direct": 0.91}))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert json.dumps(text)
