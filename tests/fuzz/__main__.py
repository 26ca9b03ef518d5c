"""Runs the targets of this folder, one after the other, each for its share of the time."""

from __future__ import annotations

import argparse
import importlib
import logging
import secrets
import sys
import time
from pathlib import Path

import structlog


def targets() -> list[str]:
    """Names of the modules that can be run; what belongs to one of them has an underscore in its name."""
    return sorted(item.stem for item in Path(__file__).parent.glob("[a-z]*.py") if "_" not in item.stem)


def main(arguments: list[str] | None = None) -> int:
    """Fuzz; returns the exit status: 0, or 1 after the first case that failed."""
    names = targets()
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "--for", dest="seconds", type=float, default=60.0, help="seconds, for all targets together"
    )
    parser.add_argument("--only", choices=names, help="one target instead of all")
    parser.add_argument("--seed", type=int, help="of a former run, to repeat it; default: a new one")
    chosen = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    seed = secrets.randbelow(1 << 32) if chosen.seed is None else chosen.seed
    wanted = [chosen.only] if chosen.only else names
    for name in wanted:
        target = importlib.import_module(f"tests.fuzz.{name}")
        began_s = time.monotonic()
        try:
            counts = target.run(chosen.seconds / len(wanted), seed)
        except AssertionError as exc:
            print(
                f"{name}: FAILED after {time.monotonic() - began_s:.0f} s, seed {seed}: {exc}",
                file=sys.stderr,
            )
            return 1
        print(
            f"{name}: {counts.cases:,} cases, {counts.refused:,} of them refused, in "
            f"{time.monotonic() - began_s:.0f} s, seed {seed}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
