"""The evidence for feed-forward: bad windows in bursts with C set before them, and in bursts left alone.

Of the bursts expected every n-th is left alone, the first among them: nothing is done on a prediction before
one has come true, or while no burst left alone has broken a promise. A verdict needs some of both kinds.

    undecided --fewer bad windows--> helps --not any more--> off for a while, then undecided again
        |                                                     ^
        +--no fewer, none to save, or no burst came ----------+   (twice as long each time)

Evidence ages: only the last bursts count, none of more than ``COMPARISONS`` turns of those left alone ago,
and none older than ``evidence_max_s``. It is discarded at once when it is about something else: a burst left
alone broke nothing where those before it did (the storage is faster now, or the load another one), and
whenever ``feed_forward`` sees a fault of the storage, another mode or other promises. A burst with C ahead in
which the victims were far better off than in all before it is a hint of the same, and so is one in which C
had to come down far: the next one is left alone, out of turn, and there is no verdict before.

Pure. Changed only by ``feed_forward``.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pmdaemon.runtime.backoff import doubled
from sla_server.services.control.decisions import Reason
from sla_server.services.control.settings import FeedForwardSettings

LEAST_ALONE: Final = 2
"""Bursts left alone that a verdict needs: one may have been a small one."""
KEPT: Final = 6
"""Bursts of each kind that a verdict looks at, the newest."""
COMPARISONS: Final = 3
"""Evidence reaches back over so many bursts left alone, once it has helped: one more than a verdict needs."""
FAR_BELOW: Final = 0.5
"""A burst in which r was at most this share of the least before is a hint that the storage changed."""
LEAST_BEFORE: Final = 2
"""Bursts with C ahead that such a comparison needs."""


class Burst(NamedTuple):
    """What came of a burst that was expected.

    Attributes:
        is_ahead: C was set before it; else it was left alone.
        bad: windows in which a promise was broken.
        at_s: when, in seconds of the monotonic clock.
        r: the most that a victim reached; 0 if that is not known.
        is_proven: its volumes did the I/O of a burst; else C held back what they wanted, which may be less.
    """

    is_ahead: bool
    bad: int
    at_s: float = 0.0
    r: float = 0.0
    is_proven: bool = True


class Entry(NamedTuple):
    """A burst, and which one of the trial it was."""

    turn: int
    burst: Burst


def _entries() -> deque[Entry]:
    return deque(maxlen=KEPT)


@dataclass(slots=True)
class Trial:
    """What expected bursts of one kind cost with C ahead and without.

    Attributes:
        ahead, alone: newest last.
        turn: bursts that came since it began.
        missed: how many expected did not come since one was proven.
        futile: how often it was switched off since it last helped.
        is_doubtful: the next one is left alone out of turn.
    """

    ahead: deque[Entry] = field(default_factory=_entries)
    alone: deque[Entry] = field(default_factory=_entries)
    turn: int = 0
    missed: int = 0
    futile: int = 0
    off_until_ns: int = 0
    helps: bool = False
    is_doubtful: bool = False

    def is_ahead(self, settings: FeedForwardSettings, now_s: float) -> bool:
        """Whether C is set before the next one; else it is left alone."""
        self._age(settings, now_s)
        if self.is_doubtful or not any(_bad(self.alone)):
            return False
        every = settings.proven_every if self.helps else settings.left_alone_every
        return self.turn % every != 0

    def miss(self) -> None:
        """A burst that was expected did not come."""
        self.missed += 1

    def add(self, burst: Burst) -> bool:
        """A burst has come and was watched; whether what was known before it was discarded."""
        if burst.is_proven:
            self.missed = 0
        is_other = False
        if burst.is_ahead:
            before = [entry.burst.r for entry in self.ahead if entry.burst.r > 0]
            if len(before) >= LEAST_BEFORE and 0 < burst.r <= FAR_BELOW * min(before):
                self.is_doubtful = True
        else:
            self.is_doubtful = False
            is_other = not burst.bad and any(_bad(self.alone))
            if is_other:
                self.discard()
        (self.ahead if burst.is_ahead else self.alone).append(Entry(self.turn, burst))
        self.turn += 1
        return is_other

    def why_off(self, settings: FeedForwardSettings) -> Reason | None:
        """Why it must be switched off; None while it helps, or is not decided."""
        if self.missed >= settings.most_missed:
            return Reason.AHEAD_NO_BURST
        if self.nothing_to_save:
            return Reason.AHEAD_NO_HELP
        if self.is_doubtful:
            return None  # what is left alone next says whether the storage is another one
        if len(self.ahead) < settings.trial_bursts or len(self.alone) < LEAST_ALONE:
            return None
        ahead, alone = statistics.fmean(_bad(self.ahead)), statistics.fmean(_bad(self.alone))
        self.helps = ahead <= settings.help_ratio * alone
        if not self.helps:
            return Reason.AHEAD_NO_HELP
        self.futile = 0
        return None

    @property
    def nothing_to_save(self) -> bool:
        """Bursts left alone break no promise."""
        return len(self.alone) >= LEAST_ALONE and not any(_bad(self.alone))

    def discard(self) -> bool:
        """What is known is about something else; whether there was anything. What is off stays off."""
        was_known = bool(self.ahead or self.alone or self.missed)
        self.ahead.clear()
        self.alone.clear()
        self.turn = self.missed = 0
        self.helps = self.is_doubtful = False
        return was_known

    def switch_off(self, settings: FeedForwardSettings, now_ns: int) -> float:
        """Off for a time that doubles, then as if new; returns the seconds."""
        off_s = doubled(settings.backoff_s, self.futile, settings.backoff_max_s)
        self.off_until_ns, self.futile = now_ns + round(off_s * 1e9), self.futile + 1
        self.discard()
        return off_s

    def bad(self) -> tuple[list[int], list[int]]:
        """Bad windows of the bursts with C ahead, and of those left alone; newest last."""
        return _bad(self.ahead), _bad(self.alone)

    def _age(self, settings: FeedForwardSettings, now_s: float) -> None:
        """Forget what is too long ago; with too little left it is not known any more whether it helps."""
        first_turn = self.turn - COMPARISONS * settings.proven_every
        first_s = now_s - settings.evidence_max_s
        for entries in (self.ahead, self.alone):
            while entries and (entries[0].turn < first_turn or entries[0].burst.at_s < first_s):
                entries.popleft()
        if len(self.alone) < LEAST_ALONE:
            self.helps = False


def _bad(entries: Iterable[Entry]) -> list[int]:
    return [entry.burst.bad for entry in entries]
