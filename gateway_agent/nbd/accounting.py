"""Accounting of a plane: streams (one client's use of one volume), and the cuts made of them.

Streams. The data path only *logs* a completion: five integers appended to an array (about 0.2 us). ``fold``
turns the log into counters with numpy, many I/Os at a time: at ``FOLD_INTS`` and at each cut. Nothing is
estimated: a fold compares every single latency with every threshold, in nanoseconds. What hangs is not in
the log: at each cut, and when a client leaves, the sessions say what is outstanding (``limits``).

Log entry: word, arrived_ns, sent_ns, replied_ns, done_ns; word = bytes << 4 | refused << 3 | failed << 2 |
kind, where the bytes of trim and write-zeroes are those that the throttle charges (docs/formats/nbd.md).
Latency is arrival to done, the reply in the client's socket buffer; service is sent upstream to reply; delay
is what our throttle held it, arrival to sent. Done never falls from one entry to the next.

What counts as what:
    reads, writes    completions of any outcome; ``errors`` is the part that failed
    bytes            of successful completions only
    others           flush, trim, write-zeroes; in no latency sum, histogram or missed count
    arrived          reads and writes offered, so that it compares with reads + writes
    failed entries   completions with an error but ``refused`` ones, and refused connections of a stream whose
                     storage is not there (these are in ``others`` and ``errors``, too)
    cost             what the throttle charges: all of them, flush as a write without bytes

Invariant: the deltas of all cuts of a stream add up to its cumulative columns, also where units are rounded
(us, milli-cost): the lifetime value is rounded, the delta is a difference of rounded values.

Cuts are made on request and kept until the link says that it has spooled them:

    collect(got) ──► got is the id of the oldest kept cut?  yes: forget it
                     a cut is kept?                         yes: answer it, the same bytes as before
                                                            no:  make one, keep it, answer it

So a link killed between receiving and spooling loses nothing and doubles nothing. Ids begin at the wall
clock of the plane's start, so that no id of a plane's former life is taken for one of this.

A cut has exactly one version of the threshold set: ``set_thresholds`` closes the cut in progress and keeps
it; its header says ``more``, and the link collects again. ``tg`` is the generation of caps in force during
the whole cut, or -1; a change of caps makes no boundary, because it needs none.

No I/O but ``RunDelay``'s; time comes as an argument.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from gateway_agent.config import ExportConfig
from gateway_agent.errors import ExportRefused
from gateway_agent.nbd.limits import (
    KIND_FLUSH,
    KIND_READ,
    KIND_WRITE,
    KIND_ZEROING,
    Completions,
    Entry,
    LimitCounter,
    Pending,
    Pendings,
    StallClock,
)
from gateway_agent.nbd.protocol import Rep
from gateway_agent.nbd.thresholds import Limit, PlaneThresholds
from pmdaemon.wire import histogram
from pmdaemon.wire.cut import COLUMNS, HIST_DTYPE, IO_READ, IO_WRITE, MISSED_DTYPE, rows_array, worst_late
from pmdaemon.wire.histogram import WIRE_BUCKETS
from pmdaemon.wire.messages.planes import DpCut
from pmdaemon.wire.rates import COST_BYTES

FAILED_BIT: Final = 4
REFUSED_BIT: Final = 8  # by the gateway, for what it asks: its client's error
LENGTH_SHIFT: Final = 4
ENTRY_INTS: Final = 5
FOLD_INTS: Final = 2048 * ENTRY_INTS  # a fold of 2,048 I/Os takes about 0.3 ms, its longest pause

_Ints = npt.NDArray[np.int64]


def word_of(kind: int, length_bytes: int, failed: bool) -> int:
    """First integer of a log entry."""
    return length_bytes << LENGTH_SHIFT | (FAILED_BIT if failed else 0) | kind


class CountedSession(Protocol):
    """A session whose requests are counted at a cut."""

    def gauges(self) -> tuple[int, int]:
        """(sent upstream and not completed, held by the throttle)."""

    def outstanding(self) -> list[Pending]:
        """Every request that has arrived and is not in the log, in any order."""

    def close(self, reason: str) -> None:
        """Close the connection."""


class StreamAccount:
    """Statistics of one (volume, client).

    Attributes:
        arrived: lifetime reads and writes offered; sessions add to it.
        log: see the module docstring; sessions extend it. The object stays the same for ever.
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
        self._limits = LimitCounter()
        self._stalls = StallClock()
        self._reported = self._lifetime()

    @property
    def descriptor(self) -> dict[str, int | str]:
        """What DP_CUT says of this stream."""
        return {"index": self.index, "volume": self.volume, "client": self.client, "backend": self.backend}

    @property
    def is_unused(self) -> bool:
        """Whether it has no connection, and every count is in a cut."""
        is_pending = self._limits.is_pending or self._stalls.is_pending
        return not self.sessions and not self.log and not is_pending and self._lifetime() == self._reported

    @property
    def limits(self) -> tuple[Limit, ...]:
        """What its reads and writes are compared with."""
        return self._limits.limits

    def set_limits(self, limits: Sequence[Limit]) -> None:
        """Compare with others from now on; a cut has one set if this comes right after ``take``."""
        self.fold()
        self._limits.set_limits(limits, self._pendings())

    def leave(self, session: CountedSession, now_ns: int) -> None:
        """A session ends; what is outstanding in it ends without a completion."""
        self.fold()
        self.sessions.remove(session)
        ended = Pendings(session.outstanding())
        if ended.oldest_ns is not None:
            self._limits.abandoned(ended, now_ns)
            self._stalls.left(ended.oldest_ns, self._pendings().oldest_ns, now_ns)

    def connection_failed(self) -> None:
        """A client was refused because the storage is not there: a failed request of no kind."""
        self._counts[KIND_FLUSH] += 1
        self._errors += 1
        self._limits.failed(0, 0, 1)

    def _pendings(self) -> Pendings:
        return Pendings([each for session in self.sessions for each in session.outstanding()])

    def fold(self) -> None:
        """Turn the log into counters."""
        if not self.log:
            return
        entries = np.array(self.log, dtype=np.int64).reshape(-1, ENTRY_INTS)
        del self.log[:]
        word, arrived_ns, sent_ns, replied_ns, done_ns = np.ascontiguousarray(entries.T)
        kind, flags = word & 3, word & (FAILED_BIT | REFUSED_BIT)
        transferred = np.where(flags, 0, word >> LENGTH_SHIFT)
        is_read, is_write = kind == KIND_READ, kind == KIND_WRITE
        is_io = is_read | is_write
        self._counts += np.bincount(kind, minlength=4)
        is_zeroing = kind == KIND_ZEROING
        self._bytes += [transferred[each].sum() for each in (is_read, is_write, is_zeroing)]
        self._flushes += int(np.count_nonzero((kind == KIND_FLUSH) & (flags == 0)))
        latency_ns = (done_ns - arrived_ns)[is_io]
        service_ns, delay_ns = (replied_ns - sent_ns)[is_io], (sent_ns - arrived_ns)[is_io]
        self._sums_ns += [latency_ns.sum(), service_ns.sum(), delay_ns.sum()]
        compared = Completions(is_write[is_io], arrived_ns[is_io], latency_ns, (flags == FAILED_BIT)[is_io])
        self._add_histograms(compared, service_ns, delay_ns)
        self._limits.completed(compared)
        if flags.any():
            self._errors += int(np.count_nonzero(flags))
            answered = flags < REFUSED_BIT  # what the gateway refuses proves nothing about its storage
            arrived_ns, done_ns = arrived_ns[answered], done_ns[answered]
            if not answered.all():
                self._stalls.refused()
            failed = np.bincount(kind[flags == FAILED_BIT], minlength=4).tolist()
            self._limits.failed(
                failed[KIND_READ], failed[KIND_WRITE], failed[KIND_ZEROING] + failed[KIND_FLUSH]
            )
        if len(done_ns):
            self._stalls.completed(arrived_ns, done_ns, lambda: self._pendings().oldest_ns)

    def _add_histograms(self, done: Completions, service_ns: _Ints, delay_ns: _Ints) -> None:
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

    def take(self, now_ns: int) -> StreamCut | None:
        """Everything since the last call, or None when nothing happened and nothing is under way."""
        self.fold()
        lifetime, reported = self._lifetime(), self._reported
        gauges = [session.gauges() for session in self.sessions]
        inflight, held = sum(gauge[0] for gauge in gauges), sum(gauge[1] for gauge in gauges)
        pendings = self._pendings()
        entries = self._limits.take(pendings, now_ns) + self._stalls.take(pendings.oldest_ns, now_ns)
        if lifetime == reported and not entries and not len(pendings):
            return None
        row = {name: value - reported[name] for name, value in lifetime.items()}
        row |= {"stream_id": 0, "inflight": inflight, "held": held}
        row |= {f"cum_{name}": lifetime[name] for name in ("reads", "writes", "read_bytes", "write_bytes")}
        taken = StreamCut(self, [row[name] for name in COLUMNS], self._hist, entries)
        self._reported = lifetime
        self._hist = np.zeros(histogram.WIRE_BUCKETS, dtype=np.int64)
        return taken


class StreamCut:
    """One stream's part of a cut.

    Attributes:
        row: values in COLUMNS order.
        hist: shape (WIRE_BUCKETS,), dense.
        missed: (io, threshold_us, counted, missed) as in a cut, of all kinds of entries.
    """

    __slots__ = ("hist", "missed", "row", "stream")

    def __init__(self, stream: StreamAccount, row: list[int], hist: _Ints, missed: list[Entry]) -> None:
        self.stream = stream
        self.row = row
        self.hist = hist
        self.missed = missed


MIXED: Final = -1
MAX_KEPT_CUTS: Final = 64  # each threshold change without a collecting link keeps one; beyond that they merge
MAX_STREAMS: Final = 320
MAX_COLUMN_BYTES: Final = 970_000  # a cut has at most 952 KiB (``link.collection``), 4 KiB of it a header
_STREAM_BYTES: Final = 8 * len(COLUMNS) + HIST_DTYPE.itemsize * WIRE_BUCKETS + 4 * MISSED_DTYPE.itemsize
"""Of a stream in the largest cut: counters, every bucket, failures by kind and OUTSTANDING."""
_LIMIT_BYTES: Final = (
    3 * MISSED_DTYPE.itemsize
)  # compared, overdue, failed; so 320 streams have 9 limits each
MAX_DESCRIPTOR_BYTES: Final = 60_000  # all streams are named in one frame header, which holds 65,535 bytes
_DESCRIPTOR_OVERHEAD_BYTES: Final = 48  # keys, map and string prefixes of one stream in msgpack


class ThrottledVolume(Protocol):
    """A volume, asked at each cut."""

    export: ExportConfig

    def take_late(self, now_ns: int) -> tuple[int, int] | None:
        """(I/Os, longest delay in us) of what its caps held for too long in this cut; None for nothing."""


class StreamTable:
    """The streams of this plane, by volume and client.

    When there is no room for another, the ones unused for longest are forgotten: without a connection, and
    with every count in a cut. One that comes back begins its lifetime columns at 0, as after a restart.
    """

    def __init__(self) -> None:
        self._by_name: dict[tuple[str, str], StreamAccount] = {}  # the one asked for last comes last
        self._descriptor_bytes = self._column_bytes = 0
        self._made = 0

    @property
    def streams(self) -> list[StreamAccount]:
        """All of them."""
        return list(self._by_name.values())

    def get(self, export: ExportConfig, client: str, thresholds: PlaneThresholds) -> StreamAccount:
        """The stream of one client on one volume, made when it is new.

        Raises:
            ExportRefused: there are more streams in use than one cut can name.
        """
        known = self._by_name.pop((export.volume, client), None)
        if known is not None:
            self._by_name[export.volume, client] = known
            return known
        names = (export.volume, client, export.backend)
        limits = thresholds.limits_for(export.volume, client)
        self._make_room(_descriptor_bytes(*names), _column_bytes(limits))
        stream = StreamAccount(self._made, *names, export.cost_read, export.cost_write)
        stream.set_limits(limits)
        self._made += 1
        self._descriptor_bytes += _descriptor_bytes(*names)
        self._column_bytes += _column_bytes(limits)
        self._by_name[export.volume, client] = stream
        return stream

    def set_thresholds(self, thresholds: PlaneThresholds) -> int:
        """Compare all streams with another set; returns how many limits were left out for want of room.

        The server judges by histograms what is not counted, and says so.
        """
        wanted = [(stream, thresholds.limits_for(stream.volume, stream.client)) for stream in self.streams]
        most = sum(len(limits) for _, limits in wanted)
        if wanted and sum(_column_bytes(limits) for _, limits in wanted) > MAX_COLUMN_BYTES:
            most = (MAX_COLUMN_BYTES // len(wanted) - _STREAM_BYTES) // _LIMIT_BYTES
        for stream, limits in wanted:
            stream.set_limits(limits[:most])
        self._column_bytes = sum(_column_bytes(stream.limits) for stream, _ in wanted)
        return sum(max(len(limits) - most, 0) for _, limits in wanted)

    def _make_room(self, name_bytes: int, column_bytes: int) -> None:
        for stream in self.streams:
            if self._has_room(name_bytes, column_bytes):
                return
            if stream.is_unused:
                del self._by_name[stream.volume, stream.client]
                self._descriptor_bytes -= _descriptor_bytes(stream.volume, stream.client, stream.backend)
                self._column_bytes -= _column_bytes(stream.limits)
        if not self._has_room(name_bytes, column_bytes):
            raise ExportRefused(
                Rep.ERR_POLICY,
                f"this gateway process already counts {len(self._by_name)} streams that are in use or not "
                f"yet collected; its limits are {MAX_STREAMS} streams, {MAX_DESCRIPTOR_BYTES} bytes of names "
                f"and {MAX_COLUMN_BYTES} bytes of counts, {_LIMIT_BYTES} for each limit of each stream. "
                "Spread the volumes over more planes",
            )

    def _has_room(self, name_bytes: int, column_bytes: int) -> bool:
        return (
            len(self._by_name) < MAX_STREAMS
            and self._descriptor_bytes + name_bytes <= MAX_DESCRIPTOR_BYTES
            and self._column_bytes + column_bytes <= MAX_COLUMN_BYTES
        )


def _column_bytes(limits: Sequence[Limit]) -> int:
    return _STREAM_BYTES + _LIMIT_BYTES * len(limits)


def _descriptor_bytes(*names: str) -> int:
    return sum(len(name.encode()) for name in names) + _DESCRIPTOR_OVERHEAD_BYTES


class CutMaker:
    """See the module docstring. Holds the streams of the plane, the kept cuts and the boundaries.

    Args:
        table: the streams.
        now_ns: start of the first cut, monotonic.
        now_unix_us: the same moment on the wall clock.
        starved_us: how long the plane has waited for a processor since its start (``RunDelay``).
    """

    def __init__(
        self, table: StreamTable, now_ns: int, now_unix_us: int, starved_us: Callable[[], int] = lambda: 0
    ) -> None:
        self.table = table
        self._starved_us = starved_us
        self.thresholds = PlaneThresholds()
        self.volumes: list[ThrottledVolume] = []  # they add themselves
        self._next_id = now_unix_us
        self._generation = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._is_finished = False
        self._begin(now_ns, now_unix_us)

    def _begin(self, now_ns: int, now_unix_us: int) -> None:
        self._start_ns, self._start_unix_us = now_ns, now_unix_us
        self._common_generation = self._generation
        self._version = self.thresholds.version
        self._start_starved_us = self._starved_us()

    def set_generation(self, generation: int) -> None:
        """Caps of another generation are in force from now on."""
        if generation != self._generation:
            self._generation, self._common_generation = generation, MIXED

    def set_thresholds(self, thresholds: PlaneThresholds, now_ns: int, now_unix_us: int) -> int:
        """Compare with another set from now on; a set already in force changes nothing.

        Returns:
            How many limits of streams were left out, see ``StreamTable``.
        """
        if thresholds == self.thresholds:
            return 0
        may_close = len(self._kept) < MAX_KEPT_CUTS
        if may_close:
            self._close(now_ns, now_unix_us, more=True)
        self.thresholds = thresholds
        left_out = self.table.set_thresholds(thresholds)
        # Too many kept cuts (no link collects): this one goes on, its missed counts are of no single version.
        self._version = thresholds.version if may_close else MIXED
        return left_out

    def finish(self, now_ns: int, now_unix_us: int) -> None:
        """Close the last cut: no I/O is counted any more."""
        self._close(now_ns, now_unix_us, more=True)
        self._is_finished = True

    def collect(self, got: int, now_ns: int, now_unix_us: int) -> bytes | None:
        """The DP_CUT frame that answers a DP_COLLECT; None when the last cut of all is spooled.

        Args:
            got: id of the last cut the link has spooled, 0 for none.
            now_ns: monotonic, the end of a cut made now.
            now_unix_us: the same moment on the wall clock.
        """
        if self._kept and self._kept[0][0] == got:
            self._kept.popleft()
        if not self._kept and self._is_finished:
            return None
        if not self._kept:
            self._close(now_ns, now_unix_us, more=False)
        return self._kept[0][1]

    def _close(self, now_ns: int, now_unix_us: int, *, more: bool) -> None:
        rows = [taken for stream in self.table.streams if (taken := stream.take(now_ns)) is not None]
        blob, hist_len, missed_len = _columns(rows)
        self._next_id += 1
        starved_us = max(self._starved_us() - self._start_starved_us, 0)
        late = {each.export.volume: found for each in self.volumes if (found := each.take_late(now_ns))}
        made = DpCut(
            id=self._next_id,
            start_ns=self._start_ns,
            end_ns=now_ns,
            start_us=self._start_unix_us,
            throttle_gen=self._common_generation,
            threshold_version=self._version,
            rows=len(rows),
            hist_entries=hist_len,
            missed_entries=missed_len,
            streams=[row.stream.descriptor for row in rows],
            more=more,
            starved_us=starved_us,
            late=worst_late(late) or None,
        )
        self._kept.append((self._next_id, made.encode_with(blob)))
        self._begin(now_ns, now_unix_us)


def _columns(rows: list[StreamCut]) -> tuple[bytes, int, int]:
    """Blob as in CUT, and its numbers of histogram and missed entries."""
    counters = rows_array([taken.row for taken in rows])
    dense = np.zeros((len(rows), WIRE_BUCKETS), dtype=np.int64)
    for index, taken in enumerate(rows):
        dense[index] = taken.hist
    row, bucket = np.nonzero(dense)
    hist = np.zeros(len(row), dtype=HIST_DTYPE)
    hist["row"], hist["bucket"], hist["count"] = row, bucket, dense[row, bucket]
    missed = np.array(
        [(index, *entry) for index, taken in enumerate(rows) for entry in taken.missed], dtype=MISSED_DTYPE
    )
    return counters.tobytes() + hist.tobytes() + missed.tobytes(), len(hist), len(missed)


class RunDelay:
    """How long this process has waited for a processor although it wanted to run.

    A data plane that its own host keeps waiting sees requests and answers late, and what it counts then is
    its host's doing, not the storage's. Each cut says so (``st``), so that the server slows no neighbour down
    for it.

    Source: Linux, Documentation/scheduler/sched-stats.rst, /proc/<pid>/schedstat: time on the processor, time
    waiting on a run queue, both ns, and the number of turns. It is of the main thread, in which a plane does
    all its work but that of file workers. Not in it: what a hypervisor takes away (steal).

    Args:
        path: for tests.
    """

    def __init__(self, path: str = "/proc/self/schedstat") -> None:
        self._fd: int | None = None
        with contextlib.suppress(OSError):  # a kernel without CONFIG_SCHED_INFO: nothing is known
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def total_us(self) -> int:
        """Since the start of the process; 0 where the kernel does not say."""
        if self._fd is None:
            return 0
        try:
            return int(os.pread(self._fd, 128, 0).split()[1]) // 1000
        except (OSError, ValueError, IndexError):
            return 0

    def close(self) -> None:
        """Let go of the descriptor."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
