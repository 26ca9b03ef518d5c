"""The supervisor: one data directory, two mailbox segments, five parts kept alive (P4).

State (all in ``Supervisor``, touched by its one thread only):

    parts       name -> ``runtime.children.Child``: the process, its restarts, its progress
    boxes       its mailboxes in both segments
    records     process states and events that dbmanager has not yet called durable (``recorder``)
    reports     PRESSURE: the parts that make no progress (``Reports``)

Order: delivery, dbmanager, services, pmdaemon, appserver; stopped in reverse, so that polling ends first,
then the mailboxes drain, then the queue is synced and the writer flushed; delivery takes the events of them
all. A node of a cluster (``[cluster]``) starts before them and stops after them. A dead part is restarted
with backoff (0.2 s doubling to 10 s, reset after 60 s of life) and an event says so; the others go on. One
that makes no progress is reported, then killed. A part whose first start ends
with EX_CONFIG (a schema of a newer release, a setting that cannot be) ends the server with the same status:
trying again would change nothing. Parts are forked from one process that has imported for all of them
(``template``), or exec'ed when it cannot, and hold a pipe to the supervisor: if it dies, however it dies,
they stop. SIGHUP goes on to delivery, which lets go of the files that recipients write. A lock on the data
directory forbids a second server (``directories``). When a part has met damage in a mailbox segment, those
that use it are ended, the segment is made again, and they start again as after a death. With
``[policy] schedule`` it also starts the policy job, with ``[reports] schedule`` the report job; neither is a
part: they end by themselves (``schedule``).

With ``[cluster.takeover]`` several servers have one database, and one of them *acts*: the one that has the
lease, which the part ``cluster`` takes and publishes (``lease_file``). The parts ``ACTING`` run while this
server acts; the others stand by, with the part ``standby``. A server that loses the lease ends all parts but
the node, empties the mailbox segments (what is in them was not acknowledged: another server has it again from
the agents), and stands by. It says to the node which parts end again and again, and when those that act have
ended (``acting_file``): the node may give the lease up by itself, and does so after that.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog

from pmdaemon.mailbox import Mailbox, attach
from pmdaemon.poller.metrics import BackpressureReporter
from pmdaemon.reserve import EVENTS_DIR, attach_reserves, initialized
from pmdaemon.runtime.children import Child, ChildKind, describe_status, stop_together, wait_for_any
from pmdaemon.runtime.clock import CLOCK_FILE, HOLD_S, Clock, ClockFile, ClockStep, SteadyClock, StepState
from pmdaemon.runtime.failures import failures
from pmdaemon.runtime.files import make_directory
from pmdaemon.runtime.hangup import Hangup, blocked
from pmdaemon.runtime.service_manager import ServiceManager
from pmdaemon.runtime.stop import ParentPipe, Stop
from pmdaemon.runtime.template import UNKNOWN_STATUS, Template
from pmdaemon.runtime.watchdog import KILLED_S, REPORTED_S, EachSecond
from pmdaemon.wire.messages.server import Problem
from sla_server.acting_file import ActingFile, ActingParts, RestartSeries
from sla_server.config import ResolvedConfig
from sla_server.directories import (
    APP,
    MAIN,
    USERS,
    Segments,
    data_identity,
    lock_data_dir,
    prepare_notify_dirs,
    prepare_runtime_dir,
    remove_runtime_dir,
)
from sla_server.events.recipients.config import NotifyDirectories
from sla_server.lease_file import FENCE, LeaseFile
from sla_server.recorder import Recorder
from sla_server.schedule import QUIET, JobSchedule, ScheduledJob
from sla_server.topology import ACTING, PARTS, STANDBY, parts_of, takes_over

log = structlog.get_logger("supervisor")
IMPORTED: Final = (
    "pmdaemon.runtime.lean_structlog",  # before structlog: see there
    "sla_server.events.delivery",
    "sla_server.db.process",
    "sla_server.services.process",
    "sla_server.api.server",
    "sla_server.standby.process",
    "pmdaemon.cli",
)
"""What the parts import, by the template that they are forked from; delivery's first, it starts first."""
IMPORTED_FOR_POSTGRESQL: Final = ("psycopg", "sqlalchemy.dialects.postgresql.psycopg")
"""0.15 s of a processor for each part that opens the database, and in a takeover all start at once."""
IMPORTED_FOR_TAKEOVERS: Final = ("sla_server.db.archive.files",)
"""Arrow, which a server that is alone imports with its first cuts: here that would hold up the first
transaction of a takeover, when processors have most to do. It takes memory while the server stands by."""
TEMPLATE_S: Final = 60.0  # for its imports; after that the parts are started one by one
PROCESSES: Final = ChildKind("part", max_wait_s=10.0, healthy_s=60.0, stop_s=10.0)
"""To stop, the flush of dbmanager takes longest; systemd's own limit is 90 s."""
STEP_S: Final = 0.1
REPORTED_BACKOFF_S: Final = 2.0  # a part that is back within seconds is worth an event, no problem
TAKEOVER_LAG_S: Final = 120.0  # cuts are durable in SQL then, in transactions 15 s apart, or not for minutes
EX_CONFIG: Final = 78  # of sysexits: a schema from the future, files of an earlier version
FAILED_SO: Final = {
    "policy": "the policy in force stays as it was",
    "rollup": "days that are due are rolled up by the next run",
    "back-test": "the policy in force stays as it was",
    "report": "reports that are due are issued by the next run",
}
STORED: Final = "what its last good run stored stays"  # of all other jobs
MOST_REASON: Final = 1000  # characters of why a part has ended


def imported(config: ResolvedConfig) -> tuple[str, ...]:
    """What the parts of this server import."""
    is_postgresql = config.database.url.startswith("postgresql")
    more = IMPORTED_FOR_POSTGRESQL if is_postgresql else ()
    return IMPORTED + more + (IMPORTED_FOR_TAKEOVERS if takes_over(config) else ())


class Reports:
    """PRESSURE of the supervisor: the parts that make no progress, reported every other second.

    It goes to ``services`` and to ``appserver``, because either may be the one that hangs; ``services``
    misses it when the supervisor itself hangs or is stopped.

    Args:
        main: its mailbox in ``main.mbx``.
        app: its mailbox in ``app.mbx``.
        clock: server time.
    """

    def __init__(self, main: Mailbox, app: Mailbox, clock: Clock) -> None:
        self._problems: list[Problem] = []
        self._reporter = BackpressureReporter(
            main, clock, dict, dict, lambda: self._problems, [(app, "appserver")]
        )

    def tick(self, problems: list[Problem]) -> None:
        """Report if it is time."""
        self._problems = problems
        self._reporter.tick()


@dataclass
class Supervisor:
    """Starts, watches and stops the parts. See the module's docstring.

    Raises (from ``run``):
        ServerRunning: the data directory is locked by another server.
    """

    config: ResolvedConfig
    config_path: Path | None
    stop: Stop
    hangup: Hangup = field(default_factory=Hangup)
    parts: dict[str, Child] = field(default_factory=dict)
    _pipe: ParentPipe = field(default_factory=ParentPipe)
    template: Template = field(default_factory=lambda: Template(IMPORTED))
    _boxes: tuple[Mailbox, ...] = ()  # in both segments, while they are in order
    clock: SteadyClock = field(default_factory=SteadyClock)
    _clock_file: ClockFile | None = None
    records: Recorder = field(default_factory=Recorder)
    _reports: Reports | None = None
    _second: EachSecond = field(default_factory=EachSecond)
    _manager: ServiceManager = field(default_factory=ServiceManager)
    _is_drained: bool = False  # dbmanager has ended in order, and with everything that was posted to it
    _status: int = 0
    _jobs: list[ScheduledJob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._segments = Segments(self.config.runtime_dir, self.config.pmdaemon.most_pairs)
        self._reserves = self.config.data_dir / "events" / "reserve"
        self._lease = LeaseFile(self.config.runtime_dir) if takes_over(self.config) else None
        self._fence: int | None = None  # with which this server acts, as one of several
        self._acting = ActingFile(self.config.runtime_dir)
        self._ends = RestartSeries(PROCESSES.healthy_s)

    def run(self) -> int:
        """Supervise until the stop is asked for; returns the exit status."""
        lock = lock_data_dir(self.config.data_dir)
        is_stopped = False
        try:
            if self.template.pid is None:
                with blocked():
                    self.template.open()
            prepare_runtime_dir(self.config.runtime_dir)
            identity, is_empty = data_identity(self.config.data_dir)
            if self._lease is not None:  # what a former term has left: not acknowledged, and had by others
                self._lease.remove()
                self._acting.remove()
                self._segments.remove()
            if self._segments.bind(identity, is_empty=is_empty):
                log.warning("segments-of-another-data-directory", effect="their messages were dropped")
            for name, problem in self._segments.prepare().items():
                self._segment_event(name, problem)
            self._clock_file = ClockFile(self.config.runtime_dir / "clock", self.clock.ahead_us)
            self._attach()
            make_directory(self._reserves, 0o700)
            notify = NotifyDirectories.of(self.config.notify, self.config.data_dir)
            prepare_notify_dirs(notify, self.config.data_dir)
            attach_reserves("supervisor", self._reserves)
            self.template.wait_ready(TEMPLATE_S, self.stop.fileno())
            self._start_parts(parts_of(self.config, is_acting=self._lease is None))
            if self._lease is None:
                self._jobs = self._scheduled()
            log.info(
                "server-started", data_dir=str(self.config.data_dir), runtime_dir=str(self.config.runtime_dir)
            )
            initialized()
            while not wait_for_any(self.stop, self.parts.values(), STEP_S, self.hangup.fileno()):
                self._step()
            log.info("server-stopping", reason=self.stop.reason)
            self._stop_parts()
            is_stopped = True
            return self._status
        finally:
            self._pipe.close()
            self.template.close()
            self._detach()
            if is_stopped and (self._is_drained or self._lease is not None):
                self._segments.remove()
                remove_runtime_dir(self.config.runtime_dir)
            self._segments.close()
            os.close(lock)

    def _attach(self) -> None:
        main = attach(self._segments.path(MAIN), "supervisor")
        self._boxes = (main,)
        app = attach(self._segments.path(APP), "supervisor")
        self._boxes = (main, app)
        self._reports = Reports(main, app, self.clock)
        self.records.attach(main)

    def _detach(self) -> None:
        self.records.attach(None)
        for box in self._boxes:
            box.close()
        self._boxes, self._reports = (), None

    def _command(self, name: str) -> list[str]:
        config = ["--config", str(self.config_path)] if self.config_path else []
        if name == "pmdaemon":
            return [sys.executable, "-m", "pmdaemon", "run", *config]
        return [sys.executable, "-m", "sla_server.process", name, *config]

    def _scheduled(self) -> list[ScheduledJob]:
        """The jobs for which the configuration has a schedule."""
        policy = self.config.policy
        texts: dict[str, str] = {
            "policy": policy.schedule,
            "rollup": policy.rollup_schedule,
            "back-test": policy.back_test_schedule,
            "report": self.config.reports.schedule,
        }
        texts.update(policy.job_schedules.items())
        schedules = {name: JobSchedule.parse(text) for name, text in texts.items()}
        return [
            ScheduledJob(schedule, self.config.data_dir, self.config_path, self._pipe, self.clock, name=name)
            for name, schedule in schedules.items()
            if schedule is not None
        ]

    def add(self, name: str, command: Sequence[str]) -> Child:
        """Keep a process running from now on; ``_start`` starts it the first time."""
        environment = {
            "SLA__DATA_DIR": str(self.config.data_dir),
            "SLA__RUNTIME_DIR": str(self.config.runtime_dir),
            CLOCK_FILE: str(self.config.runtime_dir / "clock"),
            EVENTS_DIR: str(self._reserves),
        }
        if self._fence is not None:
            environment[FENCE] = str(self._fence)
            lag_s = max(TAKEOVER_LAG_S, self.config.pmdaemon.durable_lag_s)
            environment["SLA__PMDAEMON__DURABLE_LAG_S"] = str(lag_s)
        part = Child(
            PROCESSES,
            name,
            command,
            self._pipe,
            self.clock,
            env=environment,
            has_pulse=True,
            template=self.template,
        )
        self.parts[name] = part
        return part

    def _start(self, part: Child) -> None:
        with blocked():  # delivery takes SIGHUP when it can, the others never
            if not part.start():
                self._ends.ended(part.name, 0.0, part.reason, self.clock.monotonic_ns())
        self._record(part)

    def _step(self) -> None:
        """One pass: the clock; notice deaths, start what is due, hand in records that found no room."""
        self._check_clock()
        self._pass_hangup_on()
        self._follow_lease()
        for part in list(self.parts.values()):
            if part.is_running:
                if (status := part.wait(0)) is not None:
                    self._ended(part, status)
            elif part.is_due:
                self._start(part)
                if part.is_running:
                    text = f"{part.name} was restarted: {part.reason or 'it ended'}; restart {part.restarts}"
                    self._part_event(part, "process-restarted", text)
        if damaged := self._segments.damaged():
            self._renew_segments(damaged)
        self.records.flush(self.clock.monotonic_ns())
        if self._second.is_due():
            self._publish_acting()
            self._run_jobs()
            self._manager.beat()
            self._check_progress()
            self._check_template()

    def _start_parts(self, names: Sequence[str]) -> None:
        for name in names:
            self._start(self.add(name, self._command(name)))

    def _follow_lease(self) -> None:
        """Begin to act, or end it, as the lease says."""
        if self._lease is None or (fence := self._lease.read().held_fence) == self._fence:
            return
        if self._fence is not None:
            self._end_acting()
        if fence is not None:
            log.warning("server-acts", fence=fence)
            self._fence = fence
            self._publish_acting()
            self._stop_all([STANDBY])  # it listens for agents, and writes what services write
            self._start_parts(ACTING)
            self._jobs = self._scheduled()

    def _end_acting(self) -> None:
        """The lease is lost: end what only the acting server runs, and all that was posted to it.

        Raises:
            MailboxError: a segment cannot be made again; the server ends with that error.
        """
        log.warning("server-stands-by", fence=self._fence)
        self._fence = None
        self._stop_jobs()
        self._stop_all(ACTING)  # first, and polling first of all: another server may begin within a second
        self._ends.clear()
        self._publish_acting()
        self._stop_all(PARTS)
        self._detach()
        for name in (MAIN, APP):
            self._segments.renew(name)
        self._attach()
        self._start_parts([*(name for name in PARTS if name not in ACTING), STANDBY])

    def _publish_acting(self) -> None:
        """What the node has to know of the parts that act."""
        if self._lease is not None:
            failing = self._ends.failing(self.clock.monotonic_ns())
            acting = tuple(part for part in failing if part.name in ACTING)
            self._acting.publish(ActingParts(self._fence, acting))

    def _run_jobs(self) -> None:
        for job in self._jobs:
            ended = job.step(may_start=not any(each.child.is_running for each in self._jobs))
            if ended is not None and ended[0] not in QUIET:
                text = f"the {job.name} job has failed: {ended[1]}; {FAILED_SO.get(job.name, STORED)}"
                kind = f"{job.name}-job-failed" if job.name in FAILED_SO else "single-job-failed"
                self._add_event(kind, "warning", job.name, text, {"status": ended[0]})

    def _ended(self, part: Child, status: int) -> None:
        """A part has ended: what is known of why, and whether it is worth another start."""
        if part.hung:
            self._plan_restart(part, f"it made no progress for {part.stalled_s} s and was killed", status)
            return
        said = failures(self.config.runtime_dir).get(part.name, "") if status > 0 else ""
        how = "it was killed" if status == UNKNOWN_STATUS else describe_status(status)
        self._plan_restart(part, how + (f": {said}" if said else ""), status)
        is_first = part.restarts == 0 or (part.name == "dbmanager" and not self.records.has_recorded)
        if status == EX_CONFIG and is_first:
            self._give_up(part.name, status)

    def _check_progress(self) -> None:
        """Once a second: which parts make progress; kill what hangs, report the rest."""
        problems, now_us = [], self.clock.unix_us()
        for part in self.parts.values():
            if not part.is_running:
                if part.wait_s >= REPORTED_BACKOFF_S:
                    text = f"{part.name} has ended ({part.reason}); next try within {part.wait_s:.0f} s"
                    problems.append(Problem(part.name, part.since_unix_us, text))
                continue
            if stalled_s := part.check_progress():
                self._part_event(part, "process-stalled", _stalled_event_text(part.name, stalled_s))
            if part.stalled_s:
                problems.append(_stalled(part, now_us))
        if self._reports is not None:
            self._reports.tick(problems)

    def _check_template(self) -> None:
        """What parts are forked from may have been lost: they go on, and a new one is made for the next."""
        with blocked():
            problem = self.template.check()
        if problem:
            text = (
                f"the process that parts are forked from was lost ({problem}) and is made again; parts go on"
            )
            self._add_event("template-lost", "warning", "supervisor", text, {"problem": problem})

    def _renew_segments(self, damaged: Mapping[str, str]) -> None:
        """Parts have met damage in segments: end those that use them, make them again; the parts start again.

        Raises:
            MailboxError: one cannot be made; the server ends with that error.
        """
        self._detach()
        for name, finder in damaged.items():
            path = str(self._segments.path(name))
            log.error("segment-damaged", path=path, met_by=finder, parts=list(USERS[name]))
            for part in [self.parts[user] for user in USERS[name] if user in self.parts]:
                if part.is_running:
                    status = stop_together([part], self.clock)[part.name]
                    self._plan_restart(
                        part, f"its mailbox segment {name} was damaged and is made again", status
                    )
            self._segments.renew(name)
        self._attach()
        for name, finder in damaged.items():
            problem = f"{finder} has met damage in it; the parts that use it were restarted"
            self._segment_event(name, problem)

    def _segment_event(self, name: str, problem: str) -> None:
        text = f"mailbox segment {name} was damaged and made again: {problem}"
        self._add_event("mailbox-damaged", "critical", name, text, {})

    def _plan_restart(self, part: Child, reason: str, status: int) -> None:
        """A part does not run: plan its next start."""
        life_s = 0.0 if part.hung else part.age_ns / 1e9
        self._ends.ended(part.name, life_s, reason, self.clock.monotonic_ns())
        part.died(reason[:MOST_REASON], status)
        self._record(part)

    def _give_up(self, name: str, status: int) -> None:
        """A part does not fit its configuration or data at its first start: trying again would not help."""
        self._status = status
        reason = failures(self.config.runtime_dir).get(name, "its log lines say why")
        self.stop.set(f"{name} cannot start: {reason}")

    def _record(self, part: Child) -> None:
        row = {
            "name": part.name,
            "state": "running" if part.is_running else "restarting",
            "pid": part.pid,
            "restarts": part.restarts,
            "since_us": part.since_unix_us,
            "reason": "" if part.is_running else part.reason,
        }
        self.records.add("processes", row, self.clock.monotonic_ns())

    def _pass_hangup_on(self) -> None:
        if self.hangup.take():
            self.parts["delivery"].signal(signal.SIGHUP)

    def _check_clock(self) -> None:
        """Publish server time; a step of this machine's clock is an event, its end another."""
        step = self.clock.check()
        if self._clock_file is not None:
            self._clock_file.publish(self.clock.ahead_us)
        if step is not None:
            text = describe_step(step)
            log.warning("clock-stepped", state=step.state.value, by_s=step.by_us / 1e6, text=text)
            severity = "info" if step.state is StepState.RETURNED else "warning"
            details = {"state": step.state.value, "by_us": step.by_us}
            self._add_event("clock-stepped", severity, "server", text, details)

    def _part_event(self, part: Child, kind: str, text: str) -> None:
        self._add_event(kind, "warning", part.name, text, {"restarts": part.restarts})

    def _add_event(self, kind: str, severity: str, subject: str, text: str, details: dict[str, Any]) -> None:
        at_us, now_ns = self.clock.unix_us(), self.clock.monotonic_ns()
        text = text[: 2 * MOST_REASON]
        self.records.add_event(kind, severity, subject, text, details, at_us=at_us, now_ns=now_ns)

    def _stop_parts(self) -> None:
        """Reverse order: polling ends first, the writer last; a run of the job before them."""
        self._stop_jobs()
        statuses = self._stop_all([*parts_of(self.config), STANDBY])
        self._is_drained = statuses.get("dbmanager") == 0

    def _stop_jobs(self) -> None:
        for job in self._jobs:
            job.stop()
        self._jobs = []

    def _stop_all(self, names: Sequence[str]) -> dict[str, int]:
        """Stop these, the last first; their exit statuses."""
        statuses: dict[str, int] = {}
        for name in reversed(names):
            if (part := self.parts.pop(name, None)) is not None:
                statuses |= stop_together([part], self.clock)
        return statuses


def describe_step(step: ClockStep) -> str:
    """A step of this machine's wall clock in words."""
    seconds = f"{step.by_us / 1e6:+.1f} s"
    if step.state is StepState.HELD:
        return (
            f"the server's own clock was stepped by {seconds}. Server time is held where it was for "
            f"{HOLD_S / 60:.0f} minutes. If the clock is wrong, let NTP set it back within that time, and "
            "nothing changes; if it is right now, do nothing"
        )
    if step.state is StepState.RETURNED:
        return (
            f"the server's own clock is right again after a step by {seconds}; server time did not follow it"
        )
    return (
        f"the step of the server's own clock by {seconds} has lasted {HOLD_S / 60:.0f} minutes: server time "
        "follows it from now on. Slices around the step are no_data or inexact"
    )


def _stalled(part: Child, now_us: int) -> Problem:
    """What is reported of a part that makes no progress."""
    assert part.pulse is not None  # the part runs
    text = f"{part.name} {part.pulse.problem}; it is killed and started again after {KILLED_S} s"
    return Problem(part.name, now_us - part.stalled_s * 1_000_000, text)


def _stalled_event_text(name: str, stalled_s: int) -> str:
    """What the event says when a part goes on by itself."""
    return f"{name} made no progress for {max(stalled_s, REPORTED_S)} s, and goes on"
