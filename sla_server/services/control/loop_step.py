"""What one step of a backend's loop leads to (``backend_loop``), and when a notice of it is due. Pure."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from pmdaemon.runtime.backoff import doubled
from sla_server.services.control.decisions import Reason
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.victims import Victim, figures_of


class Phase(StrEnum):
    """What the loop is doing, as shown to people."""

    IDLE = "idle"
    DECREASE = "decrease"
    HOLD = "hold"
    INCREASE = "increase"


@dataclass(frozen=True, slots=True)
class LoopStep:
    """What one step led to.

    Attributes:
        changed: C was set, moved or given up.
        reason: why, when changed; text with figures.
        notice: event kind to raise ("unattributed", "infeasible", "control-oscillation") with its text.
        violated: a promise is broken, not only at risk: the notice is critical.
        lead: the promise whose figures decided, if one did.
    """

    changed: bool = False
    reason: Reason | None = None
    text: str = ""
    notice: str = ""
    notice_text: str = ""
    violated: bool = False
    lead: Victim | None = None


NOTHING = LoopStep()


class Report(NamedTuple):
    """When a notice of a kind was given, and how long to wait before the next."""

    at_ns: int
    wait_s: float

    @staticmethod
    def due(last: Report | None, now_ns: int, settings: ControlSettings) -> Report | None:
        """The one to give now, None while it is too early; the wait doubles while the trouble goes on."""
        wait_s = settings.backoff_s
        if last is not None:
            if now_ns - last.at_ns < last.wait_s * 1e9:
                return None
            if now_ns - last.at_ns < 2 * last.wait_s * 1e9:  # else it had ended in between
                wait_s = doubled(last.wait_s, 1, settings.backoff_max_s)
        return Report(now_ns, wait_s)


@dataclass(slots=True)
class Notices:
    """When findings of a loop were said last: once, and again after times that double while they go on."""

    given: dict[str, Report] = field(default_factory=dict)

    def step(self, kind: str, now_ns: int, lead: Victim, why: str, settings: ControlSettings) -> LoopStep:
        """What says it, or nothing if it is too early."""
        report = Report.due(self.given.get(kind), now_ns, settings)
        if report is None:
            return NOTHING
        self.given[kind] = report
        text = f"{figures_of(lead)}; {why}"
        return LoopStep(notice=kind, notice_text=text, violated=lead.signal.u > 1, lead=lead)


@dataclass(slots=True)
class Moves:
    """The changes of C of the last time, up (1) and down (-1): too many turns are an oscillation."""

    made: deque[tuple[int, int]] = field(default_factory=deque)

    def turn_often(self, sign: int, now_ns: int, settings: ControlSettings) -> bool:
        """One change more; whether they have turned too often, which begins the count again."""
        self.made.append((now_ns, sign))
        while now_ns - self.made[0][0] > settings.oscillation_window_s * 1e9:
            self.made.popleft()
        turns = sum(a != b for (_, a), (_, b) in itertools.pairwise(self.made))
        if turns <= settings.oscillation_changes:
            return False
        self.made.clear()
        return True
