"""Searches for counterexamples to the suite's property tests; ``make test`` tries the same examples always.

A case is one file of tests, run by pytest with a random seed of hypothesis. Source: tests/conftest.py.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.fuzz import Counts

TESTS = Path(__file__).parent.parent
STOP_S = 120.0
"""What tests have started, they stop when they are interrupted; killed, they would leave it running."""


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
        options = ["--hypothesis-profile=search", f"--hypothesis-seed={its_seed}", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", "-q", "-x", *options, str(path)]
        status, said = finished(command, lambda: count is None and time.monotonic() > end_s)
        if status is None:
            break
        assert status == 0, f"seed {seed}, case {made}: {' '.join(command[1:])}\n{said}"
        made += 1
    return Counts(made)


def finished(command: Sequence[str], is_over: Callable[[], bool]) -> tuple[int | None, str]:
    """Exit status and output of a run of tests; None if ``is_over`` came first: it is interrupted then."""
    with tempfile.TemporaryFile("w+") as said:
        # A group of its own: of Ctrl-C it hears from here alone, and stops what it has started undisturbed.
        run = subprocess.Popen(
            command, cwd=TESTS.parent, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while run.poll() is None:
                if is_over():
                    return None, ""
                time.sleep(0.1)
        finally:
            if run.poll() is None:
                run.send_signal(signal.SIGINT)
                try:
                    run.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    run.kill()
                    run.wait()
        said.seek(0)
        return run.returncode, said.read()
