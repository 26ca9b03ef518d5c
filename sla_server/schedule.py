"""When a job runs by itself, and that run: a child process of the supervisor, never in a part of it.

    [policy] schedule = ""          never (the default; a systemd timer may start it); so [policy]
                                    rollup_schedule, back_test_schedule, job_schedules of other
                                    jobs, and [reports] schedule
                        "hourly"    at the full hour
                        "daily"     at 00:00 UTC
                        "02:30"     daily at this time, UTC
                        "every 6h"  at multiples of it since 00:00 UTC (s, m, h or d; at least 10 s)

A run that was due while the server was down is made up for, a minute after its start: the file
``DATA_DIR/policy-job/scheduled`` (or ``rollup-job`` and so on) has the time of the last one. A job
holds a lock of its own, so one that a person started is no trouble (status 79). While a run goes on no other
is due, and of several jobs one runs at a time: another that is due waits for its end. A clock that was ahead
and is set right delays a run by a period at most.

Thread: the supervisor's only one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import structlog

from pmdaemon.runtime.children import Child, ChildKind, describe_status, stop_together
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.files import make_directory, write_whole
from pmdaemon.runtime.stop import ParentPipe

log = structlog.get_logger("schedule")
JOB: Final = ChildKind("job", stop_s=5.0)
LEAST_S: Final = 10
FIRST_AFTER_S: Final = 60  # of the server's start: its database may have to be made
DAY_S: Final = 86_400
UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": DAY_S}
_STEP: Final = "sla_server.policy_jobs.step_job"
STEPS: Final = ("cost-model", "capacity", "demand", "attribution")
"""Jobs that one process runs together, with one start of Spark."""
MODULES: Final = {
    "rollup": "sla_server.policy_jobs.rollup_job",
    **dict.fromkeys(STEPS, _STEP),
    "space": "sla_server.policy_jobs.space_job",
    "report-inputs": "sla_server.policy_jobs.report_inputs_job",
    "policy": "sla_server.policy_jobs.job",
    "back-test": "sla_server.policy_jobs.back_test_job",
    "report": "sla_server.reports.job",
}
"""All jobs, in the order in which they use what others have found."""
WORDS: Final = {"hourly": 3600, "daily": DAY_S}
QUIET: Final = {
    0: "it has published a policy",
    79: "another run was under way",
    80: "nothing is stored yet",
    81: "what it computed does not help, and was not published",
}
"""Exit statuses that are no failure."""
_EVERY: Final = re.compile(r"every ([1-9][0-9]{0,5})([smhd])")
_TIME: Final = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])")


def arguments_of(*names: str) -> list[str]:
    """Of Python: a job of ``MODULES``, or several of ``STEPS``."""
    return ["-m", MODULES[names[0]], *(name for name in names if name in STEPS)]


def together(names: Sequence[str]) -> list[list[str]]:
    """Jobs as processes, one after the other: neighbours of ``STEPS`` are one."""
    found: list[list[str]] = []
    for name in names:
        if found and name in STEPS and found[-1][-1] in STEPS:
            found[-1].append(name)
        else:
            found.append([name])
    return found


@dataclass(frozen=True, slots=True)
class JobSchedule:
    """Multiples of a period since 1970, moved by an offset."""

    period_s: int
    offset_s: int = 0

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The schedule of a text of the configuration; None for never.

        Raises:
            ValueError: it is none; says what is.
        """
        if not text:
            return None
        if text in WORDS:
            return cls(WORDS[text])
        if found := _TIME.fullmatch(text):
            return cls(DAY_S, int(found[1]) * 3600 + int(found[2]) * 60)
        if (found := _EVERY.fullmatch(text)) and (period_s := int(found[1]) * UNITS_S[found[2]]) >= LEAST_S:
            return cls(period_s)
        raise ValueError(
            f'{text[:40]!r} is no schedule; give hourly, daily, a time of day in UTC ("02:30"), '
            f'"every 6h" (s, m, h or d, at least {LEAST_S} s), or nothing for never'
        )

    def next_us(self, after_us: int) -> int:
        """The first time of it after this one, us UTC."""
        period_us, offset_us = self.period_s * 1_000_000, self.offset_s * 1_000_000
        return ((after_us - offset_us) // period_us + 1) * period_us + offset_us


@dataclass
class ScheduledJob:
    """A job on its schedule.

    Attributes:
        name: of ``MODULES``: its module, and the directory of its files.
        child: the job's process, when it runs.
    """

    schedule: JobSchedule
    data_dir: Path
    config_path: Path | None
    pipe: ParentPipe
    clock: Clock
    command: Sequence[str] = ()
    name: str = "policy"
    child: Child = field(init=False)
    _due_us: int = 0

    def __post_init__(self) -> None:
        config = ["--config", str(self.config_path)] if self.config_path else []
        command = self.command or [sys.executable, *arguments_of(self.name), "--scheduled", *config]
        env = {"SLA__DATA_DIR": str(self.data_dir)}
        self.child = Child(JOB, self.name, command, self.pipe, self.clock, env=env)
        now_us = self.clock.unix_us()
        first_us = now_us + min(FIRST_AFTER_S, self.schedule.period_s) * 1_000_000
        self._due_us = max(self.schedule.next_us(self._last_us(now_us)), first_us)

    @property
    def _stamp(self) -> Path:
        return self.data_dir / f"{self.name}-job" / "scheduled"

    def _last_us(self, now_us: int) -> int:
        """When it was started last by this schedule; before the first time: now."""
        try:
            text = self._stamp.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return now_us
        return min(int(text), now_us) if text.isdecimal() and len(text) < 20 else now_us

    def step(self, may_start: bool = True) -> tuple[int, str] | None:
        """Start it when it is due and may; status and what to say of it when it has ended."""
        if self.child.is_running:
            status = self.child.wait(0)
            if status is None:
                return None
            said = (QUIET.get(status) if status or self.name == "policy" else "") or describe_status(status)
            log.info("job-ended", job=self.name, status=status, result=said)
            return status, said
        now_us = self.clock.unix_us()
        if self._due_us - now_us > 2 * self.schedule.period_s * 1_000_000:  # the clock was ahead till now
            self._due_us = self.schedule.next_us(now_us)
        if may_start and now_us >= self._due_us:
            self._due_us = self.schedule.next_us(now_us)
            self._remember(now_us)
            self.child.start()  # what fails for want of memory is due again with the next time
        return None

    def _remember(self, now_us: int) -> None:
        try:
            make_directory(self._stamp.parent, 0o700)
            write_whole(self._stamp, f"{now_us}\n")
        except OSError as exc:
            log.warning("schedule-not-stored", problem=str(exc), effect="a missed run may not be made up for")

    def stop(self) -> None:
        """End a run: it publishes in one transaction, or nothing."""
        if self.child.is_running:
            stop_together([self.child], self.clock)
