"""Statistics of control groups: what the kernel counts of each on its device (``gateway_agent.cgroups``).

One row a group: volume ``cgroup:<gateway>:<name>``, client ``cgroup``. I/Os and bytes are exact; the kernel
times nothing by group, so latency sums are 0 and nothing about latency may be promised of such a volume. It
counts completions only: ``arrived`` equals completed. ``held`` is 1 while a limit was used in full, when I/Os
wait for it, how many is not known. Lifetime sums begin with this link process, as those of ``host`` do.

A group that is not there does no I/O: it has no row, and the time counts as covered.

State: counts and time of the last *spooled* reading, of the current one, and of each group's first sight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from gateway_agent.cgroups import IoCounts
from gateway_agent.enforcers.cgroup import COST_BYTES, CgroupEnforcer, LimitedGroup, is_later
from gateway_agent.sources.sample import Sample, StreamKey, no_hist, no_missed
from pmdaemon.runtime.clock import Clock
from pmdaemon.wire import cut

CLIENT: Final = "cgroup"


class _Reading(NamedTuple):
    at_ns: int
    at_unix_us: int
    gen: int
    counts: dict[str, IoCounts]


class CgroupSource:
    """See ``StatisticsSource``; answers at once. Thread: the link's loop only.

    Args:
        backends: by volume.
        enforcer: whose generation a sample names.
        size_of: bytes of a volume's device, 0 if not known.
    """

    name = "cgroup"
    can_be_asked = True
    awaits_answer = False

    def __init__(
        self,
        clock: Clock,
        groups: Sequence[LimitedGroup],
        backends: dict[str, str],
        enforcer: CgroupEnforcer,
        size_of: Callable[[str], int] = lambda _volume: 0,
    ) -> None:
        self._clock = clock
        self._groups = groups
        self._backends = backends
        self._enforcer = enforcer
        self._size_of = size_of
        self._counted_ns = clock.monotonic_ns()
        self._base = self._read()
        self._first = dict(self._base.counts)
        self._current: _Reading | None = None
        self.sample: Sample | None = None

    def _read(self) -> _Reading:
        now_ns, gen = self._clock.monotonic_ns(), self._enforcer.gen
        elapsed_s, self._counted_ns = (now_ns - self._counted_ns) / 1e9, now_ns
        found = {group.volume: group.count(elapsed_s) for group in self._groups}
        counts = {volume: count for volume, count in found.items() if count is not None}
        return _Reading(now_ns, self._clock.unix_us(), gen, counts)

    def ask(self) -> None:
        """See ``StatisticsSource``."""
        if self.sample is not None:
            return
        current = self._current = self._read()
        full = {group.volume for group in self._groups if group.is_full}
        rows, streams = [], []
        for volume, now in current.counts.items():
            before = self._base.counts.get(volume)
            if before is None or not is_later(before, now):
                # It has come, or was made again: what it did before this reading is of no known interval.
                before = self._first[volume] = now
            rows.append(_row(before, now, self._first[volume], is_full=volume in full))
            streams.append(StreamKey(volume, CLIENT, self._backends[volume]))
        self.sample = Sample(
            source=self.name,
            start_ns=self._base.at_ns,
            end_ns=current.at_ns,
            start_unix_us=self._base.at_unix_us,
            throttle_gen=current.gen if current.gen == self._base.gen else -1,
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
        """See ``StatisticsSource``: one a group, also while it is not there."""
        return [
            {
                "volume": group.volume,
                "backend": self._backends[group.volume],
                "size_bytes": self._size_of(group.volume),
                "read_only": False,
                "source": "cgroup",
            }
            for group in self._groups
        ]


def _row(before: IoCounts, now: IoCounts, first: IoCounts, *, is_full: bool) -> list[int]:
    """One row in COLUMNS order: what happened between two readings, and since the first."""
    step = IoCounts(*(a - b for a, b in zip(now, before, strict=True)))
    life = IoCounts(*(a - b for a, b in zip(now, first, strict=True)))
    ios, size = step.reads + step.writes, step.read_bytes + step.write_bytes
    values = {
        "arrived": ios,
        "reads": step.reads,
        "writes": step.writes,
        "read_bytes": step.read_bytes,
        "write_bytes": step.write_bytes,
        "held": int(is_full),
        "cost_milli": 1000 * ios + 1000 * size // COST_BYTES,
        "cum_reads": life.reads,
        "cum_writes": life.writes,
        "cum_read_bytes": life.read_bytes,
        "cum_write_bytes": life.write_bytes,
    }
    return [values.get(column, 0) for column in cut.COLUMNS]
