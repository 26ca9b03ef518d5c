"""The evidence for feed-forward: bad windows in bursts with C set before them, and in bursts left alone.

Of the bursts expected every n-th is left alone, the first among them: nothing is done on a prediction before
one has come true, and there is always something to compare with. A verdict needs some of both.

    undecided --fewer bad windows--> helps --not any more--> off for a while, then undecided again
        |                                                     ^
        +--no fewer, none to save, or no burst came ----------+   (twice as long each time)

Pure. Changed only by ``feed_forward``.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from sla_server.services.control.decisions import Reason
from sla_server.services.control.settings import FeedForwardSettings

LEAST_ALONE: Final = 2
"""Bursts left alone that a verdict needs: one may have been a small one."""
KEPT: Final = 6
"""Bursts of each kind that a verdict looks at, the newest."""


@dataclass(slots=True)
class Trial:
    """What expected bursts of one kind cost with C ahead and without: bad windows of each.

    Attributes:
        ahead, alone: newest last.
        turn: bursts that came since it began.
        missed: expected in a row that did not come.
        futile: how often it was switched off since it last helped.
    """

    ahead: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    alone: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    turn: int = 0
    missed: int = 0
    futile: int = 0
    off_until_ns: int = 0
    helps: bool = False

    def is_ahead(self, settings: FeedForwardSettings) -> bool:
        """Whether C is set before the next one; else it is left alone."""
        every = settings.proven_every if self.helps else settings.left_alone_every
        return self.turn % every != 0

    def enter(self, came: bool, is_ahead: bool, bad: int) -> None:
        """A burst that was expected has come and was watched, or did not come."""
        if not came:
            self.missed += 1
            return
        self.missed = 0
        self.turn += 1
        (self.ahead if is_ahead else self.alone).append(bad)

    def why_off(self, settings: FeedForwardSettings) -> Reason | None:
        """Why it must be switched off; None while it helps, or is not decided."""
        if self.missed >= settings.most_missed:
            return Reason.AHEAD_NO_BURST
        if len(self.ahead) < settings.trial_bursts or len(self.alone) < LEAST_ALONE:
            return None
        ahead, alone = statistics.fmean(self.ahead), statistics.fmean(self.alone)
        self.helps = alone > 0 and ahead <= settings.help_ratio * alone
        if not self.helps:
            return Reason.AHEAD_NO_HELP
        self.futile = 0
        return None

    def switch_off(self, settings: FeedForwardSettings, now_ns: int) -> float:
        """Off for a time that doubles, then as if new; returns the seconds."""
        off_s = min(settings.backoff_s * 2.0**self.futile, settings.backoff_max_s)
        self.off_until_ns, self.futile = now_ns + round(off_s * 1e9), self.futile + 1
        self.ahead.clear()
        self.alone.clear()
        self.turn = self.missed = 0
        self.helps = False
        return off_s
