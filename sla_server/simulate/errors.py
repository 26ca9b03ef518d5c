"""Errors of the simulator, each with what to do next.

SlaError (pmdaemon.errors)
└── SimulationError       65  a trace, a document, a load, a device or a policy is wrong, or has too many I/Os
    ├── TooManyIos        65  more than the limit; the back-test leaves such a backend out
    └── NothingStored     66  no statistics of that time
"""

from __future__ import annotations

from pmdaemon.errors import SlaError


class SimulationError(SlaError):
    """What should be simulated is wrong; ``where`` names a file, a line, a key or an option."""

    exit_status = 65  # EX_DATAERR

    def __init__(self, where: str, problem: str, fix: str = "") -> None:
        self.where = where
        super().__init__(f"{where}: {problem}" + (f". {fix}" if fix else ""))


class TooManyIos(SimulationError):
    """More I/Os than ``--most-ios``: it would take too long."""

    def __init__(self, ios: int, limit: int, fix: str) -> None:
        super().__init__("--most-ios", f"{ios:,} I/Os are more than {limit:,}", fix)


class NothingStored(SimulationError):
    """No statistics of that time."""

    exit_status = 66  # EX_NOINPUT
