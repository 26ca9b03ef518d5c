"""Statistics of the drives of one QEMU process (``gateway_agent.qemu``): beside the I/O path.

One row a drive: volume ``qemu:<gateway>:<name>``, client ``qemu``. I/Os, bytes, failures and summed times are
exact; latencies are in our own buckets as soon as QEMU was given their edges. Limits, all visible
in the cuts:

- what is outstanding is not known, so that storage that hangs looks idle: nothing of availability, IOPS or
  throughput may be promised;
- no threshold is counted: percentiles are judged from the edges of buckets, and such slices are ``inexact``;
- a time contains what QEMU's own throttle held back. Service time is known only while there is no limit;
- ``held`` is 1 while a limit was used in full, when I/Os wait for it, how many is not known.

Volumes of throttle groups have no rows: QEMU counts nothing of them.

A question is answered by another thread; the sample is made of the answer. A process that was started again
counts from zero: what it shows at first was done since the last reading. After ``MOST_AWAY_NS`` without an
answer the counting begins again.

What is the same for all sources of this kind: ``counted``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gateway_agent.enforcers.qemu import CLIENT
from gateway_agent.qemu import Bins, DriveCounts, DriveStatistics
from gateway_agent.sources.counted import MOST_IOS, CountedSource, Reading, export_of
from pmdaemon.wire import cut
from pmdaemon.wire.cut import FAILED, IO_ANY, IO_READ, IO_WRITE
from pmdaemon.wire.histogram import TOTAL_READ, TOTAL_WRITE

MOST_AWAY_NS: Final = 3_600 * 10**9
"""Counts of a longer time say too little of when they were made."""


class QemuSource(CountedSource[DriveCounts]):
    """See ``StatisticsSource``. Thread: the link's loop only.

    State: the open question, and the bins of the readings that the counted sums are of.

    Args:
        name: of the monitor.
        backends: by volume; of all volumes, counted or not.
        ask: sends the question; ``answered`` is called with its answer, or ``disconnected``.
        learn: takes what a volume did in so many seconds; returns whether a limit was used in full, and
            whether there is one.
    """

    def __init__(
        self,
        name: str,
        backends: Mapping[str, str],
        ask: Callable[[], None],
        learn: Callable[[str, DriveCounts, float], tuple[bool, bool]],
    ) -> None:
        super().__init__(name, CLIENT)
        self.can_be_asked = False
        self.awaits_answer = False
        self._backends = dict(backends)
        self._ask = ask
        self._learn = learn
        self._elapsed_s = 0.0
        self._bins: tuple[dict[str, Bins], dict[str, Bins]] = ({}, {})  # of the base, of the newest reading

    @property
    def is_new(self) -> bool:
        """Whether nothing was read yet."""
        return self._base is None

    def backend_of(self, volume: str) -> str:
        """See ``CountedSource``."""
        return self._backends[volume]

    def more(self, volume: str, step: DriveCounts) -> dict[str, int]:
        """See ``CountedSource``."""
        busy_us = (step.read_ns + step.write_ns) // 1000
        is_full, is_limited = self._learn(volume, step, self._elapsed_s)
        return {
            "others": step.others,
            "errors": step.failed_reads + step.failed_writes + step.failed_others,
            "lat_sum_us": busy_us,
            "svc_sum_us": 0 if is_limited else busy_us,
            "held": int(is_full),
        }

    def connected(self, *, is_other: bool) -> None:
        """The monitor can be asked; ``is_other``: another process is behind it now, which began at zero."""
        self.can_be_asked = True
        if is_other:
            self.start_again()

    def start_again(self) -> None:
        """All counters are zero now."""
        nothing = DriveCounts()
        if self._current is not None and self.sample is not None:
            zero = dict.fromkeys(self._current.counts, nothing)
            self._current = replace(self._current, counts=zero)
        elif self._base is not None:
            self._base = replace(self._base, counts=dict.fromkeys(self._base.counts, nothing))
        self._first = dict.fromkeys(self._first, nothing)
        self._bins = {}, {}

    def disconnected(self) -> None:
        """What was asked will not be answered. A sample that is not spooled stays: it was counted."""
        self.can_be_asked = self.awaits_answer = False

    def ask(self) -> None:
        """See ``StatisticsSource``."""
        if self.can_be_asked and not self.awaits_answer and self.sample is None:
            self.awaits_answer = True
            self._ask()

    def answered(self, at_ns: int, at_unix_us: int, found: Mapping[str, DriveStatistics], gen: int) -> None:
        """The counters of all drives: what each did since the last spooled reading is the sample."""
        self.awaits_answer = False
        if self.sample is not None:  # the answer to a question of a connection before
            return
        reading = Reading(at_ns, at_unix_us, {volume: each.counts for volume, each in found.items()}, gen)
        bins = {volume: each.bins for volume, each in found.items() if each.bins is not None}
        if self._base is None or at_ns - self._base.at_ns > MOST_AWAY_NS:
            self.begin(reading)
            self._bins = bins, bins
            return
        self._elapsed_s = (at_ns - self._base.at_ns) / 1e9
        before = self._base.counts
        steps = self.take(reading)
        assert self.sample is not None  # just made
        known = [volume for volume, _ in steps if volume in before]
        hist = _histogram([volume for volume, _ in steps], known, self._bins[0], bins)
        self.sample = replace(self.sample, hist=hist, missed=_failures([step for _, step in steps]))
        self._bins = self._bins[0], bins

    def spooled(self) -> None:
        """See ``StatisticsSource``."""
        if self._current is not None:
            self._bins = self._bins[1], self._bins[1]
        super().spooled()

    def exports(self) -> list[dict[str, Any]]:
        """See ``StatisticsSource``: one a volume of the agent's file, also while QEMU does not run."""
        return [export_of(volume, backend, "qemu") for volume, backend in self._backends.items()]


def _histogram(
    rows: Sequence[str], known: Sequence[str], before: Mapping[str, Bins], now: Mapping[str, Bins]
) -> npt.NDArray[Any]:
    """HIST_DTYPE: what the bins of each row have gained; nothing of those that were emptied meanwhile."""
    entries = np.zeros((3, 0), dtype=np.int64)
    for row, volume in enumerate(rows):
        if volume not in known or volume not in before or volume not in now:
            continue
        gained = now[volume] - before[volume]
        if ((gained < 0) | (gained > MOST_IOS)).any():
            continue
        kind, bucket = np.nonzero(gained)
        place = bucket + np.where(kind == 0, TOTAL_READ, TOTAL_WRITE)
        entries = np.hstack((entries, [np.full(len(kind), row), place, gained[kind, bucket]]))
    return cut.hist_array(*entries)


def _failures(steps: Sequence[DriveCounts]) -> npt.NDArray[Any]:
    """MISSED_DTYPE: failed I/Os of each row."""
    entries = []
    for row, step in enumerate(steps):
        failed = step.failed_reads + step.failed_writes + step.failed_others
        kinds = ((IO_ANY, failed), (IO_READ, step.failed_reads), (IO_WRITE, step.failed_writes))
        entries += [(row, FAILED + io, 0, count, 0) for io, count in kinds if count]
    return cut.missed_array(entries)
