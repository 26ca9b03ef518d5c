"""Searches for counterexamples to the suite's property tests; ``make test`` tries the same examples always.

A case is one file of tests, run by pytest with a random seed of hypothesis. Source: tests/conftest.py.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz import Counts

TESTS = Path(__file__).parent.parent


def files() -> list[Path]:
    """The files of tests that use hypothesis, by name."""
    return sorted(path for path in TESTS.rglob("test_*.py") if _uses_hypothesis(path))


def _uses_hypothesis(path: Path) -> bool:
    lines = path.read_text().splitlines()
    return any(line.startswith("from hypothesis import") and "given" in line for line in lines)


def run(seconds: float, seed: int) -> Counts:
    """See ``tests.fuzz``."""
    return cases(seed, files(), end_s=time.monotonic() + seconds)


def cases(seed: int, paths: Sequence[Path], *, end_s: float = 0.0, count: int | None = None) -> Counts:
    """Run files in random order until the time is over, or so many; a file that the end meets is left."""
    rng, made = random.Random(seed), 0
    while made != count:
        path, its_seed = rng.choice(paths), rng.randrange(1 << 32)
        left_s = None if count else end_s - time.monotonic()
        options = ["--hypothesis-profile=search", f"--hypothesis-seed={its_seed}", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", "-q", "-x", *options, str(path)]
        try:
            done = subprocess.run(
                command, cwd=TESTS.parent, capture_output=True, text=True, timeout=left_s, check=False
            )
        except subprocess.TimeoutExpired:
            break
        assert done.returncode == 0, f"seed {seed}, case {made}: {' '.join(command[1:])}\n{done.stdout}"
        made += 1
    return Counts(made)
