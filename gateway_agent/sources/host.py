"""Statistics of the host's own block devices, from /proc/diskstats through psutil: beside the I/O path.

One row a device: volume ``host:<gateway>:<device>``, client ``host``; the gateway's name is in it because
every host has an ``sda``, and one name is one volume, site-wide. Rates, bytes and mean latency are exact as
far as the kernel's counters are. Limits, all visible in the cuts:

- the kernel sums times in milliseconds and knows no distribution: no histogram, no ``missed``, so no
  percentile can be judged from this source;
- ``inflight`` and ``held`` stay 0; errors are not known;
- service time and latency are the same here, as nothing holds requests back.

Devices are chosen by patterns of kernel names, or named as people do (``/dev/mapper/vg0-data``, ``vg0/data``,
``/dev/disk/by-id/...``). One with such a name is called by it (``devices.name_of``): ``dm-3`` may be another
device after the next boot. What is the same for all sources of this kind: ``counted``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

import psutil

from gateway_agent import devices as block_devices
from gateway_agent.errors import SourceReadFailed
from gateway_agent.sources.counted import Reading, ReadSource, export_of
from pmdaemon.runtime.clock import Clock
from pmdaemon.wire import names

CLIENT: Final = "host"


class DiskCounters(NamedTuple):
    """Raw lifetime counters of one device; times in milliseconds."""

    reads: int
    writes: int
    read_bytes: int
    write_bytes: int
    read_ms: int
    write_ms: int


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


class HostSource(ReadSource[DiskCounters]):
    """See ``StatisticsSource`` and ``ReadSource``. Thread: the link's loop only.

    Args:
        devices: patterns of kernel names, and names with a slash.
        backends: by device, as it is named in ``devices`` or in the volume.
        find: kernel name of a name with a slash, "" while there is no such device.
    """

    def __init__(
        self,
        clock: Clock,
        gateway: str,
        devices: Iterable[str],
        backends: Mapping[str, str],
        reader: DiskReader = read_disks,
        size_of: Callable[[str], int] = block_devices.size_bytes,
        find: Callable[[str], str] = block_devices.kernel_name,
    ) -> None:
        super().__init__("host", CLIENT, clock)
        self._gateway = gateway
        chosen = tuple(devices)
        self._patterns = tuple(each for each in chosen if "/" not in each)
        self._named = tuple(each for each in chosen if "/" in each)
        self._backends = {block_devices.name_of(device): backend for device, backend in backends.items()}
        self._reader = reader
        self._size_of = size_of
        self._find = find
        self._kernel_names: dict[str, str] = {}
        self.begin(self.read())

    def read(self) -> Reading[DiskCounters]:
        """See ``ReadSource``."""
        try:
            raw = self._reader()
        except OSError as exc:
            raise SourceReadFailed(self.name, str(exc)) from exc
        named = {self._find(each): block_devices.name_of(each) for each in self._named}
        found = {}
        for kernel_name in sorted(raw):
            is_chosen = any(fnmatchcase(kernel_name, pattern) for pattern in self._patterns)
            if not is_chosen and kernel_name not in named:
                continue
            volume = self._volume(named.get(kernel_name, kernel_name))
            if names.is_name(volume):
                found[volume] = raw[kernel_name]
                self._kernel_names[volume] = kernel_name
        return Reading(self._clock.monotonic_ns(), self._clock.unix_us(), found)

    def backend_of(self, volume: str) -> str:
        """See ``CountedSource``: a device that is not named is a backend of its own."""
        device = volume.removeprefix(self._volume(""))
        return self._backends.get(device, f"{self._gateway}:{device}")

    def more(self, volume: str, step: DiskCounters) -> dict[str, int]:
        """See ``CountedSource``."""
        busy_us = (step.read_ms + step.write_ms) * 1000
        return {"lat_sum_us": busy_us, "svc_sum_us": busy_us}

    def exports(self) -> list[dict[str, Any]]:
        """See ``StatisticsSource``: one export a device seen at the last spooled reading."""
        seen = self._base.counts if self._base is not None else {}
        return [
            export_of(volume, self.backend_of(volume), "host", self._size_of(self._kernel_names[volume]))
            for volume in seen
        ]

    def _volume(self, device: str) -> str:
        return f"host:{self._gateway}:{device}"
