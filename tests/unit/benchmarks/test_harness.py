"""What becomes a record: complete and quiet runs alone, with their options named."""

from __future__ import annotations

import argparse
import json
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
