"""The demonstration's figures, from made-up records whose answers are known."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import demo_table, demonstration, harness, sla
from benchmarks.sla_scenarios import SCENARIOS
from benchmarks.verdict import (
    Figures,
    bad_seconds_ratio,
    conditions,
    rate,
    summary,
    time_to_restore,
    told,
)
from tests.support.load import Load, Timed, percentile_ms
from tests.support.modelled_disk import Disk
from tests.support.stage import StageError

BAD_MS, GOOD_MS = 600, 50
CLOSED = Figures(
    violation_ratio=4.1,
    restore_s=3.25,
    bad_seconds_ratio=0.04,
    neighbour_kept_ratio=0.7,
    release_s=6.5,
    throttled=True,
    policy_version=1,
    io_errors=0,
)


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
    load = load_with([BAD_MS, BAD_MS, BAD_MS, GOOD_MS, GOOD_MS, GOOD_MS])
    assert time_to_restore(load, 1.0, 6.0) == pytest.approx(3.0)


def test_never_restored_is_none() -> None:
    assert time_to_restore(load_with([BAD_MS] * 6), 1.0, 6.0) is None


def test_bad_seconds() -> None:
    assert bad_seconds_ratio(load_with([GOOD_MS, GOOD_MS, BAD_MS, GOOD_MS]), 0.0, 4.0) == pytest.approx(0.25)
    assert bad_seconds_ratio(load_with([]), 0.0, 4.0) == 1.0
    died = load_with([GOOD_MS, GOOD_MS])
    assert bad_seconds_ratio(died, 0.0, 4.0) == pytest.approx(0.5), "a second without an answer is a bad one"
    hanging = load_with([GOOD_MS] * 4)
    hanging.hung = [Timed(2.5, math.inf)] * 9
    assert bad_seconds_ratio(hanging, 0.0, 4.0) == pytest.approx(0.25), "and one whose I/Os hang"


def test_a_closed_cycle_is_ok_and_says_so() -> None:
    assert summary(CLOSED)["ok"]
    assert summary(CLOSED)["failed"] == []
    assert told(CLOSED, "demo-data").endswith("the cycle closed")


@pytest.mark.parametrize(
    ("change", "failed", "seen"),
    [
        ({"violation_ratio": 0.8}, "broken", "0.80 of the promise"),
        ({"throttled": False}, "throttled", "no confirmed throttle"),
        ({"restore_s": None}, "held_again", "never"),
        ({"bad_seconds_ratio": 0.6}, "stays_held", "60.0%"),
        ({"neighbour_kept_ratio": 0.2}, "not_starved", "20.0%"),
        ({"release_s": None}, "released", "never"),
        ({"policy_version": None}, "policy", "none"),
        ({"io_errors": 3}, "no_io_errors", "3 failed"),
    ],
)
def test_each_condition_fails_by_itself_and_its_words_say_what_was_seen_and_where_to_look(
    change: dict[str, Any], failed: str, seen: str
) -> None:
    figures = replace(CLOSED, **change)
    assert summary(figures)["failed"] == [failed]
    assert not summary(figures)["ok"]
    text = told(figures, "demo-data")
    condition = next(each for each in conditions(figures) if each.name == failed)
    assert f"NO   {condition.wanted}: " in text
    assert seen in text
    assert f"look at {condition.look}" in text
    assert text.endswith(f"the cycle did NOT close: {failed}; logs are in demo-data")


def test_a_missed_goal_is_printed_and_fails_nothing() -> None:
    figures = replace(CLOSED, neighbour_kept_ratio=0.41, bad_seconds_ratio=0.3)
    assert summary(figures)["ok"]
    assert "0.41 ratio  neighbour's rate under control" in told(figures, "demo-data")


def test_the_modelled_disk_works_on_so_many_at_once_and_queues_the_rest() -> None:
    disk = Disk(4096, 0.02, at_once=2)
    assert [disk.finish_s(1.0) for _ in range(5)] == pytest.approx([1.02, 1.02, 1.04, 1.04, 1.06])
    assert disk.finish_s(9.0) == pytest.approx(9.02), "an idle disk begins at once"


def test_no_goal_rests_on_the_storage_of_the_machine() -> None:
    chosen = {each.name: (each, sla.Result(violation_ratio=4.0)) for each in SCENARIOS}
    direct = {"direct": (chosen["direct"][0], sla.Result(violation_ratio=1.0))}
    assert sla.values(direct) == {}
    assert sla.values(chosen | direct)["violation_ratio"] == 4.0


def test_a_demonstration_that_cannot_go_on_says_why_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_args: object) -> None:
        raise ExceptionGroup("tasks", [StageError("sla mode failed (1)"), ConnectionResetError()])

    monkeypatch.setattr(demonstration, "measure", fails)
    done = CliRunner().invoke(demonstration.main, ["--for", "60", "--folder", str(tmp_path)])
    assert done.exit_code == 1
    assert "it did not come to its end: sla mode failed (1); ConnectionResetError" in done.output


def test_the_table_has_a_row_a_run_with_what_failed() -> None:
    good, bad = summary(CLOSED), summary(replace(CLOSED, restore_s=None, io_errors=1))
    assert demo_table.row_of(1, 95.0, good).endswith("yes")
    assert demo_table.row_of(2, 95.0, bad).endswith("NO: held_again, no_io_errors")
    assert demo_table.row_of(3, 5.0, {}).endswith("NO: no summary")
    assert len(demo_table.row_of(1, 95.0, good)) <= len(demo_table.HEAD)


def test_busy_loops_are_stopped() -> None:
    with demo_table.busy_loops(2) as loops:
        assert [loop.poll() for loop in loops] == [None, None]
    assert all(loop.returncode is not None for loop in loops)


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
    # Nothing else runs, as far as the harness knows: a busy machine's result would not be recorded.
    monkeypatch.setattr(harness.ForeignCpu, "__exit__", lambda self, *_: setattr(self, "cores", 0.0))
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


def test_a_demonstration_says_first_how_long_it_takes_and_how_it_ends() -> None:
    endless, short = (demonstration.plan(60, endless=True), demonstration.plan(30, endless=False))
    assert "about 60 s together" in " ".join(endless.split())
    assert " ".join(endless.split()).endswith("then everything stays up, under load, until Ctrl-C.")
    assert " ".join(short.split()).endswith("then it ends by itself.")
    assert max(map(len, endless.splitlines())) <= 80


def test_the_demonstration_ends_at_sigterm_as_at_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else server, agents and disk would outlive it."""

    def run(*_args: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(demonstration, "measure", run)
    former = signal.getsignal(signal.SIGTERM)
    try:
        assert CliRunner().invoke(demonstration.main, ["--for", "60"]).exit_code == 130
    finally:
        signal.signal(signal.SIGTERM, former)
