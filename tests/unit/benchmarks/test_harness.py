"""What becomes a record: complete and quiet runs alone, with their options named."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import harness

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


def test_a_benchmark_without_options_refuses_what_it_is_given(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks.query", "--sizes", "50"])
    with pytest.raises(SystemExit) as ended:
        harness.main("query", lambda: pytest.fail("it measures"))
    assert ended.value.code == 2
    assert "--sizes" in capsys.readouterr().err


def test_what_a_child_started_and_did_not_wait_for_is_not_foreign() -> None:
    """Half a second of processor time of an orphan, beside none of others that could count."""
    burns = "import time\nwhile time.process_time() < 0.5: pass"
    leaves = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {burns!r}]).pid)"
    script = (
        "import os, subprocess, sys, time; from benchmarks import harness\n"
        "with harness.ForeignCpu():\n"
        "    before = harness._own_ticks(os.getpid())\n"
        f"    left = subprocess.run([sys.executable, '-c', {leaves!r}], capture_output=True, text=True)\n"
        "    path = f'/proc/{int(left.stdout)}/stat'\n"
        "    while open(path).read().rpartition(')')[2].split()[0] != 'Z': time.sleep(0.01)\n"
        "    print((harness._own_ticks(os.getpid()) - before) / os.sysconf('SC_CLK_TCK'))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) >= 0.5
