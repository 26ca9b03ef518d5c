"""Accounting of one stream (one client's use of one volume): exact counters, four histograms, missed counts.

Theory of operation. The data path only *logs* a completion: four integers appended to an array (about
0.2 us). ``fold`` turns the log into counters with numpy, many I/Os at a time: at ``FOLD_INTS`` and at each
cut. Nothing is estimated: a fold compares every single latency with every threshold, in nanoseconds.

Log entry: word, latency_ns, service_ns, delay_ns; word = bytes << 3 | failed << 2 | kind, where the bytes of
trim and write-zeroes are those that the throttle charges (docs/formats/nbd.md). Latency is
arrival to the reply in the client's socket buffer, service is sent upstream to reply, delay is what our
throttle held it.

What counts as what:
    reads, writes    completions of any outcome; ``errors`` is the part that failed
    bytes            of successful completions only
    others           flush, trim, write-zeroes; in no latency sum, histogram or missed count
    arrived          reads and writes offered, so that it compares with reads + writes
    cost             what the throttle charges: all of them, flush as a write without bytes

Invariant: the deltas of all cuts of a stream add up to its cumulative columns, also where units are rounded
(us, milli-cost): the lifetime value is rounded, the delta is a difference of rounded values.
"""

from __future__ import annotations

from array import array
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from gateway_agent.nbd.thresholds import Limit, PlaneThresholds
from pmdaemon.wire import histogram
from pmdaemon.wire.cut import COLUMNS, IO_ANY, IO_READ
from pmdaemon.wire.rates import COST_BYTES

KIND_READ: Final = 0
KIND_WRITE: Final = 1
KIND_ZEROING: Final = 2  # trim and write-zeroes
KIND_FLUSH: Final = 3  # also what was refused because no such command is known; that costs nothing
FAILED_BIT: Final = 4
LENGTH_SHIFT: Final = 3
ENTRY_INTS: Final = 4
FOLD_INTS: Final = (
    2048 * ENTRY_INTS
)  # a fold of 2,048 I/Os takes about 0.3 ms, the longest pause it may cause

_Ints = npt.NDArray[np.int64]


def word_of(kind: int, length_bytes: int, failed: bool) -> int:
    """First integer of a log entry."""
    return length_bytes << LENGTH_SHIFT | (FAILED_BIT if failed else 0) | kind


class CountedSession(Protocol):
    """A session whose requests are counted at a cut."""

    def gauges(self) -> tuple[int, int]:
        """(sent upstream and not completed, held by the throttle)."""

    def close(self, reason: str) -> None:
        """Close the connection."""


class StreamAccount:
    """Statistics of one (volume, client).

    Attributes:
        arrived: lifetime reads and writes offered; sessions add to it.
        log: see the module docstring; sessions extend it. The object stays the same for ever.
        sessions: open connections of this stream.
    """

    def __init__(
        self,
        index: int,
        volume: str,
        client: str,
        backend: str,
        cost_read: float = 1.0,
        cost_write: float = 1.0,
    ) -> None:
        self.index = index
        self.volume = volume
        self.client = client
        self.backend = backend
        self.arrived = 0
        self.log: array[int] = array("q")
        self.sessions: list[CountedSession] = []
        self._cost_read = cost_read
        self._cost_write = cost_write
        self._counts: _Ints = np.zeros(4, dtype=np.int64)  # by kind, lifetime
        self._bytes: _Ints = np.zeros(3, dtype=np.int64)  # read, written, charged for zeroing; lifetime
        self._flushes = 0  # that succeeded
        self._errors = 0
        self._sums_ns: _Ints = np.zeros(3, dtype=np.int64)  # latency, service, delay; lifetime
        self._hist: _Ints = np.zeros(histogram.WIRE_BUCKETS, dtype=np.int64)  # of this cut
        self._limits: tuple[Limit, ...] = ()
        self._counted: list[int] = []  # beside _limits, of this cut
        self._missed: list[int] = []
        self._reported = self._lifetime()

    @property
    def descriptor(self) -> dict[str, int | str]:
        """What DP_CUT says of this stream."""
        return {"index": self.index, "volume": self.volume, "client": self.client, "backend": self.backend}

    @property
    def is_unused(self) -> bool:
        """Whether it has no connection, and every count is in a cut."""
        return not self.sessions and not self.log and self._lifetime() == self._reported

    def set_thresholds(self, thresholds: PlaneThresholds) -> None:
        """Compare with another set from now on; call it only right after ``take`` or before any I/O."""
        self.fold()
        self._limits = thresholds.limits_for(self.volume, self.client)
        self._counted = [0] * len(self._limits)
        self._missed = [0] * len(self._limits)

    def fold(self) -> None:
        """Turn the log into counters."""
        if not self.log:
            return
        entries = np.array(self.log, dtype=np.int64).reshape(-1, ENTRY_INTS)
        del self.log[:]
        word, latency_ns, service_ns, delay_ns = entries.T
        kind = word & 3
        transferred = np.where(word & FAILED_BIT, 0, word >> LENGTH_SHIFT)
        is_read, is_write = kind == KIND_READ, kind == KIND_WRITE
        is_io = is_read | is_write
        self._counts += np.bincount(kind, minlength=4)
        is_zeroing = kind == KIND_ZEROING
        self._bytes += [transferred[each].sum() for each in (is_read, is_write, is_zeroing)]
        self._flushes += int(np.count_nonzero(word & 7 == KIND_FLUSH))
        self._errors += int(np.count_nonzero(word & FAILED_BIT))
        self._sums_ns += entries[is_io, 1:].sum(axis=0)
        self._add_histograms(latency_ns[is_read], latency_ns[is_write], service_ns[is_io], delay_ns[is_io])
        for index, (io, threshold_us) in enumerate(self._limits):
            compared = latency_ns[is_io if io == IO_ANY else is_read if io == IO_READ else is_write]
            self._counted[index] += len(compared)
            self._missed[index] += int(np.count_nonzero(compared > threshold_us * 1000))

    def _add_histograms(self, reads: _Ints, writes: _Ints, service: _Ints, delay: _Ints) -> None:
        for first, buckets, values in (
            (histogram.TOTAL_READ, histogram.BUCKETS, reads),
            (histogram.TOTAL_WRITE, histogram.BUCKETS, writes),
            (histogram.SERVICE, histogram.COARSE_BUCKETS, service),
            (histogram.DELAY, histogram.COARSE_BUCKETS, delay),
        ):
            edges = histogram.edges_for(buckets)[
                1:-1
            ]  # inner edges: below the first is 0, above the last the last
            found = np.searchsorted(edges, values, side="right")
            self._hist[first : first + buckets] += np.bincount(found, minlength=buckets)

    def _lifetime(self) -> dict[str, int]:
        """Lifetime value of every column that a cut carries as a difference."""
        reads, writes, zeroing, others = (int(count) for count in self._counts)
        read_bytes, write_bytes, zeroing_bytes = (int(count) for count in self._bytes)
        latency_ns, service_ns, delay_ns = (int(total) for total in self._sums_ns)
        cost = (
            reads * self._cost_read
            + (writes + zeroing + self._flushes) * self._cost_write
            + (read_bytes + write_bytes + zeroing_bytes) / COST_BYTES
        )
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
            "cost_milli": int(cost * 1000),
        }

    def take(self) -> StreamCut | None:
        """Everything since the last call, or None when nothing happened and nothing is under way."""
        self.fold()
        lifetime, reported = self._lifetime(), self._reported
        gauges = [session.gauges() for session in self.sessions]
        inflight, held = sum(gauge[0] for gauge in gauges), sum(gauge[1] for gauge in gauges)
        if lifetime == reported and not inflight and not held:
            return None
        row = {name: value - reported[name] for name, value in lifetime.items()}
        row |= {"stream_id": 0, "inflight": inflight, "held": held}
        row |= {f"cum_{name}": lifetime[name] for name in ("reads", "writes", "read_bytes", "write_bytes")}
        missed = self._missed_entries() if row["reads"] + row["writes"] else []
        taken = StreamCut(self, [row[name] for name in COLUMNS], self._hist, missed)
        self._reported = lifetime
        self._hist = np.zeros(histogram.WIRE_BUCKETS, dtype=np.int64)
        self._counted = [0] * len(self._limits)
        self._missed = [0] * len(self._limits)
        return taken

    def _missed_entries(self) -> list[tuple[int, int, int, int]]:
        return [
            (io, threshold_us, counted, missed)
            for (io, threshold_us), counted, missed in zip(
                self._limits, self._counted, self._missed, strict=True
            )
        ]


class StreamCut:
    """One stream's part of a cut.

    Attributes:
        row: values in COLUMNS order.
        hist: shape (WIRE_BUCKETS,), dense.
        missed: (io, threshold_us, counted, missed).
    """

    __slots__ = ("hist", "missed", "row", "stream")

    def __init__(
        self, stream: StreamAccount, row: list[int], hist: _Ints, missed: list[tuple[int, int, int, int]]
    ) -> None:
        self.stream = stream
        self.row = row
        self.hist = hist
        self.missed = missed
