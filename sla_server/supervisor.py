"""The supervisor: one data directory, two mailbox segments, four parts kept alive (P4).

State (all in ``Supervisor``, touched by its one thread only):

    parts       name -> ``runtime.children.Child``: the process, its restarts, its progress
    mailboxes   ``supervisor`` in both segments, to record process states and events with dbmanager
    pending     rows that dbmanager has not yet called durable
    reports     PRESSURE: the parts that make no progress (``vitals``)

Order: dbmanager, services, pmdaemon, appserver; stopped in reverse, so that polling ends first, then the
mailboxes drain, then the queue is synced and the writer flushed. A dead part is restarted with backoff
(0.2 s doubling to 10 s, reset after 60 s of life) and an event says so; the others go on. One that makes no
progress is reported, then killed. A part whose first start ends with EX_CONFIG (a schema of a newer release,
a setting that cannot be) ends the server with the same status: trying again would change nothing. Children
are exec'ed and hold a pipe to the supervisor: if it dies, however it dies, they stop. A lock on the data
directory forbids a second server (``directories``). When a part has met damage in a mailbox segment, the
parts that use it are ended, the segment is made again, and they start again as after a death.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog

from pmdaemon.errors import FrameTooLarge, MailboxError, WireError
from pmdaemon.mailbox import Mailbox, Message, attach
from pmdaemon.mailbox.errors import MailboxCorrupt, MessageDamaged
from pmdaemon.runtime.children import Child, ChildKind, describe_status, stop_together, wait_for_any
from pmdaemon.runtime.clock import CLOCK_FILE, HOLD_S, ClockFile, ClockStep, SteadyClock, StepState
from pmdaemon.runtime.failures import failures
from pmdaemon.runtime.stop import ParentPipe, Stop
from pmdaemon.runtime.watchdog import EachSecond
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.server import Problem, RecordRows
from sla_server.config import ResolvedConfig
from sla_server.directories import (
    APP,
    MAIN,
    USERS,
    Segments,
    lock_data_dir,
    prepare_runtime_dir,
    remove_runtime_dir,
)
from sla_server.vitals import REPORTED_BACKOFF_S, Reports, stalled, stalled_event_text

log = structlog.get_logger("supervisor")
PARTS: Final = ("dbmanager", "services", "pmdaemon", "appserver")
PROCESSES: Final = ChildKind("part", max_wait_s=10.0, healthy_s=60.0, stop_s=10.0)
"""To stop, the flush of dbmanager takes longest; systemd's own limit is 90 s."""
LOOK_S: Final = 0.1
EX_CONFIG: Final = 78  # of sysexits: a schema from the future, files of an earlier version
RESEND_S: Final = 5.0  # durability takes milliseconds
MOST_PENDING: Final = 100  # rows a message, if the 64 KiB of a frame header hold them
MOST_REASON: Final = 1000  # characters of why a part has ended
_NAMESPACE: Final = uuid.UUID("6f3c1b52-6c0a-4b55-9f5b-0a1f6f1f7d11")


@dataclass
class Supervisor:
    """Starts, watches and stops the parts. See the module's docstring.

    Raises (from ``run``):
        ServerRunning: the data directory is locked by another server.
    """

    config: ResolvedConfig
    config_path: Path | None
    stop: Stop
    parts: dict[str, Child] = field(default_factory=dict)
    _pipe: ParentPipe = field(default_factory=ParentPipe)
    _mailbox: Mailbox | None = None
    _app: Mailbox | None = None
    clock: SteadyClock = field(default_factory=SteadyClock)
    _clock_file: ClockFile | None = None
    _pending: list[list[Any]] = field(default_factory=list)
    _under_way: int = 0  # rows at the head of _pending that are posted and not yet answered
    _request: str = ""
    _posted_s: float = 0.0
    discarded: int = 0
    """Messages to the supervisor that were damaged."""
    _reports: Reports | None = None
    _second: EachSecond = field(default_factory=EachSecond)
    _has_recorded: bool = False  # a dbmanager has worked since this server's start
    _is_drained: bool = False  # dbmanager has ended in order, and with everything that was posted to it
    _status: int = 0

    def __post_init__(self) -> None:
        self._segments = Segments(self.config.runtime_dir, self.config.pmdaemon.most_pairs)

    def run(self) -> int:
        """Supervise until the stop is asked for; returns the exit status."""
        lock = lock_data_dir(self.config.data_dir)
        is_stopped = False
        try:
            prepare_runtime_dir(self.config.runtime_dir)
            for name, problem in self._segments.prepare().items():
                self._segment_event(name, problem)
            self._clock_file = ClockFile(self.config.runtime_dir / "clock", self.clock.ahead_us)
            self._attach()
            for name in PARTS:
                self._start(self.add(name, self._command(name)))
            log.info(
                "server-started", data_dir=str(self.config.data_dir), runtime_dir=str(self.config.runtime_dir)
            )
            while not wait_for_any(self.stop, self.parts.values(), LOOK_S):
                self._step()
            log.info("server-stopping", reason=self.stop.reason)
            self._stop_parts()
            is_stopped = True
            return self._status
        finally:
            self._pipe.close()
            self._detach()
            if is_stopped and self._is_drained:
                self._segments.remove()
                remove_runtime_dir(self.config.runtime_dir)
            self._segments.close()
            os.close(lock)

    def _attach(self) -> None:
        self._mailbox = attach(self._segments.path(MAIN), "supervisor")
        self._app = attach(self._segments.path(APP), "supervisor")
        self._reports = Reports(self._mailbox, self._app, self.clock)

    def _detach(self) -> None:
        for box in (self._mailbox, self._app):
            if box is not None:
                box.close()
        self._mailbox = self._app = self._reports = None

    def _command(self, name: str) -> list[str]:
        config = ["--config", str(self.config_path)] if self.config_path else []
        if name == "pmdaemon":
            return [sys.executable, "-m", "pmdaemon", "run", *config]
        return [sys.executable, "-m", "sla_server.process", name, *config]

    def add(self, name: str, command: Sequence[str]) -> Child:
        """Keep a process running from now on; ``_start`` starts it the first time."""
        environment = {
            "SLA__DATA_DIR": str(self.config.data_dir),
            "SLA__RUNTIME_DIR": str(self.config.runtime_dir),
            CLOCK_FILE: str(self.config.runtime_dir / "clock"),
        }
        part = Child(PROCESSES, name, command, self._pipe, self.clock, env=environment, has_pulse=True)
        self.parts[name] = part
        return part

    def _start(self, part: Child) -> None:
        part.start()
        self._record(part)

    def _step(self) -> None:
        """One pass: the clock; notice deaths, start what is due, hand in records that found no room."""
        self._check_clock()
        for part in self.parts.values():
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
        self._drain()
        if self._second.is_due():
            self._check_progress()

    def _ended(self, part: Child, status: int) -> None:
        """A part has ended: what is known of why, and whether it is worth another start."""
        if part.hung:
            self._plan_restart(part, f"it made no progress for {part.stalled_s} s and was killed", status)
            return
        said = failures(self.config.runtime_dir).get(part.name, "") if status > 0 else ""
        self._plan_restart(part, describe_status(status) + (f": {said}" if said else ""), status)
        is_first = part.restarts == 0 or (part.name == "dbmanager" and not self._has_recorded)
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
                self._part_event(part, "process-stalled", stalled_event_text(part.name, stalled_s))
            if part.stalled_s:
                problems.append(stalled(part, now_us))
        if self._reports is not None:
            self._reports.tick(problems)

    def _renew_segments(self, damaged: Mapping[str, str]) -> None:
        """Parts have met damage in segments: end those that use them, make them again; the parts start again.

        Raises:
            MailboxError: one cannot be made; the server ends with that error.
        """
        self._detach()
        self._under_way = 0  # what was under way is posted again
        for name, finder in damaged.items():
            path = str(self._segments.path(name))
            log.error("segment-damaged", path=path, met_by=finder, parts=list(USERS[name]))
            for part in [self.parts[user] for user in USERS[name]]:
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
        at_us = self.clock.unix_us()
        row = {
            "event_id": str(uuid.uuid5(_NAMESPACE, f"damaged/{name}/{at_us}")),
            "at_us": at_us,
            "kind": "mailbox-damaged",
            "severity": "error",
            "element": "supervisor",
            "subject": name,
            "text": f"mailbox segment {name} was damaged and made again: {problem}",
            "details": {},
        }
        self._pending.append(["events", row])

    def _plan_restart(self, part: Child, reason: str, status: int) -> None:
        """A part does not run: plan its next start."""
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
        self._pending.append(["processes", row])
        self._drain()

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
        """Have an event recorded."""
        at_us = self.clock.unix_us()
        row = {
            "event_id": str(uuid.uuid5(_NAMESPACE, f"{kind}/{subject}/{at_us}")),
            "at_us": at_us,
            "kind": kind,
            "severity": severity,
            "element": "supervisor",
            "subject": subject,
            "text": text[: 2 * MOST_REASON],
            "details": details,
        }
        self._pending.append(["events", row])
        self._drain()

    def _drain(self) -> None:
        """Post what is pending and keep it until dbmanager says that it is durable.

        One message is under way at a time; without an answer in 5 s (dbmanager was killed between taking
        and keeping it) it is posted again. Rows are upserts, so a repeat does no harm.
        """
        if self._mailbox is None:
            return
        for message in self._take():
            try:
                answer = frame.decode(message.payload)
            except WireError as exc:
                log.error("message-dropped", sender=message.sender, problem=str(exc))
                continue
            if answer.kind == Kind.RECORDED and answer.header.get("req") == self._request:
                self._has_recorded = True
                del self._pending[: self._under_way]
                self._under_way = 0
        now_s = time.monotonic()
        if not self._pending or (self._under_way and now_s - self._posted_s < RESEND_S):
            return
        del self._pending[self._under_way : -MOST_PENDING]  # bounded: the newest states matter most
        self._request = uuid.uuid4().hex
        count, record = self._record_message()
        if not count:
            return
        try:
            self._mailbox.post("dbmanager", record)
        except MailboxError as exc:
            log.warning("record-waits", error=str(exc), rows=len(self._pending))
            return
        self._under_way, self._posted_s = count, now_s

    def _record_message(self) -> tuple[int, bytes]:
        """Rows from the head of ``_pending``, as many as one message holds; a larger row is dropped."""
        count = min(len(self._pending), MOST_PENDING)
        while count:
            rows = RecordRows(self._pending[:count], self._request, "supervisor")
            try:
                return count, rows.encode()
            except FrameTooLarge as exc:
                if count == 1:
                    table, _row = self._pending.pop(0)
                    log.error("record-dropped", table=table, problem=str(exc))
                    count = min(len(self._pending), MOST_PENDING)
                else:
                    count //= 2
        return 0, b""

    def _take(self) -> Sequence[Message]:
        """What has arrived; a damaged message is none, a damaged segment is made again by the next step."""
        if self._mailbox is None:
            return ()
        try:
            return self._mailbox.take()
        except MessageDamaged as exc:
            self.discarded += 1
            log.error("message-discarded", error=str(exc), discarded=self.discarded)
        except MailboxCorrupt as exc:
            log.error("mailbox-damaged", error=str(exc))
        return ()

    def _stop_parts(self) -> None:
        """Reverse order: polling ends first, the writer last."""
        statuses: dict[str, int] = {}
        for name in ("appserver", "pmdaemon", "services", "dbmanager"):
            if name in self.parts:
                statuses |= stop_together([self.parts[name]], self.clock)
        self._is_drained = statuses.get("dbmanager") == 0


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
