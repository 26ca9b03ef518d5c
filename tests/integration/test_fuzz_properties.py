"""``make fuzz`` runs the property tests with other examples, and a counterexample names its seed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.fuzz import properties


def test_files_of_property_tests_are_run_with_other_examples() -> None:
    (quick,) = [path for path in properties.files() if path.match("wire/test_histogram.py")]
    assert properties.cases(1, [quick], count=1).cases == 1


def test_a_failure_names_seed_and_case() -> None:
    with pytest.raises(AssertionError, match=r"seed 5, case 0: .*--hypothesis-seed=\d+ .*test_gone.py"):
        properties.cases(5, [Path("tests/test_gone.py")], count=1)


def test_what_a_run_has_started_is_stopped_when_the_time_is_over(tmp_path: Path) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    path = tmp_path / "test_long.py"
    path.write_text(
        "import time\nfrom pathlib import Path\nimport pytest\n\n\n"
        "@pytest.fixture\ndef server():\n"
        f"    Path({str(begun)!r}).touch()\n    yield\n    Path({str(ended)!r}).touch()\n\n\n"
        "def test_it(server):\n    time.sleep(3600)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    assert properties.finished(command, begun.exists) == (None, "")
    assert ended.exists()
