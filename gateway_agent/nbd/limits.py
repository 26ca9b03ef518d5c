"""One stream's I/Os against its limits, and how long none of them completed: the missed entries of its cuts.

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

*Outstanding* is a read or write from its receipt until its last reply byte is in the client's socket buffer:
held by our throttle, sent upstream, or answered but not taken by its client. It is the same span as its
latency. When a client leaves, its outstanding I/Os end without a completion (``abandoned``): those beyond a
limit at that moment are overdue in the cut of that moment, unless an earlier one had them, and never settled.

*Failed* are completions with an error, but not those that the gateway refused for what they ask (read-only,
out of range): these are their client's errors, and only in the column ``errors``.

``StallClock`` finds the longest time without a completion of any kind, flush and trim included, while
anything was outstanding. Between two completions that time begins with the later one of: the former
completion, and the arrival of the oldest request that was outstanding in between. That one is known only
later, from the completions that follow and from what is still outstanding. A client that leaves ends no stall
in which another one waits, too.

No I/O, no clock; all times are monotonic ns. Source: SLA-MODEL.md 2, "Never good without proof"; ``cut``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gateway_agent.nbd.thresholds import Limit
from pmdaemon.wire.cut import FAILED, IO_ANY, IO_READ, IO_WRITE, OUTSTANDING, OVERDUE

KIND_READ: Final = 0
KIND_WRITE: Final = 1
KIND_ZEROING: Final = 2  # trim and write-zeroes
KIND_FLUSH: Final = 3  # also what was refused because no such command is known; that costs nothing

Entry = tuple[int, int, int, int]
"""(io, threshold_us, counted, missed) as in a missed entry of a cut, without its row."""
Pending = tuple[int, int]
"""(arrived_ns, kind) of a request that is outstanding."""

MOST_FORMER: Final = 64
"""Limits not in force whose ``seen`` is kept, the newest; only while an I/O beyond one is outstanding."""
LEAST_STALL_MS: Final = 1000
"""Of a stall that has ended in a cut at whose end nothing is outstanding; shorter ones are latency."""

_Ints = npt.NDArray[np.int64]
_NEVER: Final = -1  # as ``seen``: no arrival plus limit is below it
_MOST: Final = 0xFFFF_FFFF  # a u32 on the wire


class Completions(NamedTuple):
    """Reads and writes, in the order in which they completed; arrays of one length."""

    is_write: npt.NDArray[np.bool_]
    arrived_ns: _Ints
    latency_ns: _Ints
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
    """What is outstanding of one stream, at one moment."""

    def __init__(self, pending: Sequence[Pending]) -> None:
        self.pending = pending
        self._sorted: dict[int, _Ints] = {}

    def __len__(self) -> int:
        return len(self.pending)

    @property
    def oldest_ns(self) -> int | None:
        """Arrival of the oldest, of any kind; None when there is none."""
        return min(self.pending)[0] if self.pending else None

    def arrived_before(self, io: int, at_ns: int) -> int:
        """How many reads and writes of an io kind arrived before ``at_ns``."""
        arrived = self._sorted.get(io)
        if arrived is None:
            kinds = (KIND_READ,) if io == IO_READ else (KIND_WRITE,) if io == IO_WRITE else (0, 1)
            arrived = np.array(sorted(at for at, kind in self.pending if kind in kinds), dtype=np.int64)
            self._sorted[io] = arrived
        return int(np.searchsorted(arrived, at_ns))


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
            if pendings.arrived_before(limit[0], seen_ns - limit[1] * 1000)
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

    def failed(self, reads: int, writes: int, others: int) -> None:
        """Count failures by kind, whatever the limits."""
        self.is_pending = True
        self._failed[IO_ANY] += reads + writes + others
        self._failed[IO_READ] += reads
        self._failed[IO_WRITE] += writes

    def abandoned(self, pendings: Pendings, now_ns: int) -> None:
        """I/Os that end here without a completion."""
        for (io, threshold_us), count in self._counts.items():
            limit_ns = threshold_us * 1000
            beyond = pendings.arrived_before(io, now_ns - limit_ns)
            if beyond:
                self.is_pending = True
                count.overdue += beyond - pendings.arrived_before(io, count.seen_ns - limit_ns)

    def take(self, pendings: Pendings, now_ns: int) -> list[Entry]:
        """The entries of a cut that ends now, and begin the next one.

        Args:
            pendings: what is outstanding now.
            now_ns: end of the cut.
        """
        if not self.is_pending and not len(pendings):
            return []  # ``seen`` may stay: nothing that arrived before now is left that it could be asked for
        self.abandoned(pendings, now_ns)  # they may yet complete: then ``seen`` makes them settled
        compared: list[Entry] = []
        overdue: list[Entry] = []
        failed: list[Entry] = []
        for (io, threshold_us), count in self._counts.items():
            compared.append((io, threshold_us, count.counted, count.missed))
            overdue.append((OVERDUE + io, threshold_us, count.overdue, count.settled))
            failed.append((FAILED + io, threshold_us, count.failed, count.failed_missed))
        failed += [(FAILED + io, 0, count, 0) for io, count in self._failed.items()]
        found = (compared if self._has_completions else []) + [e for e in overdue + failed if e[2] or e[3]]
        self._counts = {limit: _LimitCount(now_ns) for limit in self._counts}
        self._failed = dict.fromkeys(self._failed, 0)
        self._has_completions = self.is_pending = False
        return found


class StallClock:
    """The longest stall of one stream in the cut in progress. See the module docstring."""

    def __init__(self) -> None:
        self._last_ns = 0  # the last completion
        self._longest_ns = 0
        # Since when something has been outstanding, also of clients that have left; None after a completion.
        self._inherited_ns: int | None = None

    def completed(self, arrived_ns: _Ints, done_ns: _Ints, oldest_ns: Callable[[], int | None]) -> None:
        """Requests of any kind have completed.

        Args:
            arrived_ns: shape (n,), n > 0, in the order of completion.
            done_ns: shape (n,), rising.
            oldest_ns: asked only if it matters: the arrival of the oldest request still outstanding.
        """
        before_ns = np.concatenate(([self._last_ns], done_ns[:-1]))
        self._last_ns = int(done_ns[-1])
        inherited_ns, self._inherited_ns = self._inherited_ns, None
        if int((done_ns - before_ns).max()) <= max(self._longest_ns, 999_999):  # entries say milliseconds
            return
        since_ns = np.minimum.accumulate(arrived_ns[::-1])[::-1]
        pending_ns = oldest_ns()
        if pending_ns is not None:
            since_ns = np.minimum(since_ns, pending_ns)
        if inherited_ns is not None:
            since_ns[0] = min(since_ns[0], inherited_ns)
        stalled_ns = int((done_ns - np.maximum(before_ns, since_ns)).max())
        self._longest_ns = max(self._longest_ns, stalled_ns)

    def left(self, ended_ns: int, oldest_ns: int | None, now_ns: int) -> None:
        """A client has left.

        Args:
            ended_ns: arrival of the oldest of its outstanding requests.
            oldest_ns: the same of those that other clients still wait for.
            now_ns: when.
        """
        self._pass(ended_ns if oldest_ns is None else min(ended_ns, oldest_ns), now_ns)
        if oldest_ns is None:
            self._inherited_ns = None

    def _pass(self, oldest_ns: int, now_ns: int) -> None:
        """Nothing has completed until now, while something was outstanding since ``oldest_ns`` or before."""
        since_ns = oldest_ns if self._inherited_ns is None else min(oldest_ns, self._inherited_ns)
        self._longest_ns = max(self._longest_ns, now_ns - max(self._last_ns, since_ns))
        self._inherited_ns = since_ns

    def refused(self) -> None:
        """A request has ended that proves nothing about the storage."""
        self._inherited_ns = None

    @property
    def is_pending(self) -> bool:
        """Whether a stall has ended that the next cut has to say."""
        return self._longest_ns >= LEAST_STALL_MS * 1_000_000

    def take(self, oldest_ns: int | None, now_ns: int) -> list[Entry]:
        """The entry of a cut that ends now, if there is one; begin the next cut.

        Args:
            oldest_ns: arrival of the oldest outstanding request; None when there is none.
            now_ns: the end of the cut.
        """
        age_ns = 0
        if oldest_ns is not None:
            age_ns = now_ns - oldest_ns
            self._pass(oldest_ns, now_ns)
        is_due = oldest_ns is not None or self.is_pending
        found = (OUTSTANDING, 0, _ms(age_ns), _ms(self._longest_ns))
        self._longest_ns = 0
        return [found] if is_due and (found[2] or found[3]) else []


def _ms(duration_ns: int) -> int:
    return min(duration_ns // 1_000_000, _MOST)
