"""The progress of the supervisor's parts: heard once a second, and reported every other second (PRESSURE).

Each part adds to its ``Pulse`` while it makes progress. One that is silent is reported, later killed (the
limits are in ``runtime.watchdog``), and started again like one that has died. The reports go to ``services``
and to ``appserver``, because either may be the one that hangs; ``services`` misses them when the supervisor
itself hangs or is stopped.

Thread: the supervisor's only one.
"""

from __future__ import annotations

from typing import Final

import structlog

from pmdaemon.mailbox import Mailbox
from pmdaemon.poller.backpressure import BackpressureReporter
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.watchdog import KILLED_S, SAID_S, Pulse
from pmdaemon.wire.messages.server import Problem

log = structlog.get_logger("supervisor")
REPORTED_BACKOFF_S: Final = 2.0  # a part that is back within seconds is worth an event, no problem


class Vitals:
    """What is heard of one part.

    Attributes:
        pulse: of the process that runs, if one does.
        stalled_s: how long it made no progress, as far as it has been reported.
    """

    def __init__(self) -> None:
        self.pulse: Pulse | None = None
        self.stalled_s = 0

    def begin(self) -> Pulse:
        """A process is about to be started.

        Raises:
            OSError: no descriptor is left.
        """
        self.end()
        self.pulse = Pulse()
        return self.pulse

    def end(self) -> None:
        """It has ended."""
        if self.pulse is not None:
            self.pulse.close()
        self.pulse, self.stalled_s = None, 0

    def look(self, name: str) -> int:
        """Once a second: for how many seconds the part made no progress, if that has just ended; else 0."""
        assert self.pulse is not None  # the part runs
        silent_s = self.pulse.look()
        if silent_s == 0:
            ended_s, self.stalled_s = self.stalled_s, 0
            return ended_s
        if self.pulse.problem:
            if not self.stalled_s:
                log.error("part-stalls", part=name, problem=self.pulse.problem, killed_after_s=KILLED_S)
            self.stalled_s = silent_s
        return 0


class Reports:
    """PRESSURE of the supervisor.

    Args:
        main: its mailbox in ``main.mbx``.
        app: its mailbox in ``app.mbx``.
        clock: server time.
    """

    def __init__(self, main: Mailbox, app: Mailbox, clock: Clock) -> None:
        self._problems: list[Problem] = []
        self._teller = BackpressureReporter(
            main, clock, dict, dict, lambda: self._problems, [(app, "appserver")]
        )

    def tick(self, problems: list[Problem]) -> None:
        """Report if it is time."""
        self._problems = problems
        self._teller.tick()


def stalled(name: str, vitals: Vitals, now_us: int) -> Problem:
    """What is reported of a part that makes no progress."""
    assert vitals.pulse is not None  # the part runs
    text = f"{name} {vitals.pulse.problem}; it is killed and started again after {KILLED_S} s"
    return Problem(name, now_us - vitals.stalled_s * 1_000_000, text)


def stalled_event_text(name: str, stalled_s: int) -> str:
    """What the event says when a part goes on by itself."""
    return f"{name} made no progress for {max(stalled_s, SAID_S)} s, and goes on"
