"""Accounting of one stream: one client's use of one volume.

The data path only *logs* completions, in a flat array: what it has of them anyway, and one moment for all
of a batch (about 0.1 us an I/O). ``fold`` turns the log into counters with numpy: at ``FOLD_IOS`` and at each
cut. Nothing is estimated: a fold compares every single
latency with every threshold, in nanoseconds. What hangs is not in the log: at each cut, and when a client
leaves, the sessions say what is outstanding (``limits``, ``stalls``).

Logged: ``buffers.Finished`` and done_ns; word = bytes << 4 | refused << 3 | failed << 2 | kind, where the
bytes of trim, write-zeroes and cache are those that the throttle charges (docs/formats/nbd.md). Latency is
arrival to done, the answer complete and ready to be sent; service is sent upstream to reply; delay is what
our throttle held it, arrival to sent. What a client leaves untaken of its answers is in none of them: the
time for which an I/O had to wait behind that since the last cut is logged with it. Done never falls from one
completion to the next.

What counts as what:
    reads, writes    completions of any outcome; ``errors`` is the part that failed
    bytes            of successful completions only
    others           flush, cache, block status, trim, zeroes; in no latency sum, histogram or missed count
    arrived          reads and writes offered, so that it compares with reads + writes
    sequential       of these, those that begin where the one before of their connection and kind ended
    failed entries   completions with an error but ``refused`` ones, and refused connections of a stream whose
                     storage is not there (these are in ``others`` and ``errors``, too)
    cost             what the throttle charges: all that the gateway does not refuse; flush as a write without
                     bytes, cache as one with the bytes that it has the storage read

Invariant: the deltas of all cuts of a stream add up to its cumulative columns, also where units are rounded
(us, milli-cost): the lifetime value is rounded, the delta is a difference of rounded values.

No I/O; time comes as an argument.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from gateway_agent.nbd.buffers import FINISHED_INTS, Finished
from gateway_agent.nbd.limits import (
    KIND_FLUSH,
    KIND_READ,
    KIND_WRITE,
    KIND_ZEROING,
    Completions,
    Entry,
    Ints,
    LimitCounter,
    Pending,
    Pendings,
)
from gateway_agent.nbd.stalls import StreamStalls
from pmdaemon.wire import histogram
from pmdaemon.wire.cut import COLUMNS, FAILED, IO_READ, IO_WRITE, MAX_COUNTER, OUTSTANDING
from pmdaemon.wire.messages.plane_sets import Limit
from pmdaemon.wire.rates import COST_BYTES, io_cost

if TYPE_CHECKING:
    from gateway_agent.config import ExportConfig
    from gateway_agent.nbd.access import ClientIdentity

FAILED_BIT: Final = 4
REFUSED_BIT: Final = 8  # by the gateway, for what it asks: its client's error
LENGTH_SHIFT: Final = 4
_MOST_LENGTH: Final = (1 << 49) - 1  # of what is counted; the sum of one fold is an int64
FOLD_IOS: Final = 2048  # a fold of so many takes about 0.4 ms, its longest pause
MOST_MEMBERS: Final = 4096  # names, for people; a stream is counted without one, too
_FOLD_INTS: Final = FOLD_IOS * FINISHED_INTS


def word_of(kind: int, length_bytes: int, failed: bool) -> int:
    """What kind of request it was, how many bytes, and whether it failed, in one integer."""
    return min(length_bytes, _MOST_LENGTH) << LENGTH_SHIFT | (FAILED_BIT if failed else 0) | kind


class CountedSession(Protocol):
    """A session whose requests are counted at a cut."""

    @property
    def identity(self) -> ClientIdentity | None:
        """Its client; None if that is not known."""

    @property
    def export(self) -> ExportConfig | None:
        """What it uses; None in negotiation."""

    def gauges(self) -> tuple[int, int]:
        """(sent upstream and not completed, held by the throttle); without what its client keeps waiting."""

    def outstanding(self, now_ns: int) -> list[Pending]:
        """Every request that has arrived and was not given to ``record``, in any order, as of ``now_ns``."""

    def cut_ended(self, now_ns: int) -> None:
        """A cut has ended: from now on ``paused_ns`` of a request, and of ``Finished``, is counted again."""

    def close(self, reason: str) -> None:
        """Close the connection."""


class StreamAccount:
    """Statistics of one (volume, client).

    Attributes:
        arrived, sequential: lifetime reads and writes offered; sessions add to them.
        unused_since_ns: when it was first found unused, None while it is not.
        members: of a stream that clients share, who they are: the newest ``MOST_MEMBERS``, the last one last.
        sessions: open connections of this stream; one with requests outstanding leaves by ``leave``.
    """

    def __init__(
        self,
        index: int,
        volume: str,
        client: str,
        backend: str,
        cost_read: float = 1.0,
        cost_write: float = 1.0,
        cost_bytes: float = COST_BYTES,
    ) -> None:
        self.index = index
        self.volume = volume
        self.client = client
        self.backend = backend
        self.arrived = 0
        self.sequential = 0
        self._sequential_before = 0  # as the last cut has it
        self.unused_since_ns: int | None = None
        self.members: dict[str, None] = {}
        self._log = array("q")  # ``Finished``, of all since the last fold
        self._batches = array("q")  # of each batch: how many there are in it, done_ns
        self.sessions: list[CountedSession] = []
        self._cost_read = cost_read
        self._cost_write = cost_write
        self._cost_bytes = cost_bytes
        self._cost_before = 0.0  # of what was charged at other costs
        self._charged_before = (0, 0, 0)
        self._counts: Ints = np.zeros(4, dtype=np.int64)  # by kind, lifetime
        self._refused: Ints = np.zeros(4, dtype=np.int64)  # of these, by the gateway: they are not charged
        self._bytes = [0, 0, 0]  # read, written, charged for all else; lifetime
        self._flushes = 0  # that succeeded
        self._errors = 0
        self._sums_ns: Ints = np.zeros(3, dtype=np.int64)  # latency, service, delay; lifetime
        self._hist: Ints = np.zeros(histogram.WIRE_BUCKETS, dtype=np.int64)  # of this cut
        self._limits = LimitCounter()
        self._stalls = StreamStalls()
        self._reported = self._lifetime()

    def share(self, client: str) -> None:
        """A client is counted here from now on that has no stream of its own."""
        self.members.pop(client, None)
        self.members[client] = None
        if len(self.members) > MOST_MEMBERS:
            del self.members[next(iter(self.members))]

    @property
    def descriptor(self) -> dict[str, int | str]:
        """What DP_CUT says of this stream."""
        return {"index": self.index, "volume": self.volume, "client": self.client, "backend": self.backend}

    def set_export(self, backend: str, cost_read: float, cost_write: float, cost_bytes: float) -> None:
        """Count for another backend and charge other costs from now on; what was charged stays so."""
        costs = cost_read, cost_write, cost_bytes
        if (backend, *costs) == (self.backend, self._cost_read, self._cost_write, self._cost_bytes):
            return
        self.fold()
        self._cost_before = self._cost()
        self._charged_before = self._charged()
        self.backend = backend
        self._cost_read, self._cost_write, self._cost_bytes = costs

    def _charged(self) -> tuple[int, int, int]:
        """Lifetime requests charged as reads, and as writes; bytes charged."""
        reads, writes, zeroing, _ = (int(count) for count in self._counts - self._refused)
        return reads, writes + zeroing + self._flushes, sum(self._bytes)

    def _cost(self) -> float:
        """Lifetime cost, each request at the costs of its time."""
        reads, changes, size = (
            now - before for now, before in zip(self._charged(), self._charged_before, strict=True)
        )
        base = self._cost_before + reads * self._cost_read + changes * self._cost_write
        return io_cost(base, size, self._cost_bytes)

    @property
    def is_unused(self) -> bool:
        """Whether it has no connection, and every count is in a cut."""
        if self.sessions or self._log:
            return False
        is_pending = self._limits.is_pending or self._stalls.is_pending
        return not is_pending and self._lifetime() == self._reported

    @property
    def limits(self) -> tuple[Limit, ...]:
        """What its reads and writes are compared with."""
        return self._limits.limits

    def set_limits(self, limits: Sequence[Limit], now_ns: int) -> None:
        """Compare with others from now on; a cut has one set if this comes right after ``take``."""
        self.fold()
        self._limits.set_limits(limits, self._pendings(now_ns))

    def arrived_elsewhere(self) -> None:
        """A read or write that arrived was not begun: its client repeats it where another process counts it.

        One that a cut has as arrived stays in it: no column of a cut is negative.
        """
        if self.arrived > self._reported["arrived"]:
            self.arrived -= 1

    def let_through(self, kind: int, arrived_ns: int, paused_ns: int) -> None:
        """See ``LimitCounter``."""
        self._limits.let_through(kind, arrived_ns, paused_ns)

    def leave(self, session: CountedSession, now_ns: int) -> None:
        """A session ends; what is outstanding in it ends without a completion."""
        self.fold()
        self.sessions.remove(session)
        ended = Pendings(session.outstanding(now_ns))
        if len(ended):
            self._limits.abandoned(ended, now_ns)
            self._stalls.left(ended, self._pendings(now_ns), now_ns)

    def connection_refused(self, asked_ns: int, now_ns: int) -> None:
        """A client that asked at ``asked_ns`` is refused, because the storage is not there.

        That is a failed request of no kind, and begins or prolongs a stall (``stalls``).
        """
        self.fold()
        self._stalls.refused(asked_ns, self._pendings(now_ns), now_ns)
        self._counts[KIND_FLUSH] += 1
        self._errors += 1
        self._limits.failed(0, 0, 1)

    def connection_given_up(self, asked_ns: int, now_ns: int) -> None:
        """A client that asked at ``asked_ns`` has left, before its storage was found to be there."""
        self.fold()
        self._stalls.gave_up(asked_ns, self._pendings(now_ns), now_ns)

    def connection_made(self, now_ns: int) -> None:
        """A client is let in: its storage is there."""
        self.fold()
        self._stalls.found(self._pendings(now_ns), now_ns)

    def _pendings(self, now_ns: int) -> Pendings:
        return Pendings([each for session in self.sessions for each in session.outstanding(now_ns)])

    def record(self, finished: Finished, now_ns: int) -> None:
        """Log requests that are complete now."""
        self._log.fromlist(finished)
        self._batches.fromlist([len(finished) // FINISHED_INTS, now_ns])
        if len(self._log) >= _FOLD_INTS:
            self.fold()

    def fold(self) -> None:
        """Turn the log into counters."""
        if not self._log:
            return
        entries = np.frombuffer(self._log, np.int64).reshape(-1, FINISHED_INTS)
        batches = np.frombuffer(self._batches, np.int64).reshape(-1, 2)
        done_ns = np.repeat(batches[:, 1], batches[:, 0])
        self._log, self._batches = array("q"), array("q")
        paused_ns, word, arrived_ns, sent_ns, replied_ns = np.ascontiguousarray(entries.T)
        seen_ns = arrived_ns  # as of the last cut
        arrived_ns, sent_ns = arrived_ns + paused_ns, sent_ns + paused_ns
        kind, flags = word & 3, word & (FAILED_BIT | REFUSED_BIT)
        transferred = np.where(flags, 0, word >> LENGTH_SHIFT)
        is_read, is_write = kind == KIND_READ, kind == KIND_WRITE
        is_io = is_read | is_write
        self._counts += np.bincount(kind, minlength=4)
        for i, each in enumerate((is_read, is_write, kind >= KIND_ZEROING)):
            self._bytes[i] += int(transferred[each].sum())
        self._flushes += int(np.count_nonzero((kind == KIND_FLUSH) & (flags == 0)))
        latency_ns = (done_ns - arrived_ns)[is_io]
        service_ns, delay_ns = (replied_ns - sent_ns)[is_io], (sent_ns - arrived_ns)[is_io]
        self._sums_ns += [latency_ns.sum(), service_ns.sum(), delay_ns.sum()]
        compared = Completions(is_write[is_io], seen_ns[is_io], latency_ns, (flags == FAILED_BIT)[is_io])
        self._add_histograms(compared, service_ns, delay_ns)
        self._limits.completed(compared)
        if flags.any():
            self._refused += np.bincount(kind[flags >= REFUSED_BIT], minlength=4)
            self._errors += int(np.count_nonzero(flags))
            is_io &= flags < REFUSED_BIT  # what the gateway refuses proves nothing about its storage
            failed = np.bincount(kind[flags == FAILED_BIT], minlength=4).tolist()
            self._limits.failed(
                failed[KIND_READ], failed[KIND_WRITE], failed[KIND_ZEROING] + failed[KIND_FLUSH]
            )
        self._stalls.completed(
            is_write[is_io], arrived_ns[is_io], done_ns[is_io], lambda: self._pendings(int(done_ns[-1]))
        )

    def _add_histograms(self, done: Completions, service_ns: Ints, delay_ns: Ints) -> None:
        for first, buckets, values in (
            (histogram.TOTAL_READ, histogram.BUCKETS, done.of(IO_READ).latency_ns),
            (histogram.TOTAL_WRITE, histogram.BUCKETS, done.of(IO_WRITE).latency_ns),
            (histogram.SERVICE, histogram.COARSE_BUCKETS, service_ns),
            (histogram.DELAY, histogram.COARSE_BUCKETS, delay_ns),
        ):
            edges = histogram.edges_for(buckets)[1:-1]  # below the first is 0, above the last the last
            found = np.searchsorted(edges, values, side="right")
            self._hist[first : first + buckets] += np.bincount(found, minlength=buckets)

    def _lifetime(self) -> dict[str, int]:
        """Lifetime value of every column that a cut carries as a difference."""
        reads, writes, zeroing, others = (int(count) for count in self._counts)
        read_bytes, write_bytes, _ = self._bytes
        latency_ns, service_ns, delay_ns = (int(total) for total in self._sums_ns)
        return {
            "arrived": self.arrived,
            "reads": reads,
            "writes": writes,
            "read_bytes": read_bytes,
            "write_bytes": write_bytes,
            "others": zeroing + others,
            "errors": self._errors,
            "lat_sum_us": latency_ns // 1000,
            "svc_sum_us": service_ns // 1000,
            "delay_sum_us": delay_ns // 1000,
            "cost_milli": int(self._cost() * 1000),
        }

    def take(self, now_ns: int) -> StreamCut | None:
        """Everything since the last call, or None when nothing happened and nothing is under way."""
        self.fold()
        lifetime, reported = self._lifetime(), self._reported
        gauges = [session.gauges() for session in self.sessions]
        inflight, held = sum(gauge[0] for gauge in gauges), sum(gauge[1] for gauge in gauges)
        pendings = self._pendings(now_ns)
        entries = self._limits.take(pendings, now_ns) + self._stalls.take(pendings, now_ns)
        for session in self.sessions:
            session.cut_ended(now_ns)
        if lifetime == reported and not entries and not len(pendings):
            return None
        # Zeroes of many TiB can cost more than the server takes of a cut; the rest is not counted.
        row = {name: min(value - reported[name], MAX_COUNTER) for name, value in lifetime.items()}
        if (len(pendings) or row["errors"]) and not any(entry[0] >= FAILED for entry in entries):
            entries.append((OUTSTANDING + IO_READ, 0, 0, 0))  # no read or write waits, and none failed
        row |= {"stream_id": 0, "inflight": inflight, "held": held}
        row |= {f"cum_{name}": lifetime[name] for name in ("reads", "writes", "read_bytes", "write_bytes")}
        sequential = min(self.sequential - self._sequential_before, row["arrived"])
        self._sequential_before = self.sequential
        taken = StreamCut(self, [row[name] for name in COLUMNS], self._hist, entries, sequential)
        self._reported = lifetime
        self._hist = np.zeros(histogram.WIRE_BUCKETS, dtype=np.int64)
        return taken


class StreamCut:
    """One stream's part of a cut.

    Attributes:
        row: values in COLUMNS order.
        hist: shape (WIRE_BUCKETS,), dense.
        missed: (io, threshold_us, counted, missed) as in a cut, of all kinds of entries.
        sequential: of ``arrived``.
    """

    __slots__ = ("hist", "missed", "row", "sequential", "stream")

    def __init__(
        self, stream: StreamAccount, row: list[int], hist: Ints, missed: list[Entry], sequential: int = 0
    ) -> None:
        self.stream = stream
        self.row = row
        self.hist = hist
        self.missed = missed
        self.sequential = sequential
