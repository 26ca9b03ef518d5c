"""What is known of each stream between its cuts: what was outstanding, when it was last in a cut, its rates.

A cut leaves out the streams without activity and without I/O under way. An agent with several planes sends
several cuts for one time when their intervals do not fit (one was stalled, one counts for other thresholds),
and each of these has only its own plane's streams. So a stream that is absent from a cut is

    apart     if its own newest cut reaches into the time of this one: this cut cannot be about it
    missing   if its data plane is in none of the gateway's newest cuts (``planes``): nothing is known of it;
              *stopped* once that has lasted for ``silent_s``
    waiting   if reads or writes were outstanding at the end of its newest cut: those are news only to its
              plane. Believed for ``silent_s``, then nothing is known of it
    idle      else

Only of an idle one an absence says that it did no I/O.

Reads and writes outstanding: the gauges of a cut also have flush and trim, so what arrived and completed is
followed from cut to cut. An agent that tells reads from writes (``OUTSTANDING`` with a kind) leaves flush and
trim out of these entries: they are believed. Of the first cut, and of one that does not follow the newest
one, what was outstanding when it began is what is left of the gauge without those that arrived in it; and
where the agent tells ages, only if the oldest is older than the cut. Else an I/O that arrived in its last
millisecond would look as if nothing had completed all the time.

State: a column for each stream in arrays that grow by doubling, never moved. Changed only by the controller's
one thread. No clock: every time is an argument.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from sla_server.services.control.pieces import Bools, Floats, Ints, evenly

APART_RATIO: Final = 0.1
"""Of a cut's duration, the overlap that is none: an agent takes that for one interval (``collection``)."""
APART_US: Final = 50_000
"""And at least this much."""
UNKNOWN_PLANE: Final = 0
"""As plane of a stream: any plane of its gateway."""
NO_PLANE: Final = 1
"""The gateway's host, which is missing from no cut."""
_AGE_US: Final = 1000.0
"""Ages are whole milliseconds, rounded down."""


class Span(NamedTuple):
    """The time of a cut, one value for each row, stream or place that it is about; agent's clock in us."""

    start_us: Floats
    end_us: Floats
    now_ns: Ints

    def at(self, index: Ints | Bools) -> Span:
        """Of some of them."""
        return Span(self.start_us[index], self.end_us[index], self.now_ns[index])

    @property
    def slack_us(self) -> Floats:
        """How far two intervals may overlap and still follow each other."""
        return np.maximum(APART_RATIO * (self.end_us - self.start_us), APART_US)

    def is_apart(self, former_end_us: Floats) -> Bools:
        """Whether what ended then reaches into this cut; one that ended later is of a clock put back."""
        slack = self.slack_us
        found: Bools = (former_end_us > self.start_us + slack) & (former_end_us <= self.end_us + slack)
        return found


class Followed(NamedTuple):
    """Reads and writes outstanding: in all, reads, writes; when the cut began, and ended; shape (3, n)."""

    before: Floats
    after: Floats


class Absent(NamedTuple):
    """What streams say that a cut leaves out; shape (n,) unless said otherwise.

    Attributes:
        waiting: as in ``Followed``, of those that are waiting, else 0; shape (3, n).
        rates: I/Os arrived and completed a second, of those that are apart, else 0; shape (2, n).
        says_nothing: apart, missing or waiting.
        is_stopped: its plane, or of a stream of any plane one of its gateway, has stopped.
    """

    waiting: Floats
    rates: Floats
    says_nothing: Bools
    is_stopped: Bools


class StreamStates:
    """See the module.

    Attributes:
        waiting: reads and writes, reads, writes outstanding, negative: not known; where an agent does not
            tell the kinds, all are the sum. Shape (3, streams).
        end_us: of its newest cut, agent's clock; seen_ns: when that came.
        rates: I/Os arrived and completed a second in it; shape (2, streams).
        plane: number of the data plane that each is of, UNKNOWN_PLANE or NO_PLANE; see ``planes``.
        is_missing: by number of a plane, whether the newest cut of its gateway is without it; is_stopped:
            whether it has been in none for ``silent_s``.
    """

    def __init__(self, silent_s: float) -> None:
        self._silent_ns = silent_s * 1e9
        self._count = 0
        self.waiting: Floats = np.full((3, 64), -1.0)
        self.end_us: Floats = np.zeros(64)
        self.seen_ns: Ints = np.zeros(64, np.int64)
        self.rates: Floats = np.zeros((2, 64))
        self.plane: Ints = np.full(64, UNKNOWN_PLANE)
        self.is_missing: Bools = np.zeros(64, np.bool_)
        self.is_stopped: Bools = np.zeros(64, np.bool_)

    def allot(self, count: int) -> Ints:
        """Numbers of so many new streams."""
        first, self._count = self._count, self._count + count
        while self._count > len(self.end_us):
            self.waiting = np.concatenate((self.waiting, np.full_like(self.waiting, -1.0)), axis=1)
            self.end_us = np.concatenate((self.end_us, np.zeros_like(self.end_us)))
            self.seen_ns = np.concatenate((self.seen_ns, np.zeros_like(self.seen_ns)))
            self.rates = np.concatenate((self.rates, np.zeros_like(self.rates)), axis=1)
            self.plane = np.concatenate((self.plane, np.full_like(self.plane, UNKNOWN_PLANE)))
        return np.arange(first, self._count)

    def set_missing(self, plane: int, is_missing: bool, is_stopped: bool = False) -> None:
        """Whether a plane is missing from the newest cut of its gateway, and has been for long."""
        while plane >= len(self.is_missing):
            self.is_missing = np.concatenate((self.is_missing, np.zeros_like(self.is_missing)))
            self.is_stopped = np.concatenate((self.is_stopped, np.zeros_like(self.is_stopped)))
        self.is_missing[plane], self.is_stopped[plane] = is_missing, is_stopped

    def resync(self, streams: Ints) -> None:
        """A cut of these was not seen: what is outstanding follows from the gauges of the next one."""
        self.waiting[:, streams] = -1.0

    def follow(
        self,
        streams: Ints,
        span: Span,
        arrived: Ints,
        completed: Ints,
        gauge: Ints,
        oldest_us: Floats,
        tells_kinds: Bools,
    ) -> Followed:
        """Take what a cut says of its streams, which are distinct.

        Args:
            streams: numbers, shape (n,).
            span: of their cuts.
            arrived: reads and writes; completed: of them; both of shape (n,).
            completed: see there.
            gauge: I/Os of any kind outstanding at the end.
            oldest_us: age of the oldest outstanding I/O at the end, in all, of reads, of writes; (3, n).
            tells_kinds: whether the agent tells reads from writes.
        """
        at = evenly(streams)
        known = self.waiting[:, at].copy()
        former = np.where(known[0] < 0, gauge, known[0])
        now = np.minimum(np.maximum(former + arrived - completed, 0.0), gauge)
        after = np.repeat(now[None], 3, axis=0)
        if tells_kinds.any():
            has = oldest_us > 0
            after[0] *= has[0] | ~tells_kinds
            after[1:] = np.where(tells_kinds, has[1:], after[0])
        before = known
        unknown = np.flatnonzero(known[0] < 0)
        if len(unknown):
            before = known.copy()
            waited = np.maximum(gauge[unknown] - arrived[unknown] + completed[unknown], 0)
            cut_us = (span.end_us - span.start_us)[unknown]
            is_old = (oldest_us[:, unknown] + _AGE_US >= cut_us) | ~tells_kinds[unknown]
            before[:, unknown] = np.minimum(waited, after[:, unknown]) * is_old
        for into, part in zip(self.waiting, after, strict=True):  # together it takes twice as long
            into[at] = part
        self.end_us[at], self.seen_ns[at] = span.end_us, span.now_ns
        seconds = (span.end_us - span.start_us) / 1e6
        self.rates[0, at], self.rates[1, at] = arrived / seconds, completed / seconds
        return Followed(before, after)

    def absent(
        self,
        streams: Ints,
        span: Span,
        lacks_planes: Bools | None = None,
        has_stopped: Bools | None = None,
    ) -> Absent:
        """What streams say that cuts of their gateways leave out; see the module.

        Args:
            streams: numbers, shape (n,).
            span: of the cuts.
            lacks_planes: whether a plane of its gateway is missing from each cut, None for none of them.
            has_stopped: whether one of them has stopped, likewise.
        """
        is_fresh = span.now_ns - self.seen_ns[streams] <= self._silent_ns
        self.resync(streams[~is_fresh & (self.waiting[0, streams] > 0)])
        apart = span.is_apart(self.end_us[streams])
        waiting = np.maximum(self.waiting[:, streams], 0.0)
        says_nothing = apart | (waiting[0] > 0)
        if lacks_planes is not None:
            plane = self.plane[streams]
            says_nothing |= lacks_planes & ((plane == UNKNOWN_PLANE) | self.is_missing[plane])
        is_stopped = np.zeros(len(streams), np.bool_)
        if has_stopped is not None:
            plane = self.plane[streams]
            is_stopped = has_stopped & ((plane == UNKNOWN_PLANE) | self.is_stopped[plane])
        return Absent(waiting, self.rates[:, streams] * apart, says_nothing, is_stopped)
