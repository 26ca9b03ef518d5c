"""The progress of the supervisor's parts, reported every other second (PRESSURE).

Each part adds to its ``Pulse`` while it makes progress (``runtime.children``). The reports go to ``services``
and to ``appserver``, because either may be the one that hangs; ``services`` misses them when the supervisor
itself hangs or is stopped.

Thread: the supervisor's only one.
"""

from __future__ import annotations

from typing import Final

from pmdaemon.mailbox import Mailbox
from pmdaemon.poller.metrics import BackpressureReporter
from pmdaemon.runtime.children import Child
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.watchdog import KILLED_S, REPORTED_S
from pmdaemon.wire.messages.server import Problem

REPORTED_BACKOFF_S: Final = 2.0  # a part that is back within seconds is worth an event, no problem


class Reports:
    """PRESSURE of the supervisor.

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


def stalled(part: Child, now_us: int) -> Problem:
    """What is reported of a part that makes no progress."""
    assert part.pulse is not None  # the part runs
    text = f"{part.name} {part.pulse.problem}; it is killed and started again after {KILLED_S} s"
    return Problem(part.name, now_us - part.stalled_s * 1_000_000, text)


def stalled_event_text(name: str, stalled_s: int) -> str:
    """What the event says when a part goes on by itself."""
    return f"{name} made no progress for {max(stalled_s, REPORTED_S)} s, and goes on"
