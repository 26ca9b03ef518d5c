"""Child processes that are kept running: started, watched, started again with back-off, stopped in order.

    due ──start──► running ──ended──► due (after a wait that doubles from 0.2 s; a healthy life resets it)

The supervisor keeps the processes of the server this way, the PMDaemon its pairs, the agent its planes and
its link. Each of them runs its own loop, says why a child has ended and in which order children stop.

A child is exec'ed, or forked by a ``template`` process that has imported what it needs (never forked with
threads). It holds one end of the parent's pipe: it stops when the parent is gone, however it died. It is
watched through a pidfd. Its environment says how often it was started again and how its predecessor ended. A
host without memory, processes or descriptors to spare is a reason to try again later: the other children must
go on.

A child with a pulse that makes no progress is reported, then killed (the limits are in ``runtime.watchdog``)
and started again. The data planes of the agent have no pulse: they carry application I/O.

Log events begin with the kind of the children, and name the child under it: KIND-started, KIND-not-started,
KIND-died, KIND-stalls, KIND-killed, KIND-stopped.

Thread: the parent's only thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import structlog

from pmdaemon.runtime.backoff import Backoff
from pmdaemon.runtime.clock import Clock, Deadline
from pmdaemon.runtime.failures import SCARCE
from pmdaemon.runtime.stop import ParentPipe, Stop
from pmdaemon.runtime.template import ForkedProcess, NoTemplate, Template
from pmdaemon.runtime.watchdog import KILLED_S, Pulse

log = structlog.get_logger("children")

FIRST_WAIT_S: Final = 0.2
RESTARTS_ENV: Final = "SLA_CHILD_RESTARTS"
REASON_ENV: Final = "SLA_CHILD_REASON"


class ChildKind(NamedTuple):
    """What the children of one parent have in common.

    Attributes:
        name: begins their log events.
        max_wait_s: the longest wait before a start.
        healthy_s: a child that lived this long did not die of its start.
        stop_s: how long it may take to stop before it is killed.
        has_session: whether Ctrl-C in a terminal reaches the parent alone, which then stops them in order.
    """

    name: str
    max_wait_s: float = 5.0
    healthy_s: float = 10.0
    stop_s: float = 10.0
    has_session: bool = True


class Process(Protocol):
    """A child that runs, or has ended and was not reaped."""

    pid: int

    def wait(self) -> int:
        """Reap it: its exit status, negative for a signal."""

    def send_signal(self, number: int, /) -> None:
        """Send a signal if it has not been reaped."""


class InheritedProcess:
    """A child of this process that the program before started, which exec replaced by this one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def wait(self) -> int:
        """See ``Process``."""
        if self._status is None:
            try:
                self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:  # it is no child of ours: reaped before
                self._status = 0
        return self._status

    def send_signal(self, number: int, /) -> None:
        """See ``Process``. Its id is no other process's before we reap it."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Child:
    """One child process: what to run, whether it runs, how it ended last, when it is due again.

    Args:
        name: for people, in log lines.
        env: what to add to the environment.
        has_pulse: whether it must show progress.
        template: forks it if it can; else it is exec'ed.

    Attributes:
        process: while it runs.
        pulse: while it runs, if it has one.
        descriptors: what it inherits besides the parent's pipe and the pulse.
        starts: tries to start it.
        reason: how it ended last, or why it could not be started.
        due_ns: when it may be started, on the monotonic clock.
        wait_s: the newest wait before a start.
        since_unix_us: when it was started, or ended.
        stalled_s: for how long it made no progress, as far as that has been reported.
        hung: what was wrong with its progress, if it was killed for it.
    """

    def __init__(
        self,
        kind: ChildKind,
        name: str,
        command: Sequence[str],
        pipe: ParentPipe,
        clock: Clock,
        *,
        env: Mapping[str, str] | None = None,
        has_pulse: bool = False,
        template: Template | None = None,
    ) -> None:
        self.kind = kind
        self.name = name
        self.command = command
        self.descriptors: Sequence[int] = ()
        self.process: Process | None = None
        self.pulse: Pulse | None = None
        self.starts = 0
        self.reason = ""
        self.due_ns = clock.monotonic_ns()
        self.wait_s = 0.0
        self.since_unix_us = 0
        self.stalled_s = 0
        self.hung = ""
        self._pipe = pipe
        self._clock = clock
        self._env = env or {}
        self._has_pulse = has_pulse
        self._template = template
        self._backoff = Backoff(FIRST_WAIT_S, kind.max_wait_s)
        self._started_ns = 0
        self._pid_fd = -1

    @property
    def is_running(self) -> bool:
        """Whether there is a process that has not been reaped."""
        return self.process is not None

    @property
    def is_due(self) -> bool:
        """Whether it does not run and its wait has ended."""
        return self.process is None and self._clock.monotonic_ns() >= self.due_ns

    @property
    def age_ns(self) -> int:
        """Since its newest start."""
        return self._clock.monotonic_ns() - self._started_ns

    def seconds_until_due(self) -> float:
        """How long its wait still lasts."""
        return max(0.0, (self.due_ns - self._clock.monotonic_ns()) / 1e9)

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self.process.pid if self.process is not None else None

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return max(0, self.starts - 1)

    def fileno(self) -> int:
        """The pidfd, readable when the child has ended."""
        return self._pid_fd

    def start(self) -> bool:
        """Start it; False if the host cannot just now: then it is due again later."""
        self.starts += 1
        self._started_ns = self._clock.monotonic_ns()
        try:
            self._launch()
        except OSError as exc:
            self.not_started(exc)
            return False
        self.since_unix_us = self._clock.unix_us()
        self.stalled_s, self.hung = 0, ""
        log.info(f"{self.kind.name}-started", **self._label(), pid=self.pid, restarts=self.restarts)
        return True

    def _launch(self) -> None:
        self.pulse = pulse = Pulse() if self._has_pulse else None
        reason = "".join(letter if letter.isprintable() else " " for letter in self.reason)
        environment = {
            **os.environ,
            **self._env,
            **self._pipe.child_env(),
            **(pulse.env() if pulse else {}),
            RESTARTS_ENV: str(self.restarts),
            REASON_ENV: reason,
        }
        fds = (self._pipe.child_fd, *((pulse.fd,) if pulse else ()), *self.descriptors)
        process = self._forked(environment, fds) or subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            env=environment,
            start_new_session=self.kind.has_session,
        )
        try:
            self._pid_fd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            raise
        self.process = process

    def _forked(self, environment: Mapping[str, str], fds: Sequence[int]) -> ForkedProcess | None:
        if self._template is None:
            return None
        try:
            return self._template.start(self.command, environment, fds, has_session=self.kind.has_session)
        except NoTemplate as exc:
            log.info(f"{self.kind.name}-not-forked", **self._label(), reason=str(exc))
            return None

    def adopt(self, pid: int, since_unix_us: int) -> None:
        """It runs already: the program that this one replaced by exec has started it.

        Raises:
            OSError: it has ended and was reaped.
        """
        self._pid_fd = os.pidfd_open(pid)
        self.process = InheritedProcess(pid)
        self.starts, self.since_unix_us = 1, since_unix_us
        self._started_ns = self._clock.monotonic_ns()

    def not_started(self, error: OSError) -> None:
        """Plan another start after one that failed for want of something on this host."""
        self._close_pulse()
        advice = SCARCE.get(error.errno or 0)
        problem = f"{error.strerror}. {advice}" if advice else error.strerror
        self._plan(f"it could not be started: {problem}")
        log.error(f"{self.kind.name}-not-started", **self._label(), problem=problem, again_in_s=self.wait_s)

    def wait(self, limit_s: float | None) -> int | None:
        """Reap it if it ends within the limit: its exit status, negative for a signal; None if it runs on."""
        assert self.process is not None  # callers ask ``is_running`` first
        if not _readable([self._pid_fd], limit_s):
            return None
        status = self.process.wait()
        os.close(self._pid_fd)
        self.process, self._pid_fd = None, -1
        self.hung = self.pulse.problem if self.pulse is not None and self.pulse.is_hung else ""
        self._close_pulse()
        return status

    def end(self, limit_s: float) -> int:
        """Wait until it has ended, and kill it after the limit; returns its exit status."""
        status = self.wait(limit_s)
        if status is None:
            log.warning(f"{self.kind.name}-killed", **self._label(), pid=self.pid, after_s=round(limit_s, 1))
            self.signal(signal.SIGKILL)
            status = self.wait(None)
        assert status is not None  # there is no limit after SIGKILL
        return status

    def died(self, reason: str, status: int | None = None) -> None:
        """Plan the next start of a child that has been reaped."""
        self._plan(reason)
        log.warning(
            f"{self.kind.name}-died",
            **self._label(),
            status=status,
            reason=reason,
            restart_in_s=self.wait_s,
        )

    def _plan(self, reason: str) -> None:
        if self.age_ns >= self.kind.healthy_s * 1e9:
            self._backoff.succeeded()
        self.wait_s = self._backoff.failed()
        self.due_ns = self._clock.monotonic_ns() + round(self.wait_s * 1e9)
        self.reason = reason
        self.since_unix_us = self._clock.unix_us()

    def check_progress(self) -> int:
        """Once a second: report a child that makes no progress, and kill it in the end.

        Returns for how many seconds it made none, if that has just ended by itself; else 0.
        """
        if self.pulse is None:
            return 0
        silent_s = self.pulse.check()
        if silent_s == 0:
            ended_s, self.stalled_s = self.stalled_s, 0
            return ended_s
        if self.pulse.problem:
            if not self.stalled_s:
                log.error(
                    f"{self.kind.name}-stalls",
                    **self._label(),
                    problem=self.pulse.problem,
                    killed_after_s=KILLED_S,
                )
            self.stalled_s = silent_s
        if self.pulse.is_hung:
            log.error(f"{self.kind.name}-killed", **self._label(), problem=self.pulse.problem)
            self.signal(signal.SIGKILL)
        return 0

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if it runs."""
        if self.process is not None:
            self.process.send_signal(number)

    def _close_pulse(self) -> None:
        if self.pulse is not None:
            self.pulse.close()
            self.pulse = None

    def _label(self) -> dict[str, str]:
        return {self.kind.name: self.name}


def wait_for_any(stop: Stop, children: Iterable[Child], limit_s: float, *others: int) -> bool:
    """Sleep until a child ends, one is due, the stop or the limit; returns whether to stop.

    ``others`` are descriptors that end the sleep, too, when they can be read.
    """
    deadlines_s, descriptors = [limit_s], [stop.fileno(), *others]
    for child in children:
        if child.is_running:
            descriptors.append(child.fileno())
        else:
            deadlines_s.append(child.seconds_until_due())
    _readable(descriptors, min(deadlines_s))
    return stop.is_set()


def stop_together(children: Iterable[Child], clock: Clock) -> dict[str, int]:
    """Ask all that run to stop, wait for them, kill what is left; returns their exit statuses by name."""
    running = [child for child in children if child.is_running]
    for child in running:
        child.signal(signal.SIGTERM)
    deadline = Deadline(max((child.kind.stop_s for child in running), default=0.0), clock)
    statuses = {}
    for child in running:
        statuses[child.name] = status = child.end(deadline.left_s())
        log.info(f"{child.kind.name}-stopped", **{child.kind.name: child.name}, status=status)
    return statuses


def restarts_of_this_process() -> tuple[int, str]:
    """In a child: how often its parent started it again, and how the one before it ended ("" at first)."""
    return int(os.environ.get(RESTARTS_ENV, "0")), os.environ.get(REASON_ENV, "")


def describe_status(status: int) -> str:
    """An exit status as ``subprocess`` gives it (negative: a signal) in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:  # most real-time signals have no name
        return f"killed by signal {-status}"


def _readable(descriptors: Iterable[int], limit_s: float | None) -> bool:
    """Wait until one can be read. ``select`` takes no descriptor above 1023, which a PMDaemon has."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(None if limit_s is None else limit_s * 1000))
