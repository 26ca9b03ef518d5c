"""``make fuzz`` runs the property tests with other examples, and a counterexample names its seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import properties


def test_files_of_property_tests_are_run_with_other_examples() -> None:
    (quick,) = [path for path in properties.files() if path.match("wire/test_histogram.py")]
    assert properties.cases(1, [quick], count=1).cases == 1


def test_a_failure_names_seed_and_case() -> None:
    with pytest.raises(AssertionError, match=r"seed 5, case 0: .*--hypothesis-seed=\d+ .*test_gone.py"):
        properties.cases(5, [Path("tests/test_gone.py")], count=1)
