"""What becomes a record: complete and quiet runs alone, with their options named."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cluster, harness

COMPLETE = {"lists_ms": 1.0}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "results").mkdir()
    (tmp_path / "targets.toml").write_text(
        '[query.lists_ms]\ngoal = "lists"\ntarget = 200.0\ndirection = "max"\nunit = "ms"\n'
    )
    monkeypatch.setattr(harness, "HERE", tmp_path)
    return tmp_path / "results"


def quiet(monkeypatch: pytest.MonkeyPatch, cores: float = 0.0) -> None:
    monkeypatch.setattr(harness.ForeignCpu, "__exit__", lambda self, *_: setattr(self, "cores", cores))


def chosen(*words: str) -> harness.Options:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gateways", type=int, default=4000)
    return harness.Options.of(parser, parser.parse_args(words))


def test_a_complete_run_is_recorded_with_its_options(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch)
    assert harness.run("query", lambda: harness.Sample(COMPLETE), 1, chosen()) == 0
    assert json.loads((results / "query.json").read_text())["options"] == {"gateways": 4000}


@pytest.mark.parametrize(
    ("words", "values", "cores", "lacks"),
    [
        (("--gateways", "10"), COMPLETE, 0.0, "options of its own"),
        ((), {}, 0.0, "not measured: lists_ms"),
        ((), COMPLETE, 0.5, "0.50 core"),
    ],
)
def test_any_other_run_leaves_the_record_alone(
    results: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    values: dict[str, float],
    cores: float,
    lacks: str,
) -> None:
    quiet(monkeypatch, cores)
    (results / "query.json").write_text("the record")
    harness.run("query", lambda: harness.Sample(values), 1, chosen(*words))
    assert (results / "query.json").read_text() == "the record"
    assert json.loads((results / "query.json.tmp").read_text())["benchmark"] == "query"
    assert lacks in capsys.readouterr().out


def test_a_run_of_which_a_part_failed_is_not_recorded_whatever_it_measured(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet(monkeypatch)
    assert harness.run("query", lambda: harness.Sample(COMPLETE, lacks="failed: many"), 1, chosen()) == 1
    assert not (results / "query.json").exists()
    assert "not recorded: failed: many" in capsys.readouterr().out


def test_a_benchmark_without_options_refuses_what_it_is_given(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks.query", "--sizes", "50"])
    with pytest.raises(SystemExit) as ended:
        harness.main("query", lambda: pytest.fail("it measures"))
    assert ended.value.code == 2
    assert "--sizes" in capsys.readouterr().err


ORPHANED = r"""
import os, subprocess, sys, time
from benchmarks import harness
if sys.argv[1] == "adopts":
    harness.adopt_orphans()
# The shell ends at once; what it started works on until it has used a fifth of a second.
works = "import time\nwhile time.process_time() < 0.2: pass"
shell = subprocess.run(["sh", "-c", '"$0" -c "$1" >/dev/null & echo $!', sys.executable, works],
                       stdout=subprocess.PIPE, text=True, check=True)
while os.path.exists(f"/proc/{shell.stdout.strip()}"):
    if open(f"/proc/{shell.stdout.strip()}/stat").read().rsplit(")", 1)[1].split()[0] == "Z":
        break
    time.sleep(0.01)
print(harness._own_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK") - time.process_time())
"""


@pytest.mark.parametrize(("word", "is_ours"), [("adopts", True), ("leaves", False)])
def test_work_of_a_process_whose_parent_ended_is_ours(word: str, is_ours: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ORPHANED, word], capture_output=True, text=True, check=True, timeout=120
    )
    assert (float(done.stdout) >= 0.15) is is_ours


PARTS = {"lists": ("lists_ms",), "pages": ("pages_ms",)}


def in_parts(*words: str) -> harness.Options:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--gateways", type=int, default=4000)
    return harness.Options.of(parser, parser.parse_args(words), part_option="only")


def run_part(*words: str, **values: float) -> dict[str, dict[str, Any]]:
    """The rows of the record after it, by key."""
    harness.run("query", lambda: harness.Sample(values), 1, in_parts(*words), parts=PARTS)
    path = harness.HERE / "results" / "query.json"
    return {row["key"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}


@pytest.fixture
def two_goals(results: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    targets = results.parent / "targets.toml"
    row = targets.read_text()
    targets.write_text(row + row.replace("lists", "pages"))
    quiet(monkeypatch)
    return results


def test_a_part_replaces_its_own_rows_with_the_time_of_each(
    two_goals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([10.0, 20.0, 30.0])
    monkeypatch.setattr(harness.time, "time", lambda: next(times))
    found = run_part("--only", "lists", lists_ms=1.0)
    assert {key: row["finished_unix_s"] for key, row in found.items()} == {"lists_ms": 10}
    found = run_part("--only", "pages", pages_ms=300.0)
    assert {key: (row["value"], row["met"], row["finished_unix_s"]) for key, row in found.items()} == {
        "lists_ms": (1.0, True, 10),
        "pages_ms": (300.0, False, 20),
    }
    found = run_part("--only", "lists", lists_ms=2.0)
    assert [found["lists_ms"]["value"], found["pages_ms"]["value"]] == [2.0, 300.0]


def test_a_part_after_a_complete_run_leaves_the_time_of_its_other_rows(
    two_goals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([10.0, 20.0])
    monkeypatch.setattr(harness.time, "time", lambda: next(times))
    run_part(lists_ms=1.0, pages_ms=2.0)
    found = run_part("--only", "pages", pages_ms=3.0)
    assert {key: row["finished_unix_s"] for key, row in found.items()} == {"lists_ms": 10, "pages_ms": 20}


@pytest.mark.parametrize(
    ("words", "values", "cores"),
    [
        (("--only", "lists", "--gateways", "10"), {"lists_ms": 9.0}, 0.0),  # smaller than what is recorded
        (("--only", "lists"), {}, 0.0),  # it has failed
        (("--only", "lists"), {"lists_ms": 9.0}, 0.5),
    ],
)
def test_a_part_that_is_smaller_incomplete_or_noisy_is_not_recorded(
    two_goals: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    values: dict[str, float],
    cores: float,
) -> None:
    before = run_part("--only", "lists", lists_ms=1.0)
    quiet(monkeypatch, cores)
    assert run_part(*words, **values) == before


def test_rows_of_another_machine_are_not_mixed_in(
    two_goals: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_part("--only", "lists", lists_ms=1.0)
    path = two_goals / "query.json"
    record = json.loads(path.read_text())
    record["machine"]["cores"] += 1
    path.write_text(json.dumps(record))
    assert "pages_ms" not in run_part("--only", "pages", pages_ms=3.0)
    assert "another machine" in capsys.readouterr().out


def test_the_parts_of_the_cluster_benchmark_measure_all_of_its_goals() -> None:
    found = [key for keys in cluster.GOALS.values() for key in keys]
    assert sorted(found) == sorted(harness.targets("cluster"))
    assert {*cluster.ROWS, cluster.TAKEOVER} == cluster.GOALS.keys()
