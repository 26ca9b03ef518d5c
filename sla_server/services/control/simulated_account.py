"""What a simulated gateway counts of one stream: counters and entries of a cut, as data planes send them.

Entries say what completions do not show (``wire.cut``): what is outstanding, what passed a threshold, and
what failed. An I/O that storage fails counts as a completion without bytes.

State: since the last cut, but for gauges, ``cum_*``, what waits, and since when nothing has completed. Times
are seconds. Changed only by the event loop of its world.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pmdaemon.wire.cut import FAILED, IO_ANY, IO_READ, IO_WRITE, OUTSTANDING, OVERDUE
from pmdaemon.wire.histogram import (
    DELAY,
    SERVICE,
    TOTAL_READ,
    TOTAL_WRITE,
    bucket_of_ns,
    coarse_bucket_of_ns,
)
from pmdaemon.wire.rates import COST_BYTES
from sla_server.services.control.simulated_world import Io

Threshold = tuple[int, int]
"""Kind of I/O (IO_ANY, IO_READ, IO_WRITE) and us."""
Entry = tuple[int, int, int, int]
"""Kind, threshold in us, counted, missed."""
KINDS: Final = (IO_ANY, IO_READ, IO_WRITE)
STALL_S: Final = 1.0
"""A shorter time without completion that has ended has no entry."""


@dataclass(slots=True)
class _Stall:
    """Of one kind: how many wait, since when none has completed, and the longest such time in this cut."""

    waiting: int = 0
    since: float = 0.0
    longest: float = 0.0


@dataclass(slots=True)
class SimAccount:
    """See the module."""

    arrived: int = 0
    reads: int = 0
    writes: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    lat: float = 0.0
    svc: float = 0.0
    delay: float = 0.0
    cum_reads: int = 0
    cum_read_bytes: int = 0
    inflight: int = 0
    held: int = 0
    hist: dict[int, int] = field(default_factory=dict)
    missed: dict[Threshold, int] = field(default_factory=dict)
    settled: dict[Threshold, int] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)
    failed_missed: dict[Threshold, int] = field(default_factory=dict)
    waiting: dict[int, Io] = field(default_factory=dict)
    """Held or under way, in order of arrival."""
    stalls: tuple[_Stall, ...] = field(default_factory=lambda: (_Stall(), _Stall(), _Stall()))

    def arrive(self, io: Io) -> None:
        """A request was read from its client."""
        self.arrived += 1
        self.held += 1
        self.waiting[id(io)] = io
        for stall in (self.stalls[IO_ANY], self.stalls[IO_WRITE if io.is_write else IO_READ]):
            if not stall.waiting:
                stall.since = io.arrived
            stall.waiting += 1

    def complete(self, io: Io, now: float, thresholds: Iterable[Threshold], cut_at: float) -> None:
        """An I/O is done; ``cut_at``: when this cut began."""
        size_bytes = 0 if io.failed else io.size_bytes
        if io.is_write:
            self.writes += 1
            self.write_bytes += size_bytes
        else:
            self.reads += 1
            self.read_bytes += size_bytes
            self.cum_reads += 1
            self.cum_read_bytes += size_bytes
        total_ns, delay_ns = round((now - io.arrived) * 1e9), round((io.sent - io.arrived) * 1e9)
        self.lat += now - io.arrived
        self.svc += now - io.sent
        self.delay += io.sent - io.arrived
        total = (TOTAL_WRITE if io.is_write else TOTAL_READ) + bucket_of_ns(total_ns)
        hist, service = self.hist, SERVICE + coarse_bucket_of_ns(total_ns - delay_ns)
        delay = DELAY + coarse_bucket_of_ns(delay_ns) if delay_ns else DELAY
        hist[total] = hist.get(total, 0) + 1
        hist[service] = hist.get(service, 0) + 1
        hist[delay] = hist.get(delay, 0) + 1
        del self.waiting[id(io)]
        own, other = (IO_WRITE, IO_READ) if io.is_write else (IO_READ, IO_WRITE)
        for kind in (IO_ANY, own):
            stall = self.stalls[kind]
            stall.waiting -= 1
            if (length := now - stall.since) > stall.longest:
                stall.longest = length
            stall.since = now
            if io.failed:
                self.failed[kind] = self.failed.get(kind, 0) + 1
        for key in thresholds:
            if key[0] == other or total_ns <= key[1] * 1000:
                continue
            self.missed[key] = self.missed.get(key, 0) + 1
            if io.arrived + key[1] / 1e6 < cut_at:
                self.settled[key] = self.settled.get(key, 0) + 1
            if io.failed:
                self.failed_missed[key] = self.failed_missed.get(key, 0) + 1

    def counted(self, io: int) -> int:
        """Completed I/Os of a kind."""
        return (self.reads if io != IO_WRITE else 0) + (self.writes if io != IO_READ else 0)

    def counters(self) -> Mapping[str, int]:
        """By column of the cut."""
        bytes_done = self.read_bytes + self.write_bytes
        return {
            "arrived": self.arrived,
            "reads": self.reads,
            "writes": self.writes,
            "read_bytes": self.read_bytes,
            "write_bytes": self.write_bytes,
            "lat_sum_us": round(self.lat * 1e6),
            "svc_sum_us": round(self.svc * 1e6),
            "delay_sum_us": round(self.delay * 1e6),
            "cost_milli": round((self.counted(IO_ANY) + bytes_done / COST_BYTES) * 1000),
            "inflight": self.inflight,
            "held": self.held,
            "cum_reads": self.cum_reads,
            "cum_read_bytes": self.cum_read_bytes,
            "errors": self.failed.get(IO_ANY, 0),
        }

    def entries(self, thresholds: Sequence[Threshold], cut_at: float, now: float) -> list[Entry]:
        """Missed entries of a cut from ``cut_at`` until ``now``."""
        found: list[Entry] = []
        for key in thresholds:
            if self.counted(key[0]):
                found.append((*key, self.counted(key[0]), self.missed.get(key, 0)))
        for io, threshold_us in thresholds:
            passed = self._passed(io, threshold_us / 1e6, cut_at, now)
            settled = self.settled.get((io, threshold_us), 0)
            if passed or settled:
                found.append((OVERDUE + io, threshold_us, passed, settled))
            if self.failed.get(io):
                slow = self.failed_missed.get((io, threshold_us), 0)
                found.append((FAILED + io, threshold_us, self.failed[io], slow))
        found += [(FAILED + kind, 0, count, 0) for kind, count in self.failed.items()]
        return found + self._outstanding(now)

    def _passed(self, io: int, limit_s: float, cut_at: float, now: float) -> int:
        """How many that wait have become older than the threshold in this cut."""
        other, count = {IO_READ: True, IO_WRITE: False}.get(io), 0
        for each in self.waiting.values():
            due = each.arrived + limit_s
            if due >= now:
                break
            count += due >= cut_at and each.is_write is not other
        return count

    def _outstanding(self, now: float) -> list[Entry]:
        found: list[Entry] = []
        for kind in KINDS:
            stall, oldest_ms = self.stalls[kind], 0
            if stall.waiting:
                is_write = kind == IO_WRITE
                oldest = next(io for io in self.waiting.values() if kind == IO_ANY or io.is_write is is_write)
                oldest_ms = int((now - oldest.arrived) * 1e3)
                stall.longest = max(stall.longest, now - stall.since)
            if stall.waiting or stall.longest >= STALL_S:
                found.append((OUTSTANDING + kind, 0, oldest_ms, int(stall.longest * 1e3)))
            stall.longest = 0.0
        # As agents of these kinds do: without it, errors and what is under way would be of one of before.
        is_told = any(entry[2] or entry[3] for entry in found) or self.failed
        found = [entry for entry in found if entry[2] or entry[3]]
        return found if is_told or not self.waiting else [(OUTSTANDING + IO_READ, 0, 0, 0)]

    def rest(self) -> SimAccount:
        """What the next cut begins with."""
        return SimAccount(
            cum_reads=self.cum_reads,
            cum_read_bytes=self.cum_read_bytes,
            inflight=self.inflight,
            held=self.held,
            waiting=self.waiting,
            stalls=self.stalls,
        )
