"""How long a stream's I/O has waited without a completion: the OUTSTANDING entries of its cuts.

There is one clock for reads and writes together, one for reads and one for writes. What begins and ends a
stall of a clock:

    begins   a read or write of its kind is outstanding (``limits``), or a client is refused because its
             storage is not there, which concerns all three clocks
    ends     a read or write of its kind completes, also with an error. Flush, trim and zeroing neither begin
             nor end one, and what the gateway refuses for what it asks proves nothing.

The clock runs while something is waited for, and only then. A client that gives up does not end the stall:
the next one that comes goes on with it, and the idle time between them counts nothing. So storage that hangs
is seen although no client waits as long as a promise allows. But a client whose I/O completes within
``LEAST_STALL_MS`` of its coming shows that the storage works now: its cut reports nothing of what was before.

    client A   ├── 4 s ──┤ gives up
    client B                       ├── 4 s ──┤ gives up
    client C                                       ├ 2 s ┤ completes
    stall       0 ─────► 4 ....... 4 ──────► 8 ... 8 ──► 10    (... idle)

A refused client is waited for from its attempt until ``ATTEMPT_NS`` after it: it will try again. If it does
so in time, that is one wait; a later attempt is another one, and the time between counts nothing. A client
that is let in, or any completion, ends the wait. If nothing but refusals was waited for, it ends the stall as
well; where I/O hung before, only a completion does, because storage that hangs may well let clients in.

State of a clock: the last completion, and since then ``former`` (waits that have ended), ``inherited`` (the
beginning of the present wait, of clients that gave up during it) and the refusals that go on. The present
wait itself follows from the oldest request that is outstanding, so that the data path reports nothing; of
the time between two completions it is known only later, from the completions that follow.

No I/O, no clock; all times are monotonic ns. Source: SLA-MODEL.md 2, "Never good without proof"; ``cut``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from gateway_agent.nbd.limits import Entry, Ints, Pendings
from pmdaemon.wire.cut import IO_ANY, IO_READ, IO_WRITE, OUTSTANDING

LEAST_STALL_MS: Final = 1000
"""Of a stall that a cut reports though nothing is outstanding at its end; shorter ones are latency."""
ATTEMPT_NS: Final = 30 * 10**9
"""How long a refused attempt counts: qemu, the kernel and this project's clients try again sooner."""

_LEAST_NS: Final = LEAST_STALL_MS * 1_000_000
_LEAST_REPORTED_NS: Final = 999_999  # entries say milliseconds
_MOST: Final = 0xFFFF_FFFF  # a u32 on the wire


class StallClock:
    """The longest stall of one kind of I/O in the cut in progress. See the module docstring."""

    def __init__(self) -> None:
        self._last_ns = 0  # the last completion
        self._former_ns = 0
        self._former_end_ns = 0  # nothing before counts any more
        self._inherited_ns = 0
        self._has_hung = False  # I/O ended without a completion since the last one
        self._refused: tuple[int, int] | None = None  # since when, until when
        self._longest_ns = 0

    @property
    def longest_ns(self) -> int:
        """In this cut."""
        return self._longest_ns

    def completed(self, arrived_ns: Ints, done_ns: Ints, oldest_ns: Callable[[], int | None]) -> None:
        """Reads or writes of this kind have completed.

        Args:
            arrived_ns: shape (n,), n > 0, in the order of completion.
            done_ns: shape (n,), rising.
            oldest_ns: asked only if it matters: the arrival of the oldest one still outstanding.
        """
        before_ns = np.concatenate(([self._last_ns], done_ns[:-1]))
        if self.has_past or int((done_ns - before_ns).max()) > max(self._longest_ns, _LEAST_REPORTED_NS):
            since_ns = np.minimum.accumulate(arrived_ns[::-1])[::-1]
            pending_ns = oldest_ns()
            if pending_ns is not None:
                since_ns = np.minimum(since_ns, pending_ns)
            self._passed(int(since_ns[0]), int(done_ns[0]))
            stalled_ns = (done_ns - np.maximum(before_ns, since_ns))[1:]
            self._longest_ns = max(self._longest_ns, int(stalled_ns.max(initial=0)))
        self._last_ns = int(done_ns[-1])
        self._forget()

    def _forget(self) -> None:
        self._former_ns = self._inherited_ns = 0
        self._has_hung, self._refused = False, None

    def _waits_since(self, oldest_ns: int | None, now_ns: int) -> int | None:
        """When the present wait began, but for what is inherited; None if nothing is waited for."""
        if self._refused is not None:
            since_ns, until_ns = self._refused
            if until_ns < now_ns:
                self._end_refusals(oldest_ns, until_ns)
                self._longest_ns = max(self._longest_ns, self._former_ns)  # it ended within this cut
            else:
                oldest_ns = since_ns if oldest_ns is None else min(oldest_ns, since_ns)
        return None if oldest_ns is None else max(oldest_ns, self._last_ns)

    def _end_refusals(self, oldest_ns: int | None, end_ns: int) -> None:
        """Refused clients are waited for no longer, since ``end_ns``."""
        assert self._refused is not None  # the callers look
        since_ns, self._refused = max(self._refused[0], self._last_ns), None
        goes_on = oldest_ns is not None and oldest_ns <= end_ns
        rest_ns = max(oldest_ns, self._last_ns) if oldest_ns is not None and goes_on else end_ns
        self._inherited_ns += max(rest_ns - since_ns, 0)
        if not goes_on:
            self._close(end_ns)

    def _close(self, end_ns: int) -> None:
        """The present wait has ended without a completion."""
        self._former_ns, self._inherited_ns = self._former_ns + self._inherited_ns, 0
        self._former_end_ns = end_ns

    def _passed(self, oldest_ns: int | None, now_ns: int) -> None:
        """Note the present wait, if there is one; with those before only if it is no mere latency."""
        since_ns = self._waits_since(oldest_ns, now_ns)
        if since_ns is not None:
            wait_ns = self._inherited_ns + now_ns - since_ns
            stalled_ns = wait_ns + (self._former_ns if wait_ns >= _LEAST_NS else 0)
            self._longest_ns = max(self._longest_ns, stalled_ns)

    def gave_up(self, since_ns: int, oldest_ns: int | None, now_ns: int) -> None:
        """A client that has waited since ``since_ns`` has given up.

        Args:
            since_ns: arrival of the oldest of its requests, or its attempt to connect.
            oldest_ns: arrival of the oldest request that other clients still wait for.
            now_ns: when.
        """
        first_ns = since_ns if oldest_ns is None else min(since_ns, oldest_ns)
        self._waits_since(first_ns, now_ns)  # refusals may have ended meanwhile
        rest_ns = self._waits_since(oldest_ns, now_ns)
        since_ns = max(since_ns, self._last_ns, self._former_end_ns)
        until_ns = now_ns if rest_ns is None else rest_ns
        self._inherited_ns += max(until_ns - since_ns, 0)
        self._longest_ns = max(self._longest_ns, self._former_ns + self._inherited_ns + now_ns - until_ns)
        self._has_hung = True
        if rest_ns is None:
            self._close(now_ns)

    def refused(self, asked_ns: int, oldest_ns: int | None, now_ns: int) -> None:
        """A client was refused because the storage is not there.

        Args:
            asked_ns: when it asked.
            oldest_ns: arrival of the oldest request that is outstanding.
            now_ns: when it was refused.
        """
        self._waits_since(oldest_ns, asked_ns)  # attempts before may have ended
        since_ns = max(asked_ns, self._former_end_ns) if self._refused is None else self._refused[0]
        self._refused = since_ns, now_ns + ATTEMPT_NS
        self._passed(oldest_ns, now_ns)

    def found(self, oldest_ns: int | None, now_ns: int) -> None:
        """The storage is there: a client was let in, or I/O of another kind has completed."""
        if oldest_ns is not None and oldest_ns > now_ns:
            oldest_ns = None  # it has come since
        self._passed(oldest_ns, now_ns)
        if self._refused is not None:
            self._end_refusals(oldest_ns, now_ns)
        if oldest_ns is None and not self._has_hung:
            self._former_ns = self._inherited_ns = 0

    @property
    def has_past(self) -> bool:
        """Whether something was waited for in vain since the last completion."""
        return bool(self._former_ns or self._inherited_ns or self._refused)

    def take(self, oldest_ns: int | None, now_ns: int) -> int:
        """The longest stall of a cut that ends now; begin the next cut.

        Args:
            oldest_ns: arrival of the oldest outstanding request; None when there is none.
            now_ns: the end of the cut.
        """
        self._passed(oldest_ns, now_ns)
        found_ns, self._longest_ns = self._longest_ns, 0
        return found_ns


class StreamStalls:
    """The three clocks of one stream."""

    def __init__(self) -> None:
        self._clocks = {io: StallClock() for io in (IO_ANY, IO_READ, IO_WRITE)}

    def completed(
        self,
        is_write: npt.NDArray[np.bool_],
        arrived_ns: Ints,
        done_ns: Ints,
        pendings: Callable[[], Pendings],
    ) -> None:
        """Reads and writes have completed.

        Args:
            is_write: shape (n,), in the order of completion.
            arrived_ns: shape (n,).
            done_ns: shape (n,), rising.
            pendings: what is outstanding still; asked only if it matters.
        """
        if not len(done_ns):
            return
        for io, clock in self._clocks.items():
            chosen = is_write if io == IO_WRITE else ~is_write if io == IO_READ else is_write | True
            of_kind_ns, ended_ns = arrived_ns[chosen], done_ns[chosen]
            if clock.has_past and (not len(ended_ns) or ended_ns[0] > done_ns[0]):
                pending_ns = pendings().oldest_ns(io)
                oldest_ns = [*of_kind_ns.tolist(), *([] if pending_ns is None else [pending_ns])]
                clock.found(min(oldest_ns, default=None), int(done_ns[0]))
            if len(ended_ns):
                clock.completed(of_kind_ns, ended_ns, partial(_oldest_ns, pendings, io))

    def left(self, ended: Pendings, others: Pendings, now_ns: int) -> None:
        """A client has left; ``ended`` are its requests, ``others`` those that others still wait for."""
        for io, clock in self._clocks.items():
            since_ns = ended.oldest_ns(io)
            if since_ns is not None:
                clock.gave_up(since_ns, others.oldest_ns(io), now_ns)

    def gave_up(self, asked_ns: int, pendings: Pendings, now_ns: int) -> None:
        """A client has left that had waited for its storage to be there, since ``asked_ns``."""
        for io, clock in self._clocks.items():
            clock.gave_up(asked_ns, pendings.oldest_ns(io), now_ns)

    def refused(self, asked_ns: int, pendings: Pendings, now_ns: int) -> None:
        """A client was refused because its storage is not there."""
        for io, clock in self._clocks.items():
            clock.refused(asked_ns, pendings.oldest_ns(io), now_ns)

    def found(self, pendings: Pendings, now_ns: int) -> None:
        """A client was let in."""
        for io, clock in self._clocks.items():
            clock.found(pendings.oldest_ns(io), now_ns)

    @property
    def is_pending(self) -> bool:
        """Whether a stall has ended that the next cut has to report."""
        return any(clock.longest_ns >= _LEAST_NS for clock in self._clocks.values())

    def take(self, pendings: Pendings, now_ns: int) -> list[Entry]:
        """The entries of a cut that ends now; begin the next cut.

        That of IO_ANY never comes alone: another one shows a reader that this agent counts kinds apart.
        """
        found: list[Entry] = []
        is_due = False
        for io, clock in self._clocks.items():
            oldest_ns = pendings.oldest_ns(io)
            stalled_ns = clock.take(oldest_ns, now_ns)
            # If IO_ANY is reported, each kind is, too: it comes first.
            is_due_here = oldest_ns is not None or stalled_ns >= _LEAST_NS
            is_due = is_due or (is_due_here and io == IO_ANY)
            age_ns = 0 if oldest_ns is None else max(now_ns - oldest_ns, 0)
            entry = (OUTSTANDING + io, 0, _ms(age_ns), _ms(stalled_ns))
            if (is_due or is_due_here) and (entry[2] or entry[3]):
                found.append(entry)
        return [] if [entry[0] for entry in found] == [OUTSTANDING + IO_ANY] else found


def _oldest_ns(pendings: Callable[[], Pendings], io: int) -> int | None:
    return pendings().oldest_ns(io)


def _ms(duration_ns: int) -> int:
    return min(duration_ns // 1_000_000, _MOST)
