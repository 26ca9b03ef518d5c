"""The wire fuzzer (``make fuzz``), a bounded number of cases, the same each time."""

from __future__ import annotations

import pytest

from tests.fuzz import __main__ as command
from tests.fuzz import wire

CASES = 880  # of which each eleventh is a whole pair


def test_cases() -> None:
    refused = sum(wire.one(1, case) for case in range(CASES))
    assert CASES // 4 < refused < CASES  # neither everything nor nothing is refused


def test_a_cut_whose_columns_cannot_be_true_is_refused_by_services_alone() -> None:
    """Flipped bits have made a counter of more than 2^47; the pair that passes it on does not look at it."""
    assert wire.one(77, 124607) in (True, False)


def test_a_failure_names_seed_and_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(_chance: object) -> bool:
        raise KeyError("a defect")

    monkeypatch.setattr(wire, "STEPS", (defect,))
    with pytest.raises(AssertionError, match="seed 5, case 3: KeyError"):
        wire.one(5, 3)


def test_the_command_runs_what_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "wire" in command.targets()
    assert not [name for name in command.targets() if name.startswith("_")]
    monkeypatch.setattr(wire, "run", lambda seconds, seed: wire.Counts(round(seconds), seed))
    monkeypatch.setattr(command.structlog, "configure", lambda **_: None)
    assert command.main(["--for", "7", "--only", "wire", "--seed", "3"]) == 0
    assert "wire: 7 cases, 3 of them refused" in capsys.readouterr().out

    def fails(_seconds: float, _seed: int) -> wire.Counts:
        raise AssertionError("seed 3, case 9: x")

    monkeypatch.setattr(wire, "run", fails)
    assert command.main(["--only", "wire", "--seed", "3"]) == 1
    assert "seed 3, case 9" in capsys.readouterr().err
