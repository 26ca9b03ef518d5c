"""Statistics of the host's own block devices, from /proc/diskstats through psutil: beside the I/O path.

One row a device: volume ``host:<gateway>:<device>``, client ``host``; the gateway's name is in it because
every host has an ``sda``, and one name is one volume, site-wide. Rates, bytes and mean latency are exact as
far as the kernel's counters are. Limits, all visible in the cuts:

- the kernel sums times in milliseconds and knows no distribution: no histogram, no ``missed``, so no
  percentile can be judged from this source;
- it counts completions only: ``arrived`` equals completed; ``inflight`` and ``held`` stay 0; errors are not
  known;
- service time and latency are the same here, as nothing holds requests back;
- lifetime sums begin with this link process; I/O between its death and its restart is not counted (and that
  time is not covered by any cut either, so nothing is silently good).

State: the raw counters of the last *spooled* reading (``_base``), of the current unspooled one (``_current``)
and of each device's first sight (``_first``). A device that appears later, or whose counters ran backwards
(it was replaced), starts again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil

from gateway_agent.errors import SourceReadFailed
from gateway_agent.sources.sample import Sample, StreamKey, no_hist, no_missed
from pmdaemon.runtime.clock import Clock
from pmdaemon.wire import cut, names

CLIENT: Final = "host"
COST_BYTES: Final = 65_536  # bytes of one cost unit, docs/formats/messages.md
SECTOR_BYTES: Final = 512  # the unit of /sys/block/*/size, whatever the device's own sector size


class DiskCounters(NamedTuple):
    """Raw lifetime counters of one device; times in milliseconds."""

    reads: int
    writes: int
    read_bytes: int
    write_bytes: int
    read_ms: int
    write_ms: int


class _Reading(NamedTuple):
    at_ns: int
    at_unix_us: int
    disks: dict[str, DiskCounters]


DiskReader = Callable[[], Mapping[str, DiskCounters]]


def read_disks() -> dict[str, DiskCounters]:
    """All block devices and partitions of this host.

    Raises:
        OSError: /proc/diskstats is not readable.
    """
    raw = psutil.disk_io_counters(perdisk=True, nowrap=False) or {}
    return {
        name: DiskCounters(
            io.read_count, io.write_count, io.read_bytes, io.write_bytes, io.read_time, io.write_time
        )
        for name, io in raw.items()
    }


def device_size_bytes(device: str) -> int:
    """Size as the kernel knows it, 0 when it does not say."""
    try:
        return int(Path("/sys/class/block", device, "size").read_text()) * SECTOR_BYTES
    except (OSError, ValueError):
        return 0


class HostSource:
    """See ``StatisticsSource``; answers at once. Thread: the link's loop only."""

    name = "host"
    can_be_asked = True
    awaits_answer = False

    def __init__(
        self,
        clock: Clock,
        gateway: str,
        devices: Iterable[str],
        backends: Mapping[str, str],
        reader: DiskReader = read_disks,
        size_of: Callable[[str], int] = device_size_bytes,
    ) -> None:
        self._clock = clock
        self._gateway = gateway
        self._patterns = tuple(devices)
        self._backends = dict(backends)
        self._reader = reader
        self._size_of = size_of
        self._base = self._read()
        self._first = dict(self._base.disks)
        self._current: _Reading | None = None
        self.sample: Sample | None = None

    def _read(self) -> _Reading:
        try:
            raw = self._reader()
        except OSError as exc:
            raise SourceReadFailed(self.name, str(exc)) from exc
        chosen = [name for name in sorted(raw) if any(fnmatchcase(name, p) for p in self._patterns)]
        disks = {name: raw[name] for name in chosen if names.is_name(self._volume(name))}
        return _Reading(self._clock.monotonic_ns(), self._clock.unix_us(), disks)

    def ask(self) -> None:
        """See ``StatisticsSource``."""
        if self.sample is not None:
            return
        current = self._read()
        rows, streams = [], []
        for device, now in current.disks.items():
            before = self._base.disks.get(device)
            if before is None or any(a < b for a, b in zip(now, before, strict=True)):
                self._first[device] = before = now
            rows.append(counter_row(before, now, self._first[device]))
            streams.append(StreamKey(self._volume(device), CLIENT, self._backend(device)))
        self._current = current
        self.sample = Sample(
            source=self.name,
            start_ns=self._base.at_ns,
            end_ns=current.at_ns,
            start_unix_us=self._base.at_unix_us,
            throttle_gen=None,
            threshold_version=None,
            streams=tuple(streams),
            counters=cut.rows_array(rows),
            hist=no_hist(),
            missed=no_missed(),
        )

    def spooled(self) -> None:
        """See ``StatisticsSource``."""
        if self._current is not None:
            self._base, self._current, self.sample = self._current, None, None

    def exports(self) -> list[dict[str, Any]]:
        """See ``StatisticsSource``: one export a device seen at the last spooled reading."""
        return [
            {
                "volume": self._volume(device),
                "backend": self._backend(device),
                "size_bytes": self._size_of(device),
                "read_only": False,
                "source": "host",
            }
            for device in self._base.disks
        ]

    def _volume(self, device: str) -> str:
        return f"host:{self._gateway}:{device}"

    def _backend(self, device: str) -> str:
        return self._backends.get(device, f"{self._gateway}:{device}")


def counter_row(before: DiskCounters, now: DiskCounters, first: DiskCounters) -> list[int]:
    """One row in COLUMNS order: what happened between two readings, and since the first."""
    step = DiskCounters(*(a - b for a, b in zip(now, before, strict=True)))
    life = DiskCounters(*(a - b for a, b in zip(now, first, strict=True)))
    ios = step.reads + step.writes
    busy_us = (step.read_ms + step.write_ms) * 1000
    values = {
        "arrived": ios,
        "reads": step.reads,
        "writes": step.writes,
        "read_bytes": step.read_bytes,
        "write_bytes": step.write_bytes,
        "lat_sum_us": busy_us,
        "svc_sum_us": busy_us,
        "cost_milli": 1000 * ios + 1000 * (step.read_bytes + step.write_bytes) // COST_BYTES,
        "cum_reads": life.reads,
        "cum_writes": life.writes,
        "cum_read_bytes": life.read_bytes,
        "cum_write_bytes": life.write_bytes,
    }
    return [values.get(column, 0) for column in cut.COLUMNS]
