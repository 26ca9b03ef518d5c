"""Long random tests: ``python -m tests.fuzz --for SECONDS [--only TARGET] [--seed N]``.

A target is a module of this folder with

    def run(seconds: float, seed: int) -> Counts

It makes cases from ``random.Random(f"{seed}/{case}")`` until its time is over and raises AssertionError, with
the seed and the case in its text, at the first that fails. Each target has a bounded test in the suite, too.
"""

from __future__ import annotations

from typing import NamedTuple


class Counts(NamedTuple):
    """What a target has done: ``cases`` in all, of which ``refused`` met an error that was expected."""

    cases: int
    refused: int = 0
