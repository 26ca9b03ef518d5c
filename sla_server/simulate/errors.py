"""Errors of the simulator, each with what to do next.

SlaError (pmdaemon.errors)
└── SimulationError       65  what should be simulated is wrong
    ├── BadTrace          65  a line of a trace
    ├── BadSetup          65  a document, a load, a device or a policy
    ├── TooManyIos        65  more than the limit; would take too long
    └── NothingStored     66  no statistics of that time
"""

from __future__ import annotations

from pmdaemon.errors import SlaError


class SimulationError(SlaError):
    """Root: what should be simulated is wrong."""

    exit_status = 65  # EX_DATAERR


class BadTrace(SimulationError):
    """A line of a trace cannot be read."""

    def __init__(self, path: str, line: int, problem: str, fix: str) -> None:
        self.path, self.line = path, line
        super().__init__(f"{path}: line {line}: {problem}. {fix}")


class BadSetup(SimulationError):
    """A document, a load, a device or a policy is wrong."""

    def __init__(self, where: str, problem: str, fix: str = "") -> None:
        self.where = where
        super().__init__(f"{where}: {problem}" + (f". {fix}" if fix else ""))


class TooManyIos(SimulationError):
    """More I/Os than ``--most-ios``."""

    def __init__(self, ios: int, limit: int, fix: str) -> None:
        super().__init__(f"{ios:,} I/Os are more than --most-ios {limit:,}. {fix}")


class NothingStored(SimulationError):
    """No statistics of that time."""

    exit_status = 66  # EX_NOINPUT
