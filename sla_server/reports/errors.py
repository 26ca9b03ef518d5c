"""Errors of reports.

SlaError (pmdaemon.errors)
└── ReportError
    ├── NoSuchPeriod       a text that names no period
    ├── PeriodTooLong      it holds more slices than can be read at once
    ├── NothingToReport    the agreement is not known, or was not in force in the period
    ├── NotYetFinal        its figures may still change, so it is not issued
    ├── SumsDiffer         its sums are not those of the slices that are stored
    └── PdfNotAvailable    the library that makes PDF is not installed, or lacks a system library
"""

from __future__ import annotations

from pmdaemon.errors import SlaError


class ReportError(SlaError):
    """Root of this package's errors."""

    exit_status = 2


class NoSuchPeriod(ReportError):
    """A text that names no period."""

    def __init__(self, text: str, problem: str = "is no period") -> None:
        self.text = text[:40]
        super().__init__(
            f"{self.text!r} {problem}. Give a month (2026-10), a week (2026-W40), a day (2026-10-03), "
            "a quarter (2026-Q4), a year (2026), last or this"
        )


class PeriodTooLong(ReportError):
    """More slices than can be read at once."""

    def __init__(self, text: str, slices: int, most: int) -> None:
        super().__init__(
            f"a report of {text} has up to {slices:,} slices, and at most {most:,} are read at once. Ask for "
            "shorter periods, or issue it on the server's machine: sla report issue AGREEMENT --period ..."
        )


class NothingToReport(ReportError):
    """There is nothing that a report could be made of."""

    exit_status = 69  # EX_UNAVAILABLE


class NotYetFinal(ReportError):
    """Figures may still change."""

    exit_status = 75  # EX_TEMPFAIL

    def __init__(self, name: str, period: str, because: list[str]) -> None:
        super().__init__(
            f"the report of {name} for {period} is not final: {'; '.join(because)}. "
            "Issue it later, or now with --preliminary"
        )


class SumsDiffer(ReportError):
    """A report's sums are neither those of the job ``report-inputs`` nor those that SQL counts."""

    exit_status = 70  # EX_SOFTWARE

    def __init__(self, name: str, objective: str, period: str, own: int, stored: int) -> None:
        super().__init__(
            f"the report of {name} for {period} is not issued: it counts {own:,} slices of objective "
            f"{objective}, and {stored:,} are stored, or they are of other kinds. Run 'sla-server jobs run "
            "report-inputs', then issue it again; if that fails, too, please report it with 'sla support'"
        )


class PdfNotAvailable(ReportError):
    """PDF cannot be made on this machine."""

    exit_status = 69

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"PDF cannot be made here: {problem}. Install it with "
            "pip install 'storage-sla-server[reports]' and apt-get install libpango-1.0-0 "
            "libpangoft2-1.0-0 libharfbuzz-subset0, or use -o html and print that from a browser"
        )
