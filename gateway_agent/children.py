"""Child processes that are kept running: watched through pidfds, restarted with backoff, stopped in order.

    due ──start──► running ──died──► due (after a wait that doubles from 0.2 s to 5 s; 10 s of life reset it)

A child holds one end of the parent's pipe and stops when the parent is gone, however it died. Children are in
process groups of their own, so that Ctrl-C reaches the parent alone, which stops them in order. A child that
was started again finds in its environment how often, and how its predecessor ended.

A child with a pulse (the link) that makes no progress is killed and started again (``runtime.watchdog``).
Data planes have none: they carry application I/O, and their link reports one that does not answer.

Thread: the parent's only thread.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import structlog

from pmdaemon.runtime.clock import Clock, Deadline
from pmdaemon.runtime.stop import ParentPipe, Stop
from pmdaemon.runtime.watchdog import KILLED_S, LOOK_S, SAID_S, EachSecond, Pulse

log = structlog.get_logger("children")

FIRST_WAIT_S: Final = 0.2
MAX_WAIT_S: Final = 5.0
HEALTHY_S: Final = 10.0  # a child that lived this long did not die of its start
STOP_LIMIT_S: Final = 12.0  # a plane drains for 2 s and waits 5 s for its writes; systemd kills after 30 s
RESTARTS_ENV: Final = "SLA_CHILD_RESTARTS"
REASON_ENV: Final = "SLA_CHILD_REASON"


class ChildSpec(NamedTuple):
    """What to run: a name for people, the command, and whether it must show progress."""

    name: str
    argv: tuple[str, ...]
    has_pulse: bool = False
    stops_last: bool = False


def how_it_ended(status: int) -> str:
    """An exit status as ``subprocess`` gives it (negative: a signal) in words."""
    if status >= 0:
        return f"it ended with status {status}"
    try:
        return f"it was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"it was killed by signal {-status}"


def restarts_of_this_process() -> tuple[int, str]:
    """In a child: how often its parent started it again, and how the one before it ended ("" at first)."""
    return int(os.environ.get(RESTARTS_ENV, "0")), os.environ.get(REASON_ENV, "")


class RestartPolicy:
    """When to start a child again. Pure; times on the monotonic clock."""

    def __init__(self, now_ns: int) -> None:
        self.due_ns = now_ns
        self.restarts = -1
        self._wait_s = FIRST_WAIT_S
        self._started_ns = now_ns

    def started(self, now_ns: int) -> None:
        """The child runs."""
        self._started_ns = now_ns
        self.restarts += 1

    def died(self, now_ns: int) -> float:
        """The child is gone; returns the seconds until it is due again."""
        if now_ns - self._started_ns >= HEALTHY_S * 1e9:
            self._wait_s = FIRST_WAIT_S
        wait_s = self._wait_s
        self._wait_s = min(MAX_WAIT_S, 2 * wait_s)
        self.due_ns = now_ns + round(wait_s * 1e9)
        return wait_s


class AgentChild:
    """One child process and its restart policy."""

    def __init__(self, spec: ChildSpec, pipe: ParentPipe, clock: Clock) -> None:
        self.spec = spec
        self._pipe = pipe
        self._clock = clock
        self.policy = RestartPolicy(clock.monotonic_ns())
        self._process: subprocess.Popen[bytes] | None = None
        self._pid_fd = -1
        self._pulse: Pulse | None = None
        self._ended = ""

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None else None

    def fileno(self) -> int:
        """pidfd: readable when the child has ended."""
        return self._pid_fd

    def start_if_due(self) -> bool:
        """Start it when it does not run and its wait is over; returns whether it was started.

        A host without memory or processes to spare is tried again with backoff: the others must go on.
        """
        now_ns = self._clock.monotonic_ns()
        if self._process is not None or now_ns < self.policy.due_ns:
            return False
        self.policy.started(now_ns)
        try:
            self._process, self._pid_fd = self._launch()
        except OSError as exc:
            self._drop_pulse()
            self._ended = f"it could not be started: {exc.strerror}"
            wait_s = self.policy.died(now_ns)
            log.error("child-not-started", child=self.spec.name, problem=exc.strerror, again_in_s=wait_s)
            return False
        log.info("child-started", child=self.spec.name, pid=self._process.pid, restarts=self.policy.restarts)
        return True

    def _launch(self) -> tuple[subprocess.Popen[bytes], int]:
        self._pulse = pulse = Pulse() if self.spec.has_pulse else None
        descriptors = (self._pipe.child_fd,) if pulse is None else (self._pipe.child_fd, pulse.fd)
        known = {RESTARTS_ENV: str(self.policy.restarts), REASON_ENV: self._ended}
        process = subprocess.Popen(
            self.spec.argv,
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            env={**os.environ, **self._pipe.child_env(), **known, **(pulse.env() if pulse else {})},
            process_group=0,
        )
        try:
            return process, os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            raise

    def look(self) -> None:
        """Once a second: kill it if it hangs."""
        if self._pulse is None:
            return
        if self._pulse.look() == SAID_S and self._pulse.problem:
            log.error(
                "child-stalls", child=self.spec.name, problem=self._pulse.problem, killed_after_s=KILLED_S
            )
        if self._pulse.is_hung:
            self.signal(signal.SIGKILL)

    def _drop_pulse(self) -> str:
        """Returns what was wrong with it."""
        pulse, self._pulse = self._pulse, None
        if pulse is None:
            return ""
        pulse.close()
        return f"it {pulse.problem} and was killed" if pulse.is_hung else ""

    def reap(self) -> int:
        """The child has ended: its exit status, negative for a signal."""
        assert self._process is not None  # its pidfd was readable
        status = self._process.wait()
        os.close(self._pid_fd)
        self._process, self._pid_fd = None, -1
        return status

    def died(self, status: int) -> None:
        """It ended unasked: plan the restart."""
        wait_s = self.policy.died(self._clock.monotonic_ns())
        self._ended = self._drop_pulse() or how_it_ended(status)
        log.warning(
            "child-died", child=self.spec.name, status=status, reason=self._ended, restart_in_s=wait_s
        )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if it runs."""
        if self._process is not None:
            self._process.send_signal(number)


class Children:
    """All children of the parent, in the order in which they are started.

    They are stopped together, those with ``stops_last`` when the others have ended.
    """

    def __init__(
        self, specs: Sequence[ChildSpec], stop: Stop, clock: Clock, on_change: Callable[[], None]
    ) -> None:
        self._pipe = ParentPipe()
        self._stop = stop
        self._clock = clock
        self._on_change = on_change
        self._second = EachSecond()
        self.all = [AgentChild(spec, self._pipe, clock) for spec in specs]

    def run(self) -> None:
        """Keep them running until the stop is asked for, then stop them all."""
        while not self._stop.is_set():
            started = [child.start_if_due() for child in self.all]
            if any(started):
                self._on_change()
            self._wait()
            if self._second.is_due():
                for child in self.all:
                    child.look()
        log.info("stopping", reason=self._stop.reason)
        for is_last in (False, True):
            group = [child for child in self.all if child.spec.stops_last is is_last]
            for child in group:
                child.signal(signal.SIGTERM)
            deadline = Deadline(STOP_LIMIT_S, self._clock)
            for child in group:
                self._wait_for_end(child, deadline)
        self._pipe.close()
        self._on_change()

    def _wait(self) -> None:
        running = [child for child in self.all if child.pid is not None]
        due = [child.policy.due_ns for child in self.all if child.pid is None]
        timeout_s = max(0.0, (min(due) - self._clock.monotonic_ns()) / 1e9) if due else LOOK_S
        by_fd = {child.fileno(): child for child in running}
        ended, _, _ = select.select([self._stop.fileno(), *by_fd], [], [], min(timeout_s, LOOK_S))
        for child in (by_fd[fd] for fd in ended if fd in by_fd):
            child.died(child.reap())
            self._on_change()

    def _wait_for_end(self, child: AgentChild, deadline: Deadline) -> None:
        while child.pid is not None:
            ended, _, _ = select.select([child], [], [], deadline.left_s())
            if ended:
                status = child.reap()
                log.info("child-stopped", child=child.spec.name, status=status)
            else:
                log.warning("child-killed", child=child.spec.name, after_s=STOP_LIMIT_S)
                child.signal(signal.SIGKILL)
                deadline = Deadline(STOP_LIMIT_S, self._clock)
