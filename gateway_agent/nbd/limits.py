"""One stream's I/Os against its limits: the missed entries of its cuts, but for stalls (``stalls``).

Completions alone prove too little: I/O that hangs completes never. So each cut also says how many outstanding
I/Os have passed a limit (*overdue*), and how many completions such an I/O of an earlier cut was (*settled*):

    missed + overdue - settled over any cuts = I/Os that took, or have taken, longer than the limit, each once

How that is exact without a mark on any I/O. ``seen`` is the end of the last cut in which the limit was in
force, T the end of this one. An I/O that is outstanding at T is overdue in this cut if arrival + limit < T,
but not if arrival + limit < seen: it was outstanding at ``seen``, so that cut or one before had it. For the
same reason a completion is settled exactly if arrival + limit < seen. A limit never in force before has no
``seen``: nothing is settled for it, and all that is beyond it now is overdue. One that comes back has the
``seen`` of its last cut: an I/O that was overdue then is not counted again, and one that completed while the
limit was not in force is in no ``settled``, as it is in no ``missed``.

*Outstanding* is a read or write from its receipt until its answer is complete and ready to be sent: held by
our throttle, or sent to the storage. It is the same span as its latency. What its client does not take is
its client's time: while answers wait for the client, the I/O that waits behind them grows no older
(``session``). So the age of an I/O is not simply the time since its arrival. ``arrived_ns`` is here the
moment from which its age counts without a break, and ``paused_ns`` how much of a break there was since the
last cut; at the end of that cut its age was ``seen`` - (arrived_ns - paused_ns). A limit that comes back has
a ``seen`` of long ago: breaks between it and the last cut are not known, and are ignored.

When a client leaves, its outstanding I/Os end without a completion (``abandoned``): those beyond a limit at
that moment are overdue in the cut of that moment, unless an earlier one had them, and never settled. Each
cut also says how many there were, and how old they were in all: the least that their latency would have been.

*Failed* are completions with an error, but not those that the gateway refused for what they ask (read-only,
out of range): these are their client's errors, and only in the column ``errors``.

No I/O, no clock; all times are monotonic ns. Source: SLA-MODEL.md 2, "Never good without proof"; ``cut``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.cut import FAILED, IO_ANY, IO_READ, IO_WRITE, OVERDUE
from pmdaemon.wire.messages.plane_sets import Limit

KIND_READ: Final = 0
KIND_WRITE: Final = 1
KIND_ZEROING: Final = 2  # trim and write-zeroes
KIND_FLUSH: Final = 3  # also cache, block status and unknown commands (refused; they cost nothing)

Entry = tuple[int, int, int, int]
"""(io, threshold_us, counted, missed) as in a missed entry of a cut, without its row."""
Pending = tuple[int, int, int]
"""(arrived_ns, kind, paused_ns) of a request that is outstanding, as in the module docstring."""

MOST_FORMER: Final = 64
"""Limits not in force whose ``seen`` is kept, the newest; only while an I/O beyond one is outstanding."""

Ints = npt.NDArray[np.int64]
_NEVER: Final = -1  # as ``seen``: no arrival plus limit is below it
_KIND_OF: Final = {IO_READ: KIND_READ, IO_WRITE: KIND_WRITE}


class Completions(NamedTuple):
    """Reads and writes, in the order in which they completed; arrays of one length.

    ``arrived_ns`` is as of the last cut, without the break since then; ``latency_ns`` is without any break.
    """

    is_write: npt.NDArray[np.bool_]
    arrived_ns: Ints
    latency_ns: Ints
    has_failed: npt.NDArray[np.bool_]

    def of(self, io: int) -> Completions:
        """Those of one io kind."""
        if io == IO_ANY:
            return self
        chosen = self.is_write if io == IO_WRITE else ~self.is_write
        return Completions(
            self.is_write[chosen], self.arrived_ns[chosen], self.latency_ns[chosen], self.has_failed[chosen]
        )


class Pendings:
    """What is outstanding of one stream, at one moment; ``len`` counts requests of all kinds."""

    def __init__(self, pending: Sequence[Pending]) -> None:
        self._table: Ints = np.array(pending, dtype=np.int64).reshape(-1, 3)
        self._sorted: dict[int, tuple[Ints, Ints]] = {}

    def __len__(self) -> int:
        return len(self._table)

    def _arrivals(self, io: int) -> tuple[Ints, Ints]:
        """Arrivals of an io kind, sorted: as of now, and as of the last cut."""
        found = self._sorted.get(io)
        if found is None:
            arrived_ns, kind, paused_ns = self._table.T
            chosen = kind <= KIND_WRITE if io == IO_ANY else kind == _KIND_OF[io]
            arrived_ns = arrived_ns[chosen]
            found = np.sort(arrived_ns), np.sort(arrived_ns - paused_ns[chosen])
            self._sorted[io] = found
        return found

    def oldest_ns(self, io: int) -> int | None:
        """Arrival of the oldest read or write of an io kind; None when there is none."""
        arrived = self._arrivals(io)[0]
        return int(arrived[0]) if len(arrived) else None

    def arrived_before(self, io: int, at_ns: int) -> int:
        """How many reads and writes of an io kind arrived before ``at_ns``."""
        return int(np.searchsorted(self._arrivals(io)[0], at_ns))

    def seen_before(self, io: int, at_ns: int) -> int:
        """The same, as it was in the last cut."""
        return int(np.searchsorted(self._arrivals(io)[1], at_ns))

    def ages_ns(self, io: int, now_ns: int) -> int:
        """Sum of their ages."""
        return int((now_ns - self._arrivals(io)[0]).sum())


NOTHING: Final = Pendings(())


class _LimitCount:
    """Figures of one limit in the cut in progress; ``seen_ns`` as in the module docstring."""

    __slots__ = ("counted", "failed", "failed_missed", "missed", "overdue", "seen_ns", "settled")

    def __init__(self, seen_ns: int) -> None:
        self.seen_ns = seen_ns
        self.counted = self.missed = self.overdue = self.settled = self.failed = self.failed_missed = 0


class LimitCounter:
    """Counts of all limits in force of one stream. See the module docstring."""

    def __init__(self) -> None:
        self._counts: dict[Limit, _LimitCount] = {}
        self._former: dict[Limit, int] = {}  # ``seen`` of limits that are not in force, the newest last
        self._failed = {IO_ANY: 0, IO_READ: 0, IO_WRITE: 0}
        self._abandoned = {IO_ANY: 0, IO_READ: 0, IO_WRITE: 0}
        self._ages_ns = {IO_ANY: 0, IO_READ: 0, IO_WRITE: 0}  # of those abandoned; lifetime
        self._ages_reported_ms = {IO_ANY: 0, IO_READ: 0, IO_WRITE: 0}
        self._has_completions = False  # reads or writes in this cut
        self.is_pending = False  # something is counted that is in no cut yet

    @property
    def limits(self) -> tuple[Limit, ...]:
        """Those in force."""
        return tuple(self._counts)

    def set_limits(self, limits: Sequence[Limit], pendings: Pendings) -> None:
        """Compare with others from now on; limits that stay go on, also within a cut.

        Args:
            limits: distinct ones.
            pendings: what is outstanding now.
        """
        before, former = self._counts, self._former
        self._counts = {
            limit: before[limit] if limit in before else _LimitCount(former.pop(limit, _NEVER))
            for limit in limits
        }
        ended = {limit: count.seen_ns for limit, count in before.items() if limit not in self._counts}
        needed = [
            (limit, seen_ns)
            for limit, seen_ns in {**former, **ended}.items()
            if pendings.seen_before(limit[0], seen_ns - limit[1] * 1000)
        ]
        self._former = dict(needed[-MOST_FORMER:])

    def completed(self, all_of_them: Completions) -> None:
        """Compare completed reads and writes with every limit."""
        if not len(all_of_them.latency_ns):
            return
        self._has_completions = self.is_pending = True
        by_io: dict[int, tuple[Completions, int, int]] = {}
        for (io, threshold_us), count in self._counts.items():
            if io not in by_io:
                found = all_of_them.of(io)
                oldest_ns = int(found.arrived_ns.min()) if len(found.arrived_ns) else 0
                by_io[io] = found, oldest_ns, int(np.count_nonzero(found.has_failed))
            found, oldest_ns, failed = by_io[io]
            limit_ns = threshold_us * 1000
            is_missed = found.latency_ns > limit_ns
            count.counted += len(is_missed)
            count.missed += int(np.count_nonzero(is_missed))
            if oldest_ns + limit_ns < count.seen_ns:
                count.settled += int(np.count_nonzero(found.arrived_ns + limit_ns < count.seen_ns))
            if failed:
                count.failed += failed
                count.failed_missed += int(np.count_nonzero(is_missed & found.has_failed))

    def let_through(self, kind: int, arrived_ns: int, paused_ns: int) -> None:
        """A held request goes on, after pauses since the last cut.

        They were no pauses for it, but its arrival as of that cut is from now on said to be earlier by them.
        Where that puts it beyond a limit at that cut, it is beyond it now: it is overdue, to be settled.
        """
        for (io, threshold_us), count in self._counts.items():
            if kind <= KIND_WRITE if io == IO_ANY else kind == _KIND_OF[io]:
                due_ns = arrived_ns + threshold_us * 1000
                if due_ns - paused_ns < count.seen_ns <= due_ns:
                    count.overdue += 1
                    self.is_pending = True

    def failed(self, reads: int, writes: int, others: int) -> None:
        """Count failures by kind, whatever the limits."""
        self.is_pending = True
        self._failed[IO_ANY] += reads + writes + others
        self._failed[IO_READ] += reads
        self._failed[IO_WRITE] += writes

    def abandoned(self, pendings: Pendings, now_ns: int) -> None:
        """I/Os that end here without a completion."""
        for io in self._abandoned:
            if number := pendings.arrived_before(io, now_ns):
                self.is_pending = True
                self._abandoned[io] += number
                self._ages_ns[io] += pendings.ages_ns(io, now_ns)
        self._count_overdue(pendings, now_ns)

    def _count_overdue(self, pendings: Pendings, now_ns: int) -> None:
        for (io, threshold_us), count in self._counts.items():
            limit_ns = threshold_us * 1000
            beyond = pendings.arrived_before(io, now_ns - limit_ns)
            if beyond:
                count.overdue += beyond - pendings.seen_before(io, count.seen_ns - limit_ns)

    def take(self, pendings: Pendings, now_ns: int) -> list[Entry]:
        """The entries of a cut that ends now, and begin the next one.

        Args:
            pendings: what is outstanding now.
            now_ns: end of the cut.
        """
        if not self.is_pending and not len(pendings):
            return []  # ``seen`` may stay: nothing that arrived before now is left that it could be asked for
        self._count_overdue(pendings, now_ns)  # they may yet complete: then ``seen`` makes them settled
        compared: list[Entry] = []
        overdue: list[Entry] = []
        failed: list[Entry] = []
        for (io, threshold_us), count in self._counts.items():
            compared.append((io, threshold_us, count.counted, count.missed))
            overdue.append((OVERDUE + io, threshold_us, count.overdue, count.settled))
            failed.append((FAILED + io, threshold_us, count.failed, count.failed_missed))
        overdue += self._take_abandoned()
        failed += [(FAILED + io, 0, count, 0) for io, count in self._failed.items()]
        found = (compared if self._has_completions else []) + [e for e in overdue + failed if e[2] or e[3]]
        self._counts = {limit: _LimitCount(now_ns) for limit in self._counts}
        self._failed = dict.fromkeys(self._failed, 0)
        self._has_completions = self.is_pending = False
        return found

    def _take_abandoned(self) -> list[Entry]:
        """How many, and how much older the sum of their ages has become; the sum over all cuts is rounded."""
        found = []
        for io, number in self._abandoned.items():
            ages_ms = self._ages_ns[io] // 1_000_000
            found.append((OVERDUE + io, 0, number, ages_ms - self._ages_reported_ms[io]))
            self._ages_reported_ms[io] = ages_ms
        self._abandoned = dict.fromkeys(self._abandoned, 0)
        return found
